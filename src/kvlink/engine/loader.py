"""Segments in, entries out: from the store where it has them, freshly encoded where it has not.

Knows fingerprints and objects; knows no text. What cannot be kept (a full disk, a folder that cannot be
written) is still served, and the reason is told.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from kvlink.core.entry import CacheEntry
from kvlink.core.errors import StoreError
from kvlink.core.fingerprint import Identity, fingerprint
from kvlink.engine.usage import Source
from kvlink.models.cache import Prefix
from kvlink.models.runner import Runner
from kvlink.store.base import Store
from kvlink.store.codec import codec_named, encode

BATCH_TOKENS = 2048
"""Tokens of one encoding batch, padding included: above it a batch gains nothing and costs memory."""

MAX_PADDING = 0.1
"""Share of a batch that may be padding."""

RAW = "raw"
"""The codec that holds any entry, bit for bit."""

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """One segment's entry and where it came from."""

    name: str
    entry: CacheEntry
    source: Source
    codec: str | None = None
    reason: str = ""


@dataclass(slots=True)
class LoadTimes:
    """Seconds spent on reading and on encoding."""

    load_s: float = 0.0
    encode_s: float = 0.0


class Loader:
    """Gets entries for one model and one sink prefix.

    Args:
        runner: The model.
        store: Where objects are kept.
        identity: What decides the numbers of this model's entries.
        sink: Keys and values of the sink prefix, or None.
        provenance: Facts that stand in each object's header and in no name (model's name, template).
        secret: Keys the objects' digests, as it does in the store.
        codec: How entries are written. What it has no place for (`store.codecs`) is written raw.
        accept: Codecs that are taken, best first; None takes raw, then `codec`.

    Raises:
        ValueError: What would be written would not be taken, or there is no such codec.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        store: Store,
        identity: Identity,
        sink: Prefix | None,
        provenance: dict[str, str] | None = None,
        secret: bytes | None = None,
        codec: str = RAW,
        accept: Sequence[str] | None = None,
    ) -> None:
        taken = tuple(dict.fromkeys((RAW, codec))) if accept is None else tuple(accept)
        for name in (*taken, codec):
            codec_named(name)
        if codec not in taken:
            raise ValueError(f"objects would be written as {codec} and read as {', '.join(taken)}; accept {codec}, too")
        self.store = store
        self.identity = identity
        self._runner = runner
        self.sink = sink
        self.provenance = provenance or {}
        self._secret = secret
        self._codec = codec
        self._accept = taken

    def name(self, ids: Ids) -> str:
        """Return the fingerprint of a segment."""
        return fingerprint(self.identity, ids)

    def has(self, ids: Ids) -> bool:
        """Whether the store holds an accepted object of this segment (not yet verified)."""
        return any(kept in self._accept for kept in self.store.stat(self.name(ids)))

    @contextmanager
    def load(self, segments: Sequence[Ids], times: LoadTimes | None = None) -> Generator[list[Loaded]]:
        """Hold the entries of these segments under lease while the block lasts.

        A segment that occurs twice is loaded once. What the store does not have, has only damaged, or cannot read, is
        encoded and put there.
        """
        times = times or LoadTimes()
        found: dict[Ids, Loaded] = {}
        unread: dict[Ids, str] = {}
        with ExitStack() as leases:
            start = perf_counter()
            for ids in dict.fromkeys(segments):
                try:
                    lease = self.store.get(self.name(ids), self._accept)
                except StoreError as error:
                    unread[ids] = f"not read: {error}"
                    continue
                if lease is not None:
                    stored = leases.enter_context(lease).object
                    found[ids] = Loaded(stored.name, stored.decode(), lease.source, stored.codec)
            times.load_s += perf_counter() - start
            start = perf_counter()
            for loaded in self.encode(ids for ids in dict.fromkeys(segments) if ids not in found):
                ids = loaded.entry.token_ids
                found[ids] = replace(loaded, reason=unread.get(ids, loaded.reason))
            times.encode_s += perf_counter() - start
            yield [found[ids] for ids in segments]

    def encode(self, segments: Iterable[Ids], *, must_keep: bool = False) -> Generator[Loaded]:
        """Encode segments in batches of similar length and keep them; yields them in the order of their making.

        Args:
            segments: Ids, each segment once.
            must_keep: Raise the store's error where an entry cannot be kept, instead of telling it as a reason.
        """
        for batch in batches(segments):
            for entry in self._runner.encode(batch, prefix=self.sink):
                name = self.name(entry.token_ids)
                reason = "not in the store"
                try:
                    self.store.put(name, *self._written(entry))
                except StoreError as error:
                    if must_keep:
                        raise
                    reason = f"not kept: {error}"
                yield Loaded(name, entry, "encoded", None, reason)

    def _written(self, entry: CacheEntry) -> tuple[str, memoryview]:
        """Return an entry as an object, and in which codec it is."""
        write = partial(encode, entry, self.identity, provenance=self.provenance, secret=self._secret)
        if self._codec != RAW:
            with suppress(ValueError):
                return self._codec, write(codec=self._codec)
        return RAW, write(codec=RAW)


def batches(segments: Iterable[Ids], *, batch_tokens: int = BATCH_TOKENS) -> list[list[Ids]]:
    """Group segments by length, so that a batch is full and holds little padding; longest first."""
    groups: list[list[Ids]] = []
    for ids in sorted(segments, key=len, reverse=True):
        group = groups[-1] if groups else []
        longest = len(group[0]) if group else 0
        padded = longest * (len(group) + 1)
        held = sum(map(len, group)) + len(ids)
        if group and padded <= batch_tokens and held >= (1 - MAX_PADDING) * padded:
            group.append(ids)
        else:
            groups.append([ids])
    return groups
