"""What every request passes before it is read: its id, its key, its pace, its size; and the one line logged of it.

What fails behind it without being foreseen is told there, too: with the id, and without what the error says.

The line holds no prompt, no document and no id of one.
"""

import asyncio
import json
import logging
import re
from time import perf_counter
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlink.server.auth import OPEN, Keys
from kvlink.server.faults import log_fault
from kvlink.server.metrics import Metrics
from kvlink.server.refusals import Refused, failed
from kvlink.server.serves import HEADER, Serves
from kvlink.server.tenants import Pace

log = logging.getLogger("kvlink.server")

BODY_S = 60.0
"""How long a client may take to send its body."""

OPERATORS = frozenset({"/metrics"})
"""Paths that tell of all tenants, and so nothing to any of them."""

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Door:
    """ASGI middleware around the whole server.

    A request that is meant for other weights or links is refused: it was sent by somebody who mistakes this server.

    In the scope it leaves `kvlink.tenant`, `kvlink.id`, and `kvlink.facts`: a dict of what else is logged.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        max_bytes: int,
        metrics: Metrics,
        serves: Serves,
        pace: Pace | None = None,
    ) -> None:
        self._app, self._keys, self._max_bytes, self._metrics = app, keys, max_bytes, metrics
        self._digest = serves.digest
        self._pace = pace or Pace()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = perf_counter(), 0
        headers = Request(scope).headers
        asked = headers.get("x-request-id", "")
        name = asked if _ID.fullmatch(asked) else uuid4().hex
        facts: dict[str, Any] = {}
        scope["kvlink.facts"], scope["kvlink.id"] = facts, name

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        try:
            try:
                if scope["path"] not in OPEN:
                    facts["tenant"] = self._admit(scope, headers.get("authorization"))
                if headers.get(HEADER, self._digest) != self._digest:
                    raise Refused(421, f"meant for {headers[HEADER]}, and this is {self._digest}", code="other_model")
                body = await self._body(receive, headers.get("content-length", ""))
            except Refused as refused:
                await refused.response(scope, receive, named)
                return
            await self._app(scope, _replayed(body, receive), named)
        except Exception as error:
            log_fault(name, error)
            if status:  # an answer has begun, and cannot be taken back: the server cuts it
                raise
            await failed(error).response(scope, receive, named)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.requests.labels(route, status).inc()
            row = {"id": name, "method": scope["method"], "route": route, "status": status}
            log.info("%s", json.dumps({**row, "seconds": round(perf_counter() - start, 4), **facts}))

    def _admit(self, scope: Scope, header: str | None) -> str:
        """Note who asks, and return the name.

        Raises:
            Refused: 401, 403 or 429; nobody is named, this is not for tenants, or the tenant asks too often.
        """
        tenant = self._keys.check(header)
        if scope["path"] in OPERATORS and not tenant.is_operator:
            raise Refused(403, f"{scope['path']} tells of all tenants: use an operator's key", code="forbidden")
        if wait_s := self._pace.wait_s(tenant):
            raise Refused(
                429,
                f"more than {tenant.requests_per_minute:g} requests a minute",
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )
        scope["kvlink.tenant"] = tenant
        return tenant.name

    async def _body(self, receive: Receive, length: str) -> bytes:
        """Read a body to its end.

        Raises:
            Refused: 413 or 408; it is too large, or takes too long.
        """
        refused = Refused(413, f"the body has more than {self._max_bytes} bytes", code="too_large")
        if length.isdecimal() and int(length[:20]) > self._max_bytes:
            raise refused
        found = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await receive()
                    found += message.get("body", b"")
                    if len(found) > self._max_bytes:
                        raise refused
                    if message["type"] == "http.disconnect" or not message.get("more_body"):
                        return bytes(found)
        except TimeoutError:
            raise Refused(408, f"the body was not sent within {BODY_S:.0f} s", code="timeout") from None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body which was read already, then what comes behind it."""
    is_given = False

    async def given() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return given
