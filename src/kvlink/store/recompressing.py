"""A store that makes room in the background: its least used objects become smaller before any has to go.

Knows no models' quality: whoever names the ladder of codecs knows what answers bear.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import final

from kvlink.store.base import JSON, BoundedStore, Lease, ObjectStat, Store, StoreStats
from kvlink.store.codec import BytesLike, StoredObject
from kvlink.store.recompress import RecompressReport, Tally, check_ladder, work_down
from kvlink.store.tiered import TieredStore

HIGH, LOW = 0.85, 0.75
"""Shares of the budget at which work in the background begins, and at which it ends."""

STRIDE = 0.01
"""After such a share of the budget was put, all objects are looked at again where too few could be made smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecompressingStats(StoreStats):
    """Counters of the store, and what recompression in the background did."""

    recompression: RecompressReport


@final
class RecompressingStore(Store):
    """A store in memory or on disk that writes its least used objects smaller when it fills up.

    One thread does so in the background. A `put` never waits for it: where objects come faster than they shrink, they
    are evicted as they would be without it.
    """

    def __init__(
        self,
        store: BoundedStore,
        *,
        ladder: Sequence[str] = (),
        model: str | None = None,
        high: float = HIGH,
        low: float = LOW,
    ) -> None:
        """Wrap a store, which belongs to this one from now on.

        Args:
            store: What keeps the objects, and the budget.
            ladder: Codecs below raw, in the order in which they are taken; none switches recompression off. Readers
                that do not accept one of them miss what is in it.
            model: Digest of the model whose objects are recompressed, since what one bears says nothing of another;
                None for all objects.
            high: The share of the budget at which work begins.
            low: The share at which it ends.

        Raises:
            ValueError: It is no ladder (`check_ladder`), or the shares are not 0 <= low <= high <= 1.
        """
        if not 0 <= low <= high <= 1:
            raise ValueError(f"shares of the budget are 0 <= low <= high <= 1, not low={low}, high={high}")
        self.source = store.source
        self._store = store
        self._ladder = check_ladder(ladder)
        budget_bytes = store.stats().budget_bytes
        self._model = model
        self._high_bytes, self._low_bytes = int(high * budget_bytes), int(low * budget_bytes)
        self._stride_bytes = int(STRIDE * budget_bytes)
        self._lock = threading.Lock()
        self._leases: Counter[str] = Counter()
        self._tally = Tally()
        self._foreign: set[str] = set()
        self._put_bytes = 0
        self._next_bytes = 0
        self._pass: threading.Thread | None = None
        self._again = False
        self._closed = False
        self._consider(0)

    def get(self, name: str, accept: Sequence[str]) -> Lease | None:
        """See `Store.get`. While the lease lasts, no object of this name is recompressed."""
        with self._lock:
            self._leases[name] += 1
        with ExitStack() as ending:
            ending.callback(self._return, name)
            lease = self._store.get(name, accept)
            if lease is None:
                return None
            ending.enter_context(lease)
            return Lease(object=lease.object, source=lease.source, ending=ending.pop_all())

    def put(self, name: str, codec: str, data: BytesLike) -> None:
        """See `Store.put`."""
        size = memoryview(data).nbytes
        self._store.put(name, codec, data)
        self._consider(size)

    def delete(self, name: str, codec: str | None = None) -> int:
        """See `Store.delete`."""
        return self._store.delete(name, codec)

    def names(self) -> set[str]:
        """See `Store.names`."""
        return self._store.names()

    def stat(self, name: str) -> dict[str, ObjectStat]:
        """See `Store.stat`."""
        return self._store.stat(name)

    def stats(self) -> RecompressingStats:
        """See `Store.stats`."""
        inner = self._store.stats()
        counts = {field.name: getattr(inner, field.name) for field in fields(StoreStats)}
        return RecompressingStats(**counts, recompression=self._tally.report())

    def setting(self, key: str) -> JSON:
        """See `Store.setting`."""
        return self._store.setting(key)

    def keep_setting(self, key: str, value: JSON) -> JSON:
        """See `Store.keep_setting`."""
        return self._store.keep_setting(key, value)

    def settle(self) -> None:
        """Wait until nothing is left to do in the background."""
        while True:
            with self._lock:
                running = self._pass
            if running is None:
                return
            running.join()

    def close(self) -> None:
        """See `Store.close`. The object that is being worked on is finished first."""
        with self._lock:
            self._closed = True
        self.settle()
        self._store.close()

    def __enter__(self) -> "RecompressingStore":
        return self

    def _consider(self, size: int) -> None:
        """Have room made if the store is fuller than it should be. At most one more pass waits behind a running one."""
        with self._lock:
            self._put_bytes += size
            if not self._ladder or self._closed or self._put_bytes < self._next_bytes:
                return
        if self._store.stats().used_bytes <= self._high_bytes:
            return
        with self._lock:
            if self._closed:
                return
            if self._pass is not None:
                self._again = True
                return
            # A daemon: a process ends when it wants to, and what is cut off leaves whole objects.
            self._pass = threading.Thread(target=self._make_room, name="kvlink-recompress", daemon=True)
            self._pass.start()

    def _make_room(self) -> None:
        """Recompress until the store is small enough, or nothing can be made smaller."""
        while True:
            with self._lock:
                self._next_bytes = self._put_bytes + self._stride_bytes
            try:
                work_down(
                    self._store,
                    self._ladder,
                    self._tally,
                    target_bytes=self._low_bytes,
                    spare=self._is_spared,
                    wanted=self._is_wanted,
                    stop=lambda: self._closed,
                )
            except Exception as error:  # whatever it is, puts go on, and stats tell it
                self._tally.failed(error)
            with self._lock:
                if not self._again or self._closed:
                    self._pass = None
                    return
                self._again = False

    def _is_spared(self, name: str) -> bool:
        with self._lock:
            return name in self._leases or name in self._foreign

    def _is_wanted(self, found: StoredObject) -> bool:
        """Whether an object is of the model; what is not is not read a second time."""
        if self._model in (None, found.identity.model):
            return True
        with self._lock:
            self._foreign.add(found.name)
        return False

    def _return(self, name: str) -> None:
        with self._lock:
            self._leases[name] -= 1
            if not self._leases[name]:
                del self._leases[name]


def under_pressure(store: Store, *, ladder: Sequence[str], model: str | None = None) -> Store:
    """Return a store that recompresses when it fills up; of a store made of tiers, each tier does so for itself.

    What keeps no budget itself, and what recompresses already, stays as it is.

    Args:
        store: The store, which belongs to the new one from now on.
        ladder: As of `RecompressingStore`.
        model: As of `RecompressingStore`.
    """
    if isinstance(store, TieredStore):
        store.wrap_tiers(lambda tier: under_pressure(tier, ladder=ladder, model=model))
        return store
    return RecompressingStore(store, ladder=ladder, model=model) if isinstance(store, BoundedStore) else store
