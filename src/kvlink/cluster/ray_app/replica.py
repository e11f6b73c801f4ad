"""One replica: the very application of `kvlink serve`, without an address of its own; and what it says it holds."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

from kvlink.cluster.ray_app.own_folder import own_folder
from kvlink.cluster.ray_app.passed import Message, Passed
from kvlink.server.app import make_app
from kvlink.server.auth import Keys
from kvlink.server.listening import spare
from kvlink.server.opening import Settings, opened
from kvlink.server.refusals import Refused
from kvlink.server.serves import HEADER
from kvlink.server.watching import HELD

REPORTED = 2000
"""Documents that are reported, the latest ones."""

MOST_DOCUMENTS = 20_000
"""Documents whose entries are known by name."""


class Replica:
    """A server of one model.

    Args:
        settings: Those of `kvlink serve`, by name.
        keys: Who may ask.
        hosts: Values of the header `Host` that are answered; any if None.
    """

    async def __init__(self, settings: Mapping[str, Any], keys: Keys, hosts: list[str] | None = None) -> None:
        self._ending = AsyncExitStack()
        chosen = self._own_library(Settings.of(settings))
        self._served = self._ending.enter_context(opened(chosen, keys=keys))
        if (follower := self._served.follower) is not None:
            follower.joining = Settings.of(settings).library
        self._app = make_app(self._served, keys=keys, hosts=hosts)
        self._segments: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        await self._ending.enter_async_context(self._app.router.lifespan_context(self._app))
        if follower is not None:
            with suppress(Refused):  # without the journal it answers all that names no ids
                await asyncio.to_thread(follower.catch_up)
        spare()

    async def ask(self, passed: Passed) -> AsyncGenerator[Message]:
        """Yield what the application answers; whoever stops reading gives the request up."""
        told: asyncio.Queue[Message | None] = asyncio.Queue()
        scope, given, gone = _scope(passed), False, asyncio.Event()

        async def receive() -> Message:
            nonlocal given
            if given:
                await gone.wait()
                return {"type": "http.disconnect"}
            given = True
            return {"type": "http.request", "body": passed.body, "more_body": False}

        async def send(message: Any) -> None:
            told.put_nowait(message)

        running = asyncio.ensure_future(self._app(scope, receive, send))
        running.add_done_callback(lambda _: told.put_nowait(None))
        try:
            while (message := await told.get()) is not None:
                if message["type"] == "http.response.start":
                    digest = self._served.serves.digest.encode()
                    message["headers"] = [*message["headers"], (HEADER.encode(), digest)]
                yield message
            await running
        finally:
            gone.set()
            with suppress(Exception):
                await running
            self._learn(passed, scope[HELD])

    def record_routing_stats(self) -> dict[str, Any]:
        """Return what is served, and which documents are on the device; Ray asks for it again and again."""
        sessions = self._served.engine.sessions
        assert sessions is not None, "a server attends documents where they lie"
        residency, known = sessions.residency, list(self._segments.items())
        held = [name for name, segments in known if all(one in residency for one in segments)]
        return {"serves": self._served.serves.digest, "held": held[-REPORTED:], "is_all": len(held) <= REPORTED}

    async def __del__(self) -> None:
        """End as a server does; Ray calls it once what was under way is answered."""
        await self._ending.aclose()

    def _own_library(self, settings: Settings) -> Settings:
        """Return settings in which replicas that follow a journal share a store, and no catalogue."""
        if settings.journal is None or settings.library is None:
            return settings
        own = self._ending.enter_context(own_folder(settings.library))
        return replace(settings, library=own / "library", store=settings.store or f"{settings.library}/entries")

    def _learn(self, passed: Passed, held: list[tuple[str, ...]]) -> None:
        if len(held) < len(passed.documents):
            return
        for (name, _), segments in zip(passed.documents, held, strict=False):
            self._segments[name] = segments
            self._segments.move_to_end(name)
        while len(self._segments) > MOST_DOCUMENTS:
            self._segments.popitem(last=False)


def _scope(passed: Passed) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": passed.method,
        "scheme": "http",
        "path": passed.path,
        "raw_path": passed.path.encode(),
        "query_string": passed.query,
        "root_path": "",
        "headers": list(passed.headers),
        "client": None,
        "server": None,
        HELD: [],
    }
