"""The jobs of one HTTP request, between the engine's thread and the loop. Whoever has them cancels them at the end."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from time import perf_counter

from kvlink.core.errors import KVLinkError
from kvlink.engine.engine import Engine
from kvlink.engine.job import Piece
from kvlink.engine.task import Task
from kvlink.server.watching import Watching


class Running:
    """Jobs under way; `cancel` them when their client has left.

    Args:
        engine: Runs the steps in a thread of its own.
    """

    def __init__(self, jobs: Sequence[Task], engine: Engine, watching: Watching) -> None:
        self.jobs = list(jobs)
        self._engine, self._watching = engine, watching
        self._news = asyncio.Event()
        self._last = [0.0] * len(self.jobs)

    def submit(self) -> None:
        """Let the jobs wait for their turn, all of them or none.

        Raises:
            QueueFull: So many wait that these are not taken.
        """
        loop = asyncio.get_running_loop()

        def told() -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits any more
                loop.call_soon_threadsafe(self._news.set)

        try:
            for job in self.jobs:
                job.told = told
                self._engine.submit(job)
        except KVLinkError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Give up what is under way; what it holds is free with the next step."""
        for job in self.jobs:
            job.cancel()

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece | None]]:
        """Yield what each answer has grown by, by the number of its choice, and None where one has come to its end.

        Raises:
            KVLinkError: One of the jobs failed, in its own way.
        """
        left = set(range(len(self.jobs)))
        while left:
            await self._news.wait()
            self._news.clear()
            for number in sorted(left):
                job = self.jobs[number]
                has_ended = job.has_ended  # before its pieces are read: what is told last is read, too
                for piece in job.pieces():
                    self._observe(number, piece)
                    yield number, piece
                if has_ended:
                    if job.answer is None:
                        raise job.error or KVLinkError("the request ended without an answer")
                    left.discard(number)
                    self._watching.ended(job)
                    yield number, None

    def _observe(self, number: int, piece: Piece) -> None:
        if piece.token is None:
            return
        now, last = perf_counter(), self._last[number]
        if last:
            self._watching.gap(now - last)
        else:
            self._watching.first(now - self.jobs[number].start)
        self._last[number] = now
