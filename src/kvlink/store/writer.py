"""Writes that nobody waits for: a bounded queue, worked off by one thread that ends when there is nothing left.

Knows no stores: it is handed calls. Each write belongs to a name and a place; one that waits is not queued twice.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import final

Key = tuple[int, str, str]
"""Number of the place, name, codec."""


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    num_bytes: int
    call: Callable[[], None]


@final
class Writer:
    """Makes queued calls, one after another, in their order. Every method may be called from any thread.

    What a call raises ends with it: calls tell of failures themselves.
    """

    def __init__(self, *, most_bytes: int) -> None:
        """Start nothing yet.

        Args:
            most_bytes: What waits may hold so many bytes of memory. A single write of more is taken when none waits.
        """
        self.most_bytes = most_bytes
        self._changed = threading.Condition()
        self._waiting: OrderedDict[Key, _Write] = OrderedDict()
        self._running: Key | None = None
        self._endings: dict[str, list[Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that wait, or are being written."""
        with self._changed:
            return self._num_bytes

    def submit(self, key: Key, num_bytes: int, call: Callable[[], None]) -> bool:
        """Queue a write, and return whether it will be made: not where too much waits. Never waits itself."""
        with self._changed:
            if key in self._waiting:
                return True
            if self._num_bytes and self._num_bytes + num_bytes > self.most_bytes:
                return False
            self._waiting[key] = _Write(num_bytes, call)
            self._num_bytes += num_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kvlink-writer", daemon=True)
                self._thread.start()
            return True

    def void(self, name: str, codec: str | None = None) -> None:
        """Forget the queued writes of a name, and wait until one that is being made has ended."""
        with self._changed:
            for key in [key for key in self._waiting if _is_of(key, name, codec)]:
                self._num_bytes -= self._waiting.pop(key).num_bytes
            if threading.current_thread() is not self._thread:
                self._changed.wait_for(lambda: self._running is None or not _is_of(self._running, name, codec))
            calls = self._ended(name)
        _make(calls)

    def after(self, name: str, call: Callable[[], None]) -> None:
        """Make a call once no write of `name` is left: now, or in the writer's thread."""
        with self._changed:
            if self._has(name):
                self._endings.setdefault(name, []).append(call)
                return
        call()

    def flush(self) -> None:
        """Wait until nothing is left to be written."""
        with self._changed:
            if threading.current_thread() is not self._thread:
                self._changed.wait_for(lambda: self._thread is None)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                self._running, write = self._waiting.popitem(last=False)
                name = self._running[1]
            with suppress(Exception):
                write.call()
            with self._changed:
                self._running = None
                self._num_bytes -= write.num_bytes
                calls = self._ended(name)
                self._changed.notify_all()
            with suppress(Exception):
                _make(calls)

    def _has(self, name: str) -> bool:
        return (self._running is not None and self._running[1] == name) or any(key[1] == name for key in self._waiting)

    def _ended(self, name: str) -> list[Callable[[], None]]:
        """Return what has to be called now that a write of `name` is gone. The lock is held."""
        return [] if self._has(name) else self._endings.pop(name, [])


def _is_of(key: Key, name: str, codec: str | None) -> bool:
    return key[1] == name and codec in (None, key[2])


def _make(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
