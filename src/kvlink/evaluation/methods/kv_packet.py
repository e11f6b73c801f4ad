"""`kv_packet`: documents between trained soft tokens, encoded once together with them; nothing is computed but T.

Source: Chen et al. 2026 (KV Packet, arXiv 2604.13226). The soft tokens are trained with `kvlink train packet`.
"""

from typing import ClassVar

from kvlink.core.entry import CacheEntry
from kvlink.core.errors import InputError
from kvlink.core.layout import Prompt
from kvlink.evaluation.case import Bench, Case, Ids
from kvlink.evaluation.methods.base import Method, Prefilled, whole_number
from kvlink.models.packet import Wrapping, encode_packet, read_wrapping


class KVPacket(Method):
    """Packets laid side by side, their keys rotated to their places; positions count soft tokens."""

    takes: ClassVar[tuple[str, ...]] = ("h", "t")

    def __init__(self, *, file: str = "", h: str = "", t: str = "") -> None:
        """Take parameters.

        Args:
            file: What `kvlink train packet` wrote; it says what stands before the header while encoding.
            h, t: Soft tokens before and behind a document that the file is expected to hold; anything if not given.

        Raises:
            InputError: No file is named: untrained soft tokens say nothing.
        """
        if not file:
            raise InputError(
                "kv_packet has no soft tokens until they are trained: `kvlink train packet --out FILE`, then "
                "kv_packet(file=FILE)"
            )
        self.file = file
        self._wanted = [whole_number(text, name) if text else None for text, name in ((h, "h"), (t, "t"))]
        self._loaded: tuple[Bench, Wrapping] | None = None
        self._read: tuple[Case, list[CacheEntry], int] | None = None

    @property
    def facts(self) -> dict[str, int | str]:
        """How many soft tokens there are."""
        if self._loaded is None:
            return {}
        return {"header": len(self._loaded[1].header), "trailer": len(self._loaded[1].trailer)}

    def prepare(self, case: Case) -> None:
        """Encode the packets, and S."""
        self._entries(case)
        case.bench.prefix(case.prompt.system)

    def prefill(self, case: Case, tail: Ids, *, keep: int, room: int = 0) -> Prefilled:
        """Lay out what is known and compute T."""
        wrapping, (entries, loaded) = self._of(case.bench), self._entries(case)
        prompt = Prompt(case.prompt.system, tuple((wrapping.around(ids),) for ids in case.prompt.segments), tail)
        layout, prefix = prompt.layout(), case.bench.prefix(case.prompt.system)
        assert prefix is not None, "S is never empty"
        cache = case.bench.assembler.assemble(layout, prefix=prefix, entries=entries, room=room)
        logits = case.bench.assembler.prefill(cache, prompt, layout, logits_to_keep=keep)
        return Prefilled(logits, len(tail), loaded, cache)

    def _entries(self, case: Case) -> tuple[list[CacheEntry], int]:
        if self._read is None or self._read[0] is not case:
            wrapping, runner = self._of(case.bench), case.bench.runner
            prefix = case.bench.prefix(wrapping.card.sink_ids)
            made = {ids: encode_packet(runner, wrapping, ids, prefix=prefix) for ids in set(case.prompt.segments)}
            self._read = case, *case.read([made[ids] for ids in case.prompt.segments])
        return self._read[1:]

    def _of(self, bench: Bench) -> Wrapping:
        if self._loaded is None or self._loaded[0] is not bench:
            found = read_wrapping(self.file, digest=bench.digest, hidden=bench.runner.embedding.embedding_dim)
            sizes = [len(found.header), len(found.trailer)]
            if any(wanted not in (None, size) for wanted, size in zip(self._wanted, sizes, strict=True)):
                raise InputError(
                    f"{self.file} holds {sizes[0]} + {sizes[1]} soft tokens, not those that were asked for"
                )
            self._loaded = bench, found
        return self._loaded[1]
