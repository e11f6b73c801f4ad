"""How long a run would take: measured speed of this machine times what the rows hold."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvlink.core.errors import KVLinkError
from kvlink.evaluation.case import Bench, Case
from kvlink.evaluation.evaluate import NEW_TOKENS, Limits
from kvlink.training.data import Row

SHORT, LONG = 200, 1000
"""Tokens of the two forwards that are timed: their difference shows what attention adds to long prompts."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Rows, tokens and minutes of one task."""

    task: str
    rows: int
    methods: int
    tokens: int
    minutes: float


def estimate(
    bench: Bench, tasks: dict[str, list[Row]], *, methods: int, limits: Limits, generate: bool
) -> list[Estimate]:
    """Return one estimate per task.

    Each method is taken to cost one forward over the row and its share of encoding; reuse costs less. Generated
    tokens cost a decode step each.
    """
    per_token, per_pair = _speed(bench)
    found: list[Estimate] = []
    for task, rows in tasks.items():
        tokens, seconds = 0, 0.0
        for row in rows:
            try:
                case = Case(bench, row, max_documents=limits.max_documents, max_tokens=limits.max_tokens)
            except KVLinkError:  # the run tells it and goes on
                continue
            length = case.prompt.num_tokens
            tokens += length
            forward = per_token * length + per_pair * length**2
            seconds += forward * (methods + 1)
            if generate:
                seconds += methods * (forward * 2 + NEW_TOKENS[row.task] * per_token * 20)
        found.append(Estimate(task, len(rows), methods, tokens, seconds / 60))
    return found


def _speed(bench: Bench) -> tuple[float, float]:
    """Return seconds per token and per pair of tokens, from two forwards."""
    seconds: list[float] = []
    for length in (SHORT, LONG):
        ids = torch.arange(length, device=bench.runner.device)[None] % bench.runner.embedding.num_embeddings
        times: list[float] = []
        for _ in range(2):
            start = time.perf_counter()
            with torch.inference_mode():
                bench.runner.forward(cache=None, input_ids=ids)
            bench.runner.synchronize()
            times.append(time.perf_counter() - start)
        seconds.append(min(times))
    per_pair = max(0.0, (seconds[1] / LONG - seconds[0] / SHORT) / (LONG - SHORT))
    return max(1e-9, seconds[1] / LONG - per_pair * LONG), per_pair


def total(estimates: Sequence[Estimate]) -> float:
    """Return the minutes of all tasks together."""
    return sum(one.minutes for one in estimates)
