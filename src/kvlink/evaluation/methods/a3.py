"""`a3`: the tokens that the question attends most are computed again.

Source: Zhou et al. 2025 (A^3, arXiv 2511.17560): tokens are ranked by the attention of the question, after layer 0.
"""

from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from kvlink.core.errors import InputError
from kvlink.evaluation.methods.base import number, whole_number
from kvlink.evaluation.methods.repairing import Placed, Repairing
from kvlink.models.recompute import attention_paid


class A3(Repairing):
    """The share of the document tokens that the row's own T attends most in one layer."""

    takes: ClassVar[tuple[str, ...]] = ("r", "layer")

    def __init__(self, *, r: str = "0.15", layer: str = "0", sink: str = "header") -> None:
        """Take parameters.

        Args:
            r: Share of the document tokens that is computed again.
            layer: Layer whose attention ranks them; in layer 0 keys know no context, so it is exact there.
            sink: The sink prefix.
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
        start = placed.layout.spans[-1].start
        rows = torch.arange(start, start + len(placed.case.prompt.tail))
        paid = attention_paid(bench.assembler, placed.cache, placed.prompt, placed.layout, rows, layer=self.layer)
        return placed.best(paid[placed.candidates], self.share), len(rows) * (self.layer + 1) / layers
