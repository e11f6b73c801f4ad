"""`a3`: the tokens that the question attends most are computed again.

All document tokens and the question run through the layers before one; there the question's attention ranks them.

Source: Zhou et al. 2025 (A^3, arXiv 2511.17560), ranked as its public code does it: in layer 1, all heads as one, S
left out of the softmax, summed over the question, and averaged over five neighbours.
"""

from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvlink.core.errors import InputError
from kvlink.evaluation.methods.base import number, whole_number
from kvlink.evaluation.methods.repairing import Placed, Repairing
from kvlink.models.recompute import attention_paid

NEIGHBOURS = 5
"""Tokens over which a score is averaged, the token itself in their midst."""


class A3(Repairing):
    """The share of the document tokens that the row's own T attends most in one layer."""

    takes: ClassVar[tuple[str, ...]] = ("r", "layer")

    def __init__(self, *, r: str = "0.15", layer: str = "1", sink: str = "header") -> None:
        """Take parameters.

        Args:
            r: Share of the document tokens that is computed again.
            layer: Layer whose attention ranks them; that of the embeddings is 0, where keys know no context.
            sink: The sink prefix; `bos` as published.
        """
        super().__init__(sink=sink)
        self.share = number(r, "r", most=1.0)
        self.layer = whole_number(layer, "layer")

    def choose(self, placed: Placed) -> tuple[Int[Tensor, " rows"], float]:
        """Rank by the question alone: ids of an answer behind it have no say."""
        bench, layers = placed.case.bench, placed.case.bench.runner.geometry.layers
        if self.layer >= layers:
            raise InputError(f"layer={self.layer}, but this model has {layers} layers")
        if not placed.share(self.share):
            return placed.candidates[:0], 0.0
        start, asking = placed.layout.spans[-1].start, len(placed.case.prompt.tail)
        rows = torch.cat((placed.candidates, torch.arange(start, start + asking)))
        paid = attention_paid(
            bench.assembler, placed.cache, placed.prompt, placed.layout, rows, asking=asking, layer=self.layer
        )
        first = placed.layout.spans[0].stop
        near = avg_pool1d(paid[None, : start - first], NEIGHBOURS, stride=1, padding=NEIGHBOURS // 2)[0]
        return placed.best(near[placed.candidates - first], self.share), len(rows) * self.layer / layers
