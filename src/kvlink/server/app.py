"""The application: routes, what they share, and how every error is told. Begins and ends the engine's thread."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from time import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvlink.core.errors import KVLinkError
from kvlink.server import documents, generation
from kvlink.server.auth import Keys
from kvlink.server.door import Door
from kvlink.server.faults import log_fault
from kvlink.server.hosts import Hosts
from kvlink.server.rebuilding import Rebuilding, cancelled
from kvlink.server.refusals import Refused, answer, invalid, refusal_of
from kvlink.server.served import Served

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def make_app(served: Served, *, keys: Keys | None = None, hosts: list[str] | None = None) -> FastAPI:
    """Return the application.

    Args:
        keys: Who may ask; everybody if None.
        hosts: Values of the header `Host` that are answered; any if None.

    Raises:
        InputError: Served while the application runs: the engine assembles documents for each prompt.
    """
    rebuilding = Rebuilding(served)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        served.engine.start()
        app.state.ready = True
        tasks = [asyncio.create_task(rebuilding.run())]
        if served.follower is not None:
            tasks.append(asyncio.create_task(served.follower.run()))
        if served.shadow is not None:
            tasks.append(asyncio.create_task(served.shadow.run(served)))
        try:
            yield
        finally:
            app.state.ready = False
            for task in tasks:
                await cancelled(task)
            if served.follower is not None:
                await asyncio.to_thread(served.follower.close)
            await asyncio.to_thread(served.engine.stop)
            if served.traces is not None:
                await asyncio.to_thread(served.traces.close)

    app = FastAPI(title="KVLink", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan)
    app.state.ready, app.state.served = False, served
    app.include_router(generation.routes(served))
    app.include_router(documents.routes(served, rebuilding))
    _add_operations(app, served)
    _add_errors(app)
    if hosts is not None:
        app.add_middleware(Hosts, names=hosts)
    app.add_middleware(
        Door, keys=keys or Keys(), max_bytes=served.max_bytes, metrics=served.metrics, serves=served.serves
    )
    return app


def _add_operations(app: FastAPI, served: Served) -> None:
    made, page = int(time()), (Path(__file__).parent / "dashboard.html").read_text("utf-8")
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
        """Return 200 while requests are taken, else 503; what is served, and the epoch of the journal it follows."""
        follower = served.follower
        is_ready = app.state.ready and not (follower is not None and follower.is_behind)
        told = {"ready": is_ready, "serves": served.serves.to_json()}
        if follower is not None:
            told["journal"] = follower.epoch
        return answer(told, status=200 if is_ready else 503)

    @app.get("/dashboard")
    async def dashboard() -> Response:
        """Return a page that shows the metrics; it holds nothing itself, and loads nothing from elsewhere."""
        return Response(page, media_type="text/html", headers={"content-security-policy": POLICY})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return counters for Prometheus."""
        return Response(await asyncio.to_thread(served.metrics.text), media_type="text/plain; version=0.0.4")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return error.response

    @app.exception_handler(KVLinkError)
    async def ours(request: Request, error: KVLinkError) -> Response:
        refused = refusal_of(error)
        if refused.status == 500:
            log_fault(request.scope["kvlink.id"], error)
        return refused.response

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        return invalid(error.errors()).response

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return Refused(error.status_code, str(error.detail)).response

    _: Any = (refused, ours, malformed, http)
