"""One tier: a store that may fail, and what this process saw of it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, final

from kvlink.core.errors import StoreError
from kvlink.store.base import Source, Store, StoreStats

FAILURES = (StoreError, OSError)
"""What a tier may raise without failing a request."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """What one tier did.

    Attributes:
        stats: Its own counters.
        promotions: Objects that it was given because a slower tier had them.
        failures: Calls that raised, and objects that it did not get because too many waited to be written.
        reason: What failed last; empty if nothing has.
    """

    source: Source
    stats: StoreStats
    promotions: int
    failures: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredStats(StoreStats):
    """What happened since the store was opened.

    `hits`, `misses` and `puts` count calls of this store; all else is the sum over its tiers, fastest first.
    """

    tiers: tuple[TierStats, ...]


@final
class Tier:
    """A store with its place in the stack. Every method may be called from any thread."""

    def __init__(self, number: int, store: Store) -> None:
        """Count from now on.

        Args:
            number: 0 for the fastest.
            store: The store; this tier does not close it.
        """
        self.number = number
        self.store = store
        self._lock = threading.Lock()
        self._promotions = 0
        self._failures = 0
        self._reason = ""

    def attempt(self, call: Callable[[Store], _T], errors: list[Exception] | None = None) -> _T | None:
        """Return what the store returns, or None where it fails. A failure is counted, and added to `errors`."""
        try:
            return call(self.store)
        except FAILURES as error:
            self.failed(str(error))
            if errors is not None:
                errors.append(error)
            return None

    def failed(self, reason: str) -> None:
        """Count a failure."""
        with self._lock:
            self._failures += 1
            self._reason = reason

    def promoted(self) -> None:
        """Count an object that a slower tier had."""
        with self._lock:
            self._promotions += 1

    def stats(self) -> TierStats:
        """Return its counters, and those of its store."""
        stats = self.store.stats()
        with self._lock:
            return TierStats(
                source=self.store.source,
                stats=stats,
                promotions=self._promotions,
                failures=self._failures,
                reason=self._reason,
            )
