"""Segments in, entries out: from the store where it has them, freshly encoded where it has not.

Knows fingerprints and objects; knows no text. What cannot be kept (a full disk, a folder that cannot be
written) is still served, and the reason is told.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter

from kvlink.core.entry import CacheEntry
from kvlink.core.errors import StoreError
from kvlink.core.fingerprint import Identity, fingerprint
from kvlink.engine.batches import batches
from kvlink.engine.encoding import Encoding
from kvlink.engine.flight import Wanted
from kvlink.engine.loaded import Begun, Ids, Loaded, LoadTimes, Search
from kvlink.engine.prefetch import Prefetch, Prefetcher
from kvlink.engine.rates import Rates
from kvlink.engine.uploading import Uploader
from kvlink.models.cache import Prefix
from kvlink.models.pruning import require_prunable
from kvlink.models.runner import Runner
from kvlink.store.base import Source as StoreSource
from kvlink.store.base import Store
from kvlink.store.codec import RAW, codec_named, encode
from kvlink.store.opening import host_bytes
from kvlink.store.remote import RemoteStore
from kvlink.store.tiered import TieredStore

CLAIM_S = 60.0
"""A claim ends by itself after so many seconds, should this machine die."""

WAIT_S = 10.0
"""How long another machine that has claimed a segment is waited for."""


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
        prefetch_bytes: What is loaded ahead may take so much memory; None is half of what a host tier has.
        wait_s: How long to wait for another machine that has claimed a segment.
        rates: What is known of the speed of loading and encoding; nothing if None.
        monotonic: Seconds that only go forward.

    Attributes:
        ahead: What is loaded ahead.

    Raises:
        ValueError: What would be written would not be taken, or there is no such codec.
        ModelRefused: Pruned objects would be taken, and the model cannot attend what they leave out.
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
        prefetch_bytes: int | None = None,
        wait_s: float = WAIT_S,
        rates: Rates | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        taken = tuple(dict.fromkeys((RAW, codec))) if accept is None else tuple(accept)
        for name in (*taken, codec):
            codec_named(name)
        if codec not in taken:
            raise ValueError(f"objects would be written as {codec} and read as {', '.join(taken)}; accept {codec}, too")
        if any(codec_named(name).prunes for name in taken):
            require_prunable(runner)
        self.store = store
        self.identity = identity
        self._runner = runner
        self.sink = sink
        self.provenance = provenance or {}
        self._secret = secret
        self._codec = codec
        self._accept = taken
        self.wait_s = wait_s
        self._monotonic = monotonic
        self._model = threading.Lock()
        self._encoding = Encoding()
        self.rates = rates or Rates()
        self.ahead = Prefetcher(
            store=store,
            accept=taken,
            rates=self.rates,
            budget_bytes=host_bytes() // 2 if prefetch_bytes is None else prefetch_bytes,
            uploader=Uploader(runner.device) if runner.device.type == "cuda" else None,
            monotonic=monotonic,
        )

    def name(self, ids: Ids) -> str:
        """Return the fingerprint of a segment."""
        return fingerprint(self.identity, ids)

    @property
    def runner(self) -> Runner:
        """The model."""
        return self._runner

    @property
    def accept(self) -> tuple[str, ...]:
        """Codecs that are taken, best first."""
        return self._accept

    def has(self, ids: Ids) -> bool:
        """Whether the store holds an accepted object of this segment (not yet verified)."""
        return self.codec_of(ids) is not None

    def codec_of(self, ids: Ids) -> str | None:
        """Return in which codec the store holds this segment (not yet verified), the best accepted one, or None."""
        found = self.store.stat(self.name(ids))
        return next((codec for codec in self._accept if codec in found), None)

    def prefetch(self, segments: Sequence[Ids], priority: int = 0) -> Prefetch:
        """Load segments ahead, the greatest priority first, then in order of arrival; what is absent stays so.

        What was loaded is held for a `load` that needs it, until the handle is cancelled. Never waits.
        """
        size = self._runner.geometry.bytes_per_token(self._runner.dtype)
        wanted = [Wanted.of(self.name(ids), tokens=len(ids), token_bytes=size) for ids in dict.fromkeys(segments)]
        return self.ahead.prefetch(wanted, priority=priority)

    def locate(self, name: str) -> tuple[StoreSource, str, int] | None:
        """Return from where an object would come, its codec and bytes; None where there is none.

        Raises:
            StoreUnusable: The store cannot be asked.
        """
        if isinstance(self.store, TieredStore):
            return self.store.locate(name, self._accept)
        stats = self.store.stat(name)
        codec = next((codec for codec in self._accept if codec in stats), None)
        return None if codec is None else (self.store.source, codec, stats[codec].num_bytes)

    def close(self) -> None:
        """Let go of what was loaded ahead. The store stays open."""
        self.ahead.close()

    @contextmanager
    def load(self, segments: Sequence[Ids], times: LoadTimes | None = None) -> Generator[list[Loaded]]:
        """Hold the entries of these segments under lease while the block lasts.

        A segment that occurs twice is loaded once. What the store does not have, has only damaged, or cannot read, is
        encoded and put there; so is what would take longer to load than to encode. Of several threads that need one
        absent segment, one encodes it; of several machines that share a remote, too, as long as that one is alive.
        """
        times = times or LoadTimes()
        found: dict[Ids, Loaded] = {}
        search = Search()
        with ExitStack() as leases:
            while True:
                num_made = self._encoding.num_made
                start = perf_counter()
                for ids in dict.fromkeys(segments):
                    if ids not in found and ids not in search.refused:
                        self._find(ids, found, search, leases)
                times.load_s += perf_counter() - start
                absent = {self.name(ids): ids for ids in segments if ids not in found}
                split = self._encoding.begin(list(absent), num_made=num_made) if absent else ([], {})
                if split is not None:
                    break
            mine, others = split
            start = perf_counter()
            try:
                self._make([absent[name] for name in mine], found, search, leases)
            finally:
                self._encoding.give_up(mine)
            for name, making in others.items():
                with suppress(CancelledError):
                    found[absent[name]] = Loaded(name, making.result(), "encoded", None, "encoded by another request")
            left = [absent[name] for name in others if absent[name] not in found]
            found |= {loaded.entry.token_ids: loaded for loaded in self.encode(left)}
            times.encode_s += perf_counter() - start
            yield [found[ids] for ids in segments]

    @contextmanager
    def stored(self, segments: Sequence[Ids], times: LoadTimes) -> Generator[tuple[list[Loaded], Search]]:
        """Hold the entries that need not be encoded under lease while the block lasts; say what is known of others."""
        found: dict[Ids, Loaded] = {}
        search = Search()
        with ExitStack() as leases:
            start = perf_counter()
            for ids in dict.fromkeys(segments):
                self._find(ids, found, search, leases)
            times.load_s += perf_counter() - start
            yield list(found.values()), search

    def encode(
        self, segments: Iterable[Ids], *, must_keep: bool = False, search: Search | None = None
    ) -> Generator[Loaded]:
        """Encode segments in batches of similar length and keep them; yields them in the order of their making.

        Args:
            segments: Ids, each segment once.
            must_keep: Raise the store's error where an entry cannot be kept, instead of telling it as a reason; and let
                slower tiers keep up.
            search: Why these are encoded, where that is known.
        """
        search = search or Search()
        for batch in batches(segments):
            with self._model:
                start = perf_counter()
                entries = self._runner.encode(batch, prefix=self.sink)
                self._runner.synchronize()
                self.rates.encoded(sum(map(len, batch)), perf_counter() - start)
            if must_keep and isinstance(self.store, TieredStore):
                self.store.flush()
            for entry in entries:
                yield self._kept(entry, search, must_keep=must_keep)

    def begun(self, ids: Ids) -> Begun:
        """Return what is known of a segment that is to be encoded; nothing here."""
        return Begun()

    def drafted(self, entry: CacheEntry, begun: Begun, search: Search) -> Loaded:
        """Keep an entry that was encoded from what was begun."""
        return self._kept(entry, search)

    def claims(self, ids: Ids, search: Search, claims: ExitStack) -> bool:
        """Whether this machine is to encode a segment: always, where no remote is shared or it has the object.

        Args:
            claims: What was claimed is let go with it.
        """
        if ids in search.refused or not isinstance(self.store, (RemoteStore, TieredStore)):
            return True
        claim = self.store.claim(self.name(ids), ttl_s=CLAIM_S)
        if claim is not None:
            claims.enter_context(claim)
        return claim is not None

    def arrives(self, name: str, *, at_most_s: float) -> bool:
        """Wait for a segment that another machine encodes; whether it is there. Ends early with its claim."""
        if not isinstance(self.store, (RemoteStore, TieredStore)):
            return False
        return self.store.wait(name, self._accept, at_most_s=at_most_s)

    def _find(self, ids: Ids, found: dict[Ids, Loaded], search: Search, leases: ExitStack) -> None:
        """Look for a segment where it may be: loaded ahead, then in the store, unless encoding is faster."""
        name = self.name(ids)
        ahead = self.ahead.take(name)
        if ahead is not None:
            leases.callback(ahead.release)
            found[ids] = Loaded(name, ahead.entry, ahead.source, ahead.codec)
            return
        if self._is_refused(ids, search):
            return
        try:
            start = perf_counter()
            lease = self.store.get(name, self._accept)
        except StoreError as error:
            search.reasons[ids] = f"not read: {error}"
            return
        if lease is not None:
            stored = leases.enter_context(lease).object
            found[ids] = Loaded(name, stored.decode(), lease.source, stored.codec)
            self.rates.loaded(lease.source, stored.num_bytes, perf_counter() - start)

    def _is_refused(self, ids: Ids, search: Search) -> bool:
        """Whether a segment is there and had better be encoded."""
        size = len(ids) * self._runner.geometry.bytes_per_token(self._runner.dtype)
        if not self.rates.may_refuse(size, len(ids)):
            return False
        try:
            located = self.locate(self.name(ids))
        except StoreError:
            return False
        reason = self.rates.refusal(located[0], located[2], len(ids)) if located else ""
        if located and reason:
            search.refused[ids] = located[0]
            search.reasons[ids] = reason
        return bool(reason)

    def _make(self, mine: list[Ids], found: dict[Ids, Loaded], search: Search, leases: ExitStack) -> None:
        """Encode segments, except those that another machine has claimed and finishes in time."""
        start = self._monotonic()
        with ExitStack() as claims:
            theirs = [ids for ids in mine if not self.claims(ids, search, claims)]
            # Who had a claim may have put the entry and let go a moment ago, so this machine looks again under its own.
            ours = (ids for ids in mine if ids not in theirs and not self._came(ids, found, search, leases))
            for loaded in self.encode(ours, search=search):
                self._made(loaded, found)
        for ids in theirs:
            left_s = max(0.0, self.wait_s - (self._monotonic() - start))
            if not self._came(ids, found, search, leases, at_most_s=left_s):
                waited = f"waited {self._monotonic() - start:.1f} s for another machine that had claimed it"
                search.reasons[ids] = f"not in the store; {waited}"
        for loaded in self.encode((ids for ids in theirs if ids not in found), search=search):
            self._made(loaded, found)

    def _came(
        self, ids: Ids, found: dict[Ids, Loaded], search: Search, leases: ExitStack, *, at_most_s: float = 0.0
    ) -> bool:
        """Take a segment that another machine puts into the store within a while; whether it did."""
        if ids not in search.refused and self.arrives(self.name(ids), at_most_s=at_most_s):
            self._find(ids, found, search, leases)
        if ids in found:
            found[ids] = replace(found[ids], reason="another machine has just encoded it")
            self._encoding.made(found[ids].name, found[ids].entry)
        return ids in found

    def _made(self, loaded: Loaded, found: dict[Ids, Loaded]) -> None:
        found[loaded.entry.token_ids] = loaded
        self._encoding.made(loaded.name, loaded.entry)

    def _kept(self, entry: CacheEntry, search: Search, *, must_keep: bool = False) -> Loaded:
        """Write an entry into the store, and say why it was encoded."""
        name, ids = self.name(entry.token_ids), entry.token_ids
        reason = search.reasons.get(ids, "not in the store")
        codec, data, refusal = self._written(entry)
        try:
            self._keep(name, codec, data, search.refused.get(ids))
        except StoreError as error:
            if must_keep:
                raise
            reason = search.reasons.get(ids, f"not kept: {error}")
        return Loaded(name, entry, "encoded", None, reason + refusal)

    def _keep(self, name: str, codec: str, data: memoryview, refused: StoreSource | None) -> None:
        """Put an object; one that a slow tier has already goes to faster ones alone."""
        if refused is None:
            self.store.put(name, codec, data)
        elif isinstance(self.store, TieredStore):
            self.store.promote(name, codec, data, above=refused)

    def _written(self, entry: CacheEntry) -> tuple[str, memoryview, str]:
        """Return an entry as an object, in which codec it is, and what to tell of that."""
        write = partial(encode, entry, self.identity, provenance=self.provenance, secret=self._secret)
        refusal = ""
        if self._codec != RAW:
            try:
                return self._codec, write(codec=self._codec), ""
            except ValueError as error:
                refusal = f"; written raw, since {self._codec} refuses it: {error}"
        return RAW, write(codec=RAW), refusal
