"""The application: routes, what they share, and how every error is told. Begins and ends the engine's thread."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from time import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import Response

from kvlink.core.errors import KVLinkError
from kvlink.server import documents, generation
from kvlink.server.auth import Keys
from kvlink.server.door import Door
from kvlink.server.refusals import Refused, answer, invalid, refusal_of
from kvlink.server.served import Served

LOOPBACK = ["127.0.0.1", "localhost"]


def make_app(served: Served, *, keys: Keys | None = None, hosts: list[str] | None = None) -> FastAPI:
    """Return the application.

    Args:
        keys: Who may ask; everybody if None.
        hosts: Values of the header `Host` that are answered; any if None. On loopback it keeps out web pages whose name
            was made to point here.

    Raises:
        InputError: Served while the application runs: the engine assembles documents for each prompt.
    """
    rebuilding = documents.Rebuilding(served)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        served.engine.start()
        app.state.ready = True
        task = asyncio.create_task(rebuilding.run())
        try:
            yield
        finally:
            app.state.ready = False
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await asyncio.to_thread(served.engine.stop)

    app = FastAPI(title="KVLink", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.ready = False
    app.include_router(generation.routes(served))
    app.include_router(documents.routes(served, rebuilding))
    _add_operations(app, served)
    _add_errors(app)
    if hosts is not None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    app.add_middleware(Door, keys=keys or Keys(), max_bytes=served.max_bytes, metrics=served.metrics)
    return app


def _add_operations(app: FastAPI, served: Served) -> None:
    made = int(time())
    model = {"id": served.model, "object": "model", "created": made, "owned_by": "kvlink"}

    @app.get("/v1/models")
    async def models() -> Response:
        """Return the one model that is served."""
        return answer({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """Return the model of this name."""
        served.check_model(name)
        return answer(model)

    @app.get("/health")
    async def health() -> Response:
        """Return 200 as long as the process answers."""
        return answer({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """Return 200 while requests are taken, else 503."""
        return answer({"ready": app.state.ready}, status=200 if app.state.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return counters for Prometheus."""
        return Response(await asyncio.to_thread(served.metrics.text), media_type="text/plain; version=0.0.4")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return error.response

    @app.exception_handler(KVLinkError)
    async def ours(_: Request, error: KVLinkError) -> Response:
        return refusal_of(error).response

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        return invalid(error.errors()).response

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return Refused(error.status_code, str(error.detail)).response

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, error: Exception) -> Response:
        return Refused(500, f"the request failed: {type(error).__name__}", code="failed").response

    _: Any = (refused, ours, malformed, http, unforeseen)
