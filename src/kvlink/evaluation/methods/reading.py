"""Entries as a method reads them: once per row, through a codec where one is asked for."""

from kvlink.core.entry import CacheEntry
from kvlink.core.errors import InputError
from kvlink.evaluation.case import Case, Ids
from kvlink.store.codecs import CODECS, RAW


class Reading:
    """Takes the entries of a row, once per row."""

    def __init__(self, codec: str = RAW) -> None:
        """Take the name of a codec.

        Raises:
            InputError: There is none of this name.
        """
        if codec not in CODECS:
            raise InputError(f"there is no codec {codec!r}; there are {', '.join(CODECS)}")
        self.codec = codec
        self._read: tuple[Case, list[CacheEntry], int] | None = None

    def entries(self, case: Case, sink: Ids, *, cut: bool = False) -> tuple[list[CacheEntry], int]:
        """Return the row's entries behind a sink prefix as they are read, and the bytes they take in the codec.

        Args:
            cut: Whether long documents are cut.

        Raises:
            InputError: The codec does not take one of them, or the row has a codec besides.
            ModelRefused: The codec leaves tokens out, and this model cannot attend so.
        """
        if self._read is None or self._read[0] is not case:
            if self.codec != RAW and case.codec is not CODECS[RAW]:
                raise InputError(f"codec={self.codec} inside of another codec: no store holds such objects; take one")
            own = case if self.codec == RAW else case.through(CODECS[self.codec])
            self._read = case, *own.read(case.entries(sink, cut=cut))
        return self._read[1:]
