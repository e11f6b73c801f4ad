"""Time to first token under traffic, with and without loading ahead: a real Redis behind networks of known speed.

Requests arrive at random at 0.7 of the measured capacity, on documents of which a few are asked for most; one thread
answers them in their order. Both arms see the same requests at the same times and take turns in blocks.
"""

import gc
import random
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np

from kvlink.core.document import Document
from kvlink.engine.engine import Engine
from kvlink.engine.loader import Loader
from kvlink.engine.prefetch import Prefetch
from kvlink.evaluation.bench.store_model import NAME, write_tiny_model
from kvlink.evaluation.bench.store_network import Network, behind, redis_server
from kvlink.evaluation.bench.texts import document_of
from kvlink.store.memory import MemoryStore
from kvlink.store.redis import RedisStore
from kvlink.store.tiered import TieredStore

NETWORKS = (Network(100e6, 0.020), Network(1e9, 0.001))
QUESTION = "Which?"
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p999": 99.9}
RESAMPLES = 1000
RUN = 50
"""Consecutive requests that are resampled together, since those that waited in one queue are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is asked for, and how fast.

    Attributes:
        documents: Different ones; document number n is asked for in proportion to n ** -zipf.
        tokens: Of each document.
        each: Documents in each request.
        host_share: Share of the documents that fits into memory.
        load: Arrivals over what one thread without loading ahead can answer.
        blocks: In how many turns the two arms alternate.
    """

    requests: int = 5000
    documents: int = 200
    tokens: int = 64
    each: int = 1
    zipf: float = 1.0
    host_share: float = 0.25
    load: float = 0.7
    blocks: int = 50
    seed: int = 0

    @property
    def warmup(self) -> int:
        """Requests that fill the memory."""
        return max(10, min(200, self.requests // 10))

    @property
    def measured(self) -> int:
        """Requests that the capacity is measured on: enough that their share of memory hits is that of all."""
        return max(10, min(1000, self.requests // 5))


@dataclass(slots=True)
class Arm:
    """One engine with memory of its own, and what its requests took.

    Attributes:
        busy_s, span_s: Seconds spent on answers, and from the first arrival of each block to its last answer.
    """

    engine: Engine
    store: TieredStore
    ahead: bool
    busy_s: float = 0.0
    span_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)


def bench_prefetch(
    traffic: Traffic,
    *,
    networks: Sequence[Network] = NETWORKS,
    progress: Callable[[], None] = lambda: None,
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return the model's name and digest, and a row for each network and arm (`prefetch`: whether it loads ahead).

    Raises:
        InputError: There is no redis-server.
    """
    rows: list[dict[str, Any]] = []
    with redis_server() as place, tempfile.TemporaryDirectory(prefix="kvlink-bench-") as folder:
        base = Engine.from_pretrained(write_tiny_model(Path(folder), seed=traffic.seed), links=None, device="cpu")
        texts = [document_of(base.prompter, traffic.tokens, seed=at, name=f"{at}") for at in range(traffic.documents)]
        with _arm(base, RedisStore(f"unix://{place}"), 1, ahead=False) as filling:
            filling.engine.encode(texts)
            num_bytes = sum(
                stat.num_bytes for name in filling.store.names() for stat in filling.store.stat(name).values()
            )
        budget = int(num_bytes * traffic.host_share)
        for network in networks:
            with behind(network, place) as url, ExitStack() as arms:
                plain, ahead = (
                    arms.enter_context(_arm(base, RedisStore(url), budget, ahead=ahead)) for ahead in (False, True)
                )
                capacity = _measure(traffic, texts, plain, ahead, progress)
                _run(traffic, texts, (plain, ahead), capacity, progress)
                about = {
                    "network": asdict(network),
                    "traffic": asdict(traffic),
                    "host_budget_bytes": budget,
                    "object_bytes": num_bytes // traffic.documents,
                    "capacity_per_s": capacity,
                }
                rows += _rows(about, plain, ahead, seed=traffic.seed)
    return base.model_info | {"name": NAME}, rows


def runs_of(traffic: Traffic, networks: int) -> int:
    """Return how often `progress` will be called."""
    return networks * (2 * traffic.warmup + traffic.measured + 2 * traffic.requests)


@contextmanager
def _arm(base: Engine, remote: RedisStore, host_bytes: int, *, ahead: bool) -> Generator[Arm]:
    """Open an engine whose entries lie in the remote, with memory above it."""
    store = TieredStore(MemoryStore(budget_bytes=host_bytes), remote)
    loader = Loader(
        runner=base.runner,
        store=store,
        identity=base.loader.identity,
        sink=base.loader.sink,
        prefetch_bytes=max(1, host_bytes // 2),
    )
    engine = Engine(runner=base.runner, prompter=base.prompter, loader=loader, report=base.report)
    with engine:
        yield Arm(engine, store, ahead)


def _requests(traffic: Traffic, count: int, *, seed: int) -> list[list[int]]:
    """Draw documents for each request, none twice in one."""
    generator = np.random.default_rng(seed)
    weights = np.arange(1, traffic.documents + 1) ** -traffic.zipf
    weights /= weights.sum()
    return [generator.choice(traffic.documents, traffic.each, replace=False, p=weights).tolist() for _ in range(count)]


def _answer(arm: Arm, texts: Sequence[Document]) -> None:
    answer = arm.engine.generate(texts, QUESTION, max_new_tokens=1)
    for row in answer.usage.documents:
        arm.sources[row.source] = arm.sources.get(row.source, 0) + 1


def _measure(
    traffic: Traffic, texts: Sequence[Document], plain: Arm, ahead: Arm, progress: Callable[[], None]
) -> float:
    """Fill both memories alike, and return how many requests per second are answered one after another."""
    for wanted in _requests(traffic, traffic.warmup, seed=traffic.seed + 1):
        for arm in (plain, ahead):
            _answer(arm, [texts[at] for at in wanted])
            progress()
    start = time.perf_counter()
    for wanted in _requests(traffic, traffic.measured, seed=traffic.seed + 2):
        _answer(plain, [texts[at] for at in wanted])
        progress()
    seconds = time.perf_counter() - start
    for arm in (plain, ahead):
        arm.sources.clear()
    return traffic.measured / seconds


def _run(
    traffic: Traffic, texts: Sequence[Document], arms: Sequence[Arm], capacity: float, progress: Callable[[], None]
) -> None:
    """Let both arms answer the same requests, in turns."""
    drawn = _requests(traffic, traffic.requests, seed=traffic.seed + 3)
    generator = random.Random(traffic.seed + 4)  # noqa: S311
    gaps = [generator.expovariate(traffic.load * capacity) for _ in drawn]
    size = -(-traffic.requests // traffic.blocks)
    gc.collect()
    gc.freeze()  # a collection that walks the whole of torch stops all threads for tens of milliseconds
    for number, start in enumerate(range(0, traffic.requests, size)):
        block = slice(start, start + size)
        for arm in arms if number % 2 == 0 else reversed(arms):
            _serve(arm, [[texts[at] for at in wanted] for wanted in drawn[block]], gaps[block], progress)


def _serve(
    arm: Arm, requests: Sequence[Sequence[Document]], gaps: Sequence[float], progress: Callable[[], None]
) -> None:
    """Answer requests as they arrive, and note the time from each arrival to its first token."""
    waiting: Queue[tuple[float, Sequence[Document], Prefetch | None] | None] = Queue()

    def arrive() -> None:
        due = time.perf_counter()
        try:
            for wanted, gap in zip(requests, gaps, strict=True):
                due += gap
                time.sleep(max(0.0, due - time.perf_counter()))
                waiting.put((due, wanted, arm.engine.prefetch(wanted) if arm.ahead else None))
        finally:
            waiting.put(None)

    arriving = threading.Thread(target=arrive, daemon=True)
    begun = time.perf_counter()
    arriving.start()
    while (request := waiting.get()) is not None:
        due, wanted, handle = request
        start = time.perf_counter()
        _answer(arm, wanted)
        stop = time.perf_counter()
        arm.ttft_s.append(stop - due)
        arm.busy_s += stop - start
        if handle is not None:
            handle.cancel()
        progress()
    arm.span_s += time.perf_counter() - begun
    arriving.join()


def _rows(about: dict[str, Any], plain: Arm, ahead: Arm, *, seed: int) -> list[dict[str, Any]]:
    before = _percentiles(plain.ttft_s)
    rows: list[dict[str, Any]] = []
    for arm in (plain, ahead):
        found = _percentiles(arm.ttft_s)
        total = sum(arm.sources.values())
        rows.append(
            {
                "what": "prefetch",
                **about,
                "prefetch": arm.ahead,
                "ttft_s": found,
                "p999_interval_s": _interval(arm.ttft_s, seed=seed),
                "change": {name: found[name] / before[name] - 1 for name in found},
                "utilisation": arm.busy_s / arm.span_s,
                "sources": {name: count / total for name, count in arm.sources.items()},
                "samples_s": arm.ttft_s,
            }
        )
    return rows


def _percentiles(samples: Sequence[float]) -> dict[str, float]:
    return {name: float(np.percentile(samples, at)) for name, at in PERCENTILES.items()}


def _interval(samples: Sequence[float], *, seed: int) -> list[float]:
    """Return a 95 % interval of the 99.9th percentile, by resampling runs of consecutive requests."""
    values = np.asarray(samples)
    size = min(RUN, len(values))
    generator = np.random.default_rng(seed)
    starts = generator.integers(0, len(values) - size + 1, (RESAMPLES, -(-len(values) // size)))
    drawn = values[(starts[:, :, None] + np.arange(size)).reshape(RESAMPLES, -1)[:, : len(values)]]
    low, high = np.percentile(np.percentile(drawn, 99.9, axis=1), [2.5, 97.5])
    return [float(low), float(high)]
