"""The task that makes entries of documents that were put, one document at a time, between the steps of requests."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, TypeVar

from kvlink.core.errors import KVLinkError
from kvlink.engine.record import Row
from kvlink.engine.usage import DocumentUsage
from kvlink.server.served import Served

log = logging.getLogger("kvlink.server")

State = Literal["queued", "encoding", "ready", "failed"]
Found = TypeVar("Found")


class Rebuilding:
    """Works until it is cancelled. What it could not encode, the next request that needs it does."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._wanted = asyncio.Event()
        self._wanted.set()  # what an earlier process left
        self._now: tuple[bytes, str] | None = None
        self._failed: dict[tuple[bytes, str], str] = {}

    def want(self) -> None:
        """Say that a document was put."""
        self._wanted.set()

    def state(self, row: Row) -> tuple[State, str]:
        """Return how far a document is, and why it failed if it did."""
        if row.state == "ready":
            return "ready", ""
        if (row.scope, row.id) == self._now:
            return "encoding", ""
        reason = self._failed.get((row.scope, row.id), "")
        return ("failed" if reason else "queued"), reason

    async def run(self) -> None:
        """Go on for ever."""
        library = self._served.library
        if library is None:
            return
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                rows = await asyncio.to_thread(library.rows)
                known = {(row.scope, row.id) for row in rows if row.state == "pending"}
                self._failed = {one: why for one, why in self._failed.items() if one in known}
                for row in rows:
                    if row.state == "pending":
                        await self._encode(row.scope, row.id)
                await in_engine(self._served, library.work)  # what is left: entries of old texts, above all
            except Exception as error:  # requests encode what they need; the next put tries again
                log.warning("documents wait to be encoded: %s", type(error).__name__)

    async def _encode(self, scope: bytes, one: str) -> None:
        library = self._served.library
        assert library is not None, "it runs"
        self._now = scope, one
        try:
            made = await in_engine(self._served, lambda: self._made(scope, one))
            self._failed.pop((scope, one), None)
            for row in made:
                self._served.metrics.observe_rebuilt(row)
                if row.source == "skipped":
                    self._failed[scope, one] = row.reason
        except KVLinkError as error:
            self._failed[scope, one] = str(error)
            self._served.metrics.rebuilds_failed.inc()
        finally:
            self._now = None

    def _made(self, scope: bytes, one: str) -> list[DocumentUsage]:
        library = self._served.library
        assert library is not None, "it runs"
        if not library.known([one], scope=scope):  # it was deleted meanwhile
            return []
        return library.engine_of(scope).encode(library.documents([one], scope=scope))


async def in_engine(served: Served, function: Callable[[], Found]) -> Found:
    """Return what a function finds in the thread that runs the engine."""
    return await asyncio.wrap_future(served.engine.call(function))


async def cancelled(task: "asyncio.Task[None]") -> None:
    """Cancel a task and wait until it has ended."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
