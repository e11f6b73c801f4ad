"""Objects in the memory of this process, least recently used first. Knows no files and no other process."""

import json
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import final

from kvlink.core.errors import DamagedObject, StoreFull
from kvlink.store.base import JSON, BoundedStore, Lease, ObjectStat, StoreStats, check_names, check_step, recoded
from kvlink.store.codec import CODECS, BytesLike, StoredObject, check_head, open_object
from kvlink.store.header import canonical_json


@dataclass(slots=True, eq=False)
class _Slot:
    """One object. Once dropped from the table it lives on, and is counted, until its last lease ends."""

    data: memoryview
    last_use: float
    leases: int = 0
    dropped: bool = False


@final
class MemoryStore(BoundedStore):
    """The `host` tier. Put takes memory over without copying it, unless it is read-only.

    The budget is hard: it counts leased objects, also those that were deleted under their readers.
    """

    source = "host"

    def __init__(
        self, *, budget_bytes: int, secret: bytes | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """Make an empty store.

        Args:
            budget_bytes: What all objects together may take.
            secret: What objects must be signed with; None for unsigned ones.
            clock: Seconds since the epoch; reported by `stat`, decides nothing.
        """
        self._budget_bytes = budget_bytes
        self._secret = secret
        self._clock = clock
        self._lock = threading.Lock()
        self._slots: OrderedDict[tuple[str, str], _Slot] = OrderedDict()
        self._used_bytes = 0
        self._counts: Counter[str] = Counter()
        self._settings: dict[str, str] = {}

    def get(self, name: str, accept: Sequence[str]) -> Lease | None:
        """See `Store.get`."""
        check_names(name, accept)
        for codec in accept:
            slot = self._borrow((name, codec))
            if slot is None:
                continue
            with ExitStack() as ending:
                ending.callback(self._give_back, slot)
                try:
                    # Readers get views of this memory, and one of them may have written to it: verify every time.
                    found = open_object(slot.data, name=name, codec=codec, secret=self._secret)
                except DamagedObject:
                    self._quarantine((name, codec), slot)
                    continue
                self._count("hits")
                return Lease(object=found, source=self.source, ending=ending.pop_all())
        self._count("misses")
        return None

    def put(self, name: str, codec: str, data: BytesLike) -> None:
        """See `Store.put`. An object under lease stays as it is."""
        check_names(name, (codec,))
        check_head(data, name=name, codec=codec)
        key, size = (name, codec), memoryview(data).nbytes
        with self._lock:
            old = self._slots.get(key)
            if old is None or not old.leases:
                self._make_room(size, key)
                view = memoryview(data)
                self._slots[key] = _Slot(memoryview(bytearray(view)) if view.readonly else view, self._clock())
                self._used_bytes += size
            self._counts["puts"] += 1

    def delete(self, name: str, codec: str | None = None) -> int:
        """See `Store.delete`."""
        codecs = tuple(CODECS) if codec is None else (codec,)
        check_names(name, codecs)
        with self._lock:
            return sum(self._drop((name, codec)) for codec in codecs)

    def recompress(
        self, name: str, codec: str, into: str, *, wanted: Callable[[StoredObject], bool] = lambda found: True
    ) -> bool:
        """See `BoundedStore.recompress`. The new object takes the old one's place at once, so it needs no room."""
        check_step(name, codec, into)
        old, new = (name, codec), (name, into)
        with self._lock:
            slot = self._slots.get(old)
            used_at = slot.last_use if slot else 0.0
        if slot is None or slot.leases:
            return False
        try:
            found = open_object(slot.data, name=name, codec=codec, secret=self._secret)
        except DamagedObject:
            self._quarantine(old, slot)
            return False
        if not wanted(found):
            return False
        data = recoded(found, into, secret=self._secret)
        with self._lock:
            replaced = self._slots.get(new)
            is_idle = not slot.leases and slot.last_use == used_at and not (replaced and replaced.leases)
            if self._slots.get(old) is not slot or not is_idle or data.nbytes >= slot.data.nbytes:
                return False
            last = next(key for key in reversed(self._slots) if key in (old, new))
            fresh = _Slot(data, max(used_at, replaced.last_use) if replaced else used_at)
            kept = [(new, fresh) if key == last else (key, one) for key, one in self._slots.items()]
            for key in (old, new):
                self._drop(key)
            self._slots = OrderedDict((key, one) for key, one in kept if key != old and (key != new or one is fresh))
            self._used_bytes += data.nbytes
            return True

    def names(self) -> set[str]:
        """See `Store.names`."""
        with self._lock:
            return {name for name, _ in self._slots}

    def stat(self, name: str) -> dict[str, ObjectStat]:
        """See `Store.stat`."""
        check_names(name)
        with self._lock:
            found = {codec: slot for codec in CODECS if (slot := self._slots.get((name, codec)))}
            return {
                codec: ObjectStat(num_bytes=slot.data.nbytes, last_use=min(slot.last_use, self._clock()))
                for codec, slot in found.items()
            }

    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        with self._lock:
            return StoreStats(
                hits=self._counts["hits"],
                misses=self._counts["misses"],
                puts=self._counts["puts"],
                evictions=self._counts["evictions"],
                quarantined=self._counts["quarantined"],
                used_bytes=self._used_bytes,
                budget_bytes=self._budget_bytes,
            )

    def setting(self, key: str) -> JSON:
        """See `Store.setting`."""
        with self._lock:
            return json.loads(self._settings.get(key, "null"))

    def keep_setting(self, key: str, value: JSON) -> JSON:
        """See `Store.keep_setting`."""
        if value is None:
            raise ValueError(f"setting {key!r} needs a value; None says that there is none")
        text = canonical_json(value)
        with self._lock:
            return json.loads(self._settings.setdefault(key, text))

    def close(self) -> None:
        """See `Store.close`."""
        with self._lock:
            for key in tuple(self._slots):
                self._drop(key)

    def _borrow(self, key: tuple[str, str]) -> _Slot | None:
        """Return the slot with one lease more, as the most recently used one."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is not None:
                self._slots.move_to_end(key)
                slot.last_use = self._clock()
                slot.leases += 1
            return slot

    def _give_back(self, slot: _Slot) -> None:
        with self._lock:
            slot.leases -= 1
            if slot.dropped and not slot.leases:
                self._used_bytes -= slot.data.nbytes

    def _quarantine(self, key: tuple[str, str], slot: _Slot) -> None:
        """Drop a damaged object, unless another thread did, or has put a new one there."""
        with self._lock:
            if self._slots.get(key) is slot:
                self._drop(key)
                self._counts["quarantined"] += 1

    def _drop(self, key: tuple[str, str]) -> bool:
        """Take an object out of the table, and out of the budget if nobody reads it. The lock is held."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return False
        slot.dropped = True
        if not slot.leases:
            self._used_bytes -= slot.data.nbytes
        return True

    def _make_room(self, size: int, key: tuple[str, str]) -> None:
        """Drop the old object under `key`, then others, until `size` bytes fit. The lock is held.

        Raises:
            StoreFull: It cannot fit. Nothing has been dropped.
        """
        idle = [other for other, slot in self._slots.items() if not slot.leases]
        leased_bytes = self._used_bytes - sum(self._slots[other].data.nbytes for other in idle)
        if leased_bytes + size > self._budget_bytes:
            raise StoreFull(
                f"object {key[0]}.{key[1]} has {size} bytes, but {leased_bytes} of {self._budget_bytes} in memory are "
                f"being read; raise the budget of the host, or ask for less at a time"
            )
        self._drop(key)
        for victim in idle:
            if self._used_bytes + size <= self._budget_bytes:
                break
            self._counts["evictions"] += self._drop(victim)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1
