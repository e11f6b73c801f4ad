"""What is minimised, one figure per row: the distance to the teacher, or to the right id.

The teacher's distribution is kept as its most likely ids and, in one bucket, the rest of the mass: the divergence
between such bucketed distributions never exceeds the full one, and is zero where that is.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

TOP = 64
"""Most likely ids of the teacher that are kept per row."""


@dataclass(frozen=True, slots=True, eq=False)
class TopLogits:
    """The most likely ids of each row, and their log-probabilities under the whole vocabulary."""

    ids: Int[Tensor, "rows top"]
    logprobs: Float[Tensor, "rows top"]

    @classmethod
    def of(cls, logits: Float[Tensor, "rows vocab"], *, top: int = TOP) -> "TopLogits":
        """Keep the `top` largest; all of a smaller vocabulary."""
        found = logits.float().log_softmax(-1).topk(min(top, logits.shape[-1]), dim=-1)
        return cls(found.indices, found.values)


def distill(logits: Float[Tensor, "rows vocab"], teacher: TopLogits) -> Float[Tensor, " rows"]:
    """Return KL(teacher || student) of each row over the kept ids and the rest, in nats.

    Source: Hinton et al. 2015 (distillation), restricted to the teacher's most likely ids.
    """
    wanted = teacher.logprobs.to(logits.device)
    found = logits.float().log_softmax(-1).gather(-1, teacher.ids.to(logits.device))  # [rows, top]
    kept = (wanted.exp() * (wanted - found)).sum(-1)
    return kept + _rest(wanted) * (_log_rest(wanted) - _log_rest(found))


def answer(logits: Float[Tensor, "rows vocab"], targets: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """Return the negative log-likelihood of the id that follows each row, in nats."""
    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")


def _rest(logprobs: Float[Tensor, "rows top"]) -> Float[Tensor, " rows"]:
    return (1 - logprobs.exp().sum(-1)).clamp(min=1e-6)


def _log_rest(logprobs: Float[Tensor, "rows top"]) -> Float[Tensor, " rows"]:
    return _rest(logprobs).log()
