"""What a server costs: the same closed loop of clients against an engine in this process, and over HTTP.

Clients are threads that ask, read their stream and ask again. Both arms are asked the same prompts in the same order,
answer greedily, and have the same store and the same room on the device. They take turns, so that drift hits both.
"""

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import count as counting
from json import dumps, loads
from random import Random
from statistics import mean
from time import perf_counter, process_time, sleep
from typing import Any

import numpy as np

from kvlink.core.document import Document
from kvlink.core.errors import InputError, KVLinkError
from kvlink.engine.build import BEGINNINGS_SHARE, sessions_of
from kvlink.engine.engine import Engine
from kvlink.engine.limits import Limits
from kvlink.engine.scheduler import Scheduler
from kvlink.engine.worker import Worker
from kvlink.evaluation.bench.serve_process import MODEL, ServerProcess
from kvlink.evaluation.bench.throughput import percentiles, require_given_back
from kvlink.evaluation.bench.throughput_load import Traffic

CHAT = "/v1/chat/completions"
LEAST_BYTES = 2 << 20
"""Of a budget of the device: `kvlink serve` takes no less."""

PARTS = 8
"""Parts of the requests that only the server is asked; its memory is read behind each."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a client saw of one request.

    Attributes:
        start, first, end: When it was sent, when its first text was there, and when it had ended.
        completion_tokens, computed_tokens: Tokens of the answer, and those of the prompt that were computed now.
        error: Why there is no whole answer; empty if there is.
        name: Id of the request, where it has one.
    """

    start: float
    first: float
    end: float
    completion_tokens: int = 0
    computed_tokens: int = 0
    error: str = ""
    name: str = ""


Order = tuple[int, ...]
Ask = Callable[[Order], Told]
Progress = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Loop:
    """One run of a closed loop.

    Attributes:
        counted: What counts, all of it asked and answered while every client was busy.
        seconds: How long that took.
        asked: Requests, counted or not.
        errors: How often each error came among all of them.
    """

    counted: list[Told]
    seconds: float
    asked: int
    errors: Mapping[str, int]


@dataclass(slots=True, eq=False)
class Arm:
    """Who is asked, and what came of it. Orders of documents go on from loop to loop; none comes twice.

    Attributes:
        clock: Seconds that processors have spent on the one who is asked.
        spent_s: Of those, seconds while the loops ran.
    """

    name: str
    ask: Ask
    orders: Iterator[Order]
    clock: Callable[[], float]
    spent_s: float = 0.0
    loops: list[Loop] = field(default_factory=list[Loop])

    def run(self, *, clients: int, warmup: int, count: int, progress: Progress) -> None:
        """Run the loop once more."""
        before = self.clock()
        self.loops.append(closed_loop(self.ask, self.orders, clients, warmup, count, progress))
        self.spent_s += self.clock() - before

    @property
    def rates(self) -> list[float]:
        """Requests per second of each loop."""
        return [len(one.counted) / one.seconds for one in self.loops]

    @property
    def firsts(self) -> list[float]:
        """Median time to the first text of each loop."""
        return [float(np.median(_ttfts(one))) for one in self.loops]

    def row(self, clients: int) -> dict[str, Any]:
        """Return what was counted."""
        counted = [told for one in self.loops for told in one.counted]
        fine = [told for told in counted if not told.error]
        ttft = [told.first - told.start for told in fine]
        errors: Counter[str] = sum((Counter(one.errors) for one in self.loops), Counter[str]())
        asked = sum(one.asked for one in self.loops)
        return {
            "arm": self.name,
            "clients": clients,
            "requests": len(counted),
            "asked": asked,
            "errors": dict(errors),
            "requests_per_s": float(np.median(self.rates)),
            "ttft_s": percentiles(ttft),
            "total_s": percentiles([told.end - told.start for told in fine]),
            "processor_s": self.spent_s / asked,
            "completion_tokens": mean(told.completion_tokens for told in fine),
            "computed_tokens": mean(told.computed_tokens for told in fine),
            "samples_per_s": self.rates,
            "samples_s": {"ttft": ttft},
        }


def bench_cost(
    engine: Arm,
    server: Arm,
    process: ServerProcess,
    *,
    clients: int,
    rounds: int,
    count: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Run both arms in turn, and return a row for each; that of the server says what it costs.

    `ttft_added_s` is what lies between the moment at which the engine had a request's first token, in its own time, and
    the first text that the client saw.

    Args:
        count: Counted requests of each arm in each round, behind one of each client that is not counted.

    Raises:
        KVLinkError: No counted request of a round was answered.
    """
    for number in range(rounds):
        for arm in (engine, server) if number % 2 else (server, engine):
            arm.run(clients=clients, warmup=clients, count=count, progress=progress)
    alone, served = engine.row(clients), server.row(clients)
    pairs = list(zip(server.rates, engine.rates, strict=True))
    served["cost"] = spread([1 - one / other for one, other in pairs])
    served["ttft_cost_s"] = spread([one - other for one, other in zip(server.firsts, engine.firsts, strict=True)])
    fine = [told for one in server.loops for told in one.counted if not told.error]
    logged = process.logged({told.name for told in fine})
    served["ttft_added_s"] = spread([told.first - told.start - logged[told.name]["engine_ttft_s"] for told in fine])
    return [alone, served]


def bench_soak(
    server: Arm, process: ServerProcess, *, clients: int, requests: int, progress: Progress
) -> dict[str, Any]:
    """Ask the server alone so often, and return a row: errors, rate, and its memory behind each part.

    `growth` is that of the memory from the end of the second part to the end.
    """
    before = len(server.loops)
    memory = [process.memory_bytes]
    for part in np.array_split(np.arange(requests), PARTS):
        if len(part):
            server.run(clients=clients, warmup=0, count=len(part), progress=progress)
            memory.append(process.memory_bytes)
    loops = server.loops[before:]
    errors: Counter[str] = sum((Counter(one.errors) for one in loops), Counter[str]())
    return {
        "arm": "soak",
        "clients": clients,
        "requests": sum(one.asked for one in loops),
        "errors": dict(errors),
        "requests_per_s": float(np.median([len(one.counted) / one.seconds for one in loops])) if loops else None,
        "memory_bytes": memory,
        "growth": memory[-1] / memory[min(2, len(memory) - 1)] - 1,
    }


def closed_loop(ask: Ask, orders: Iterator[Order], clients: int, warmup: int, count: int, progress: Progress) -> Loop:
    """Let so many clients ask one request after another, until `count` have ended behind the first `warmup`.

    All of them are busy until then; what is under way at that moment comes to its end, too, and is not counted. Between
    two requests a client waits for a random part of the time between two tokens: who asks in the same process would
    be in step with the engine else, and be taken into its very next step.

    Args:
        progress: Called for each of the first `warmup + count` that have ended.
    """
    lock = threading.Lock()
    ended: list[Told] = []

    def client(number: int) -> None:
        pauses = Random(number)  # noqa: S311
        while True:
            with lock:
                if len(ended) >= warmup + count:
                    return
                order = next(orders)
            told = ask(order)
            with lock:
                ended.append(told)
                if len(ended) <= warmup + count:
                    progress()
            sleep(pauses.random() * (told.end - told.first) / max(1, told.completion_tokens))

    start = perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        for one in [pool.submit(client, number) for number in range(clients)]:
            one.result()
    ended.sort(key=lambda told: told.end)
    counted = ended[warmup : warmup + count]
    start = ended[warmup - 1].end if warmup else start
    errors = Counter(told.error for told in ended if told.error)
    if all(told.error for told in counted):
        raise KVLinkError(f"none of {count} requests was answered: {dict(errors)}")
    return Loop(counted, counted[-1].end - start, len(ended), errors)


@contextmanager
def engine_arm(base: Engine, traffic: Traffic, texts: Sequence[Document]) -> Generator[Arm]:
    """Give the arm that asks an engine in threads, its steps in a thread of their own, as in a server.

    Args:
        base: Gives model, links and store.

    Raises:
        InputError: The model's documents cannot be attended where they lie.
        KVLinkError: When it is left: something is still held.
    """
    if base.sessions is None:
        raise InputError("this model's documents are assembled for each prompt, and such a model is not served")
    question = traffic.asks(base)
    sessions = sessions_of(
        base.loader,
        links=base.assembler.links,
        adapter=base.assembler.adapter,
        bundle="bench",
        device_budget_bytes=device_bytes(base, traffic),
    )
    scheduler = Scheduler(sessions, limits=Limits())
    engine = Engine(
        runner=base.runner,
        prompter=base.prompter,
        loader=base.loader,
        report=base.report,
        end_ids=base.job([], question).end_ids,
        links=base.assembler.links,
        adapter=base.assembler.adapter,
        sessions=sessions,
        worker=Worker(scheduler),
    )

    def ask(order: Order) -> Told:
        start, first = perf_counter(), 0.0
        try:
            stream = engine.stream([texts[at] for at in order], question, max_new_tokens=traffic.answer)
            for piece in stream:
                first = first or (perf_counter() if piece else 0.0)
        except KVLinkError as error:
            return Told(start, start, perf_counter(), error=type(error).__name__)
        end, usage = perf_counter(), stream.answer.usage
        return Told(start, first or end, end, usage.completion_tokens, usage.prompt_tokens - usage.cached_tokens)

    engine.start()
    try:
        yield Arm("engine", ask, traffic.orders(), process_time)
    finally:
        engine.stop()
    require_given_back(scheduler, sessions)


def server_arm(server: ServerProcess, traffic: Traffic, texts: Sequence[Document], question: str) -> Arm:
    """Return the arm that asks over HTTP, each time by a connection of its own."""
    numbers = counting()

    def ask(order: Order) -> Told:
        name = f"bench-{next(numbers)}"
        start, first, last, usage = perf_counter(), 0.0, b"", b""
        body = chat_body([texts[at] for at in order], question, max_tokens=traffic.answer)
        try:
            with closing(server.connection()) as connection:
                connection.request("POST", CHAT, body, {"content-type": "application/json", "x-request-id": name})
                response = connection.getresponse()
                if response.status != 200:
                    return Told(start, start, perf_counter(), error=f"status {response.status}")
                for line in response:
                    if not line.startswith(b"data: "):
                        continue
                    last, before = line[6:].strip(), last
                    first = first or (perf_counter() if _SAID in last else 0.0)
                    usage = before if last == b"[DONE]" else usage
        except (OSError, HTTPException) as error:
            return Told(start, start, perf_counter(), error=type(error).__name__)
        end = perf_counter()
        if last != b"[DONE]":
            return Told(start, start, end, error="the stream was cut")
        spent = loads(usage)["usage"]
        computed = spent["prompt_tokens"] - spent["prompt_tokens_details"]["cached_tokens"]
        return Told(start, first or end, end, spent["completion_tokens"], computed, name=name)

    return Arm("server", ask, traffic.orders(), lambda: server.processor_s)


def chat_body(documents: Sequence[Document], question: str, *, max_tokens: int, temperature: float = 0.0) -> bytes:
    """Return a streamed request as bytes."""
    return dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": question}],
            "documents": [{"title": one.title, "text": one.text} for one in documents],
            "temperature": temperature,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


def device_bytes(engine: Engine, traffic: Traffic) -> int:
    """Return a budget of the device in which `resident` of the documents have room beside known beginnings."""
    runner = engine.runner
    documents = int(traffic.resident * traffic.pool) * traffic.tokens * runner.geometry.bytes_per_token(runner.dtype)
    return max(LEAST_BYTES, -(-documents * BEGINNINGS_SHARE // (BEGINNINGS_SHARE - 1)))


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """Return median, quartiles and the samples."""
    low, middle, high = np.percentile(samples, (25, 50, 75)).tolist()
    return {"median": middle, "q1": low, "q3": high, "samples": list(samples)}


_SAID = b'"delta": {"content": "'


def _ttfts(loop: Loop) -> list[float]:
    return [told.first - told.start for told in loop.counted if not told.error]
