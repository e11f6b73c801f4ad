"""A gateway: takes requests as a server does, and passes each to one of several servers by its documents.

A request that no server has begun to answer goes to the next one; what has begun is the client's. Texts of documents go
to all servers or to none, or to one where all of them follow one journal.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from time import perf_counter
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvlink.cluster.asked import Asked, Lengths, in_library, put_in, read, usage_in, usage_of
from kvlink.cluster.backends import Backends, Unreached
from kvlink.cluster.choice import Choice, Policy
from kvlink.cluster.route_metrics import RouteMetrics
from kvlink.server.auth import OPEN, Keys
from kvlink.server.hosts import Hosts
from kvlink.server.refusals import Refused, answer

log = logging.getLogger("kvlink.server.route")

BODY_S = 60.0
"""How long a client may take to send its body."""

TAIL = 1 << 18
"""Bytes of a stream's end in which its usage is looked for."""

BACKEND = "x-kvlink-backend"
"""Header of an answer: which backend it is of, counted from 1."""

AGAIN = frozenset({429, 503})
"""Statuses of a server that has no room, or closes: another one may have."""

_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "te", "trailer", "transfer-encoding", "upgrade", "host"}
)


class Gateway:
    """Passes requests on.

    Args:
        keys: Who may ask; everybody if it holds none. Servers get the header, too, and may check it again.
        max_bytes: The largest body.
    """

    def __init__(self, backends: Backends, policy: Policy, *, keys: Keys, max_bytes: int = 16 << 20) -> None:
        self._backends, self._policy, self._keys, self._max_bytes = backends, policy, keys, max_bytes
        self._lengths, self._metrics, self._writing = Lengths(), RouteMetrics(backends), asyncio.Lock()

    def app(self, hosts: list[str] | None = None) -> Starlette:
        """Return the application.

        Args:
            hosts: Values of the header `Host` that are answered; any if None.
        """

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncGenerator[None]:
            await self._backends.check()
            watching = asyncio.create_task(self._backends.watch())
            try:
                yield
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching
                await self._backends.close()

        guard = [Middleware(Hosts, names=hosts)] if hosts is not None else []
        document = "/v1/documents/{name:path}"
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._told),
                Route("/v1/documents", self._everywhere, methods=["POST"]),
                Route(document, self._everywhere, methods=["PUT", "DELETE"]),
                Route("/v1/{path:path}", self._somewhere, methods=["GET", "POST"]),
            ],
            lifespan=lifespan,
            middleware=guard,
            exception_handlers={Refused: _refused, HTTPException: _unknown},
        )

    async def _health(self, _: Request) -> Response:
        return answer({"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        up, serves = self._backends.up, self._backends.serves
        told = {"ready": bool(up), "backends": len(up), "serves": serves and serves.to_json()}
        return answer(told, status=200 if up else 503)

    async def _told(self, request: Request) -> Response:
        self._check(request)
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _somewhere(self, request: Request) -> Response:
        """Pass a request to the server that is best for it, or to the next one."""
        self._check(request)
        body = await body_of(request, self._max_bytes)
        return await self._pass(request, body, read(body, request.headers.get("x-session-id")))

    async def _pass(self, request: Request, body: bytes, asked: Asked) -> Response:
        start = perf_counter()
        failed: set[str] = set()
        busy: Response | None = None
        while True:
            weighed = self._lengths.weighed(asked)
            choice = self._policy.choose(weighed, session=asked.session, without=failed)
            if choice is None:
                raise_if_nobody(busy, failed)
                assert busy is not None, "else it has raised"
                return busy
            passing = _Passing(self, asked, choice, start)
            try:
                response = await self._ask(passing, request, body)
            except Unreached:
                passing.end(None)
                failed.add(choice.node)
                self._metrics.retries.labels(choice.node, "unreached").inc()
                continue
            except BaseException:
                passing.end(None)
                raise
            if response.status_code not in AGAIN:
                return response
            failed.add(choice.node)
            self._metrics.retries.labels(choice.node, str(response.status_code)).inc()
            busy = response

    async def _ask(self, passing: "_Passing", request: Request, body: bytes) -> Response:
        """Return a server's whole answer, or its stream once that has begun.

        Raises:
            Unreached: The server broke off before.
        """
        node = passing.choice.node
        asking = asyncio.ensure_future(
            self._backends.send(node, request.method, _path(request), body=body, headers=_headers(request.headers))
        )
        found = await _unless_gone(request, asking)
        if found.headers.get("content-type", "").startswith("text/event-stream"):
            return _Events(passing, found, self._backends)
        text = await _unless_gone(request, asyncio.ensure_future(self._backends.read(node, found)))
        passing.end(found.status_code, usage_of(text) if found.status_code == 200 else None)
        headers = {**_headers(found.headers), BACKEND: self._backends.number(node)}
        return Response(text, status_code=found.status_code, headers=headers)

    async def _everywhere(self, request: Request) -> Response:
        """Pass a change of documents to all servers, acknowledged once all have it; to one where they share texts."""
        self._check(request)
        body = await body_of(request, self._max_bytes)
        names = [in_library(request.path_params["name"])] if request.path_params else put_in(body)
        if self._backends.share_texts:
            response = await self._pass(request, body, Asked(tuple((name, None) for name in names)))
            for name in names:
                self._policy.forget(name)
            return response
        async with self._writing:  # two changes of one document come to all servers in the same order
            up, urls = self._backends.up, self._backends.urls
            if len(up) < len(urls):
                away = ", ".join(str(place + 1) for place, url in enumerate(urls) if url not in up)
                raise Refused(503, f"backend {away} of {len(urls)} is away: it would keep the old text", code="away")
            asked = (self._one(url, request, body) for url in urls)
            found = await asyncio.gather(*asked)
        for name in names:
            self._policy.forget(name)
        good = [one for one in found if one is not None and one.status_code < 300]
        bad = [one for one in found if one is not None and one.status_code >= 300]
        lacking = {one.status_code for one in bad} == {404} and request.method == "DELETE"
        if None not in found and (not bad or (good and lacking)):
            return good[0]
        if None not in found and not good and bad:
            return bad[0]
        raise Refused(502, f"{len(good)} of {len(urls)} backends have taken it: send it again", code="not_everywhere")

    async def _one(self, url: str, request: Request, body: bytes) -> Response | None:
        try:
            headers = _headers(request.headers)
            found = await self._backends.send(url, request.method, _path(request), body=body, headers=headers)
            text = await self._backends.read(url, found)
        except Unreached:
            return None
        return Response(text, status_code=found.status_code, headers=_headers(found.headers))

    def ended(self, asked: Asked, choice: Choice, status: int | None, usage: Any, seconds: float) -> None:
        """Learn from what has ended.

        Args:
            status: None if no answer came to its end.
            usage: The answer's, if it tells one.
        """
        self._policy.done(choice)
        if status is None:
            return
        held = self._lengths.learn(asked, usage)
        if status == 200 and usage is None:  # a stream without usage: what was sent there is there now
            held = [name for name, _ in asked.documents]
        self._policy.note(choice.node, held)
        self._metrics.requests.labels(choice.node, choice.reason, status).inc()
        row = {"backend": choice.node, "reason": choice.reason, "share": round(choice.share, 3), "status": status}
        log.info("%s", json.dumps({**row, "seconds": round(seconds, 4)}))

    def _check(self, request: Request) -> None:
        if request.url.path not in OPEN:
            self._keys.check(request.headers.get("authorization"))


class _Passing:
    """One request at one server; ends once."""

    def __init__(self, gateway: Gateway, asked: Asked, choice: Choice, start: float) -> None:
        self.choice = choice
        self._gateway, self._asked, self._start = gateway, asked, start
        self._has_ended = False

    def end(self, status: int | None, usage: Any = None) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._gateway.ended(self._asked, self.choice, status, usage, perf_counter() - self._start)


class _Events(StreamingResponse):
    """A server's stream as it comes; whoever stops reading it gives it up there, too."""

    def __init__(self, passing: _Passing, upstream: httpx.Response, backends: Backends) -> None:
        self._passing, self._upstream, self._backends = passing, upstream, backends
        headers = {**_headers(upstream.headers), BACKEND: backends.number(passing.choice.node)}
        super().__init__(self._parts(), status_code=upstream.status_code, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._upstream.aclose()
            self._passing.end(None)

    async def _parts(self) -> AsyncGenerator[bytes]:
        tail = b""
        try:
            async for part in self._backends.parts(self._passing.choice.node, self._upstream):
                tail = (tail + part)[-TAIL:]
                yield part
        except Unreached:
            gone = Refused(502, "the backend broke off in the middle of the answer", code="backend_lost")
            yield f"data: {json.dumps(gone.body)}\n\n".encode()
            return
        self._passing.end(self._upstream.status_code, usage_in(tail))


async def body_of(request: Request, max_bytes: int) -> bytes:
    """Return the body of a request.

    Raises:
        Refused: It is too large, does not come in time, or the client has left.
    """
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                found += part
                if len(found) > max_bytes:
                    raise Refused(413, f"the body has more than {max_bytes} bytes", code="too_large")
    except TimeoutError:
        raise Refused(408, f"the body was not sent within {BODY_S:.0f} s", code="timeout") from None
    except ClientDisconnect:
        raise Refused(499, "the client has left", code="client_closed") from None
    return bytes(found)


def raise_if_nobody(busy: Response | None, failed: set[str]) -> None:
    """Refuse a request that no server has taken; one that was told to come again is told so.

    Raises:
        Refused: 503.
    """
    if busy is None:
        tried = f"{len(failed)} did not answer" if failed else "none says that it is ready"
        raise Refused(503, f"no backend can be asked: {tried}", code="no_backend")


async def _unless_gone(request: Request, asking: "asyncio.Future[Any]") -> Any:
    """Return what is waited for, unless the client leaves."""
    watch = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({asking, watch}, return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            return asking.result()
        raise Refused(499, "the client has left", code="client_closed")
    finally:
        watch.cancel()
        asking.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused), "registered for those"
    return error.response


async def _unknown(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for those"
    return Refused(error.status_code, str(error.detail)).response


def _path(request: Request) -> str:
    path = request.scope.get("raw_path", request.url.path.encode()).decode("ascii")
    query = request.url.query
    return f"{path}?{query}" if query else path


def _headers(headers: Any) -> dict[str, str]:
    """Return what is passed on of headers; lengths are told anew."""
    return {name: one for name, one in headers.items() if name.lower() not in _HOP and name.lower() != "content-length"}
