"""Traffic for `bench throughput`: what is asked, and a loop that asks it and notes when each token was there."""

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from time import perf_counter, sleep
from typing import Any, Literal

import numpy as np

from kvlink.core.document import Document
from kvlink.core.errors import InputError, KVLinkError
from kvlink.engine.engine import Engine
from kvlink.engine.job import Job
from kvlink.engine.scheduler import Scheduler, SchedulerStats
from kvlink.evaluation.bench.texts import document_of, question_of

Loop = Literal["closed", "open"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is asked. The same seed gives the same documents, orders and arrivals.

    Attributes:
        requests: Counted ones.
        warmup: Requests before those; None for twice as many as are under way, at least a tenth of the counted ones.
        documents: Different documents in each request, never twice in the same order.
        tokens, question, answer: Of each document, of the question (about), of the answer.
        pool: Documents to draw from.
        zipf: Document number n is asked for in proportion to n ** -zipf.
        resident: Share of the pool that the device tier holds.
    """

    requests: int = 200
    warmup: int | None = None
    documents: int = 10
    tokens: int = 200
    question: int = 30
    answer: int = 64
    pool: int = 100
    zipf: float = 1.1
    resident: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        """Check that such requests can be made and served.

        Raises:
            InputError: They cannot.
        """
        if self.documents > self.pool or self.resident * self.pool < self.documents:
            raise InputError(
                f"a request of {self.documents} documents needs that many on the device, and {self.resident:g} of a "
                f"pool of {self.pool} are fewer: ask for fewer, or enlarge the pool or the resident share"
            )
        orders = math.perm(self.pool, self.documents)
        if orders < 20 * self.requests:
            raise InputError(
                f"{self.documents} of {self.pool} documents have {orders} orders, too few "
                f"for {self.requests} requests that are all new: enlarge the pool or ask for fewer requests"
            )

    def before(self, concurrency: int) -> int:
        """Return how many requests are not counted."""
        return max(2 * concurrency, self.requests // 10) if self.warmup is None else self.warmup

    def texts(self, engine: Engine) -> list[Document]:
        """Return the pool."""
        return [document_of(engine.prompter, self.tokens, seed=self.seed * self.pool + at) for at in range(self.pool)]

    def asks(self, engine: Engine) -> str:
        """Return the question."""
        return question_of(engine.prompter, self.question)

    def orders(self) -> Generator[tuple[int, ...]]:
        """Yield the documents of each request, in orders of which none comes twice."""
        generator = np.random.default_rng(self.seed)
        weights = np.arange(1, self.pool + 1) ** -self.zipf
        weights /= weights.sum()
        seen: set[tuple[int, ...]] = set()
        while True:
            order = tuple(generator.choice(self.pool, self.documents, replace=False, p=weights).tolist())
            if order not in seen:
                seen.add(order)
                yield order

    def gaps(self, rate: float) -> Generator[float]:
        """Yield seconds between arrivals that know nothing of each other."""
        generator = np.random.default_rng(self.seed + 1)
        while True:
            yield float(generator.exponential(1 / rate))


@dataclass(slots=True, eq=False)
class Asked:
    """One request.

    Attributes:
        due: When it arrived.
        times: When each token of its answer was there.
        prompts: For each of those, how many steps had computed rows of prompts until then.
    """

    due: float
    job: Job
    times: list[float] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters at one moment; those of `Serving` beside those of its scheduler."""

    at: float
    stats: SchedulerStats
    forwards: int
    calls: int
    running: int


@dataclass(slots=True, eq=False)
class Serving:
    """Asks, steps and notes, in one thread. The load stays what it is until the last counted request has ended.

    Attributes:
        rate: Requests per second of an open loop; None for a closed one that keeps `concurrency` under way.
        progress: Called as each request ends, warm-up included.
        asked: All requests, in order of arrival.
        start, stop: The counters when the first counted request arrived, and when the last had ended.
        forwards, calls: Forwards so far, and calls of attention in each of their layers.
        running: Requests under way, summed over the steps.
        most_own_bytes: The most that own rows of all requests took behind any step.
    """

    engine: Engine
    scheduler: Scheduler
    traffic: Traffic
    texts: list[Document]
    concurrency: int
    rate: float | None = None
    progress: Callable[[], None] = lambda: None
    asked: list[Asked] = field(default_factory=list)
    forwards: int = 0
    calls: int = 0
    running: int = 0
    start: Reading | None = None
    stop: Reading | None = None
    most_own_bytes: int = 0
    _flying: list[Asked] = field(default_factory=list)
    _prompts: int = 0

    @property
    def counted(self) -> list[Asked]:
        """The requests that count."""
        before = self.traffic.before(self.concurrency)
        return self.asked[before : before + self.traffic.requests]

    def run(self) -> None:
        """Serve until the last counted request has ended, then give up the others.

        Raises:
            KVLinkError: A request failed.
        """
        hook = self.engine.runner.model.register_forward_pre_hook(self._watch, with_kwargs=True)
        try:
            self._serve()
        finally:
            hook.remove()
            for one in self._flying:
                one.job.cancel()
            while self.engine.step():
                pass

    def _serve(self) -> None:
        orders, question = self.traffic.orders(), self.traffic.asks(self.engine)
        gaps = None if self.rate is None else self.traffic.gaps(self.rate)
        due = perf_counter() + (next(gaps) if gaps else 0.0)
        total = self.traffic.before(self.concurrency) + self.traffic.requests
        ended = 0
        while len(self.asked) < total or not all(one.job.has_ended for one in self.counted):
            if gaps is None:
                while len(self._flying) < self.concurrency:
                    self._ask(orders, question, perf_counter())
            else:
                while due <= perf_counter() and len(self.asked) < total + self.concurrency:
                    self._ask(orders, question, due)
                    due += next(gaps)
            if not self._flying:
                sleep(max(0.0, due - perf_counter()))
                continue
            for one in self._step():
                if one.job.answer is None:
                    raise one.job.error or KVLinkError("a request ended without an answer")
                ended += 1
                if ended <= total:
                    self.progress()
        self.stop = self._read()

    def _ask(self, orders: Iterator[tuple[int, ...]], question: str, due: float) -> None:
        number, tokens = len(self.asked), self.traffic.answer
        if number < min(self.concurrency, self.traffic.before(self.concurrency)):  # so that they do not end together
            tokens = 1 + number * tokens // self.concurrency
        elif number == self.traffic.before(self.concurrency):
            self.start = self._read(at=due)
        texts = [self.texts[at] for at in next(orders)]
        one = Asked(due, self.engine.job(texts, question, max_new_tokens=tokens))
        self.engine.submit(one.job)
        self.asked.append(one)
        self._flying.append(one)

    def _step(self) -> list[Asked]:
        """Run a step and note what it brought; return the requests that have ended."""
        rows = self.scheduler.stats().rows
        self.engine.step()
        now, stats = perf_counter(), self.scheduler.stats()
        self.running += stats.running
        self.most_own_bytes = max(self.most_own_bytes, stats.own_bytes)
        new = [(one, sum(piece.token is not None for piece in one.job.pieces())) for one in self._flying]
        self._prompts += stats.rows - rows > sum(count for one, count in new if one.times)
        for one, count in new:
            one.times += [now] * count
            one.prompts += [self._prompts] * count
        ended = [one for one in self._flying if one.job.has_ended]
        self._flying = [one for one in self._flying if not one.job.has_ended]
        return ended

    def _read(self, *, at: float | None = None) -> Reading:
        at = perf_counter() if at is None else at
        return Reading(at, self.scheduler.stats(), self.forwards, self.calls, self.running)

    def _watch(self, model: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Count the parts that each layer of a forward attends, one call for each."""
        if (attending := keywords.get("attending")) is not None:
            self.forwards += 1
            self.calls += sum(any(part.sights.values()) for part in attending.parts)
