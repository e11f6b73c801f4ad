"""Who holds what within a hard budget of bytes, least recently used first. Knows neither tensors nor loaders."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar, final

from kvlink.core.errors import DeviceBusy, DeviceOverflow

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Leased(Generic[_T]):
    """One thing that is held, or is being made by the first who leased it.

    Attributes:
        num_bytes: What it takes, or may take while it is not there.
        count: Leases that have not ended.
        made: What came of its making; cancelled where nothing did.
    """

    name: str
    num_bytes: int
    count: int = 1
    made: "Future[_T]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Entered(Generic[_T]):
    """What one call has leased, by name.

    Attributes:
        there: What was there.
        others: What another caller makes now.
        new: What this caller has to make, or to give up.
    """

    there: dict[str, Leased[_T]]
    others: dict[str, Leased[_T]]
    new: dict[str, Leased[_T]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyStats:
    """What happened so far, and how full it is.

    Attributes:
        num_residents: Segments that a request would find.
        used_bytes: Real bytes of all, deleted ones that are still read included, and of those being made.
        leased_bytes: Those of them that running requests hold.
        hits, misses: Different segments of each hold, by whether they were resident.
        evictions: Residents dropped to make room.
    """

    num_residents: int
    used_bytes: int
    leased_bytes: int
    budget_bytes: int
    hits: int
    misses: int
    evictions: int


@final
class Leases(Generic[_T]):
    """Leases on things by name. Every method may be called from any thread; none waits for a making.

    What is leased is never evicted. What is dropped under its leases is found no more, but counted until the last ends.
    """

    def __init__(self, *, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Leased[_T]] = OrderedDict()
        self._leaving: set[Leased[_T]] = set()
        self._counts: Counter[str] = Counter()

    def enter(self, sizes: Mapping[str, int], *, beside: Iterable[Leased[_T]] = ()) -> Entered[_T]:
        """Lease all these or none, with room for those that have to be made.

        Args:
            sizes: What each name would take, if it is not there.
            beside: What the same request holds already.

        Raises:
            DeviceOverflow: The request would take more than the budget.
            DeviceBusy: It would take more than what others leave. Nothing has been evicted.
        """
        with self._lock:
            found = {name: self._kept[name] for name in sizes if name in self._kept}
            absent = {name: size for name, size in sizes.items() if name not in found}
            ours = (*found.values(), *beside)
            needed = _bytes_of(ours) + sum(absent.values())
            others = self._leased_bytes() - _bytes_of(leased for leased in ours if leased.count)
            if needed > self.budget_bytes:
                raise DeviceOverflow(
                    f"the documents of this request take {needed} bytes on the device, and its budget is "
                    f"{self.budget_bytes} bytes: ask for fewer or shorter documents, or raise the budget"
                )
            self._require(needed, others)
            for name, leased in found.items():
                leased.count += 1
                self._kept.move_to_end(name)
            self._make_room(sum(absent.values()))
            new = {name: Leased[_T](name, size) for name, size in absent.items()}
            self._kept |= new
            there = {name: leased for name, leased in found.items() if leased.made.done()}
            self._counts["hits"] += len(there)
            self._counts["misses"] += len(sizes) - len(there)
            return Entered(there, {name: leased for name, leased in found.items() if name not in there}, new)

    def resize(self, leased: Leased[_T], num_bytes: int) -> None:
        """Say what a thing really takes, before it is made.

        Raises:
            DeviceBusy: It takes more than was said, and more than what others leave.
        """
        with self._lock:
            if num_bytes > leased.num_bytes:
                self._require(num_bytes, self._leased_bytes() - leased.num_bytes)
                self._make_room(num_bytes - leased.num_bytes)
            leased.num_bytes = num_bytes

    def give_up(self, leased: Leased[_T]) -> None:
        """Say that a thing will not be made, unless it has been: who waits for it has to see to it. Leases go on."""
        with self._lock:  # so that nobody finds a thing of which nothing has come
            if leased.made.cancel():
                self._unmake(leased)

    def fail(self, leased: Leased[_T], error: Exception) -> None:
        """Say why a thing could not be made: all who wait for it learn it, and nobody finds it again."""
        with self._lock:
            self._unmake(leased)
            leased.made.set_exception(error)

    def leave(self, leased: Leased[_T]) -> None:
        """End one lease. What nobody waits for any more need not be made."""
        with self._lock:
            leased.count -= 1
            if not leased.count:
                self._leaving.discard(leased)
                if leased.made.cancel():
                    self._unmake(leased)

    def drop(self, *names: str) -> bool:
        """Let nobody find these again; whether nothing of them is left, leased or being made."""
        with self._lock:
            for name in names:
                leased = self._kept.pop(name, None)
                if leased is not None and leased.count:
                    self._leaving.add(leased)
            return not any(leased.name in names for leased in self._leaving)

    def stats(self) -> ResidencyStats:
        """Return counters and fill."""
        with self._lock:
            return ResidencyStats(
                num_residents=len(self._kept),
                used_bytes=self._used_bytes(),
                leased_bytes=self._leased_bytes(),
                budget_bytes=self.budget_bytes,
                hits=self._counts["hits"],
                misses=self._counts["misses"],
                evictions=self._counts["evictions"],
            )

    def __contains__(self, name: str) -> bool:
        """Whether a thing is there, or is being made."""
        with self._lock:
            return name in self._kept

    def _unmake(self, leased: Leased[_T]) -> None:
        leased.num_bytes = 0
        if self._kept.get(leased.name) is leased:
            del self._kept[leased.name]

    def _require(self, needed: int, others: int) -> None:
        """Refuse what does not fit beside what others hold. The lock is held."""
        if needed + others > self.budget_bytes:
            raise DeviceBusy(
                f"{needed} bytes are needed on the device, but other requests hold {others} of the {self.budget_bytes} "
                "bytes of its budget: ask again when one of them has ended, or raise the budget"
            )

    def _make_room(self, num_bytes: int) -> None:
        """Evict what nobody holds, least recently used first, until so much fits. The lock is held."""
        missing = self._used_bytes() + num_bytes - self.budget_bytes
        for name, leased in tuple(self._kept.items()):
            if missing <= 0:
                return
            if not leased.count:
                del self._kept[name]
                missing -= leased.num_bytes
                self._counts["evictions"] += 1

    def _used_bytes(self) -> int:
        return _bytes_of(self._kept.values()) + _bytes_of(self._leaving)

    def _leased_bytes(self) -> int:
        return _bytes_of(leased for leased in self._kept.values() if leased.count) + _bytes_of(self._leaving)


def _bytes_of(those: Iterable[Leased[_T]]) -> int:
    return sum(leased.num_bytes for leased in those)
