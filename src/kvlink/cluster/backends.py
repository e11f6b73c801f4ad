"""The servers behind a gateway: which of them answer, and what they have under way. The only file that knows httpx.

A server that refuses connections is out at once; one that breaks one off is checked at once; one that is merely slow to
say that it is ready is out after a few times. It is in again as soon as it says so.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import httpx

from kvlink.cluster.choice import Policy
from kvlink.core.errors import InputError

log = logging.getLogger("kvlink.server.route")

CONNECT_S = 5.0
IDLE_S = 2.0
"""How long a connection is kept for the next request: less than servers keep it, or they meet on the way."""

PATIENCE = 3
"""Checks without an answer in time after which a server is out."""


class Unreached(Exception):
    """A server could not be asked, or broke off before it began to answer."""


class Backends:
    """Servers by URL, in and out of a policy.

    Args:
        urls: Each names one server of the same model.
        check_s: Seconds between two checks, and for one.

    Raises:
        InputError: One is no URL of HTTP, or there is none, or one twice.
    """

    def __init__(self, urls: Sequence[str], policy: Policy, *, check_s: float = 2.0) -> None:
        self.urls = [_checked(url) for url in urls]
        if not urls or len(set(self.urls)) < len(urls):
            raise InputError(f"{', '.join(urls) or 'nothing'} does not name each backend once: --backends URL,URL")
        self._policy, self._check_s = policy, check_s
        self._out: dict[str, asyncio.Event] = {}
        self._missed = dict.fromkeys(self.urls, 0)
        self._doubts: set[asyncio.Task[None]] = set()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=IDLE_S)
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)

    @property
    def up(self) -> list[str]:
        """Those that are asked, in the order in which they were named."""
        return [url for url in self.urls if url in self._out]

    async def watch(self) -> None:
        """Check again and again, until it is cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(self._check_s)

    async def check(self) -> None:
        """Ask each server once whether it is ready."""
        await asyncio.gather(*(self._check(url) for url in self.urls))

    async def send(
        self, url: str, method: str, path: str, *, body: bytes, headers: Mapping[str, str]
    ) -> httpx.Response:
        """Return the head of a server's answer; what is behind it is read, and closed, by the caller.

        Args:
            path: With its query.

        Raises:
            Unreached: It could not be asked, broke off, or is out before it began to answer.
        """
        out = self._out.get(url)
        if out is None:
            raise Unreached(url)
        headers = {**headers, "accept-encoding": "identity"}  # what is passed on is not unpacked here
        request = self._client.build_request(method, url + path, content=body, headers=headers)
        sending = asyncio.ensure_future(self._client.send(request, stream=True))
        leaving = asyncio.ensure_future(out.wait())
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                return sending.result()
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
        """Check a server now: it has broken a connection off."""
        task = asyncio.ensure_future(self._check(url))
        self._doubts.add(task)
        task.add_done_callback(self._doubts.discard)

    def fail(self, url: str, why: str) -> None:
        """Take a server out until it says again that it is ready."""
        out = self._out.pop(url, None)
        if out is not None:
            log.warning("%s is out: %s", url, why)
            self._policy.leave(url)
            out.set()

    async def close(self) -> None:
        """Close all connections."""
        for task in self._doubts:
            task.cancel()
        await self._client.aclose()

    async def _check(self, url: str) -> None:
        try:
            async with asyncio.timeout(self._check_s):
                status = (await self._client.get(f"{url}/ready")).status_code
        except TimeoutError:
            self._missed[url] += 1
            if self._missed[url] >= PATIENCE:
                self.fail(url, f"no answer within {self._check_s:g} s, {self._missed[url]} times")
            return
        except httpx.TransportError as error:
            self.fail(url, type(error).__name__)
            return
        self._missed[url] = 0
        if status != 200:
            self.fail(url, f"not ready: {status}")
        elif url not in self._out:
            log.warning("%s is in", url)
            self._out[url] = asyncio.Event()
            self._policy.join(url)


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise InputError(f"{url!r} is no address of a server: name it like http://10.0.0.2:8000")
    return url.rstrip("/")
