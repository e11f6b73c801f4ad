"""Requests per second with many under way, against full prefill of one after another, in one process.

`shared`: documents lie encoded in a folder; a device tier that holds a part of them is filled before counting begins.
`full`: the stock model, whole prompt and answer, one request after another; its requests are spread between the other
arm's runs. Both compute the same requests; answers end at their length alone.
"""

import gc
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from itertools import islice, pairwise
from time import perf_counter
from typing import Any

import numpy as np
import torch

from kvlink.core.document import Document
from kvlink.core.errors import KVLinkError
from kvlink.engine.build import BEGINNINGS_SHARE, sessions_of
from kvlink.engine.engine import Engine
from kvlink.engine.loader import Loader
from kvlink.engine.scheduler import Limits, Scheduler
from kvlink.engine.session import Sessions
from kvlink.engine.stream import greedy
from kvlink.engine.worker import Worker
from kvlink.evaluation.bench.throughput_load import Loop, Serving, Traffic
from kvlink.store.disk import DiskStore

ARMS = ("shared", "full")

PERCENTILES = {"p50": (50.0, 1), "p90": (90.0, 1), "p99": (99.0, 1000), "p999": (99.9, 10_000)}
"""Each percentile, and from how many samples on it is told."""

LOAD = 0.7
"""Share of what the closed loop served that arrives in an open one."""

SLICES = 8
"""Parts of equal time in which output tokens are counted, too: how steady the rate was."""


def bench_throughput(
    engine: Engine,
    traffic: Traffic,
    *,
    concurrency: Sequence[int] = (1, 16, 64),
    loop: Loop = "closed",
    rate: float | None = None,
    arms: Sequence[str] = ARMS,
    full_requests: int = 4,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Return one row per number of requests under way and loop, and one of the full arm.

    Args:
        engine: Gives the model and its links; its store and device tier are not used.
        concurrency: Requests under way: always so many in a closed loop, at most so many in an open one.
        loop: `closed`, or `open`: arrivals that wait for nothing. Without a rate, a closed loop runs before each.
        rate: Arrivals per second of the open loop; `LOAD` of what the closed one served if None.
        arms: Some of `ARMS`.
        full_requests: Counted requests of the full arm.
        progress: Called after each document that is encoded, and each request.

    Raises:
        InputError: The model's documents cannot be attended where they lie, or the prompts exceed its context.
        KVLinkError: A request failed, or memory was not given back.
    """
    texts = traffic.texts(engine)
    levels = concurrency if "shared" in arms else ()
    spread = np.array_split(np.arange(full_requests if "full" in arms else 0), len(levels) + 1)
    full = [Full(engine, traffic, texts)] if "full" in arms else []
    rows: list[dict[str, Any]] = []
    with _encoded(engine, texts if levels else [], progress) as loader:
        for arm in full:
            arm.answer(0)  # warms up
            progress()
        for at, part in enumerate(spread):
            for arm in full:
                for number in part:
                    arm.answer(1 + int(number), counted=True)
                    progress()
            for rated in _loops(loop, rate) if at < len(levels) else ():
                wanted = LOAD * rows[-1]["requests_per_s"] if rated == 0 else rated
                rows.append(_served(engine, loader, traffic, texts, levels[at], wanted, progress))
    for arm in full:
        alone = arm.row()
        for row in rows:
            row["times_full"] = row["requests_per_s"] / alone["requests_per_s"]
        rows.append(alone)
    return rows


def runs_of(
    traffic: Traffic,
    *,
    concurrency: Sequence[int],
    loop: Loop,
    rate: float | None,
    arms: Sequence[str],
    full_requests: int,
) -> int:
    """Return how often `progress` is called."""
    runs = 1 + full_requests if "full" in arms else 0
    if "shared" not in arms:
        return runs
    loops = len(_loops(loop, rate))
    return runs + traffic.pool + loops * sum(traffic.before(count) + traffic.requests for count in concurrency)


def percentiles(samples: Sequence[float]) -> dict[str, float | None]:
    """Return those percentiles of seconds for which there are samples enough, and None for the others."""
    return {
        name: float(np.percentile(samples, at)) if len(samples) >= least else None
        for name, (at, least) in PERCENTILES.items()
    }


@contextmanager
def _encoded(base: Engine, texts: Sequence[Document], progress: Callable[[], None]) -> Generator[Loader]:
    """Encode documents into a folder; give the loader that finds them there."""
    with tempfile.TemporaryDirectory(prefix="kvlink-bench-") as folder, DiskStore(folder) as store:
        of = base.loader
        loader = Loader(runner=base.runner, store=store, identity=of.identity, sink=of.sink)
        encoder = Engine(
            runner=base.runner,
            prompter=base.prompter,
            loader=loader,
            report=base.report,
            links=base.assembler.links,
        )
        with closing(loader):
            encoder.encode(texts, progress=lambda _: progress())
            yield loader


def _loops(loop: Loop, rate: float | None) -> tuple[float | None, ...]:
    """Return the rates of what runs at each level: None for a closed loop, 0 for a share of what that served."""
    if loop == "closed":
        return (None,)
    return (None, 0.0) if rate is None else (rate,)


class Full:
    """The stock model: sdpa without an explicit mask, logits of the last row only, transformers' own cache."""

    def __init__(self, engine: Engine, traffic: Traffic, texts: Sequence[Document]) -> None:
        self._engine, self._traffic, self._texts = engine, traffic, texts
        self._seconds: list[float] = []
        self._ttft: list[float] = []
        self._gaps: list[float] = []

    def answer(self, number: int, *, counted: bool = False) -> list[int]:
        """Answer the request of this number greedily, and return the ids."""
        engine, order = self._engine, next(islice(self._traffic.orders(), number, None))
        prompt = engine.job([self._texts[at] for at in order], self._traffic.asks(engine)).request.prompt
        runner = engine.runner
        inputs = prompt.ids(prompt.layout())[None].to(runner.device)
        ids, times, known = list[int](), list[float](), None
        start = perf_counter()
        with torch.inference_mode():
            for _ in range(self._traffic.answer):
                found = runner.model(
                    input_ids=inputs, **{runner.cache_argument: known}, use_cache=True, logits_to_keep=1
                )
                ids.append(greedy(found.logits[0, -1]))
                times.append(perf_counter())
                inputs, known = torch.tensor([ids[-1:]], device=runner.device), found[runner.cache_argument]
        if counted:
            self._seconds.append(times[-1] - start)
            self._ttft.append(times[0] - start)
            self._gaps += [after - before for before, after in pairwise(times)]
        return ids

    def row(self) -> dict[str, Any]:
        """Return what was counted; its rates hold for any number of requests that wait for each other."""
        rate = len(self._seconds) / sum(self._seconds)
        return {
            "concurrency": 1,
            "arm": "full",
            "loop": "closed",
            "rate": None,
            "requests": len(self._seconds),
            "links": 0,
            "requests_per_s": rate,
            "output_tokens_per_s": rate * self._traffic.answer,
            "times_full": 1.0,
            "ttft_s": percentiles(self._ttft),
            "itl_s": percentiles(self._gaps),
            "gaps": {"all": len(self._gaps)},
            "hit_ratio": dict.fromkeys(("device", "host", "disk", "remote"), 0.0),
            "samples_s": {"ttft": self._ttft, "total": self._seconds},
        }


def _served(
    base: Engine,
    loader: Loader,
    traffic: Traffic,
    texts: list[Document],
    concurrency: int,
    rate: float | None,
    progress: Callable[[], None],
) -> dict[str, Any]:
    with _shared(base, loader, traffic, texts, concurrency) as (engine, scheduler, sessions):
        serving = Serving(engine, scheduler, traffic, texts, concurrency, rate, progress)
        gc.collect()
        serving.run()
        return _row(serving, sessions)


@contextmanager
def _shared(
    base: Engine, loader: Loader, traffic: Traffic, texts: Sequence[Document], concurrency: int
) -> Generator[tuple[Engine, Scheduler, Sessions]]:
    """Open an engine with a device tier of its own, whose answers end at their length; all must be given back."""
    links, adapter, runner = base.assembler.links, base.assembler.adapter, base.runner
    for_documents = (
        int(traffic.resident * traffic.pool) * traffic.tokens * runner.geometry.bytes_per_token(runner.dtype)
    )
    budget = -(-for_documents * BEGINNINGS_SHARE // (BEGINNINGS_SHARE - 1))
    sessions = sessions_of(loader, links=links, adapter=adapter, bundle="bench", device_budget_bytes=budget)
    scheduler = Scheduler(sessions, limits=Limits(max_running=concurrency, max_queue=1 << 30))
    engine = Engine(
        runner=runner,
        prompter=base.prompter,
        loader=loader,
        report=base.report,
        links=links,
        adapter=adapter,
        sessions=sessions,
        worker=Worker(scheduler),
    )
    yield engine, scheduler, sessions
    require_given_back(scheduler, sessions)
    segments = (ids for text in texts for ids in base.prompter.segments(text, cut=base.cuts_documents))
    sessions.forget(*map(loader.name, segments))
    engine.forget_beginnings()
    left = sessions.residency.stats().used_bytes, sessions.beginnings.stats().used_bytes
    if any(left):
        raise KVLinkError(f"{left} bytes of documents and beginnings are left though nothing should know them")


def require_given_back(scheduler: Scheduler, sessions: Sessions) -> None:
    """Check that no request holds anything after all have ended.

    Raises:
        KVLinkError: Something is still held.
    """
    stats, tree = scheduler.stats(), sessions.beginnings.stats()
    held = {
        "requests": stats.running + stats.waiting,
        "own bytes": stats.own_bytes,
        "bytes of documents": sessions.residency.stats().leased_bytes,
        "bytes of beginnings": tree.leased_bytes,
        "bytes over the budget of beginnings": max(0, tree.used_bytes - tree.budget_bytes),
    }
    if any(held.values()):
        raise KVLinkError(f"all requests have ended, but this is still held: {held}")


def _row(serving: Serving, sessions: Sessions) -> dict[str, Any]:
    start, stop, counted = serving.start, serving.stop, serving.counted
    assert start is not None and stop is not None, "it has run"  # noqa: PT018
    seconds, steps = stop.at - start.at, stop.stats.steps - start.stats.steps
    model_s, other_s = stop.stats.model_s - start.stats.model_s, stop.stats.other_s - start.stats.other_s
    arrived = [at for one in serving.asked for at in one.times if start.at < at <= stop.at]
    gaps = [
        (after - before, said != prompts)
        for one in counted
        for (before, prompts), (after, said) in pairwise(zip(one.times, one.prompts, strict=True))
    ]
    ttft = [one.times[0] - one.due for one in counted]
    beside = [gap for gap, prefilled in gaps if prefilled]
    residents, forwards = sessions.residency.stats(), stop.forwards - start.forwards
    return {
        "concurrency": serving.concurrency,
        "arm": "shared",
        "loop": "closed" if serving.rate is None else "open",
        "rate": serving.rate,
        "requests": len(counted),
        "links": sessions.num_links,
        "requests_per_s": (stop.stats.finished - start.stats.finished) / seconds,
        "output_tokens_per_s": len(arrived) / seconds,
        "ttft_s": percentiles(ttft),
        "itl_s": percentiles([gap for gap, _ in gaps]),
        "itl_prefill_s": percentiles(beside),
        "itl_decode_s": percentiles([gap for gap, prefilled in gaps if not prefilled]),
        "gaps": {"all": len(gaps), "prefill": len(beside)},
        "hit_ratio": hit_ratio(serving),
        "scheduler_share": other_s / (model_s + other_s),
        "overhead_per_step_s": other_s / steps,
        "steps": steps,
        "rows_per_step": (stop.stats.rows - start.stats.rows) / steps,
        "calls_per_layer": (stop.calls - start.calls) / forwards,
        "running_per_step": (stop.running - start.running) / steps,
        "preempted": stop.stats.preempted - start.stats.preempted,
        "evictions": residents.evictions,
        "bytes": {
            "documents_budget": residents.budget_bytes,
            "documents": residents.used_bytes,
            "most_own": serving.most_own_bytes,
        },
        "window_s": seconds,
        "samples_s": {"ttft": ttft},
        "samples_tokens_per_s": (np.histogram(arrived, SLICES, (start.at, stop.at))[0] / (seconds / SLICES)).tolist(),
    }


def hit_ratio(serving: Serving) -> dict[str, float]:
    """Return the share of prompt tokens that was found in each tier, or was a known beginning."""
    tokens: Counter[str] = Counter(device=0, host=0, disk=0, remote=0, encoded=0, beginning=0)
    prompts = 0
    for one in serving.counted:
        assert one.job.answer is not None, "it has ended"
        usage = one.job.answer.usage
        prompts += usage.prompt_tokens
        tokens["beginning"] += usage.cached_tokens
        for row in usage.documents:
            tokens[row.source] += row.tokens
            tokens["beginning"] -= 0 if row.source == "encoded" else row.tokens
    return {name: count / prompts for name, count in tokens.items()}
