"""A scheduler against a simple model of it: who may end how, which tokens an answer has, what is held at rest."""

from collections import Counter
from collections.abc import Sequence
from random import Random
from time import perf_counter
from typing import Any

import torch
from engines import name_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from scheduled import engine_with, scheduler_of

from kvlink.core.errors import Cancelled, DeadlineExceeded, DeviceOverflow, ModelError, QueueFull
from kvlink.engine import session as session_module
from kvlink.engine.engine import Engine
from kvlink.engine.loader import Loader
from kvlink.engine.task import Task
from kvlink.store import MemoryStore

DOCUMENTS = (
    "The office opens at seven.",
    "Bread is baked on Tuesdays.",
    "The hut lies at 2,100 m, below the pass.",
    "A bus leaves at six and at nine.",
    "Salt is sold in the yard behind the office.",
)
REQUESTS: tuple[tuple[tuple[int, ...], str], ...] = (
    ((0,), "When?"),
    ((0, 1), "When?"),
    ((1, 0), "Why?"),
    ((0, 3), "Which bus?"),
    ((2,), "How high?"),
    ((), "Who?"),
    ((4, 0), "Where?"),
    ((0, 1, 2, 3, 4), "All?"),  # more than the device holds
)
TOO_MUCH = 7
MOST = 10
"""Tokens of the longest answer."""
LIMITS = {
    "max_running": 4,
    "max_queue": 4,
    "step_rows": 64,
    "prefill_rows": 32,
    "most_overtaken": 2,
    "look_ahead": 4,
    "patience": 2,
}
SEEDS = st.integers(0, 1 << 32)


class Alone:
    """Each request's answer when nothing else goes on."""

    def __init__(self, base: Engine) -> None:
        self.base = base
        self._engine = engine_with(base)
        self._known: dict[int, Task] = {}

    def ids(self, which: int) -> tuple[int, ...]:
        task = self._task(which)
        assert task.answer is not None
        return task.answer.ids

    def ties(self, which: int, said: Sequence[int], one: int, other: int) -> bool:
        """Whether two tokens tie within 1e-4 behind an answer's first tokens."""
        sessions = self._engine.sessions
        assert sessions is not None
        session = sessions.begin(self._task(which).request, room=1, said=said)
        sessions.advance([(session, len(session.left))])
        sessions.end(session)
        assert session.logits is not None
        return abs(float(session.logits[one] - session.logits[other])) < 1e-4

    def _task(self, which: int) -> Task:
        if which not in self._known:
            task = job_of(self._engine, which, MOST)
            self._engine.forget_beginnings()
            self._engine.submit(task)
            while not task.has_ended:
                self._engine.step()
            self._known[which] = task
        return self._known[which]


def job_of(engine: Engine, which: int, new: int) -> Task:
    at, question = REQUESTS[which]
    return engine.job([DOCUMENTS[one] for one in at], question, max_new_tokens=new)


class SchedulerMachine(RuleBasedStateMachine):
    """The model: jobs with what was done to them; nothing of the scheduler's own reckoning.

    Attributes:
        live: Jobs that have not ended, with their request and length.
        allowed: Errors that a job may end with by now.
        doomed: Jobs that cannot end with an answer any more.
        seen: What has happened, so that a walk can show that it happens.
    """

    def __init__(self, alone: Alone) -> None:
        super().__init__()
        base, self.alone = alone.base, alone
        self.store = MemoryStore(budget_bytes=1 << 24)
        of = base.loader
        loader = Loader(runner=base.runner, store=self.store, identity=of.identity, sink=of.sink)
        row = base.runner.geometry.bytes_per_token(base.runner.dtype)
        sizes = [len(base.prompter.segments(one, cut=False)[0]) for one in map(document, DOCUMENTS)]
        self.own_bytes = 300 * row
        self.engine = engine_with(
            base.over(loader), budget=(sum(sizes) - 10) * row * 8 // 7, own_bytes=self.own_bytes, **LIMITS
        )
        self.scheduler = scheduler_of(self.engine)
        self.live: dict[Task, tuple[int, int]] = {}
        self.allowed: dict[Task, set[type]] = {}
        self.doomed: set[Task] = set()
        self.poisoned: set[Task] = set()
        self.bad: set[str] = set()
        self.hiccup = False
        self.ended = 0
        self.seen: Counter[str] = Counter()
        self.sound, session_module.forward = session_module.forward, self.forward

    # --- what happens -----------------------------------------------------------------------------------------------

    @rule(seed=SEEDS)
    def submit(self, seed: int) -> None:
        draw = Random(seed)
        for _ in range(draw.randint(1, 3)):
            which, new = draw.randrange(len(REQUESTS)), draw.randint(1, MOST)
            job = job_of(self.engine, which, new)
            is_full = self.scheduler.stats().waiting >= LIMITS["max_queue"]
            try:
                self.engine.submit(job)
            except QueueFull:
                assert is_full
                self.seen["refused"] += 1
                continue
            assert not is_full
            self.live[job] = which, new
            self.allowed[job] = {DeviceOverflow} if which == TOO_MUCH else set()
            if which == TOO_MUCH:
                self.doomed.add(job)

    @rule(seed=SEEDS)
    def step(self, seed: int) -> None:
        for _ in range(Random(seed).randint(1, 8)):
            self.one_step()

    @rule(seed=SEEDS)
    def cancel(self, seed: int) -> None:
        if job := self.some(seed):
            job.cancel()
            self.allowed[job].add(Cancelled)
            self.doomed.add(job)

    @rule(seed=SEEDS)
    def be_late(self, seed: int) -> None:
        if job := self.some(seed):
            job.deadline = perf_counter() - 1
            self.allowed[job].add(DeadlineExceeded)
            self.doomed.add(job)

    @rule(seed=SEEDS)
    def poison(self, seed: int) -> None:
        """Let every forward with rows of a request fail."""
        if job := self.some(seed):
            self.poisoned.add(job)
            self.allowed[job].add(ModelError)
            self.doomed.add(job)

    @rule(seed=SEEDS)
    def poison_document(self, seed: int) -> None:
        """Let every forward that encodes a document fail, until somebody has paid for it."""
        self.bad.add(DOCUMENTS[seed % len(DOCUMENTS)])

    @rule()
    def fail_once(self) -> None:
        """Let the next forward fail, whatever it holds."""
        self.hiccup = True

    @rule(seed=SEEDS)
    def damage(self, seed: int) -> None:
        """Change a stored object, and let nobody find its resident."""
        name = name_of(self.engine, DOCUMENTS[seed % len(DOCUMENTS)])
        if slot := self.store._slots.get((name, "raw")):
            slot.data[-1] ^= 1
            self.seen["damaged"] += 1
        assert self.engine.sessions is not None
        self.engine.sessions.residency.drop(name)

    @rule(seed=SEEDS)
    def remove(self, seed: int) -> None:
        name = name_of(self.engine, DOCUMENTS[seed % len(DOCUMENTS)])
        self.store.delete(name)
        self.engine.forget(name)

    # --- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        stats = self.scheduler.stats()
        assert stats.finished + stats.failed + stats.cancelled == self.ended
        assert stats.submitted == self.ended + len(self.live)
        assert stats.waiting + stats.running == len(self.live)
        assert stats.own_bytes <= self.own_bytes or stats.running == 1
        assert all(job.overtaken <= LIMITS["most_overtaken"] for job in self.scheduler._waiting)
        self.seen["preempted"] = stats.preempted
        if not self.live:
            self.check_rest()

    def check_rest(self) -> None:
        sessions, stats = self.engine.sessions, self.scheduler.stats()
        assert sessions is not None
        assert self.scheduler.is_idle
        assert (stats.own_bytes, stats.encoding) == (0, 0)
        assert sessions.residency.stats().leased_bytes == 0
        assert sessions.beginnings.stats().leased_bytes == 0
        assert not sessions._running
        assert not sessions._openings

    def teardown(self) -> None:
        """Let all come to their end in a bounded number of steps, or close."""
        try:
            if self.scheduler.stats().submitted % 3 == 0:
                for job in self.live:
                    self.allowed[job].add(Cancelled)
                self.scheduler.close()
                self.note_ends()
                assert not self.live
            for _ in range(400):  # 8 requests of at most 300 rows, 32 of which go through in any step
                if not self.live:
                    break
                self.one_step()
            assert not self.live, f"{len(self.live)} requests starve"
            self.check()
        finally:
            session_module.forward = self.sound

    def one_step(self) -> None:
        over = [job for job in self.live if self.allowed[job] & {Cancelled, DeadlineExceeded}]
        self.engine.step()
        assert all(job.has_ended for job in over)
        self.note_ends()

    def note_ends(self) -> None:
        for job in [job for job in self.live if job.has_ended]:
            which, new = self.live.pop(job)
            self.ended += 1
            assert (job.answer is None) != (job.error is None)
            self.seen["answered" if job.answer else type(job.error).__name__] += 1
            if job.answer is None:
                assert type(job.error) in self.allowed[job], job.error
                continue
            assert job not in self.doomed
            assert "".join(piece.text for piece in job.pieces()) == job.answer.text
            assert job.answer.usage.completion_tokens == len(job.answer.ids) == new
            self.seen["encoded"] += any(row.source == "encoded" for row in job.answer.usage.documents)
            self.check_tokens(which, job.answer.ids)

    def check_tokens(self, which: int, ids: tuple[int, ...]) -> None:
        wanted = self.alone.ids(which)
        at = next((at for at, (one, other) in enumerate(zip(ids, wanted, strict=False)) if one != other), None)
        assert at is None or self.alone.ties(which, wanted[:at], ids[at], wanted[at])

    # --- how it is done ---------------------------------------------------------------------------------------------

    def some(self, seed: int) -> Task | None:
        jobs = list(self.live)
        return jobs[seed % len(jobs)] if jobs else None

    def forward(self, runner: Any, runs: Sequence[Any], *rest: Any, **options: Any) -> torch.Tensor:
        """Compute, and perhaps fail behind it: what was written must not be taken for known."""
        logits = self.sound(runner, runs, *rest, **options)
        jobs = {id(job.session.own): job for job in self.live if job.session}
        makings = {id(one.draft.own): one for one in self.scheduler._drafts._making.values() if one.draft}
        texts = {self.engine.prompter.segments(document(text), cut=False)[0]: text for text in DOCUMENTS}
        self.seen["together"] += sum(bool(job.session and job.session.ids) for job in self.live) > 1
        self.seen["drafts beside answers"] += any(run.unrotated is not None for run in runs) and len(runs) > 1
        for run in runs:
            job, making = jobs.get(id(run.own)), makings.get(id(run.own))
            text = texts[making.absent.ids] if making else None
            fails = self.hiccup or job in self.poisoned or text in self.bad
            if fails and len(runs) == 1:  # so the model knows who pays for it
                for other, (which, _) in self.live.items():
                    if other is job or (making and other.opening and making.absent.leased in other.opening.missing):
                        assert other is job or DOCUMENTS.index(str(text)) in REQUESTS[which][0]
                        self.allowed[other].add(ModelError)
                        if other is job:  # who waits may be preempted before it learns of it, and begin anew
                            self.doomed.add(other)
                self.bad.discard(str(text))
            if fails:
                self.hiccup = False
                raise RuntimeError("the device has had enough")
        return logits


def document(text: str) -> Any:
    from kvlink import Document

    return Document(text)


def walk(machine: SchedulerMachine, *, rules: int, seed: int = 0) -> Counter[str]:
    """Do many more things than hypothesis has time for; returns what has happened."""
    draw = Random(seed)
    often = [machine.submit, machine.step, machine.step, machine.step, machine.damage]
    seldom = [machine.cancel, machine.be_late, machine.poison, machine.remove, machine.poison_document]
    try:
        for _ in range(rules):
            chance = draw.random()
            if chance < 0.03:
                machine.fail_once()
            else:
                draw.choice(seldom if chance < 0.25 else often)(draw.getrandbits(32))
            machine.check()
    finally:
        machine.teardown()
    return machine.seen
