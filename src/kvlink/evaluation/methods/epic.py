"""`epic`: the first tokens of every document are computed again (LegoLink), for there attention has its sinks.

Source: Hu et al. 2024 (EPIC, arXiv 2410.15332).
"""

from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from kvlink.core.layout import Kind
from kvlink.evaluation.methods.base import whole_number
from kvlink.evaluation.methods.repairing import Placed, Repairing


class Epic(Repairing):
    """The first k tokens of every document that is not exact already, in all layers."""

    takes: ClassVar[tuple[str, ...]] = ("k",)

    def __init__(self, *, k: str = "16", sink: str = "header") -> None:
        """Take parameters.

        Args:
            k: Tokens of each document.
            sink: The sink prefix; `none` as published.
        """
        super().__init__(sink=sink)
        self.first = whole_number(k, "k")

    def choose(self, placed: Placed) -> tuple[Int[Tensor, " rows"], float]:
        """Take the beginnings."""
        starts = torch.tensor([0, *(span.start for span in placed.layout.of(Kind.SEGMENT))])
        begin = placed.candidates - starts[placed.layout.groups()[placed.candidates]]
        return placed.candidates[begin < self.first], 0.0
