"""`concat_reencoded`: entries laid side by side, their keys rotated to their places. KVLink with K = 0."""

from kvlink.core.entry import CacheEntry
from kvlink.core.errors import InputError
from kvlink.core.layout import Layout
from kvlink.evaluation.case import Case, Ids
from kvlink.evaluation.methods.base import Method, Prefilled, sink_named
from kvlink.models.cache import SlotCache
from kvlink.store.codecs import CODECS, Codec
from kvlink.store.codecs.base import geometry_of


class ConcatReencoded(Method):
    """Entries encoded behind a sink prefix, reused at any place."""

    def __init__(self, *, sink: str = "header", codec: str = "raw") -> None:
        """Take parameters.

        Args:
            sink: The sink prefix.
            codec: What the entries go through before they are used, as if they came from a store.
        """
        self.sink = sink_named(sink)
        if codec not in CODECS:
            raise InputError(f"there is no codec {codec!r}; there are {', '.join(CODECS)}")
        self.codec = CODECS[codec]
        self._read: tuple[Case, list[CacheEntry], int] | None = None

    def prepare(self, case: Case) -> None:
        """Encode the documents behind the sink prefix, and S."""
        self._entries(case)
        case.bench.prefix(case.prompt.system)

    def place(self, case: Case, layout: Layout, *, room: int) -> SlotCache:
        """Lay out S and the entries."""
        prefix = case.bench.prefix(case.prompt.system)
        assert prefix is not None, "S is never empty"
        entries, _ = self._entries(case)
        return case.bench.assembler.assemble(layout, prefix=prefix, entries=entries, room=room)

    def prefill(self, case: Case, tail: Ids, *, keep: int, room: int = 0) -> Prefilled:
        """Lay out what is known and compute T."""
        prompt = case.with_tail(tail)
        layout = prompt.layout()
        _, num_bytes = self._entries(case)
        cache = self.place(case, layout, room=room)
        logits = case.bench.assembler.prefill(cache, prompt, layout, logits_to_keep=keep)
        return Prefilled(logits, len(tail), num_bytes, cache)

    def _entries(self, case: Case) -> tuple[list[CacheEntry], int]:
        """Return the row's entries as they are read, and the bytes they take in the codec; once per row."""
        if self._read is None or self._read[0] is not case:
            found = [through(self.codec, entry) for entry in case.entries(case.bench.sink_ids(self.sink))]
            self._read = case, [entry for entry, _ in found], sum(num_bytes for _, num_bytes in found)
        return self._read[1:]


def through(codec: Codec, entry: CacheEntry) -> tuple[CacheEntry, int]:
    """Return what a codec makes of an entry, and the bytes that it takes packed.

    Raises:
        InputError: The codec does not take it.
    """
    try:
        packed = codec.pack(entry)
    except ValueError as error:
        raise InputError(f"an entry of {entry.num_tokens} tokens has no place in this codec: {error}") from error
    read = codec.unpack(packed, geometry=geometry_of(entry), dtype=entry.keys.dtype, token_ids=entry.token_ids)
    return read, sum(tensor.nbytes for tensor in packed.values())
