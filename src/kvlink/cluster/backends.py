"""The servers behind a gateway: which of them answer, and what they have under way. The only file that knows httpx.

A server that refuses connections is out at once; one that breaks one off is checked at once; one that is merely slow to
say that it is ready is out after a few times. It is in again as soon as it says so.

All that are in serve the same: the first to be in decides what. One of other weights or links stays out, and would
refuse what is sent to it all the same.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from kvlink.cluster.choice import Policy
from kvlink.core.errors import InputError
from kvlink.server.serves import HEADER, Serves

log = logging.getLogger("kvlink.server.route")

CONNECT_S = 5.0
IDLE_S = 2.0
"""How long a connection is kept for the next request: less than servers keep it, or they meet on the way."""

PATIENCE = 3
"""Checks without an answer in time after which a server is out."""

OTHER_MODEL = 421
"""Status of a server that was sent what is meant for other weights or links."""


class Unreached(Exception):
    """A server could not be asked, or broke off before it began to answer."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a check has found.

    Attributes:
        why: Why a server cannot be asked; empty where it can.
        is_late: It was only too slow.
        serves: What it serves.
        journal: Epoch of the journal that it follows; empty for none.
    """

    why: str = ""
    is_late: bool = False
    serves: Serves | None = None
    journal: str = ""


class Backends:
    """Servers by URL, in and out of a policy.

    Args:
        urls: Each names one server of the same model.
        check_s: Seconds between two checks, and for one.

    Attributes:
        serves: What those that are in serve; None before the first.

    Raises:
        InputError: One is no URL of HTTP, or there is none, or one twice.
    """

    def __init__(self, urls: Sequence[str], policy: Policy, *, check_s: float = 2.0) -> None:
        self.urls = [_checked(url) for url in urls]
        if not urls or len(set(self.urls)) < len(urls):
            raise InputError(f"{', '.join(urls) or 'nothing'} does not name each backend once: --backends URL,URL")
        self._policy, self._check_s = policy, check_s
        self.serves: Serves | None = None
        self._out: dict[str, asyncio.Event] = {}
        self._journals: dict[str, str] = {}
        self._whys = dict.fromkeys(self.urls, "")
        self._missed = dict.fromkeys(self.urls, 0)
        self._doubts: set[asyncio.Task[None]] = set()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=IDLE_S)
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)

    @property
    def up(self) -> list[str]:
        """Those that are asked, in the order in which they were named."""
        return [url for url in self.urls if url in self._out]

    @property
    def share_texts(self) -> bool:
        """Whether those that are asked follow one journal, so that a text which one of them takes is everybody's."""
        found = {self._journals[url] for url in self.up}
        return len(found) == 1 and "" not in found

    def number(self, url: str) -> str:
        """Return the place of a server in the order in which they were named, counted from 1."""
        return str(self.urls.index(url) + 1)

    async def watch(self) -> None:
        """Check again and again, until it is cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(self._check_s)

    async def check(self) -> None:
        """Ask each server once whether it is ready; of several that come in together the first named one decides."""
        told = await asyncio.gather(*map(self._ask, self.urls))
        for url, one in zip(self.urls, told, strict=True):
            self._judge(url, one)

    async def send(
        self, url: str, method: str, path: str, *, body: bytes, headers: Mapping[str, str]
    ) -> httpx.Response:
        """Return the head of a server's answer; what is behind it is read, and closed, by the caller.

        Args:
            path: With its query.

        Raises:
            Unreached: It could not be asked, broke off, is out, or serves something else, and has not begun to answer.
        """
        out = self._out.get(url)
        if out is None or self.serves is None:
            raise Unreached(url)
        # what is passed on is not unpacked here
        headers = {**headers, "accept-encoding": "identity", HEADER: self.serves.digest}
        request = self._client.build_request(method, url + path, content=body, headers=headers)
        sending = asyncio.ensure_future(self._client.send(request, stream=True))
        leaving = asyncio.ensure_future(out.wait())
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                return await self._meant(url, sending.result())
            raise Unreached(url)
        except httpx.ConnectError as error:
            self.fail(url, "it refuses connections")
            raise Unreached(url) from error
        except httpx.TransportError as error:
            self.doubt(url)
            raise Unreached(url) from error
        finally:
            sending.cancel()
            leaving.cancel()

    async def read(self, url: str, response: httpx.Response) -> bytes:
        """Return the rest of an answer.

        Raises:
            Unreached: The server broke off.
        """
        try:
            return await response.aread()
        except httpx.TransportError as error:
            self.doubt(url)
            raise Unreached(url) from error
        finally:
            await response.aclose()

    def doubt(self, url: str) -> None:
        """Check a server now: it has broken a connection off, or is another one than it was."""
        task = asyncio.ensure_future(self._check(url))
        self._doubts.add(task)
        task.add_done_callback(self._doubts.discard)

    def fail(self, url: str, why: str) -> None:
        """Take a server out until it says again that it is ready."""
        out = self._out.pop(url, None)
        if out is not None:
            self._policy.leave(url)
            out.set()
        if out is not None or why != self._whys[url]:
            log.warning("%s is out: %s", url, why)
        self._whys[url] = why

    async def close(self) -> None:
        """Close all connections."""
        for task in self._doubts:
            task.cancel()
        await self._client.aclose()

    async def _meant(self, url: str, response: httpx.Response) -> httpx.Response:
        if response.status_code == OTHER_MODEL:
            await response.aclose()
            self.doubt(url)
            raise Unreached(url)
        return response

    async def _check(self, url: str) -> None:
        self._judge(url, await self._ask(url))

    async def _ask(self, url: str) -> Told:
        try:
            async with asyncio.timeout(self._check_s):
                found = await self._client.get(f"{url}/ready")
        except TimeoutError:
            return Told(is_late=True)
        except httpx.TransportError as error:
            return Told(type(error).__name__)
        if found.status_code != 200:
            return Told(f"not ready: {found.status_code}")
        body = _object(found)
        serves, journal = Serves.read(body), body.get("journal")
        if serves is None:
            return Told("it does not say what it serves: is it kvlink serve, of this version?")
        return Told(serves=serves, journal=journal if isinstance(journal, str) else "")

    def _judge(self, url: str, told: Told) -> None:
        """Let a server in, or take it out."""
        if told.is_late:
            self._missed[url] += 1
            if self._missed[url] >= PATIENCE:
                self.fail(url, f"no answer within {self._check_s:g} s, {PATIENCE} times or more")
            return
        self._missed[url] = 0
        others = [other for other in self._out if other != url]
        if told.serves is None:
            self.fail(url, told.why)
        elif others and self.serves is not None and told.serves != self.serves:
            self.fail(url, told.serves.other_than(self.serves))
        else:
            if told.serves != self.serves and url in self._out:
                self.fail(url, "it serves something else now")  # and what was learned of it is forgotten
            self.serves = told.serves
            self._journals[url] = told.journal
            self._let_in(url)

    def _let_in(self, url: str) -> None:
        if url not in self._out:
            log.warning("%s is in", url)
            self._out[url], self._whys[url] = asyncio.Event(), ""
            self._policy.join(url)


def _object(response: httpx.Response) -> Mapping[str, Any]:
    try:
        found: Any = response.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise InputError(f"{url!r} is no address of a server: name it like http://10.0.0.2:8000")
    return url.rstrip("/")
