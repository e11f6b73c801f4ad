"""Objects that were used longest ago are written smaller.

A ladder of codecs, such as `int8` and `int4`, is worked down from `raw`: first every raw object takes the first step,
least used first, then the next step. int4 is made of the decoded int8, the only thing that is left then. Knows no
places and no models: which codecs a model's answers bear, whoever names the ladder knows (`kvlink store calibrate`).

A crash between writing the new object and dropping the old one leaves both, and both are whole. They stay until room is
needed: a reader takes the best that it accepts, and the next time that the old one is recompressed it replaces the new.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvlink.core.errors import StoreError
from kvlink.store.base import BoundedStore, Store
from kvlink.store.codec import RAW, StoredObject, codec_named


@dataclass(frozen=True, slots=True, kw_only=True)
class RecompressReport:
    """What recompression did.

    Attributes:
        written: Objects by the codec that they are in now; one that took two steps counts in both.
        freed_bytes: By how much the objects became smaller.
        left_alone: Objects that were passed over: leased, used or deleted meanwhile, damaged, refused by the codec, or
            no smaller in it. One that is passed over again counts again.
        failures: Objects that could not be read or written.
        reason: What failed last; empty if nothing has.
    """

    written: Mapping[str, int]
    freed_bytes: int
    left_alone: int
    failures: int
    reason: str


class Tally:
    """Adds up what recompression did. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: Counter[str] = Counter()
        self._freed_bytes = 0
        self._left_alone = 0
        self._failures = 0
        self._reason = ""

    def wrote(self, codec: str, freed_bytes: int) -> None:
        """Count an object that is in another codec now."""
        with self._lock:
            self._written[codec] += 1
            self._freed_bytes += freed_bytes

    def passed_over(self) -> None:
        """Count an object that was left as it is."""
        with self._lock:
            self._left_alone += 1

    def failed(self, error: Exception) -> None:
        """Count an object that could not be read or written."""
        with self._lock:
            self._failures += 1
            self._reason = str(error)

    def report(self) -> RecompressReport:
        """Return all of it so far."""
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
    tally = Tally()
    work_down(
        store, check_ladder(ladder), tally, target_bytes=target_bytes, spare=is_leased, stop=stop, progress=progress
    )
    return tally.report()


def work_down(
    store: BoundedStore,
    ladder: tuple[str, ...],
    tally: Tally,
    *,
    target_bytes: int,
    spare: Callable[[str], bool],
    wanted: Callable[[StoredObject], bool] = lambda found: True,
    stop: Callable[[], bool],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Work down the ladder, one codec after the other; each is looked up anew, since the one before has added to it.

    Arguments as in `recompress`; `wanted` is asked as in `BoundedStore.recompress`.
    """
    done = 0
    for at, codec in enumerate((RAW, *ladder[:-1]) if ladder else ()):
        if store.stats().used_bytes <= target_bytes:
            return
        found = _least_used(store, codec)
        for place, name in enumerate(found):
            if stop() or store.stats().used_bytes <= target_bytes:
                return
            if spare(name):
                tally.passed_over()
            else:
                _take(store, name, codec, ladder[at:], wanted, tally)
            done += 1
            progress(done, done + len(found) - place - 1)


def _least_used(store: Store, codec: str) -> list[str]:
    """Return the names that have an object in a codec, the least used first."""
    stats = ((name, store.stat(name).get(codec)) for name in store.names())
    used = [(stat.last_use, name) for name, stat in stats if stat is not None]
    return [name for _, name in sorted(used)]


def _take(
    store: BoundedStore,
    name: str,
    codec: str,
    below: tuple[str, ...],
    wanted: Callable[[StoredObject], bool],
    tally: Tally,
) -> None:
    """Put an object in the first codec below that takes it."""
    for into in below:
        before = _sizes(store, name, codec, into)
        try:
            if store.recompress(name, codec, into, wanted=wanted):
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
