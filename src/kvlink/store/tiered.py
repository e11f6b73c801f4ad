"""A store made of stores, fastest first: what a slow one has, the faster ones get. Knows no places.

A tier that fails is passed over, and counted: a request never fails because of it, nor waits for a slow tier to write.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import final

from kvlink.core.errors import StoreUnusable
from kvlink.store.base import JSON, Lease, ObjectStat, Source, Store, check_names
from kvlink.store.claim import Claim
from kvlink.store.codec import CODECS, BytesLike, check_head
from kvlink.store.flights import Flight, Flights, Key
from kvlink.store.remote import RemoteStore
from kvlink.store.tier import FAILURES, Tier, TieredStats
from kvlink.store.writer import Writer

WAITING_BYTES = 2**29
"""Memory that objects may hold while they wait to be written to slower tiers."""


@final
class TieredStore(Store):
    """Memory of the host, disk, remote: any stores, fastest first.

    Write policy: `put` writes to the fastest of disk and remote before it returns; the slower ones follow in the
    background (`flush` waits for them). The host gets what was asked for again, by promotion; only where there is
    nothing but hosts, `put` writes to them. Promotion to a host happens at once, to a disk in the background.

    `get` takes the first tier that has any accepted codec, even if a slower one has a better codec.
    """

    def __init__(self, *tiers: Store, waiting_bytes: int = WAITING_BYTES) -> None:
        """Stack the stores. They belong to this one from now on, which closes them.

        Args:
            tiers: Fastest first. All must take the same secret.
            waiting_bytes: Memory that objects may hold while they wait to be written. What is more is not written to
                the slower tier, and counted there.

        Raises:
            ValueError: There is none.
        """
        if not tiers:
            raise ValueError("a tiered store needs at least one store")
        self.source = tiers[-1].source
        self._tiers = [Tier(number, store) for number, store in enumerate(tiers)]
        kept = [tier for tier in self._tiers if tier.store.source != "host"]
        self._keeping = kept or self._tiers
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._flights = Flights(self._find)
        self._writer = Writer(most_bytes=waiting_bytes)

    def get(self, name: str, accept: Sequence[str]) -> Lease | None:
        """See `Store.get`. Of many that ask for the same at the same time, one searches; all get what it finds."""
        check_names(name, accept)
        lease = self._flights.take(name, accept)
        with self._lock:
            self._counts["misses" if lease is None else "hits"] += 1
        return lease

    def put(self, name: str, codec: str, data: BytesLike) -> None:
        """See `Store.put`, and the write policy above. One tier that keeps it is enough; the others are counted.

        Raises:
            StoreFull, StoreUnusable: No tier has kept it. The error is that of the fastest.
        """
        check_names(name, (codec,))
        check_head(data, name=name, codec=codec)
        errors: list[Exception] = []
        slower = iter(self._keeping)
        for tier in slower:
            before = len(errors)
            tier.attempt(lambda store: store.put(name, codec, data), errors)
            if len(errors) == before:
                break
        else:
            raise errors[0]
        for tier in self._tiers:
            if tier not in self._keeping:  # what it may have is older
                tier.attempt(lambda store: store.delete(name, codec))
        for tier in slower:
            self._later(tier, name, codec, data, lambda: False)
        with self._lock:
            self._counts["puts"] += 1

    def promote(self, name: str, codec: str, data: BytesLike, *, above: Source) -> None:
        """Give an object to all tiers faster than the one of this source, as if it had just been found there."""
        check_names(name, (codec,))
        check_head(data, name=name, codec=codec)
        flight = self._flights.alone(name)
        sources = [tier.store.source for tier in self._tiers]
        for tier in reversed(self._tiers[: sources.index(above) if above in sources else 0]):
            self._promote(name, codec, data, tier, flight)

    def locate(self, name: str, accept: Sequence[str]) -> tuple[Source, str, int] | None:
        """Return from which tier `get` would take an object now, its codec and bytes; None where no tier has any."""
        check_names(name, accept)
        for tier in self._tiers:
            found = tier.attempt(lambda store: store.stat(name)) or {}
            for codec in accept:
                if codec in found:
                    return tier.store.source, codec, found[codec].num_bytes
        return None

    def wrap_tiers(self, wrap: Callable[[Store], Store]) -> None:
        """Put another store around each tier's; it is for whoever opens them, before anybody else uses this one."""
        for tier in self._tiers:
            tier.store = wrap(tier.store)

    def in_host(self, name: str, accept: Sequence[str]) -> bool:
        """Whether memory has an accepted object. Asks no other tier."""
        check_names(name, accept)
        hosts = [tier for tier in self._tiers if tier.store.source == "host"]
        found = [tier.attempt(lambda store: store.stat(name)) or {} for tier in hosts]
        return any(not stats.keys().isdisjoint(accept) for stats in found)

    def free_host(self, name: str) -> int:
        """Drop from memory what a slower tier has, too; return how many objects. What no other tier has stays."""
        check_names(name)
        slower = [tier for tier in self._tiers if tier.store.source != "host"]
        freed = 0
        for host in (tier for tier in self._tiers if tier.store.source == "host"):
            for codec in host.attempt(lambda store: store.stat(name)) or ():
                if any(codec in (tier.attempt(lambda store: store.stat(name)) or ()) for tier in slower):
                    freed += host.attempt(lambda store, codec=codec: store.delete(name, codec)) or 0
        return freed

    def flush(self) -> None:
        """Wait until what `put` and promotions left to do in the background is done, or has failed."""
        self._writer.flush()

    def delete(self, name: str, codec: str | None = None) -> int:
        """See `Store.delete`. An object in several tiers counts once. What waits to be written is written no more.

        Raises:
            StoreUnusable: A tier could not delete, so that it may still have the object; the others have.
        """
        codecs = tuple(CODECS) if codec is None else (codec,)
        check_names(name, codecs)
        failed: dict[str, Exception] = {}
        gone: set[str] = set()
        with self._flights.deleting(name):
            self._writer.void(name, codec)
            for tier in self._tiers:
                errors: list[Exception] = []
                found = tier.attempt(lambda store: [each for each in codecs if store.delete(name, each)], errors)
                gone.update(found or ())
                if codec is None and not errors:  # codecs that this version does not know
                    tier.attempt(lambda store: store.delete(name), errors)
                if errors:
                    failed[tier.store.source] = errors[0]
        if failed:
            what = "; ".join(f"{source} ({error})" for source, error in failed.items())
            raise StoreUnusable(f"{name} may still be in {what}; it is gone from all other tiers; delete it again")
        return len(gone)

    def names(self) -> set[str]:
        """See `Store.names`. A tier that fails is left out; see `stats`."""
        return {name for tier in self._tiers for name in tier.attempt(lambda store: store.names()) or ()}

    def stat(self, name: str) -> dict[str, ObjectStat]:
        """See `Store.stat`: as the fastest tier that has it knows it. One that fails is left out."""
        check_names(name)
        stats: dict[str, ObjectStat] = {}
        for tier in self._tiers:
            stats = (tier.attempt(lambda store: store.stat(name)) or {}) | stats
        return stats

    def stats(self) -> TieredStats:
        """See `Store.stats`."""
        tiers = tuple(tier.stats() for tier in self._tiers)
        with self._lock:
            return TieredStats(
                hits=self._counts["hits"],
                misses=self._counts["misses"],
                puts=self._counts["puts"],
                evictions=sum(tier.stats.evictions for tier in tiers),
                quarantined=sum(tier.stats.quarantined for tier in tiers),
                used_bytes=sum(tier.stats.used_bytes for tier in tiers),
                budget_bytes=sum(tier.stats.budget_bytes for tier in tiers),
                tiers=tiers,
            )

    def setting(self, key: str) -> JSON:
        """See `Store.setting`. The slowest tier that has it decides: it is the one that machines share.

        Raises:
            StoreUnusable: No tier could be asked.
        """
        errors: list[Exception] = []
        for tier in reversed(self._tiers):
            value = tier.attempt(lambda store: store.setting(key), errors)
            if value is not None:
                return value
        if len(errors) == len(self._tiers):
            raise errors[0]
        return None

    def keep_setting(self, key: str, value: JSON) -> JSON:
        """See `Store.keep_setting`. Kept in every tier, the value of the slowest that has one.

        Raises:
            StoreUnusable: No tier could keep it.
        """
        kept = None if value is None else self.setting(key)
        errors: list[Exception] = []
        for tier in reversed(self._tiers):
            offered = value if kept is None else kept
            found = tier.attempt(lambda store, offered=offered: store.keep_setting(key, offered), errors)
            kept = found if kept is None else kept
        if len(errors) == len(self._tiers):
            raise errors[0]
        return kept

    def close(self) -> None:
        """See `Store.close`. Writes what waits, then closes every tier."""
        self._writer.flush()
        with ExitStack() as closing:
            for tier in self._tiers:
                closing.callback(tier.store.close)

    def claim(self, name: str, *, ttl_s: float) -> Claim | None:
        """See `RemoteStore.claim`. Where no tier is a remote, whoever asks gets the claim.

        It ends when the remote has what was put under it, which may be later than its release.
        """
        ending = ExitStack()
        for remote in self._remotes():
            taken = remote.claim(name, ttl_s=ttl_s)
            if taken is None:
                return None
            ending.callback(self._writer.after, name, taken.release)
        check_names(name)
        return Claim(name=name, ending=ending)

    def wait(self, name: str, accept: Sequence[str], *, at_most_s: float) -> bool:
        """See `RemoteStore.wait`. Where no tier is a remote, it says at once whether the object is there."""
        for remote in self._remotes():
            return remote.wait(name, accept, at_most_s=at_most_s)
        check_names(name, accept)
        return not self.stat(name).keys().isdisjoint(accept)

    def __enter__(self) -> "TieredStore":
        return self

    def _remotes(self) -> list[RemoteStore]:
        return [tier.store for tier in self._tiers if isinstance(tier.store, RemoteStore)]

    def _find(self, key: Key, flight: Flight) -> Lease | None:
        for place, tier in enumerate(self._tiers):
            lease = tier.attempt(lambda store: store.get(*key))
            if lease is not None:
                found = lease.object
                for faster in reversed(self._tiers[:place]):
                    self._promote(found.name, found.codec, found.data, faster, flight)
                return lease
        return None

    def _promote(self, name: str, codec: str, data: BytesLike, tier: Tier, flight: Flight) -> None:
        """Give a tier an object that a slower one had, unless its name is deleted meanwhile."""
        if tier.store.source == "host":  # which takes the very memory over
            self._write(tier, name, codec, data, lambda: flight.is_void, promoted=True)
        else:
            self._later(tier, name, codec, data, lambda: flight.is_void, promoted=True)

    def _later(
        self,
        tier: Tier,
        name: str,
        codec: str,
        data: BytesLike,
        is_void: Callable[[], bool],
        *,
        promoted: bool = False,
    ) -> None:
        """Queue a write; one that finds no room is counted as a failure of its tier."""
        with self._flights.before_deletion(name) as in_time:
            if not in_time or is_void():
                return
            size = memoryview(data).nbytes
            write = partial(self._write_behind, tier, name, codec, data, is_void, promoted=promoted)
            if not self._writer.submit((tier.number, name, codec), size, write):
                tier.failed(f"{self._writer.num_bytes} bytes wait to be written, so {name}.{codec} was left out")

    def _write_behind(
        self, tier: Tier, name: str, codec: str, data: BytesLike, is_void: Callable[[], bool], *, promoted: bool
    ) -> None:
        """Write where nobody would see an error: each is counted, whatever it is."""
        try:
            self._write(tier, name, codec, data, is_void, promoted=promoted)
        except Exception as error:
            tier.failed(f"{type(error).__name__}: {error}")

    def _write(
        self,
        tier: Tier,
        name: str,
        codec: str,
        data: BytesLike,
        is_void: Callable[[], bool],
        *,
        promoted: bool,
    ) -> None:
        """Write to one tier, unless the name is deleted meanwhile."""
        if is_void():
            return
        errors: list[Exception] = []
        tier.attempt(lambda store: store.put(name, codec, data), errors)
        if promoted and not errors:
            tier.promoted()
        with self._flights.before_deletion(name) as in_time:
            gone = is_void() or not in_time
        if gone:  # the deletion may have passed this tier before the object was there
            with suppress(*FAILURES):
                tier.store.delete(name, codec)
