"""What is being encoded at this moment, so that nobody encodes it a second time."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import final

from kvlink.core.entry import CacheEntry


@final
class Encoding:
    """Names whose entries some thread makes now. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._making: dict[str, Future[CacheEntry]] = {}
        self._num_made = 0

    @property
    def num_made(self) -> int:
        """How many have ended: who has looked for an entry before one ended looks again."""
        with self._lock:
            return self._num_made

    def begin(self, names: Sequence[str], *, num_made: int) -> tuple[list[str], "dict[str, Future[CacheEntry]]"] | None:
        """Take on all names that nobody makes; return them, and the others with what will come of them.

        Args:
            num_made: What it was before the caller looked for these names in vain. If it has grown since, one of them
                may be there now: the answer is None, and the caller looks again.
        """
        with self._lock:
            if self._num_made != num_made:
                return None
            others = {name: self._making[name] for name in names if name in self._making}
            mine = [name for name in names if name not in others]
            self._making |= {name: Future() for name in mine}
            return mine, others

    def made(self, name: str, entry: CacheEntry) -> None:
        """Hand an entry to all who wait for it."""
        with self._lock:
            self._num_made += 1
            waiting = self._making.pop(name)
        waiting.set_result(entry)

    def give_up(self, names: Sequence[str]) -> None:
        """End those that are not made: who waits makes them itself."""
        with self._lock:
            left = [self._making.pop(name) for name in names if name in self._making]
            self._num_made += len(left)
        for waiting in left:
            waiting.cancel()
