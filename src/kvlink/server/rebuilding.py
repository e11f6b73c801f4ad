"""The task that makes entries of documents that were put, one document at a time, without holding answers up."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, TypeVar

from kvlink.core.document import Document
from kvlink.core.errors import InputError, KVLinkError
from kvlink.engine.engine import Engine
from kvlink.engine.record import Row
from kvlink.engine.task import Task
from kvlink.engine.usage import DocumentUsage
from kvlink.server.served import Served

log = logging.getLogger("kvlink.server")

SHORT = 256
"""Tokens that are encoded at once while nobody waits for an answer."""

QUESTION = "?"
"""What is asked of a document so that it is encoded."""

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
            document = await asyncio.to_thread(self._current, scope, one)
            if document is None:
                return
            made = await encoded(self._served, library.engine_of(scope), document)
            self._failed.pop((scope, one), None)
            self._served.metrics.observe_rebuilt(made)
            if made.source == "skipped":
                self._failed[scope, one] = made.reason
        except KVLinkError as error:
            self._failed[scope, one] = str(error)
            self._served.metrics.rebuilds_failed.inc()
        finally:
            self._now = None

    def _current(self, scope: bytes, one: str) -> Document | None:
        """Return a document, or None if it was deleted meanwhile."""
        assert self._served.library is not None, "it runs"
        try:
            return self._served.library.documents([one], scope=scope)[0]
        except InputError:
            return None


async def encoded(served: Served, engine: Engine, document: Document) -> DocumentUsage:
    """Have a document's entry in the store; return where it came from.

    Where answers are under way, or it is long, it goes through the model by and by, as documents of requests do. What
    the store could not keep of that is encoded once more, to learn why.

    Raises:
        StoreFull, StoreUnusable: The store cannot take it.
    """
    told = await _in_steps(served, engine, document)
    (row,) = await in_engine(served, lambda: engine.encode([document]))
    return told if told is not None and told.source == "encoded" and row.source != "encoded" else row


async def _in_steps(served: Served, engine: Engine, document: Document) -> DocumentUsage | None:
    """Ask something about a document, so that steps encode it; return its row, or None where nobody did."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def told() -> None:
        with suppress(RuntimeError):  # the loop is closed, so nobody waits any more
            loop.call_soon_threadsafe(news.set)

    try:
        job = await asyncio.to_thread(_asked, served, engine, document)
        if job is None:
            return None
        job.told = told
        engine.submit(job)
    except KVLinkError:  # there is no room for a question, or the queue is full
        return None
    try:
        while not job.has_ended:
            await news.wait()
            news.clear()
    finally:
        job.cancel()
    return None if job.usage is None else job.usage.documents[0]


def _asked(served: Served, engine: Engine, document: Document) -> Task | None:
    """Return a request that needs a document's entry; None where nothing is absent, or little and nobody waits."""
    job = engine.job([document], QUESTION, max_new_tokens=1)
    absent = [ids for ids in job.request.prompt.segments if engine.loader.codec_of(ids) is None]
    waits = served.engine.stats().running > 0 or sum(map(len, absent)) > SHORT
    return job if absent and waits else None


async def in_engine(served: Served, function: Callable[[], Found]) -> Found:
    """Return what a function finds in the thread that runs the engine."""
    return await asyncio.wrap_future(served.engine.call(function))


async def cancelled(task: "asyncio.Task[None]") -> None:
    """Cancel a task and wait until it has ended."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
