"""The promise that every store keeps, written once. Knows codecs and no places: no memory, disk or network.

A store holds encoded objects under (fingerprint, codec), within a byte budget, and forgets the least used ones first.
It is a cache: whatever it lost, it says so by a miss; whatever it returns has been verified, bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, final

from kvlink.core.fingerprint import is_fingerprint
from kvlink.store.codec import BytesLike, StoredObject, codec_named, encode

JSON: TypeAlias = dict[str, Any] | list[Any] | str | int | float | bool | None
Source: TypeAlias = Literal["host", "disk", "remote"]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lease:
    """A verified object that stays as it is until the lease ends: a context manager.

    What was decoded stays readable afterwards, but its memory is then no longer part of any budget.

    Attributes:
        object: The object.
        source: Where it came from.
        ending: What has to happen when the lease ends.
    """

    object: StoredObject
    source: Source
    ending: ExitStack = field(default_factory=ExitStack, repr=False)

    def release(self) -> None:
        """End the lease. A second time does nothing."""
        self.ending.close()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStat:
    """What a store knows of an object without reading it.

    Attributes:
        last_use: Seconds since the epoch, never later than now; a disk knows it to the minute.
    """

    num_bytes: int
    last_use: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What happened since the store was opened, and how full it is.

    Attributes:
        hits, misses: Calls of `get`, by outcome.
        puts: Objects accepted.
        evictions: Objects dropped to make room.
        quarantined: Objects that did not verify and were set aside.
        used_bytes, budget_bytes: Real bytes, everything counted that takes room; both 0 where a server keeps the
            account and evicts by its own rules.
    """

    hits: int
    misses: int
    puts: int
    evictions: int
    quarantined: int
    used_bytes: int
    budget_bytes: int


class Store(ABC):
    """Encoded objects under (fingerprint, codec). Every method may be called from any thread.

    Names must be fingerprints and codecs known ones; all methods raise ValueError for others. Methods raise
    StoreUnusable when the place itself cannot be read or written.
    """

    source: Source
    """What its leases name as their source; a store made of tiers names the slowest, its leases the one that had it."""

    @abstractmethod
    def get(self, name: str, accept: Sequence[str]) -> Lease | None:
        """Return the object in the first codec of `accept` that is there, or None.

        What is returned has been verified just now. An object that does not verify is quarantined, counted, and as
        good as absent. While the lease lasts, the object is neither evicted nor overwritten under its reader.
        """

    @abstractmethod
    def put(self, name: str, codec: str, data: BytesLike) -> None:
        """Keep an object. It appears whole or not at all; doing it twice is doing it once.

        Only the head is verified here, everything at each `get`. `data` is handed over: nobody writes to it afterwards.

        Raises:
            DamagedObject: The header is not that of (name, codec), or does not describe `data`.
            StoreFull: No room, even with all evicted that may be. The store is then as it was, or emptier.
        """

    @abstractmethod
    def delete(self, name: str, codec: str | None = None) -> int:
        """Remove the object in one codec, or in all (None), what is quarantined of it included.

        Returns how many objects were removed. Absence is no error. Leases of it go on; no new one is given.
        """

    @abstractmethod
    def names(self) -> set[str]:
        """Return the names of all objects."""

    @abstractmethod
    def stat(self, name: str) -> dict[str, ObjectStat]:
        """Return what is there of `name`, by codec. Reads nothing and counts as no use."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return counters and fill."""

    @abstractmethod
    def setting(self, key: str) -> JSON:
        """Return a small fact that was kept with the objects, or None."""

    @abstractmethod
    def keep_setting(self, key: str, value: JSON) -> JSON:
        """Keep a small fact unless one is kept under `key` already, and return the kept one.

        Raises:
            TypeError, ValueError: `value` is None, or no JSON value.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. The store is not used afterwards; a second time does nothing."""

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class BoundedStore(Store):
    """A store that keeps a budget itself, and that can put an object in another codec in its own place."""

    @abstractmethod
    def recompress(
        self, name: str, codec: str, into: str, *, wanted: Callable[[StoredObject], bool] = lambda found: True
    ) -> bool:
        """Put an object in another codec, in place of the one in `codec` and of any in `into`.

        The new object is made of the decoded old one, is written whole, and only then the old one is dropped: what is
        cut off in between leaves both. It counts as no use: the last use is that of the old one. Nothing is evicted
        for it, and the old bytes are not counted while the new ones are written.

        Returns whether it was done. Where not, nothing has changed: the old object is not there, does not verify (it is
        then quarantined), is none that is `wanted`, is being read from this store's memory, was used or deleted
        meanwhile, or the new one would be no smaller.

        Raises:
            ValueError: The entry has no place in the codec `into`, or one of the two leaves tokens out.
            StoreFull, StoreUnusable: The new object could not be written. The old one is as it was.
        """


def check_step(name: str, codec: str, into: str) -> None:
    """Refuse a step of recompression that leads nowhere, or to a codec that leaves tokens out.

    Raises:
        ValueError: It is one, or there is no such codec.
    """
    check_names(name, (codec, into))
    if codec == into or codec_named(into).prunes:
        raise ValueError(f"{codec} is not recompressed into {into}: take another codec, one that keeps every token")


def recoded(found: StoredObject, codec: str, *, secret: bytes | None) -> memoryview:
    """Return an object in another codec, with the same facts in its header.

    Raises:
        ValueError: The entry has no place in it.
    """
    return encode(found.decode(), found.identity, codec=codec, provenance=found.provenance, secret=secret)


def check_names(name: str, codecs: Sequence[str] = ()) -> None:
    """Refuse what is no fingerprint, or no codec.

    Raises:
        ValueError: One of them has the wrong form.
    """
    if not is_fingerprint(name):
        raise ValueError(f"a name is a fingerprint (64 hex digits), not {name!r}")
    for codec in codecs:
        codec_named(codec)
