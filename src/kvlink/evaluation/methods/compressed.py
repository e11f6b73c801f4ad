"""`int8`, `int4`, `prune`: any method that reads entries, reading them as a store in a codec would give them."""

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from kvlink.core.errors import InputError
from kvlink.core.pruning import SCORES
from kvlink.evaluation.case import Case, Ids
from kvlink.evaluation.methods import method_named
from kvlink.evaluation.methods.base import Method, Prefilled, one_of, whole_number
from kvlink.models.cache import SlotCache
from kvlink.store.codecs import CODECS, Codec
from kvlink.store.codecs.pruned import Pruned


class Compressed(Method):
    """Another method, on entries that went through a codec. Nothing else about it changes."""

    takes: ClassVar[tuple[str, ...]] = ("method",)

    def __init__(self, codec: Codec, method: str) -> None:
        self._inner = method_named(method)
        if isinstance(self._inner, Compressed):
            raise InputError(f"{method} inside of another codec: no store holds such objects; take one of them")
        self.generates = self._inner.generates
        self._codec = codec
        self._asked = method
        self._row: tuple[Case, Case] | None = None

    @property
    def facts(self) -> dict[str, int | str]:
        """What the method within says."""
        return dict(self._inner.facts)

    def prepare(self, case: Case) -> None:
        """Encode what the method reads, and pack it.

        Raises:
            InputError: It reads no entries.
        """
        row = self._through(case)
        self._inner.prepare(row)
        if case.prompt.documents and not row.read_any:
            raise InputError(f"{self._asked} reads no entries, so there is nothing to compress")

    def prefill(self, case: Case, tail: Ids, *, keep: int, room: int = 0) -> Prefilled:
        """Compute what the method computes."""
        return self._inner.prefill(self._through(case), tail, keep=keep, room=room)

    def step(self, case: Case, cache: SlotCache, token_id: int) -> Float[Tensor, " vocab"]:
        """Append one id."""
        return self._inner.step(self._through(case), cache, token_id)

    def _through(self, case: Case) -> Case:
        """Return the row with the codec; the same object for the same row, since methods remember what they read."""
        if self._row is None or self._row[0] is not case:
            self._row = case, case.through(self._codec)
        return self._row[1]


class Int8(Compressed):
    """Entries in 8 bits."""

    def __init__(self, *, method: str = "concat_reencoded") -> None:
        super().__init__(CODECS["int8"], method)


class Int4(Compressed):
    """Entries in 4 bits, keys in 5."""

    def __init__(self, *, method: str = "concat_reencoded") -> None:
        super().__init__(CODECS["int4"], method)


class Prune(Compressed):
    """Entries of which so many per cent of the bytes are left."""

    takes: ClassVar[tuple[str, ...]] = ("size", "method")

    def __init__(self, *, size: str = "50", method: str = "concat_reencoded", score: str = "keydiff") -> None:
        """Take parameters.

        Args:
            size: Per cent of the bytes of raw keys and values.
            method: Any other one that reads entries.
            score: What judges tokens.
        """
        percent = whole_number(size, "size", least=1)
        if percent > 99:
            raise InputError(f"size={size}: of 100 per cent nothing is pruned; from 1 to 99 are possible")
        super().__init__(Pruned(percent, score=one_of(score, "score", *SCORES)), method)
