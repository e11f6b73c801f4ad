"""Which names a server answers to: on loopback it keeps out web pages whose own name was made to point here."""

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvlink.server.refusals import Refused


class Hosts:
    """ASGI middleware that answers requests to some names alone.

    Args:
        names: Values of the header `Host`, without ports.
    """

    def __init__(self, app: ASGIApp, *, names: Collection[str]) -> None:
        self._app, self._names = app, frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or refuse it."""
        if scope["type"] == "http" and _name(Headers(scope=scope).get("host", "")) not in self._names:
            names = ", ".join(sorted(self._names))
            message = (
                f"without an API key this server answers to the names {names} alone: ask for one of them, or serve "
            )
            refused = Refused(400, message + "with --api-key", code="unknown_host")
            await refused.response(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
