"""`cacheblend`: the tokens whose keys and values deviate most in an early layer are computed again.

What they have in that layer and in those before it stays in the buffer, chosen or not, as in the public code. Keys and
values count alike, as in the paper; the public code compares values alone. Like it, this one chooses once and not layer
by layer.

Source: Yao et al. 2024 (CacheBlend, arXiv 2405.16444). `mask=released` repeats a fault of its public code, in which
tokens that are computed again see tokens behind them: there from the checked layer on, here in all layers.
"""

from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from kvlink.core.errors import InputError
from kvlink.evaluation.methods.base import number, one_of, whole_number
from kvlink.evaluation.methods.repairing import Placed, Repairing
from kvlink.models.recompute import deviations


class CacheBlend(Repairing):
    """All document tokens run through the layers before one; the share that deviates most there goes on."""

    takes: ClassVar[tuple[str, ...]] = ("r", "check_layer")

    def __init__(self, *, r: str = "0.15", check_layer: str = "1", mask: str = "exact", sink: str = "header") -> None:
        """Take parameters.

        Args:
            r: Share of the document tokens that is computed again.
            check_layer: Layer in which keys and values are compared; that of the embeddings is 0.
            mask: `exact`, by position; or `released`.
            sink: The sink prefix; `bos` as published.
        """
        super().__init__(sink=sink)
        self.share = number(r, "r", most=1.0)
        self.check_layer = whole_number(check_layer, "check_layer", least=1)
        self.released = one_of(mask, "mask", "exact", "released") == "released"

    def choose(self, placed: Placed) -> tuple[Int[Tensor, " rows"], float]:
        """Compare and rank."""
        bench, layers = placed.case.bench, placed.case.bench.runner.geometry.layers
        if self.check_layer >= layers:
            raise InputError(f"check_layer={self.check_layer}, but this model has {layers} layers")
        if not placed.share(self.share):
            return placed.candidates[:0], 0.0
        found = deviations(
            bench.assembler, placed.cache, placed.prompt, placed.layout, placed.candidates, layer=self.check_layer
        )
        return placed.best(found, self.share), len(placed.candidates) * self.check_layer / layers
