"""A place that has just failed is left alone for a while, so that an outage costs one timeout and not one per call.

Knows no store and no network.
"""

import threading
import time
from collections.abc import Callable
from typing import final


@final
class Breaker:
    """Open after a failure: no call is made. After each pause one call tries again; a success closes it."""

    def __init__(self, *, pause_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin closed.

        Args:
            pause_s: How long a place is left alone.
            clock: Seconds that only go forward.
        """
        self.pause_s = pause_s
        self.reason = ""
        self._clock = clock
        self._lock = threading.Lock()
        self._paused_at: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the last call failed."""
        with self._lock:
            return self._paused_at is not None

    def admit(self) -> bool:
        """Whether a call may be made. Of many that ask after a pause, one may; the others wait for what it finds."""
        with self._lock:
            if self._paused_at is None:
                return True
            if self._clock() - self._paused_at < self.pause_s:
                return False
            self._paused_at = self._clock()
            return True

    def succeeded(self) -> None:
        """Note that the place has answered, be it with a refusal."""
        with self._lock:
            self._paused_at = None

    def failed(self, reason: str) -> None:
        """Note that the place has not answered."""
        with self._lock:
            self._paused_at = self._clock()
            self.reason = reason
