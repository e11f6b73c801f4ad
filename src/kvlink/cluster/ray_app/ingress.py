"""The ingress: reads a request once, passes it on through Ray's router, and tries another replica where none has begun.

Keys and limits are checked by the replicas, which answer as `kvlink serve` does.
"""

import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvlink.cluster.asked import Asked, Lengths, in_library, put_in, read, usage_in, usage_of
from kvlink.cluster.gateway import AGAIN, TAIL, body_of
from kvlink.cluster.ray_app.passed import Message, Passed, weighed
from kvlink.server.refusals import Refused, answer
from kvlink.server.serves import HEADER

log = logging.getLogger("kvlink.server.route")

ATTEMPTS = 4
"""Replicas that are tried for one request."""

OTHER_MODEL = 421

Answer = AsyncGenerator[Message]


class Ingress:
    """Takes requests of any path.

    Args:
        replicas: Of `Replica`, behind the router.
        max_bytes: The largest body.
    """

    def __init__(self, replicas: DeploymentHandle, *, max_bytes: int = 16 << 20) -> None:
        self._replicas: Any = replicas.options(stream=True)
        self._max_bytes = max_bytes
        self._lengths = Lengths()
        self._serves: bytes | None = None

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        try:
            if request.url.path == "/health":
                return answer({"status": "ok"})
            body = await body_of(request, self._max_bytes)
            return await self._pass(request, body, _asked(request, body))
        except Refused as refused:
            return refused.response

    async def _pass(self, request: Request, body: bytes, asked: Asked) -> Response:
        """Ask one replica after another, until one has begun to answer."""
        passed = self._passed(request, body, asked)
        busy: Response | None = None
        others = 0
        for _ in range(ATTEMPTS):
            messages: Answer = aiter(self._replicas.ask.remote(passed))
            try:
                head = await anext(messages)
            except (RayActorError, StopAsyncIteration) as error:
                log.warning("a replica is lost: %s", type(error).__name__)
                continue
            except RayError as error:
                raise Refused(500, f"the request failed: {type(error).__name__}", code="failed") from error
            response = await self._begun(head, messages, asked)
            if response is None:
                others += 1
                continue
            if response.status_code not in AGAIN:
                return response
            busy = response
        if others == ATTEMPTS and self._serves is not None:  # all are others now
            self._serves = None
            return await self._pass(request, body, asked)
        if busy is None:
            raise Refused(503, f"no replica has answered in {ATTEMPTS} attempts", code="no_backend")
        return busy

    async def _begun(self, head: Message, messages: Answer, asked: Asked) -> Response | None:
        """Return what a replica answers, a stream as it comes; None if it is of other weights or links."""
        status, headers = head["status"], {name.lower(): value for name, value in head["headers"]}
        serves = headers.pop(HEADER.encode())
        if status == OTHER_MODEL:
            return None
        self._serves = serves
        raw = list(headers.items())
        if headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            response: Response = StreamingResponse(self._parts(messages, asked), status_code=status)
        else:
            try:
                text = b"".join([message.get("body", b"") async for message in messages])
            except RayActorError:
                return None
            if status == 200:
                self._lengths.learn(asked, usage_of(text))
            response = Response(text, status_code=status)
        response.raw_headers = raw
        return response

    async def _parts(self, messages: Answer, asked: Asked) -> AsyncGenerator[bytes]:
        tail = b""
        try:
            async for message in messages:
                part = message.get("body", b"")
                tail = (tail + part)[-TAIL:]
                yield part
        except RayError:
            gone = Refused(502, "the replica broke off in the middle of the answer", code="backend_lost")
            yield f"data: {json.dumps(gone.body)}\n\n".encode()
            return
        self._lengths.learn(asked, usage_in(tail))

    def _passed(self, request: Request, body: bytes, asked: Asked) -> Passed:
        given = [(name.lower(), value) for name, value in request.headers.raw if name.lower() != HEADER.encode()]
        if self._serves is not None:
            given.append((HEADER.encode(), self._serves))
        return Passed(
            method=request.method,
            path=request.url.path,
            query=request.url.query.encode(),
            headers=tuple(given),
            body=body,
            documents=weighed(asked, self._lengths),
            session=asked.session,
        )


def _asked(request: Request, body: bytes) -> Asked:
    """Return what routing has to know of a request; of a change of documents which they are."""
    place = "/v1/documents"
    if not request.url.path.startswith(place):
        return read(body, request.headers.get("x-session-id"))
    one = request.url.path[len(place) + 1 :]
    names: list[Any] = [in_library(one)] if one else put_in(body)
    return Asked(tuple((name, None) for name in names))
