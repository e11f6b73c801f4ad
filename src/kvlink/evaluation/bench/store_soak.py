"""Many requests in orders never seen, in a store too small for all documents: hits, bytes and memory stay level."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvlink.engine.engine import Engine
from kvlink.engine.loader import Loader
from kvlink.engine.rates import Rates
from kvlink.evaluation.bench.store_model import NAME, write_tiny_model
from kvlink.evaluation.bench.texts import document_of
from kvlink.store.disk import DiskStore
from kvlink.store.memory import MemoryStore
from kvlink.store.tiered import TieredStore

HOST_SHARE, DISK_SHARE = 0.15, 0.5
"""Shares of the documents' bytes that memory and disk may take."""

QUARTERS = 4


def bench_soak(
    *,
    requests: int = 2000,
    documents: int = 200,
    tokens: int = 64,
    each: int = 4,
    zipf: float = 1.0,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return the model's name and digest, and one row.

    A quarter of the requests runs before counting begins. `hit_ratio`: tokens of documents that were loaded, by
    quarter, and by tier; `most_bytes` the most that each tier ever held, looked at after each request; `memory_bytes`
    the median resident memory of the process, by quarter.

    Args:
        requests: Counted ones.
        each: Documents in each request, never twice in the same order.
        zipf: Document number n is asked for in proportion to n ** -zipf.
    """
    with tempfile.TemporaryDirectory(prefix="kvlink-soak-") as name:
        folder = Path(name)
        base = Engine.from_pretrained(write_tiny_model(folder / "model", seed=seed), links=None, device="cpu")
        texts = [document_of(base.prompter, tokens, seed=at) for at in range(documents)]
        size = 4096 + tokens * base.runner.geometry.bytes_per_token(base.runner.dtype)
        budgets = {"host": int(HOST_SHARE * documents * size), "disk": int(DISK_SHARE * documents * size)}
        store = TieredStore(
            MemoryStore(budget_bytes=budgets["host"]), DiskStore(folder / "kv", budget_bytes=budgets["disk"])
        )
        loader = Loader(
            runner=base.runner,
            store=store,
            identity=base.loader.identity,
            sink=base.loader.sink,
            rates=Rates(least=1 << 62),
        )
        generator = np.random.default_rng(seed)
        weights = np.arange(1, documents + 1) ** -zipf
        shares = (weights / weights.sum()).tolist()
        seen: set[tuple[int, ...]] = set()
        sources: list[list[str]] = []
        memory: list[int] = []
        most = dict.fromkeys(budgets, 0)
        with Engine(runner=base.runner, prompter=base.prompter, loader=loader, report=base.report) as engine:
            for _ in range(requests + requests // QUARTERS):
                order = _novel(generator, shares, each, seen)
                answer = engine.generate([texts[at] for at in order], f"Which of {order[0]}?", max_new_tokens=1)
                sources.append([row.source for row in answer.usage.documents])
                memory.append(resident_bytes())
                for tier in store.stats().tiers:
                    most[tier.source] = max(most[tier.source], tier.stats.used_bytes)
                progress()
            stats = store.stats()
        counted = sources[-requests:]
        parts = np.array_split(np.arange(requests), QUARTERS)
        hits = [np.mean([source != "encoded" for at in part for source in counted[at]]).item() for part in parts]
        flat = [source for row in counted for source in row]
        held = [float(np.median(np.asarray(memory[-requests:])[part])) for part in parts]
        row = {
            "what": "soak",
            "requests": requests,
            "documents": documents,
            "tokens": tokens,
            "documents_each": each,
            "zipf": zipf,
            "hit_ratio": {"quarters": hits, **{tier: flat.count(tier) / len(flat) for tier in ("host", "disk")}},
            "drift": hits[-1] - hits[0],
            "budget_bytes": budgets,
            "most_bytes": most,
            "bounded": all(most[tier] <= budget for tier, budget in budgets.items()),
            "evictions": {tier.source: tier.stats.evictions for tier in stats.tiers},
            "failures": {tier.source: tier.failures for tier in stats.tiers},
            "memory_bytes": held,
            "memory_growth": held[-1] / held[0] - 1,
        }
    return base.model_info | {"name": NAME}, [row]


def runs_of(requests: int) -> int:
    """Return how often `progress` will be called."""
    return requests + requests // QUARTERS


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _novel(
    generator: np.random.Generator, weights: list[float], each: int, seen: set[tuple[int, ...]]
) -> tuple[int, ...]:
    """Draw documents in an order that was not drawn before."""
    while True:
        order = tuple(generator.choice(len(weights), each, replace=False, p=weights).tolist())
        if order not in seen:
            seen.add(order)
            return order
