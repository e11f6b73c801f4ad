"""Entries of documents that changed: within a segment the longest common beginning is kept, the rest is computed.

Only from `raw`: what is kept must be the very numbers that the model computed. Knows no texts and no catalogue.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import final

from kvlink.core.entry import CacheEntry
from kvlink.core.errors import StoreError
from kvlink.engine.loaded import Begun, Ids, Loaded, Search
from kvlink.engine.loader import Loader
from kvlink.engine.rates import Rates
from kvlink.models.cache import Prefix
from kvlink.models.runner import Runner
from kvlink.store.codec import RAW

REBUILDING = "rebuilding"
"""How the reason begins of a segment that was encoded because its document has changed."""

ABSENT = "not in the store"
"""What a loader says of a segment that is just absent."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A segment that was encoded.

    Attributes:
        kept: Tokens whose keys and values were copied from an earlier version.
        reason: Why as many were computed.
    """

    name: str
    tokens: int
    kept: int
    reason: str

    @property
    def computed(self) -> int:
        """Tokens that went through the model."""
        return self.tokens - self.kept


@final
class Rebuilder(Loader):
    """A loader that knows earlier versions: what it has to encode, it continues from them where it can."""

    _sources: Callable[[str], Sequence[str]]
    _uses: Callable[[str], bool]
    _told: Callable[[Rebuilt], None]

    @classmethod
    def over(
        cls,
        base: Loader,
        *,
        scope: bytes,
        sources: Callable[[str], Sequence[str]],
        uses: Callable[[str], bool] = lambda _: True,
        told: Callable[[Rebuilt], None] = lambda _: None,
    ) -> "Rebuilder":
        """Make one with model and store of another loader.

        Args:
            scope: Of the entries' names.
            sources: Returns names of earlier versions' entries for a segment's name, the likeliest first.
            uses: Whether a name is used; what is not, and was not there, does not stay in the store.
            told: Called with each segment once it is encoded, and kept if it can be.
        """
        made = cls.__new__(cls)
        identity = replace(base.identity, scope=scope)
        vars(made).update(vars(base), identity=identity, _sources=sources, _uses=uses, _told=told)
        return made

    def encode(
        self, segments: Iterable[Ids], *, must_keep: bool = False, search: Search | None = None
    ) -> Generator[Loaded]:
        """See `Loader.encode`. The reason of a segment of a changed document begins with `rebuilding`."""
        whole: dict[Ids, Begun] = {}
        for ids in segments:
            begun = self.begun(ids)
            if begun.kept is None:
                whole[ids] = begun
                continue
            for loaded in self._after(begun.kept).encode([ids], must_keep=must_keep, search=search):
                yield self._tell(loaded, begun)
        for loaded in super().encode(whole, must_keep=must_keep, search=search):
            yield self._tell(loaded, whole[loaded.entry.token_ids])

    def begun(self, ids: Ids) -> Begun:
        """See `Loader.begun`: the longest beginning that an earlier version shares."""
        kept, why = self._beginning(ids)
        if kept is None:
            return Begun(None, why and f"{REBUILDING}: encoded whole, {why}")
        return Begun(kept, f"{REBUILDING}: {kept.num_tokens} of {len(ids)} tokens kept")

    def drafted(self, entry: CacheEntry, begun: Begun, search: Search) -> Loaded:
        """See `Loader.drafted`."""
        return self._tell(super().drafted(entry, begun, search), begun)

    def _after(self, kept: CacheEntry) -> Loader:
        """Return a plain loader that keeps this beginning of the next segment. What it takes says nothing of others."""
        made = Loader.__new__(Loader)
        vars(made).update(vars(self), _runner=_After(self._runner, kept), rates=Rates())
        return made

    def _tell(self, loaded: Loaded, begun: Begun) -> Loaded:
        """Say how a segment was encoded, and let nothing stay that is not used."""
        how, kept = begun.how, begun.kept.num_tokens if begun.kept else 0
        if how:
            rest = loaded.reason.removeprefix(ABSENT)
            loaded = replace(loaded, reason=f"{how}; {rest}" if rest and rest == loaded.reason else how + rest)
        if not self._uses(loaded.name):
            self.store.delete(loaded.name)
        self._told(Rebuilt(loaded.name, loaded.entry.num_tokens, kept, loaded.reason))
        return loaded

    def _beginning(self, ids: Ids) -> tuple[CacheEntry | None, str]:
        """Return the longest beginning that an earlier version shares, or None and why there is none.

        Nothing is said of a segment that has no earlier version.
        """
        sources = self._sources(self.name(ids))
        longest, best, others = 0, "", set[str]()
        for name in sources:
            known = self._raw(name)
            if known is None:
                others.update(self._codecs(name))
            elif (length := common_beginning(known.token_ids, ids)) > longest:
                longest, best = length, name
            else:
                others.add(RAW)
        if longest and (known := self._raw(best)):  # read again: all at once may be more than the memory holds
            keys, values = known.keys[:, :, :longest], known.values[:, :, :longest]
            return CacheEntry(keys, values, ids[:longest]), ""
        if not sources:
            return None, ""
        if RAW in others:
            return None, "it begins as no earlier version does"
        kept = ", ".join(sorted(others))
        return None, f"of the earlier version only {kept} is kept" if kept else "the earlier version's entry is gone"

    def _raw(self, name: str) -> CacheEntry | None:
        """Return an entry that is stored bit for bit, or None."""
        try:
            lease = self.store.get(name, (RAW,))
        except StoreError:
            return None
        if lease is None:
            return None
        with lease:
            return lease.object.decode()

    def _codecs(self, name: str) -> set[str]:
        try:
            return set(self.store.stat(name))
        except StoreError:
            return set()


class _After:
    """A runner of which only encoding is asked, and which continues from a known beginning."""

    def __init__(self, runner: Runner, kept: CacheEntry) -> None:
        self._runner = runner
        self._kept = kept
        self.synchronize = runner.synchronize

    def encode(self, batch: Sequence[Ids], *, prefix: Prefix | None = None) -> list[CacheEntry]:
        """See `Runner.encode`."""
        return [self._runner.encode_after(self._kept, ids, prefix=prefix) for ids in batch]


def common_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first ids two segments share."""
    differing = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))
