"""Requests of a simulation: topics by Zipf's law, documents of one topic together, arrivals that wait for nothing."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What users ask.

    Attributes:
        requests: How many.
        rate: Of them per second; their gaps are exponential.
        documents: In all.
        topic: Documents of one topic; a request's documents are of the same one.
        each: Documents of one request.
        zipf: Exponent of the topics' popularity.
        tokens: Mean of a document's tokens; lengths are log-normal.
        question: Tokens of a question, with its links.
        answer: Mean of an answer's tokens; lengths are geometric.
        changes: Documents that get another text per second.
        seed: Of all that is drawn.
    """

    requests: int
    rate: float
    documents: int = 20_000
    topic: int = 10
    each: int = 5
    zipf: float = 1.0
    tokens: int = 300
    question: int = 60
    answer: int = 64
    changes: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Drawn:
    """Traffic as arrays; the same for all policies.

    Attributes:
        lengths: Tokens of each document.
        arrivals: Second of each request.
        asked: Documents of each request.
        answers: Tokens of each answer.
        changes: Second, and document, of each change.
    """

    lengths: NDArray[np.int64]
    arrivals: NDArray[np.float64]
    asked: NDArray[np.int64]
    answers: NDArray[np.int64]
    changes: list[tuple[float, int]]


def draw(traffic: Traffic) -> Drawn:
    """Draw everything that the seed decides."""
    dice = np.random.default_rng(traffic.seed)
    spread = 0.5
    lengths = dice.lognormal(np.log(traffic.tokens) - spread**2 / 2, spread, traffic.documents)
    arrivals = dice.exponential(1 / traffic.rate, traffic.requests).cumsum()
    topics = max(1, traffic.documents // traffic.topic)
    weights = 1 / np.arange(1, topics + 1) ** traffic.zipf
    chosen = dice.choice(topics, traffic.requests, p=weights / weights.sum())
    size = min(traffic.topic, traffic.documents)
    each = min(traffic.each, size)
    asked = np.empty((traffic.requests, each), dtype=np.int64)
    for start in range(0, traffic.requests, 50_000):  # within a few MB
        part = chosen[start : start + 50_000]
        inside = dice.random((len(part), size)).argpartition(each - 1, axis=1)[:, :each]
        asked[start : start + 50_000] = part[:, None] * size + inside
    answers = dice.geometric(1 / traffic.answer, traffic.requests)
    end = float(arrivals[-1])
    count = int(dice.poisson(traffic.changes * end))
    moments = np.sort(dice.random(count) * end).tolist()
    changed = dice.integers(traffic.documents, size=count).tolist()
    return Drawn(lengths.astype(np.int64) + 1, arrivals, asked, answers, list(zip(moments, changed, strict=True)))
