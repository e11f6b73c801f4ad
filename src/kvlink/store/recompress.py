"""Under pressure, objects that were used longest ago are written smaller before any has to go.

A ladder of codecs, such as `int8` and `int4`, is worked down from `raw`: first every raw object takes the first step,
least used first, then the next step. int4 is made of the decoded int8, the only thing that is left then. Knows no
places and no models: which codecs a model's answers bear, whoever names the ladder knows (`kvlink store calibrate`).

A crash between writing the new object and dropping the old one leaves both, and both are whole. They stay until room is
needed: a reader takes the best that it accepts, and the next time that the old one is recompressed it replaces the new.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import final

from kvlink.core.errors import StoreError
from kvlink.store.base import JSON, BoundedStore, Lease, ObjectStat, Store, StoreStats
from kvlink.store.codec import RAW, BytesLike, codec_named

HIGH, LOW = 0.85, 0.75
"""Shares of the budget at which work in the background begins, and at which it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecompressReport:
    """What recompression did.

    Attributes:
        written: Objects by the codec that they are in now; one that took two steps counts in both.
        freed_bytes: By how much the objects became smaller.
        left_alone: Objects that were passed over: leased, used or deleted meanwhile, damaged, refused by the codec, or
            no smaller in it.
        failures: Objects that could not be read or written.
        reason: What failed last; empty if nothing has.
    """

    written: Mapping[str, int]
    freed_bytes: int
    left_alone: int
    failures: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecompressingStats(StoreStats):
    """Counters of the store, and what recompression in the background did."""

    recompression: RecompressReport


class _Tally:
    """Adds up what recompression did."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: Counter[str] = Counter()
        self._freed_bytes = 0
        self._left_alone = 0
        self._failures = 0
        self._reason = ""

    def wrote(self, codec: str, freed_bytes: int) -> None:
        with self._lock:
            self._written[codec] += 1
            self._freed_bytes += freed_bytes

    def passed_over(self) -> None:
        with self._lock:
            self._left_alone += 1

    def failed(self, error: Exception) -> None:
        with self._lock:
            self._failures += 1
            self._reason = str(error)

    def report(self) -> RecompressReport:
        with self._lock:
            return RecompressReport(
                written=dict(self._written),
                freed_bytes=self._freed_bytes,
                left_alone=self._left_alone,
                failures=self._failures,
                reason=self._reason,
            )


def check_ladder(ladder: Sequence[str]) -> tuple[str, ...]:
    """Return a ladder as it was given.

    Raises:
        ValueError: A codec is unknown, is named twice, is raw, or leaves tokens out.
    """
    found = tuple(ladder)
    for codec in found:
        if codec == RAW or codec_named(codec).prunes or found.count(codec) > 1:
            raise ValueError(
                f"a ladder of recompression names codecs below raw that keep every token, each once, such as int8, "
                f"int4; {', '.join(found)} is none"
            )
    return found


def recompress(
    store: BoundedStore,
    ladder: Sequence[str],
    *,
    target_bytes: int = 0,
    is_leased: Callable[[str], bool] = lambda name: False,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RecompressReport:
    """Recompress objects now, the lowest step of the ladder first, least used first, until the store is small enough.

    Args:
        store: The store.
        ladder: Codecs below raw, in the order in which they are taken.
        target_bytes: Enough is when the store takes no more than that; 0 takes everything down the whole ladder.
        is_leased: Names for which this says so are left alone.
        stop: Asked before each object.
        progress: Called with steps done and steps known so far.

    Raises:
        ValueError: It is no ladder (`check_ladder`).
    """
    tally = _Tally()
    _run(store, check_ladder(ladder), tally, target_bytes, is_leased, stop, progress)
    return tally.report()


@final
class RecompressingStore(Store):
    """A store in memory or on disk that writes its least used objects smaller when it fills up.

    One thread does so in the background. A `put` never waits for it: where objects come faster than they shrink, they
    are evicted as they would be without it.
    """

    def __init__(
        self, store: BoundedStore, *, ladder: Sequence[str] = (), high: float = HIGH, low: float = LOW
    ) -> None:
        """Wrap a store, which belongs to this one from now on.

        Args:
            store: What keeps the objects, and the budget.
            ladder: Codecs below raw, in the order in which they are taken; none switches recompression off. Readers
                that do not accept one of them miss what is in it.
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
        self._high_bytes, self._low_bytes = int(high * budget_bytes), int(low * budget_bytes)
        self._lock = threading.Lock()
        self._leases: Counter[str] = Counter()
        self._tally = _Tally()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvlink-recompress")
        self._pass: Future[None] | None = None
        self._again = False
        self._closed = False
        self._consider()

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
        self._store.put(name, codec, data)
        self._consider()

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
            running.result()

    def close(self) -> None:
        """See `Store.close`. The object that is being worked on is finished first."""
        with self._lock:
            self._closed = True
        self._worker.shutdown()
        self._store.close()

    def __enter__(self) -> "RecompressingStore":
        return self

    def _consider(self) -> None:
        """Have room made if the store is fuller than it should be. At most one more pass waits behind a running one."""
        if not self._ladder or self._store.stats().used_bytes <= self._high_bytes:
            return
        with self._lock:
            if self._closed:
                return
            if self._pass is not None:
                self._again = True
                return
            self._pass = self._worker.submit(self._make_room)

    def _make_room(self) -> None:
        """Recompress until the store is small enough, or nothing can be made smaller."""
        while True:
            try:
                _run(
                    self._store,
                    self._ladder,
                    self._tally,
                    self._low_bytes,
                    self._is_leased,
                    lambda: self._closed,
                    lambda done, total: None,
                )
            except Exception as error:  # whatever it is, puts go on, and stats tell it
                self._tally.failed(error)
            with self._lock:
                if not self._again or self._closed:
                    self._pass = None
                    return
                self._again = False

    def _is_leased(self, name: str) -> bool:
        with self._lock:
            return name in self._leases

    def _return(self, name: str) -> None:
        with self._lock:
            self._leases[name] -= 1
            if not self._leases[name]:
                del self._leases[name]


def _run(
    store: BoundedStore,
    ladder: tuple[str, ...],
    tally: _Tally,
    target_bytes: int,
    is_leased: Callable[[str], bool],
    stop: Callable[[], bool],
    progress: Callable[[int, int], None],
) -> None:
    """Work down the ladder, one codec after the other; each is looked up anew, since the one before has added to it."""
    done = 0
    for at, codec in enumerate((RAW, *ladder[:-1]) if ladder else ()):
        if store.stats().used_bytes <= target_bytes:
            return
        found = _least_used(store, codec)
        for place, name in enumerate(found):
            if stop() or store.stats().used_bytes <= target_bytes:
                return
            if is_leased(name):
                tally.passed_over()
            else:
                _take(store, name, codec, ladder[at:], tally)
            done += 1
            progress(done, done + len(found) - place - 1)


def _least_used(store: Store, codec: str) -> list[str]:
    """Return the names that have an object in a codec, the least used first."""
    stats = ((name, store.stat(name).get(codec)) for name in store.names())
    used = [(stat.last_use, name) for name, stat in stats if stat is not None]
    return [name for _, name in sorted(used)]


def _take(store: BoundedStore, name: str, codec: str, below: tuple[str, ...], tally: _Tally) -> None:
    """Put an object in the first codec below that takes it."""
    for into in below:
        before = _sizes(store, name, codec, into)
        try:
            if store.recompress(name, codec, into):
                tally.wrote(into, before - _sizes(store, name, codec, into))
                return
        except ValueError:
            continue
        except (StoreError, OSError) as error:
            tally.failed(error)
            return
        break
    tally.passed_over()


def _sizes(store: Store, name: str, *codecs: str) -> int:
    return sum(stat.num_bytes for codec, stat in store.stat(name).items() if codec in codecs)
