"""What a load found, what it knows of the rest, and what it took. Plain values."""

from dataclasses import dataclass, field

from kvlink.core.entry import CacheEntry
from kvlink.engine.usage import Source
from kvlink.store.base import Source as StoreSource

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """One segment's entry and where it came from."""

    name: str
    entry: CacheEntry
    source: Source
    codec: str | None = None
    reason: str = ""


@dataclass(slots=True)
class LoadTimes:
    """Seconds spent on reading and on encoding."""

    load_s: float = 0.0
    encode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Search:
    """What is known of segments that one load did not get.

    Attributes:
        reasons: Why they are encoded, where it is not just that they are absent.
        refused: Those that are there, and from where they would have come.
    """

    reasons: dict[Ids, str] = field(default_factory=dict)
    refused: dict[Ids, StoreSource] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Begun:
    """What is known of a segment before it is encoded.

    Attributes:
        kept: The entry of its beginning, stored bit for bit; None where there is none.
        how: What is told of that.
    """

    kept: CacheEntry | None = None
    how: str = ""
