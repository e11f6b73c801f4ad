"""What a queued request will need, loaded before its turn: reads, digests and decompression, never the model.

A few threads work off one queue and end when it is empty. What they have loaded is held under lease, within a budget of
bytes, until it is used, cancelled or replaced.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, auto
from time import perf_counter
from typing import final

from kvlink.core.entry import CacheEntry
from kvlink.core.errors import StoreError
from kvlink.engine.rates import Rates
from kvlink.engine.uploading import Uploader
from kvlink.engine.usage import Source
from kvlink.store.base import Lease, Store
from kvlink.store.tiered import TieredStore

THREADS = 2
"""Threads that load: on a CPU more would take the model's cores."""

STALE_S = 60.0
"""What nobody has used for so long makes room for what is asked for now."""

RAW = "raw"


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A segment that will be needed, and the bytes of its entry once it is decoded."""

    name: str
    entry_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What was loaded; `release` when it is no longer read."""

    entry: CacheEntry
    source: Source
    codec: str
    release: Callable[[], None]


class _State(Enum):
    QUEUED = auto()
    READING = auto()
    HELD = auto()
    OVER = auto()


@final
class Prefetch:
    """A handle of what was asked for."""

    def __init__(self, prefetcher: "Prefetcher") -> None:
        self._prefetcher = prefetcher
        self.pending: set[str] = set()

    @property
    def done(self) -> bool:
        """Whether nothing of it is left to be loaded: all is held, used, cancelled, or not to be had."""
        return not self.pending

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, at most so long; return whether it is."""
        return self._prefetcher.wait(self, timeout_s)

    def cancel(self) -> None:
        """Let go of what is held and queued for it alone. A second time does nothing."""
        self._prefetcher.cancel(self)


@dataclass(slots=True, eq=False)
class _Flight:
    """One segment on its way, for all who want it.

    Attributes:
        order: Flights with lower values go first.
        owners: Who wants it, and has neither used nor cancelled it.
        users: How many read it, or wait for it, now.
        num_bytes: What it takes or will take; None while that is not known.
    """

    wanted: Wanted
    order: tuple[int, int]
    owners: dict[Prefetch, None] = field(default_factory=dict)
    state: _State = _State.QUEUED
    users: int = 0
    num_bytes: int | None = None
    since_s: float = 0.0
    lease: Lease | None = None
    entry: CacheEntry | None = None


@final
class Prefetcher:
    """Loads ahead from one store. Every method may be called from any thread."""

    def __init__(
        self,
        *,
        store: Store,
        accept: Sequence[str],
        rates: Rates,
        budget_bytes: int,
        uploader: Uploader | None = None,
        threads: int = THREADS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start nothing yet.

        Args:
            store: Where objects are.
            accept: Codecs that are taken, best first.
            rates: Is told how long loads take.
            budget_bytes: What is held and being read may take, decoded copies included.
            uploader: Moves entries to a device; None leaves them on the CPU.
            threads: How many loads run at once.
            monotonic: Seconds that only go forward.
        """
        self.budget_bytes = budget_bytes
        self._store = store
        self._accept = tuple(accept)
        self._rates = rates
        self._uploader = uploader
        self._most_threads = threads
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._flights: dict[str, _Flight] = {}
        self._threads: set[threading.Thread] = set()
        self._used_bytes = 0
        self._arrivals = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that are held or being read."""
        with self._changed:
            return self._used_bytes

    def prefetch(self, wanted: Sequence[Wanted], *, priority: int = 0) -> Prefetch:
        """Queue what is wanted, the greatest priority first, then in order of arrival."""
        handle = Prefetch(self)
        with self._changed:
            for one in wanted:
                self._arrivals += 1
                order = (-priority, self._arrivals)
                flight = self._flights.get(one.name)
                if flight is None:
                    flight = self._flights[one.name] = _Flight(one, order)
                flight.order = min(flight.order, order)
                flight.owners[handle] = None
                if flight.state is not _State.HELD:
                    handle.pending.add(one.name)
            while handle.pending and len(self._threads) < self._most_threads:
                thread = threading.Thread(target=self._work, name="kvlink-prefetch", daemon=True)
                self._threads.add(thread)
                thread.start()
            self._changed.notify_all()
        return handle

    def take(self, name: str) -> Held | None:
        """Return what was loaded ahead, waiting for it if it is being read; None if the caller has to look itself."""
        with self._changed:
            flight = self._flights.get(name)
            if flight is None:
                return None
            flight.users += 1
            if flight.state is _State.READING:
                self._changed.wait_for(lambda: flight.state is not _State.READING)
            ending = self._give_back(flight, next(iter(flight.owners), None))
            lease, entry = flight.lease, flight.entry
            if lease is None or entry is None:
                flight.users -= 1
                return None
        ending.close()
        if self._uploader is not None:
            self._uploader.received(entry)
        return Held(entry, lease.source, lease.object.codec, lambda: self._leave(flight))

    def cancel(self, handle: Prefetch) -> None:
        """See `Prefetch.cancel`."""
        with ExitStack() as ending, self._changed:
            for flight in list(self._flights.values()):
                if handle in flight.owners:
                    ending.enter_context(self._give_back(flight, handle))
            handle.pending.clear()
            self._changed.notify_all()

    def wait(self, handle: Prefetch, timeout_s: float | None) -> bool:
        """See `Prefetch.wait`."""
        with self._changed:
            return self._changed.wait_for(lambda: not handle.pending, timeout_s)

    def close(self) -> None:
        """Let go of everything, and wait for reads that are under way."""
        with self._changed:
            handles = {owner for flight in self._flights.values() for owner in flight.owners}
            threads = list(self._threads)
        for handle in handles:
            self.cancel(handle)
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        while (flight := self._next()) is not None:
            lease, entry, seconds = None, None, 0.0
            try:
                start = perf_counter()
                lease = self._store.get(flight.wanted.name, self._accept)
                if lease is not None:
                    entry = lease.object.decode()
                    seconds = perf_counter() - start
                    if self._uploader is not None:
                        entry = self._uploader.upload(entry)
            except (StoreError, OSError, RuntimeError, MemoryError):  # the load that needs it meets it again
                entry = None
            if lease is not None and entry is not None:
                self._rates.loaded(lease.source, lease.object.num_bytes, seconds)
            self._land(flight, lease, entry)

    def _next(self) -> _Flight | None:
        """Return the next flight, with room for it; None ends the thread. Waits while there is no room."""
        while True:
            with self._changed:
                queued = [flight for flight in self._flights.values() if flight.state is _State.QUEUED]
                if not queued:
                    self._threads.discard(threading.current_thread())
                    self._changed.notify_all()
                    return None
                flight = min(queued, key=lambda one: one.order)
                if flight.num_bytes is not None:
                    if flight.num_bytes > self.budget_bytes or not flight.num_bytes:
                        self._end(flight)
                    elif self._make_room(flight):
                        flight.state = _State.READING
                        self._used_bytes += flight.num_bytes
                        return flight
                    else:
                        self._changed.wait()
                    continue
            size = self._size(flight.wanted)
            with self._changed:
                flight.num_bytes = size

    def _size(self, wanted: Wanted) -> int:
        """Return what a segment will take, 0 if it is not there."""
        try:
            if isinstance(self._store, TieredStore):
                located = self._store.locate(wanted.name, self._accept)
                codec, num_bytes = (located[1], located[2]) if located else (RAW, 0)
            else:
                stats = self._store.stat(wanted.name)
                codec = next((codec for codec in self._accept if codec in stats), RAW)
                num_bytes = stats[codec].num_bytes if codec in stats else 0
        except (StoreError, OSError):
            return 0
        return num_bytes and self._taken(codec, num_bytes, wanted)

    def _taken(self, codec: str, num_bytes: int, wanted: Wanted) -> int:
        copied = codec != RAW or self._uploader is not None
        return num_bytes + copied * wanted.entry_bytes

    def _make_room(self, flight: _Flight) -> bool:
        """Whether there is room, after what is less urgent or stale had to go. The lock is held."""
        assert flight.num_bytes is not None
        now = self._monotonic()
        replaceable = sorted(
            (
                one
                for one in self._flights.values()
                if one.state is _State.HELD and (one.order[0] > flight.order[0] or now - one.since_s > STALE_S)
            ),
            key=lambda one: one.order,
        )
        missing = self._used_bytes + flight.num_bytes - self.budget_bytes
        if sum(one.num_bytes or 0 for one in replaceable) < missing:
            return False
        while self._used_bytes + flight.num_bytes > self.budget_bytes:
            self._end(replaceable.pop()).close()
        return True

    def _land(self, flight: _Flight, lease: Lease | None, entry: CacheEntry | None) -> None:
        """Hold what was read if somebody still wants it and it fits."""
        with ExitStack() as ending, self._changed:
            self._used_bytes -= flight.num_bytes or 0
            fits = False
            if lease is not None and entry is not None:
                size = self._taken(lease.object.codec, lease.object.num_bytes, flight.wanted)
                fits = self._used_bytes + size <= self.budget_bytes and bool(flight.owners or flight.users)
                if fits:
                    flight.lease, flight.entry, flight.num_bytes = lease, entry, size
                    flight.state, flight.since_s = _State.HELD, self._monotonic()
                    self._used_bytes += size
                    for owner in flight.owners:
                        owner.pending.discard(flight.wanted.name)
                    if not flight.owners:  # cancelled, and a load waits for it
                        ending.enter_context(self._end(flight))
            if not fits:
                flight.num_bytes = 0
                flight.state = _State.QUEUED
                self._end(flight)
                if lease is not None:
                    ending.callback(lease.release)
            self._changed.notify_all()

    def _give_back(self, flight: _Flight, owner: Prefetch | None) -> ExitStack:
        """Let an owner go, and with the last one the flight. The lock is held."""
        if owner is not None:
            flight.owners.pop(owner, None)
            owner.pending.discard(flight.wanted.name)
        if flight.owners or flight.state is _State.READING:
            return ExitStack()
        return self._end(flight)

    def _end(self, flight: _Flight) -> ExitStack:
        """Take a flight out of the account; what its lease's end needs is returned. The lock is held."""
        if flight.state is _State.HELD:
            self._used_bytes -= flight.num_bytes or 0
        if flight.state is not _State.OVER:
            flight.state = _State.OVER
            if self._flights.get(flight.wanted.name) is flight:
                del self._flights[flight.wanted.name]
            for owner in flight.owners:
                owner.pending.discard(flight.wanted.name)
            self._changed.notify_all()
        ending = ExitStack()
        if flight.lease is not None and not flight.users:
            ending.callback(flight.lease.release)
        return ending

    def _leave(self, flight: _Flight) -> None:
        with self._changed:
            flight.users -= 1
            is_last = not flight.users and flight.state is _State.OVER
        if is_last and flight.lease is not None:
            flight.lease.release()
