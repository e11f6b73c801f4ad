"""A store made of stores, fastest first: what a slow one has, the faster ones get. Knows no places.

A tier that fails is passed over, and counted: a request never fails because of it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TypeVar, final

from kvlink.core.errors import StoreError, StoreUnusable
from kvlink.store.base import JSON, Lease, ObjectStat, Source, Store, StoreStats, check_names
from kvlink.store.codec import CODECS, BytesLike, StoredObject, check_head
from kvlink.store.remote import Claim, RemoteStore

_Key = tuple[str, tuple[str, ...]]
_T = TypeVar("_T")
_FAILURES = (StoreError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """What one tier did.

    Attributes:
        stats: Its own counters.
        promotions: Objects that it was given because a slower tier had them.
        failures: Calls that raised, promotions that it could not take among them.
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


@dataclass(slots=True, eq=False)
class _Tier:
    """A store, and what this process saw of it."""

    store: Store
    promotions: int = 0
    failures: int = 0
    reason: str = ""


@dataclass(slots=True, eq=False)
class _Flight:
    """One search that serves all who asked for the same while it lasted.

    Attributes:
        is_void: The name was deleted meanwhile: nothing of it may be promoted any more.
    """

    is_void: bool
    passengers: int = 0
    landed: "Future[Lease | None]" = field(default_factory=Future)


@final
class TieredStore(Store):
    """Memory of the host, disk, remote: any stores, fastest first.

    Write policy: `put` writes to the disk and to the remote, at once and before it returns. The host gets what was
    asked for again, by promotion; only where there is nothing but hosts, `put` writes to them.

    `get` takes the first tier that has any accepted codec, even if a slower one has a better codec.
    """

    def __init__(self, *tiers: Store) -> None:
        """Stack the stores. They belong to this one from now on, which closes them.

        Args:
            tiers: Fastest first. All must take the same secret.

        Raises:
            ValueError: There is none.
        """
        if not tiers:
            raise ValueError("a tiered store needs at least one store")
        self.source = tiers[-1].source
        self._tiers = [_Tier(store) for store in tiers]
        kept = [tier for tier in self._tiers if tier.store.source != "host"]
        self._keeping = kept or self._tiers
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._flights: dict[_Key, _Flight] = {}
        self._deleting: Counter[str] = Counter()

    def get(self, name: str, accept: Sequence[str]) -> Lease | None:
        """See `Store.get`. Of many that ask for the same at the same time, one searches; all get what it finds."""
        check_names(name, accept)
        key = (name, tuple(accept))
        with self._lock:
            flight = self._flights.get(key)
            leads = flight is None
            if flight is None:
                flight = self._flights[key] = _Flight(is_void=name in self._deleting)
            flight.passengers += 1
        if leads:
            self._fly(key, flight)
        lease = flight.landed.result()
        with self._lock:
            self._counts["misses" if lease is None else "hits"] += 1
        if lease is None:
            return None
        ending = ExitStack()
        ending.callback(self._leave, flight, lease)
        return Lease(object=lease.object, source=lease.source, ending=ending)

    def put(self, name: str, codec: str, data: BytesLike) -> None:
        """See `Store.put`, and the write policy above. One tier that keeps it is enough; the others are counted.

        Raises:
            StoreFull, StoreUnusable: No tier has kept it. The error is that of the fastest.
        """
        check_names(name, (codec,))
        check_head(data, name=name, codec=codec)
        errors: list[Exception] = []
        for tier in self._keeping:
            self._try(tier, lambda store: store.put(name, codec, data), errors)
        if len(errors) == len(self._keeping):
            raise errors[0]
        for tier in self._tiers:
            if tier not in self._keeping:  # what it may have is older
                self._try(tier, lambda store: store.delete(name, codec))
        with self._lock:
            self._counts["puts"] += 1

    def delete(self, name: str, codec: str | None = None) -> int:
        """See `Store.delete`. An object in several tiers counts once.

        Raises:
            StoreUnusable: A tier could not delete, so that it may still have the object; the others have.
        """
        codecs = tuple(CODECS) if codec is None else (codec,)
        check_names(name, codecs)
        with self._lock:
            self._deleting[name] += 1
            for (flying, _), flight in self._flights.items():
                flight.is_void |= flying == name
        failed: dict[str, Exception] = {}
        gone: set[str] = set()
        try:
            for tier in self._tiers:
                errors: list[Exception] = []
                found = self._try(tier, lambda store: [each for each in codecs if store.delete(name, each)], errors)
                gone.update(found or ())
                if codec is None and not errors:  # codecs that this version does not know
                    self._try(tier, lambda store: store.delete(name), errors)
                if errors:
                    failed[tier.store.source] = errors[0]
        finally:
            with self._lock:
                self._deleting[name] -= 1
                self._deleting += Counter()  # drops those that are zero
        if failed:
            what = "; ".join(f"{source} ({error})" for source, error in failed.items())
            raise StoreUnusable(f"{name} may still be in {what}; it is gone from all other tiers; delete it again")
        return len(gone)

    def names(self) -> set[str]:
        """See `Store.names`. A tier that fails is left out; see `stats`."""
        return {name for tier in self._tiers for name in self._try(tier, lambda store: store.names()) or ()}

    def stat(self, name: str) -> dict[str, ObjectStat]:
        """See `Store.stat`: as the fastest tier that has it knows it. One that fails is left out."""
        check_names(name)
        stats: dict[str, ObjectStat] = {}
        for tier in self._tiers:
            stats = (self._try(tier, lambda store: store.stat(name)) or {}) | stats
        return stats

    def stats(self) -> TieredStats:
        """See `Store.stats`."""
        inner = [tier.store.stats() for tier in self._tiers]
        with self._lock:
            return TieredStats(
                hits=self._counts["hits"],
                misses=self._counts["misses"],
                puts=self._counts["puts"],
                evictions=sum(stats.evictions for stats in inner),
                quarantined=sum(stats.quarantined for stats in inner),
                used_bytes=sum(stats.used_bytes for stats in inner),
                budget_bytes=sum(stats.budget_bytes for stats in inner),
                tiers=tuple(
                    TierStats(
                        source=tier.store.source,
                        stats=stats,
                        promotions=tier.promotions,
                        failures=tier.failures,
                        reason=tier.reason,
                    )
                    for tier, stats in zip(self._tiers, inner, strict=True)
                ),
            )

    def setting(self, key: str) -> JSON:
        """See `Store.setting`. The slowest tier that has it decides: it is the one that machines share.

        Raises:
            StoreUnusable: No tier could be asked.
        """
        errors: list[Exception] = []
        for tier in reversed(self._tiers):
            value = self._try(tier, lambda store: store.setting(key), errors)
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
            found = self._try(tier, lambda store, offered=offered: store.keep_setting(key, offered), errors)
            kept = found if kept is None else kept
        if len(errors) == len(self._tiers):
            raise errors[0]
        return kept

    def close(self) -> None:
        """See `Store.close`. Closes every tier."""
        with ExitStack() as closing:
            for tier in self._tiers:
                closing.callback(tier.store.close)

    def claim(self, name: str, *, ttl_s: float) -> Claim | None:
        """See `RemoteStore.claim`. Where no tier is a remote, whoever asks gets the claim."""
        for remote in self._remotes():
            return remote.claim(name, ttl_s=ttl_s)
        check_names(name)
        return Claim(name=name)

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

    def _fly(self, key: _Key, flight: _Flight) -> None:
        """Search, promote, and tell everybody who waits."""
        try:
            lease = self._find(key, flight)
        except BaseException as error:
            with self._lock:
                del self._flights[key]
            flight.landed.set_exception(error)
            return
        with self._lock:
            del self._flights[key]
        flight.landed.set_result(lease)

    def _find(self, key: _Key, flight: _Flight) -> Lease | None:
        for place, tier in enumerate(self._tiers):
            lease = self._try(tier, lambda store: store.get(*key))
            if lease is not None:
                for faster in reversed(self._tiers[:place]):
                    self._promote(lease.object, faster, flight)
                return lease
        return None

    def _promote(self, found: StoredObject, tier: _Tier, flight: _Flight) -> None:
        """Give a tier an object that a slower one had, unless its name is deleted meanwhile."""
        if flight.is_void:
            return
        errors: list[Exception] = []
        self._try(tier, lambda store: store.put(found.name, found.codec, found.data), errors)
        with self._lock:
            tier.promotions += not errors
            is_void = flight.is_void
        if is_void:  # the deletion may have passed this tier before the object was there
            with suppress(*_FAILURES):
                tier.store.delete(found.name, found.codec)

    def _leave(self, flight: _Flight, lease: Lease) -> None:
        """End one of the leases that share what a flight found; with the last, the tier's own ends."""
        with self._lock:
            flight.passengers -= 1
            is_last = not flight.passengers
        if is_last:
            lease.release()

    def _try(self, tier: _Tier, call: Callable[[Store], _T], errors: list[Exception] | None = None) -> _T | None:
        """Return what a tier returns, or None where it fails. A failure is counted, and added to `errors`."""
        try:
            return call(tier.store)
        except _FAILURES as error:
            with self._lock:
                tier.failures += 1
                tier.reason = str(error)
            if errors is not None:
                errors.append(error)
            return None
