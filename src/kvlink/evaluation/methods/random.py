"""`random`: tokens drawn by lot are computed again. The control that every way to choose has to beat."""

from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from kvlink.evaluation.methods.base import number, whole_number
from kvlink.evaluation.methods.repairing import Placed, Repairing


class Random(Repairing):
    """A share of the document tokens, the same ones whenever a row comes again."""

    takes: ClassVar[tuple[str, ...]] = ("r",)

    def __init__(self, *, r: str = "0.15", seed: str = "0", sink: str = "header") -> None:
        """Take parameters.

        Args:
            r: Share of the document tokens that is computed again.
            seed: Of the lots, together with the row.
            sink: The sink prefix.
        """
        super().__init__(sink=sink)
        self.share = number(r, "r", most=1.0)
        self.seed = whole_number(seed, "seed")

    def choose(self, placed: Placed) -> tuple[Int[Tensor, " rows"], float]:
        """Draw."""
        generator = torch.Generator().manual_seed(int(placed.case.row.digest[:12], 16) + self.seed)
        return placed.best(torch.rand(len(placed.candidates), generator=generator), self.share), 0.0
