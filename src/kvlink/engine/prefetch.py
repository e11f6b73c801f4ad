"""What a queued request will need, loaded before its turn: reads, digests and decompression, never the model.

A few threads work off one queue and end when it is empty. What they have loaded is held under lease, within a budget of
bytes, until it is used, cancelled or replaced.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import final

from kvlink.core.entry import CacheEntry
from kvlink.core.errors import StoreError
from kvlink.engine.flight import Flight, Held, Prefetch, State, Wanted
from kvlink.engine.rates import Rates
from kvlink.engine.uploading import Uploader
from kvlink.store.base import Lease, Store
from kvlink.store.codec import RAW
from kvlink.store.tiered import TieredStore

THREADS = 2
"""Threads that load: on a CPU more would take the model's cores."""

STALE_S = 60.0
"""What nobody has used for so long makes room for what is asked for now."""

IDLE_S = 5.0
"""A thread that has had nothing to do for so long ends."""

AT_HAND_BYTES = 4 * 2**20
"""Smaller objects that are in memory are left there: to hand them to a thread and back costs more than to read them."""

QUICK_S = 0.015
"""What loads in less time is left to its request: beside a model that runs, it would take as much from others."""


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
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._work_waits = threading.Condition(lock)
        self._flights: dict[str, Flight] = {}
        self._threads: set[threading.Thread] = set()
        self._used_bytes = 0
        self._arrivals = 0
        self._is_closing = False

    @property
    def used_bytes(self) -> int:
        """Bytes that are held or being read."""
        with self._changed:
            return self._used_bytes

    def prefetch(self, wanted: Sequence[Wanted], *, priority: int = 0) -> Prefetch:
        """Queue what is wanted, the greatest priority first, then in order of arrival; nothing without a gain."""
        handle = Prefetch(cancel=self.cancel, wait=self.wait)
        far = [one for one in wanted if self._is_far(one)]
        seconds = self._rates.longest_s([one.object_bytes for one in far])
        if seconds is not None and seconds < QUICK_S:
            far = []
        with self._changed:
            for one in far:
                self._arrivals += 1
                order = (-priority, self._arrivals)
                flight = self._flights.get(one.name)
                if flight is None:
                    flight = self._flights[one.name] = Flight(one, order, num_bytes=self._taken(one))
                flight.order = min(flight.order, order)
                flight.owners[handle] = None
                if flight.state is not State.HELD:
                    handle.pending.add(one.name)
            self._is_closing = False
            while handle.pending and len(self._threads) < self._most_threads:
                thread = threading.Thread(target=self._work, name="kvlink-prefetch", daemon=True)
                self._threads.add(thread)
                thread.start()
            self._work_waits.notify_all()
        return handle

    def take(self, name: str) -> Held | None:
        """Return what was loaded ahead, waiting for it if it is being read; None if the caller has to look itself."""
        with self._changed:
            flight = self._flights.get(name)
            if flight is None:
                return None
            flight.users += 1
            if flight.state is State.READING:
                self._changed.wait_for(lambda: flight.state is not State.READING)
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
            self._work_waits.notify_all()

    def wait(self, handle: Prefetch, timeout_s: float | None) -> bool:
        """See `Prefetch.wait`."""
        with self._changed:
            return self._changed.wait_for(lambda: not handle.pending, timeout_s)

    def close(self) -> None:
        """Let go of everything, and wait for reads that are under way."""
        with self._changed:
            handles = {owner for flight in self._flights.values() for owner in flight.owners}
            threads = list(self._threads)
            self._is_closing = True
            self._work_waits.notify_all()
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

    def _next(self) -> Flight | None:
        """Return the next flight, with room for it; None ends the thread. Waits while there is no room."""
        has_waited = False
        while True:
            with self._changed:
                queued = [flight for flight in self._flights.values() if flight.state is State.QUEUED]
                if not queued:
                    if not has_waited and not self._is_closing:
                        has_waited = not self._work_waits.wait(IDLE_S)
                        continue
                    self._threads.discard(threading.current_thread())
                    return None
                flight = min(queued, key=lambda one: one.order)
                if flight.num_bytes > self.budget_bytes:
                    self._end(flight)
                elif self._make_room(flight):
                    flight.state = State.READING
                    self._used_bytes += flight.num_bytes
                    return flight
                else:
                    self._work_waits.wait()

    def _taken(self, wanted: Wanted, found: Lease | None = None) -> int:
        """Return what a segment takes as it was found, or at most."""
        if found is None:
            size, copied = wanted.object_bytes, self._accept != (RAW,)
        else:
            size, copied = found.object.num_bytes, found.object.codec != RAW
        return size + (copied + (self._uploader is not None)) * wanted.entry_bytes

    def _is_far(self, wanted: Wanted) -> bool:
        """Whether it may be where it takes time to get it; what is in no place but memory is not even looked for."""
        is_large = wanted.object_bytes >= AT_HAND_BYTES
        if isinstance(self._store, TieredStore):
            return is_large or not self._store.in_host(wanted.name, self._accept)
        if self._store.source == "host":
            return is_large and not self._store.stat(wanted.name).keys().isdisjoint(self._accept)
        return True

    def _make_room(self, flight: Flight) -> bool:
        """Whether there is room, after what is less urgent or stale had to go. The lock is held."""
        now = self._monotonic()
        replaceable = sorted(
            (
                one
                for one in self._flights.values()
                if one.state is State.HELD and (one.order[0] > flight.order[0] or now - one.since_s > STALE_S)
            ),
            key=lambda one: one.order,
        )
        missing = self._used_bytes + flight.num_bytes - self.budget_bytes
        if sum(one.num_bytes for one in replaceable) < missing:
            return False
        while self._used_bytes + flight.num_bytes > self.budget_bytes:
            self._end(replaceable.pop()).close()
        return True

    def _land(self, flight: Flight, lease: Lease | None, entry: CacheEntry | None) -> None:
        """Hold what was read if somebody still wants it and it fits."""
        with ExitStack() as ending, self._changed:
            self._used_bytes -= flight.num_bytes
            fits = False
            if lease is not None and entry is not None:
                size = self._taken(flight.wanted, lease)
                fits = self._used_bytes + size <= self.budget_bytes and bool(flight.owners or flight.users)
                if fits:
                    flight.lease, flight.entry, flight.num_bytes = lease, entry, size
                    flight.state, flight.since_s = State.HELD, self._monotonic()
                    self._used_bytes += size
                    for owner in flight.owners:
                        owner.pending.discard(flight.wanted.name)
                    if not flight.owners:  # cancelled, and a load waits for it
                        ending.enter_context(self._end(flight))
            if not fits:
                flight.num_bytes = 0
                flight.state = State.QUEUED
                self._end(flight)
                if lease is not None:
                    ending.callback(lease.release)
            self._changed.notify_all()

    def _give_back(self, flight: Flight, owner: Prefetch | None) -> ExitStack:
        """Let an owner go, and with the last one the flight. The lock is held."""
        if owner is not None:
            flight.owners.pop(owner, None)
            owner.pending.discard(flight.wanted.name)
        if flight.owners or flight.state is State.READING:
            return ExitStack()
        return self._end(flight)

    def _end(self, flight: Flight) -> ExitStack:
        """Take a flight out of the account; what its lease's end needs is returned. The lock is held."""
        if flight.state is State.HELD:
            self._used_bytes -= flight.num_bytes
            self._work_waits.notify_all()
        if flight.state is not State.OVER:
            flight.state = State.OVER
            if self._flights.get(flight.wanted.name) is flight:
                del self._flights[flight.wanted.name]
            for owner in flight.owners:
                owner.pending.discard(flight.wanted.name)
            self._changed.notify_all()
        ending = ExitStack()
        if flight.lease is not None and not flight.users:
            ending.callback(flight.lease.release)
        return ending

    def _leave(self, flight: Flight) -> None:
        with self._changed:
            flight.users -= 1
            is_last = not flight.users and flight.state is State.OVER
        if is_last and flight.lease is not None:
            flight.lease.release()
