"""The servers behind a gateway: which of them answer, and what they have under way. The only file that knows httpx.

A server that refuses connections is out at once; one that breaks one off is checked at once; one that is merely slow to
say that it is ready is out after a few times. It is in again as soon as it says so.

One that is out may still answer what it has, as servers do that are told to end: that is waited for. Only where nothing
at all comes from a server, neither what is waited for nor an answer to several checks, is it given up.

All serve the same, as long as the gateway runs: the first to be in decides what. One of other weights or links stays
out, and would refuse what is sent to it all the same.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from kvlink.cluster.choice import Policy
from kvlink.core.errors import InputError
from kvlink.server.serves import HEADER, Serves

log = logging.getLogger("kvlink.server.route")

CONNECT_S = 5.0
IDLE_S = 2.0
"""How long a connection is kept for the next request: less than servers keep it, or they meet on the way."""

KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""Seconds, seconds, times and milliseconds: when the system takes the machine behind a connection for gone."""

PATIENCE = 3
"""Checks without an answer in time after which a server is out."""

OTHER_MODEL = 421
"""Status of a server that was sent what is meant for other weights or links."""


_NOBODY = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT})
"""Of a machine that does not answer; one that refuses connections does."""


class Unreached(Exception):
    """A server could not be asked, broke off, or hangs."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a check has found.

    Attributes:
        why: Why a server cannot be asked; empty where it can.
        is_late: Nothing has come from it in time.
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
        serves: What all that are let in serve; None before the first.

    Raises:
        InputError: One is no URL of HTTP, or there is none, or one twice.
    """

    def __init__(self, urls: Sequence[str], policy: Policy, *, check_s: float = 2.0) -> None:
        self.urls = [_checked(url) for url in urls]
        if not urls or len(set(self.urls)) < len(urls):
            raise InputError(f"{', '.join(urls) or 'nothing'} does not name each backend once: --backends URL,URL")
        self._policy, self._check_s = policy, check_s
        self.serves: Serves | None = None
        self._in: set[str] = set()
        self._waits: dict[str, dict[asyncio.Timeout, float]] = {url: {} for url in self.urls}
        self._journals: dict[str, str] = {}
        self._whys = dict.fromkeys(self.urls, "")
        self._missed = dict.fromkeys(self.urls, 0)
        self._doubts: set[asyncio.Task[None]] = set()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=IDLE_S)
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=False, socket_options=_keepalive())
        self._client = httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False)

    @property
    def up(self) -> list[str]:
        """Those that are asked, in the order in which they were named."""
        return [url for url in self.urls if url in self._in]

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
            Unreached: It could not be asked, broke off, hangs, is out, or serves something else, and has not begun to
                answer.
        """
        if url not in self._in or self.serves is None:
            raise Unreached(url)
        # what is passed on is not unpacked here
        headers = {**headers, "accept-encoding": "identity", HEADER: self.serves.digest}
        request = self._client.build_request(method, url + path, content=body, headers=headers)
        async with self._unless_lost(url):
            try:
                response = await self._client.send(request, stream=True)
            except httpx.ConnectError as error:
                self.fail(url, "it cannot be connected to")
                raise Unreached(url) from error
        return await self._meant(url, response)

    async def read(self, url: str, response: httpx.Response) -> bytes:
        """Return the rest of an answer.

        Raises:
            Unreached: The server broke off, or hangs.
        """
        try:
            async with self._unless_lost(url):
                return await response.aread()
        finally:
            await response.aclose()

    async def parts(self, url: str, response: httpx.Response) -> AsyncGenerator[bytes]:
        """Yield the rest of an answer as it comes.

        Raises:
            Unreached: The server broke off, or hangs.
        """
        coming = response.aiter_raw()
        while True:
            async with self._unless_lost(url):  # what whoever reads this does with a part is not waited for
                part = await anext(coming, None)
            if part is None:
                return
            yield part

    def doubt(self, url: str) -> None:
        """Check a server now: it has broken a connection off, or is another one than it was."""
        task = asyncio.ensure_future(self._check(url))
        self._doubts.add(task)
        task.add_done_callback(self._doubts.discard)

    def fail(self, url: str, why: str) -> None:
        """Send a server no new request until it says again that it is ready; what it has, it may answer."""
        if url in self._in or why != self._whys[url]:
            log.warning("%s is out: %s", url, why)
        if url in self._in:
            self._in.remove(url)
            self._policy.leave(url)
        self._whys[url] = why

    async def close(self) -> None:
        """Close all connections."""
        for task in self._doubts:
            task.cancel()
        await self._client.aclose()

    @asynccontextmanager
    async def _unless_lost(self, url: str) -> AsyncGenerator[None]:
        """Wait for something of a server for as long as it takes, unless it breaks off or hangs.

        Raises:
            Unreached: It does.
        """
        try:
            async with asyncio.timeout(None) as wait:
                self._waits[url][wait] = asyncio.get_running_loop().time()
                try:
                    yield
                finally:
                    self._waits[url].pop(wait, None)
        except TimeoutError as error:
            raise Unreached(url) from error
        except httpx.TransportError as error:
            self.doubt(url)
            raise Unreached(url) from error

    def _give_up(self, url: str) -> None:
        """End all waits for a server that are older than its silence; a stream that goes on is younger."""
        now = asyncio.get_running_loop().time()
        for wait, begun in list(self._waits[url].items()):
            if now - begun >= PATIENCE * self._check_s:
                del self._waits[url][wait]
                wait.reschedule(now)

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
            return Told(type(error).__name__, is_late=is_silence(error))
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
                self._give_up(url)
            return
        self._missed[url] = 0
        if told.serves is None:
            self.fail(url, told.why)
        elif self.serves is not None and told.serves != self.serves:
            self.fail(url, f"{told.serves.other_than(self.serves)}: start a new gateway to go over to it")
        else:
            self.serves = told.serves
            self._journals[url] = told.journal
            self._let_in(url)

    def _let_in(self, url: str) -> None:
        if url not in self._in:
            log.warning("%s is in", url)
            self._in.add(url)
            self._whys[url] = ""
            self._policy.join(url)


def is_silence(error: BaseException) -> bool:
    """Return whether an error says that nothing has come from a machine, and not that it refuses or breaks off."""
    if isinstance(error, httpx.TimeoutException):
        return True
    causes = [cause for cause in _causes(error) if isinstance(cause, OSError)]
    refuses = any(isinstance(cause, ConnectionRefusedError) for cause in causes)  # at one of its addresses
    return not refuses and any(cause.errno in _NOBODY for cause in causes)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all that it was raised from: several where a name has several addresses."""
    yield error
    members = cast("BaseExceptionGroup[BaseException]", error).exceptions if isinstance(error, ExceptionGroup) else ()
    for one in (*members, error.__cause__):
        if one is not None:
            yield from _causes(one)


def _keepalive() -> list[tuple[int, int, int]]:
    """Return the options of a socket that notices when the other machine has vanished; not all systems have all."""
    times = [(getattr(socket, name), value) for name, value in KEEPALIVE.items() if hasattr(socket, name)]
    return [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        *((socket.IPPROTO_TCP, name, value) for name, value in times),
    ]


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
