"""Segments on their way from a store, and the handle of who asked for them. Knows no threads."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import final

from kvlink.core.entry import CacheEntry
from kvlink.engine.usage import Source
from kvlink.store.base import Lease

HEADER_BYTES, HEADER_BYTES_PER_TOKEN = 8192, 16
"""At most what an object holds besides keys and values, as a rule."""


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A segment that will be needed.

    Attributes:
        object_bytes: What its largest object may take. Asking the store for it would cost a round trip.
        entry_bytes: What its entry takes once it is decoded.
    """

    name: str
    object_bytes: int
    entry_bytes: int

    @classmethod
    def of(cls, name: str, *, tokens: int, token_bytes: int) -> "Wanted":
        """Return what is known beforehand of a segment of so many tokens."""
        return cls(name, HEADER_BYTES + tokens * (token_bytes + HEADER_BYTES_PER_TOKEN), tokens * token_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What was loaded; `release` when it is no longer read."""

    entry: CacheEntry
    source: Source
    codec: str
    release: Callable[[], None]


@final
class Prefetch:
    """A handle of what was asked for: it owns flights until they are used or cancelled."""

    def __init__(
        self, *, cancel: "Callable[[Prefetch], None]", wait: "Callable[[Prefetch, float | None], bool]"
    ) -> None:
        self._cancel = cancel
        self._wait = wait
        self.pending: set[str] = set()

    @property
    def done(self) -> bool:
        """Whether nothing of it is left to be loaded: all is held, used, cancelled, or not to be had."""
        return not self.pending

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, at most so long; return whether it is."""
        return self._wait(self, timeout_s)

    def cancel(self) -> None:
        """Let go of what is held and queued for it alone. A second time does nothing."""
        self._cancel(self)


class State(Enum):
    """What has become of it so far."""

    QUEUED = auto()
    READING = auto()
    HELD = auto()
    OVER = auto()


@dataclass(slots=True, eq=False)
class Flight:
    """One segment on its way, for all who want it.

    Attributes:
        order: Flights with lower values go first.
        owners: Who wants it, and has neither used nor cancelled it.
        users: How many read it, or wait for it, now.
        num_bytes: What it takes, or may take while it is not there.
    """

    wanted: Wanted
    order: tuple[int, int]
    owners: dict[Prefetch, None] = field(default_factory=dict)
    state: State = State.QUEUED
    users: int = 0
    num_bytes: int = 0
    since_s: float = 0.0
    lease: Lease | None = None
    entry: CacheEntry | None = None
