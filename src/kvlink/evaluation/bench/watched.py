"""Where the time of a load goes: wrappers around store and loader that change nothing but take the time.

A store reads and verifies in one call. So verifying, like decoding, is timed once more on the same bytes, right behind
the request, and reading is what is left.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import final

from kvlink.engine.loader import Ids, Loaded, Loader, LoadTimes
from kvlink.engine.usage import Timings
from kvlink.store.base import JSON, Lease, ObjectStat, Store, StoreStats
from kvlink.store.codec import BytesLike, StoredObject, open_object

SPLIT = ("tokenise_s", "lookup_s", "read_s", "verify_s", "decode_s", "rotate_s", "forward_s", "sample_s")
"""Parts of a time to first token."""


@dataclass(slots=True)
class Watch:
    """What one request did.

    Attributes:
        get_s: Seconds in the store.
        held_s: Seconds for which entries were held: while residents were made of them.
        objects: What was read.
    """

    get_s: float = 0.0
    held_s: float = 0.0
    objects: list[StoredObject] = field(default_factory=list[StoredObject])

    def reset(self) -> None:
        """Begin anew."""
        self.get_s = self.held_s = 0.0
        self.objects.clear()

    def split(self, times: Timings, *, shared: bool) -> dict[str, float]:
        """Return where the time of a request went.

        Args:
            shared: Whether documents became residents; else they were rotated into the prompt.
        """
        start = perf_counter()
        for stored in self.objects:
            open_object(stored.data, name=stored.name, codec=stored.codec)
        verify_s = min(perf_counter() - start, self.get_s)
        start = perf_counter()
        for stored in self.objects:
            stored.decode()
        decode_s = min(perf_counter() - start, max(0.0, times.load_s - self.get_s))
        self.objects.clear()
        rotate_s = self.held_s if shared else times.rotate_s
        parts = (
            times.tokenise_s,
            times.load_s - self.get_s - decode_s + times.rotate_s - rotate_s,
            self.get_s - verify_s,
            verify_s,
            decode_s,
            rotate_s,
            times.forward_s,
            times.sample_s,
        )
        return dict(zip(SPLIT, parts, strict=True))


class WatchedLoader(Loader):
    """A loader that tells how long its entries were held."""

    watch: Watch

    @contextmanager
    def load(self, segments: Sequence[Ids], times: LoadTimes | None = None) -> Generator[list[Loaded]]:
        """See `Loader.load`."""
        with super().load(segments, times) as loaded:
            start = perf_counter()
            yield loaded
            self.watch.held_s += perf_counter() - start


@final
class WatchedStore(Store):
    """A store that tells how long it took."""

    def __init__(self, inner: Store, watch: Watch) -> None:
        self.source = inner.source
        self._inner = inner
        self._watch = watch

    def get(self, name: str, accept: Sequence[str]) -> Lease | None:
        """See `Store.get`."""
        start = perf_counter()
        lease = self._inner.get(name, accept)
        self._watch.get_s += perf_counter() - start
        if lease is not None:
            self._watch.objects.append(lease.object)
        return lease

    def put(self, name: str, codec: str, data: BytesLike) -> None:
        """See `Store.put`."""
        self._inner.put(name, codec, data)

    def delete(self, name: str, codec: str | None = None) -> int:
        """See `Store.delete`."""
        return self._inner.delete(name, codec)

    def names(self) -> set[str]:
        """See `Store.names`."""
        return self._inner.names()

    def stat(self, name: str) -> dict[str, ObjectStat]:
        """See `Store.stat`."""
        return self._inner.stat(name)

    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        return self._inner.stats()

    def setting(self, key: str) -> JSON:
        """See `Store.setting`."""
        return self._inner.setting(key)

    def keep_setting(self, key: str, value: JSON) -> JSON:
        """See `Store.keep_setting`."""
        return self._inner.keep_setting(key, value)

    def close(self) -> None:
        """See `Store.close`."""
        self._inner.close()
