"""Entries as a store in one codec would give them: what a method reuses besides the model's own numbers."""

from kvlink.core.entry import CacheEntry
from kvlink.core.errors import InputError
from kvlink.evaluation.case import Case, Ids
from kvlink.models.pruning import require_prunable
from kvlink.models.runner import Runner
from kvlink.store.codecs import CODECS, Codec
from kvlink.store.codecs.base import geometry_of


class Reading:
    """Takes the entries of a row through a codec, once per row."""

    def __init__(self, codec: str) -> None:
        """Take the name of a codec.

        Raises:
            InputError: There is none of this name.
        """
        if codec not in CODECS:
            raise InputError(f"there is no codec {codec!r}; there are {', '.join(CODECS)}")
        self.codec = CODECS[codec]
        self._read: tuple[Case, list[CacheEntry], int] | None = None
        self._prunable: Runner | None = None

    def entries(self, case: Case, sink: Ids, *, cut: bool = False) -> tuple[list[CacheEntry], int]:
        """Return the row's entries behind a sink prefix as they are read, and the bytes they take in the codec.

        Args:
            cut: Whether long documents are cut.

        Raises:
            InputError: The codec does not take one of them.
            ModelRefused: The codec leaves tokens out, and this model cannot attend so.
        """
        if self._read is None or self._read[0] is not case:
            if self.codec.prunes and self._prunable is not case.bench.runner:
                require_prunable(case.bench.runner)
                self._prunable = case.bench.runner
            found = [through(self.codec, entry) for entry in case.entries(sink, cut=cut)]
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
