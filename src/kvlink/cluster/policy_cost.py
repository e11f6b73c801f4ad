"""What routing itself costs: microseconds of one choice, by number of nodes and by what is known of the documents."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from kvlink.cluster.affinity import Affinity

HOMES = 3
"""Nodes that hold each of the known documents."""

STATES = ("known", "everywhere", "unknown")
"""Documents on a few nodes; on all of them; on none."""


def bench_policy(
    nodes: Sequence[int],
    *,
    requests: int = 2000,
    each: int = 10,
    documents: int = 2000,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Return a row for each number of nodes and each state; a choice and its end are timed together.

    Args:
        each: Documents of one request.
        documents: In all, in the state `known`.
        progress: Is told of each row.
    """
    rows: list[dict[str, Any]] = []
    for number in nodes:
        for state in STATES:
            seconds = _seconds(state, number, requests, each, documents, seed)
            low, median, high, worst = np.percentile(seconds, [25, 50, 75, 99]).tolist()
            rows.append(
                {
                    "nodes": number,
                    "state": state,
                    "each": each,
                    "requests": requests,
                    "median_s": median,
                    "q1_s": low,
                    "q3_s": high,
                    "p99_s": worst,
                }
            )
            progress()
    return rows


def _seconds(state: str, nodes: int, requests: int, each: int, documents: int, seed: int) -> list[float]:
    dice = np.random.default_rng(seed)
    policy = Affinity()
    names = [f"node-{number}" for number in range(nodes)]
    for name in names:
        policy.join(name)
    count = {"known": documents, "everywhere": each, "unknown": requests * each}[state]
    ids = [f"document-{number}" for number in range(count)]
    if state == "known":
        for one in ids:
            for place in dice.choice(nodes, min(HOMES, nodes), replace=False).tolist():
                policy.note(names[place], [one])
    elif state == "everywhere":
        for name in names:
            policy.note(name, ids)
    found: list[float] = []
    for request in range(requests):
        if state == "unknown":
            asked = range(request * each, (request + 1) * each)
        else:
            asked = dice.choice(count, min(each, count), replace=False).tolist()
        weighed = [(ids[place], 300) for place in asked]
        start = perf_counter()
        choice = policy.choose(weighed)
        assert choice is not None, "there are nodes"
        policy.done(choice)
        found.append(perf_counter() - start)
    return found
