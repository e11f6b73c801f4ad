"""What methods share that reuse entries and compute some of their tokens again; each says which ones."""

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlink.core.layout import Kind, Layout, Prompt
from kvlink.evaluation.case import Case, Ids
from kvlink.evaluation.methods.base import Prefilled
from kvlink.evaluation.methods.concat_reencoded import ConcatReencoded
from kvlink.models.cache import SlotCache
from kvlink.models.recompute import recompute


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A row whose entries are laid out, before anything is computed.

    Attributes:
        candidates: Positions of the document tokens that are not exact already: all, but those of a first document
            that was encoded behind S itself.
    """

    case: Case
    prompt: Prompt
    layout: Layout
    cache: SlotCache
    candidates: Int[Tensor, " candidates"]

    def share(self, part: float) -> int:
        """Return how many candidates a part of all document tokens is, rounded up."""
        return min(len(self.candidates), math.ceil(part * self.layout.num_document_tokens))

    def best(self, scores: Float[Tensor, " candidates"], part: float) -> Int[Tensor, " rows"]:
        """Return the positions of the candidates with the highest scores, ascending; of equal ones the earlier."""
        order = scores.cpu().argsort(descending=True, stable=True)[: self.share(part)]
        return self.candidates[order].sort().values


class Repairing(ConcatReencoded):
    """Entries laid side by side; chosen tokens of documents are computed again together with T, in all layers.

    Attributes:
        released: Whether those attend as in CacheBlend's public code.
    """

    released = False

    def __init__(self, *, sink: str = "header") -> None:
        super().__init__(sink=sink)

    @abstractmethod
    def choose(self, placed: Placed) -> tuple[Int[Tensor, " rows"], float]:
        """Return positions of document tokens, ascending, and the tokens' worth of work that choosing took."""

    def prefill(self, case: Case, tail: Ids, *, keep: int, room: int = 0) -> Prefilled:
        """Lay out what is known, choose, and compute chosen tokens and T."""
        prompt = case.with_tail(tail)
        layout = prompt.layout()
        cache = self.place(case, layout, room=room)
        _, num_bytes = self._reading.entries(case, case.bench.sink_ids(self.sink))
        placed = Placed(case, prompt, layout, cache, self._candidates(case, layout))
        rows, work = self.choose(placed)
        logits = recompute(
            case.bench.assembler, cache, prompt, layout, rows, released=self.released, logits_to_keep=keep
        )
        return Prefilled(logits, len(tail) + len(rows) + math.ceil(work), num_bytes, cache)

    def _candidates(self, case: Case, layout: Layout) -> Int[Tensor, " candidates"]:
        exact = case.bench.sink_ids(self.sink) == case.prompt.system
        spans = layout.of(Kind.SEGMENT)[1 if exact else 0 :]
        return torch.cat([torch.arange(0), *(torch.arange(span.start, span.stop) for span in spans)])
