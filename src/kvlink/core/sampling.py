"""From logits to a choice: penalties, filters and a draw, for many rows at once. Pure; knows no requests.

Settings of a row stand in sequences beside the logits, one element per row. What a filter excludes becomes `-inf`.
Tokens with the same logit are kept or excluded together, so that no filter depends on the order of a sort.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

_FEW = 1024
"""Likeliest tokens among which `keep_top_p` looks first: a sort of the whole vocabulary is rarely needed."""


def penalise(
    logits: Float[Tensor, " tokens"],
    counts: Float[Tensor, " tokens"],
    *,
    repetition: Float[Tensor, " tokens"],
    presence: Float[Tensor, " tokens"],
    frequency: Float[Tensor, " tokens"],
) -> Float[Tensor, " tokens"]:
    """Make tokens that were generated before less likely, or more.

    Args:
        logits: Of these tokens alone, of any rows.
        counts: How often each of them was generated, at least once.
        repetition: Divides positive logits and multiplies negative ones; 1 changes nothing.
        presence: Is subtracted once.
        frequency: Is subtracted as often as the token was generated.

    Source: Keskar et al. 2019 (CTRL) for `repetition`; the API of OpenAI for the other two.
    """
    return torch.where(logits > 0, logits / repetition, logits * repetition) - presence - frequency * counts


def scale(logits: Float[Tensor, "rows vocab"], temperature: Sequence[float]) -> Float[Tensor, "rows vocab"]:
    """Divide by a temperature above zero, the largest logit of each row moved to 0: nothing overflows upwards."""
    smallest = torch.finfo(logits.dtype).tiny
    return (logits - logits.amax(-1, keepdim=True)).div_(_column(temperature, logits).clamp(min=smallest))


def keep_min_p(logits: Float[Tensor, "rows vocab"], min_p: Sequence[float]) -> Float[Tensor, "rows vocab"]:
    """Keep tokens that are at least `min_p` times as likely as the likeliest; 0 keeps all.

    Source: Nguyen et al. 2024 (min-p sampling).
    """
    ratio = (logits - logits.amax(-1, keepdim=True)).exp_()
    return logits.masked_fill(ratio < _column(min_p, logits), -torch.inf)


def keep_top_k(logits: Float[Tensor, "rows vocab"], top_k: Sequence[int]) -> Float[Tensor, "rows vocab"]:
    """Keep the `top_k` likeliest tokens, at least one, and what is as likely as the last of them.

    Source: Fan et al. 2018 (top-k sampling).
    """
    vocab = logits.shape[-1]
    last = torch.tensor([min(k, vocab) - 1 for k in top_k], device=logits.device)
    best = logits.topk(int(min(max(top_k), vocab))).values
    return logits.masked_fill(logits < best.gather(-1, last[:, None]), -torch.inf)


def keep_top_p(logits: Float[Tensor, "rows vocab"], top_p: Sequence[float]) -> Float[Tensor, "rows vocab"]:
    """Keep the fewest likeliest tokens that have `top_p` together, above 0, and what is as likely as the last of them.

    Source: Holtzman et al. 2020 (nucleus sampling).
    """
    wanted = torch.tensor(top_p, dtype=torch.float64, device=logits.device)[:, None]
    probabilities = logits.softmax(-1)
    vocab = logits.shape[-1]
    num = min(_FEW, vocab)
    while True:
        best = probabilities.topk(num).values  # [rows, num]
        together = best.double().cumsum(-1)
        if num == vocab or bool((together[:, -1:] >= wanted).all()):
            break
        num = min(8 * num, vocab)
    before = together - best  # what likelier tokens have
    last = (before < wanted).sum(-1, keepdim=True) - 1
    return logits.masked_fill(probabilities < best.gather(-1, last), -torch.inf)


def draw(logits: Float[Tensor, "rows vocab"], uniform: Sequence[float]) -> Int[Tensor, " rows"]:
    """Return one id per row, by the inverse of the cumulative distribution in the order of the vocabulary.

    Args:
        logits: Each row has a finite maximum.
        uniform: One number of [0, 1) per row decides; the rows know nothing of each other.
    """
    heights = logits.softmax(-1).double().cumsum(-1)
    total = heights[:, -1:]
    at = torch.tensor(uniform, dtype=torch.float64, device=logits.device)[:, None] * total
    at = torch.minimum(at, total.nextafter(torch.zeros_like(total)))  # the product may be rounded up to the total
    return torch.searchsorted(heights, at, right=True)[:, 0]


def _column(values: Sequence[float], like: Tensor) -> Float[Tensor, "rows 1"]:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
