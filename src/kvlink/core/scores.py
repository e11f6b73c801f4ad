"""How good an answer is: distances between distributions, and matches between texts. Pure; knows no models.

Logits in, floats out; texts in, floats out. Averages are taken by the caller: mean in a row, then over rows.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

RESAMPLES = 10_000
"""Paired resamples of rows behind an interval."""

_PICKS = 2**20
"""Picks of rows that are held at a time: 8 MiB, however many rows and resamples there are."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def nll(logits: Float[Tensor, "tokens vocab"], ids: Int[Tensor, " tokens"]) -> float:
    """Return the mean negative log-likelihood of `ids`, in nats per token."""
    return torch.nn.functional.cross_entropy(logits.double(), ids).item()


def kl(reference: Float[Tensor, "tokens vocab"], logits: Float[Tensor, "tokens vocab"]) -> float:
    """Return the mean Kullback-Leibler divergence KL(reference || logits), in nats per token; never below zero."""
    wanted, found = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    terms = (wanted.exp() * (wanted - found)).masked_fill(wanted == -torch.inf, 0.0)  # 0 log 0 = 0
    return terms.sum(-1).mean().clamp(min=0).item()  # unlike max(), clamp keeps what is not a number


def agreement(reference: Float[Tensor, "tokens vocab"], logits: Float[Tensor, "tokens vocab"]) -> float:
    """Return the share of tokens at which both have the same most likely id."""
    return (reference.argmax(-1) == logits.argmax(-1)).double().mean().item()


def normalise(text: str) -> str:
    """Return a text in lower case without punctuation, articles and doubled spaces.

    Source: the evaluation of SQuAD (Rajpurkar et al. 2016).
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(found: str, answers: Sequence[str]) -> float:
    """Return 1 if the text equals one of the answers after normalisation, else 0."""
    return max((float(normalise(found) == normalise(answer)) for answer in answers), default=0.0)


def f1(found: str, answers: Sequence[str]) -> float:
    """Return the best F1 of words over the answers (SQuAD): 1 if both are empty after normalisation."""
    return max((_f1(normalise(found).split(), normalise(answer).split()) for answer in answers), default=0.0)


def substring(found: str, answers: Sequence[str]) -> float:
    """Return 1 if one of the normalised answers stands in the normalised text, else 0.

    Source: the metric of the KVLink paper (arXiv 2502.16002), after Liu et al. 2023 (Lost in the Middle).
    """
    text = normalise(found)
    return max((float(normalise(answer) in text) for answer in answers), default=0.0)


def _f1(found: Sequence[str], wanted: Sequence[str]) -> float:
    if not found or not wanted:
        return float(list(found) == list(wanted))
    common = (Counter(found) & Counter(wanted)).total()
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean difference with its 95 % percentile interval."""

    difference: float
    low: float
    high: float


def paired_interval(
    values: Sequence[float], baseline: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Return the mean of `values - baseline` over the same rows, and how far chance could move it.

    Rows are resampled with replacement, both values of a row together; percentiles 2.5 and 97.5.

    Source: Efron 1979 (bootstrap), percentile method.

    Raises:
        ValueError: There are no rows, or not the same number of both.
    """
    if len(values) != len(baseline):  # numpy would repeat a single row for all
        raise ValueError(f"{len(values)} rows cannot be paired with {len(baseline)}")
    differences = np.subtract(np.asarray(values, dtype=float), np.asarray(baseline, dtype=float))
    if differences.size == 0:
        raise ValueError("an interval needs at least one row")
    draw, rows = np.random.default_rng(seed), differences.size
    at_once = max(1, _PICKS // rows)
    means = np.concatenate(
        [
            differences[draw.integers(0, rows, (min(at_once, resamples - begin), rows))].mean(axis=1)
            for begin in range(0, resamples, at_once)
        ]
    )
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(differences.mean()), float(low), float(high))
