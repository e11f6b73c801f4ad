"""One forward for many requests: who begins, whose rows go through next, and what becomes of the tokens.

    step: admit -> begin -> advance (decodes first, then prompts and documents in chunks) -> sample -> hand over

First come, first served, with two exceptions that are bounded: a request whose documents are resident may overtake a
few times, and one that waits for memory in vain takes it back from the youngest. While requests run, the documents of
those that wait are loaded in the background. One thread at a time runs steps; any thread may submit and cancel.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from threading import Lock
from time import perf_counter

import torch

from kvlink.core.errors import Cancelled, DeadlineExceeded, DeviceBusy, KVLinkError, ModelError, QueueFull
from kvlink.engine.drafts import Drafts, Work
from kvlink.engine.limits import Limits, SchedulerStats
from kvlink.engine.loaded import LoadTimes
from kvlink.engine.sampling import sample
from kvlink.engine.session import Session, Sessions
from kvlink.engine.sources import usage_of
from kvlink.engine.task import Task


class Scheduler:
    """Runs the requests of one engine.

    Attributes:
        lock: Held by whoever runs a step.
    """

    def __init__(self, sessions: Sessions, *, limits: Limits = Limits()) -> None:  # noqa: B008 (frozen)
        self.lock = sessions.lock
        self.limits = limits
        self._sessions = sessions
        self._waiting: deque[Task] = deque()
        self._inbox: deque[Task] = deque()
        self._running: list[Task] = []
        self._drafts = Drafts()
        self._door = Lock()
        self._closed = False
        self._counts: Counter[str] = Counter(
            steps=0, rows=0, submitted=0, finished=0, failed=0, cancelled=0, preempted=0
        )
        self._model_s = self._other_s = 0.0

    # --- any thread -------------------------------------------------------------------------------------------------

    def submit(self, job: Task) -> None:
        """Let a job wait for its turn.

        Raises:
            QueueFull: As many as may wait do so already.
            Cancelled: The scheduler is closed.
        """
        with self._door:
            if self._closed:
                raise Cancelled("the engine is closing and takes no further request")
            waiting = len(self._waiting) + len(self._inbox)
            if waiting >= self.limits.max_queue:
                raise QueueFull(f"{waiting} requests wait, the queue holds {self.limits.max_queue}: try again later")
            self._counts["submitted"] += 1
            job.number = self._counts["submitted"]
            self._inbox.append(job)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._inbox or self._waiting or self._running)

    def stats(self) -> SchedulerStats:
        """Return what goes on and what happened."""
        return SchedulerStats(
            waiting=len(self._waiting) + len(self._inbox),
            running=len(self._running),
            encoding=len(self._drafts),
            own_bytes=self._own_bytes(),
            model_s=self._model_s,
            other_s=self._other_s,
            **self._counts,
        )

    # --- the thread that runs the model -----------------------------------------------------------------------------

    def step(self) -> bool:
        """Do one round; return whether there was anything to do. The caller holds the lock."""
        start, model_s = perf_counter(), self._model_s
        self._load_ahead(self._take_in())
        self._give_up()
        self._admit()
        self._begin_ready()
        work, drafts = self._work()
        if work or drafts:
            self._hand_over(self._advance(work, drafts))
        elif self._running:
            self._drafts.wait([job.opening for job in self._running if job.opening])
        self._other_s += perf_counter() - start - (self._model_s - model_s)
        return bool(work or drafts or self._running)

    def close(self) -> None:
        """Give up everything; nothing can be submitted from now on. The caller holds the lock."""
        with self._door:
            self._closed = True
        self._take_in()
        for job in [*self._waiting, *self._running]:
            self._end(job, Cancelled("the engine was closed"), "cancelled")
        self._waiting.clear()
        self._running.clear()
        self._drafts.sweep()

    def _take_in(self) -> list[Task]:
        with self._door:
            new = [*self._inbox]
            self._waiting.extend(new)
            self._inbox.clear()
        return new

    def _load_ahead(self, new: Sequence[Task]) -> None:
        """Have the documents of new requests loaded, unless nothing can be done in the meantime."""
        if self._running or len(self._waiting) > 1:
            for job in new:
                job.ahead = job.shared.residency.ahead(job.request.prompt.segments) if job.reuse else None

    def _give_up(self) -> None:
        """Let go of what was cancelled or is too late."""
        now = perf_counter()
        for job in [*self._waiting, *self._running]:
            if job.is_cancelled:
                self._end(job, Cancelled("the request was cancelled by its caller"), "cancelled")
            elif job.deadline is not None and now > job.deadline:
                said = "its documents were being encoded" if job.opening else "it was still waiting"
                if job.session:
                    said = f"{len(job.ids)} tokens of its answer were there"
                late = f"the request was not answered within {job.deadline - job.start:.1f} s: {said}"
                self._end(job, DeadlineExceeded(late), "failed")
        self._drop_ended()

    def _admit(self) -> None:
        """Begin requests as long as there is room for them."""
        while self._waiting and len(self._running) < self.limits.max_running and (job := self._next()):
            needed = self._needed(job)
            if self._running and self._own_bytes() + needed > self.limits.own_bytes:
                self._wait_for_memory()
                return
            try:
                self._open(job)
            except DeviceBusy:
                self._wait_for_memory()
                return
            except Exception as error:
                self._waiting.remove(job)
                self._end(job, _as_ours(error), "failed")
                continue
            self._waiting.remove(job)
            self._running.append(job)
            for other in self._waiting:
                other.overtaken += other.number < job.number

    def _next(self) -> Task | None:
        """Return the first, or one behind it whose documents are resident, as long as that harms nobody much.

        None if the documents of all these are being loaded, and something else can be done in the meantime.
        """
        ahead = list(islice(self._waiting, self.limits.look_ahead))
        if ahead[0].blocked or any(job.overtaken >= self.limits.most_overtaken for job in ahead):
            ahead = ahead[:1]
        if self._running:
            ahead = [job for job in ahead if not job.is_loading]
        return max(ahead, key=_share, default=None)  # the first of equals

    def _wait_for_memory(self) -> None:
        """Let the first request wait for others to end; after a while, let the youngest begin anew behind it."""
        first = self._waiting[0]
        first.blocked += 1
        younger = [job for job in self._running if job.number > first.number]
        if first.blocked >= self.limits.patience and younger:
            youngest = max(younger, key=lambda job: job.number)
            if youngest.session is not None:  # what was said stands behind documents in this order
                youngest.request, youngest.order = youngest.session.request, "given"
            self._put_back(youngest)
            self._counts["preempted"] += 1

    def _put_back(self, job: Task) -> None:
        """Let a running job wait anew, in its place."""
        job.let_go()
        self._running.remove(job)
        at = next((i for i, other in enumerate(self._waiting) if other.number > job.number), len(self._waiting))
        self._waiting.insert(at, job)

    def _open(self, job: Task) -> None:
        """Hold what is there of a request's documents, and have the others encoded."""
        spent, start = LoadTimes(), perf_counter()
        job.opening = job.shared.open(job.request, reuse=job.reuse, times=spent)
        self._drafts.add(job.opening)
        if job.ahead is not None:
            job.ahead.cancel()
        job.opened, job.blocked, job.ahead = perf_counter(), 0, None
        self._model_s += job.opened - start
        if job.usage is None:
            rotate_s = job.opened - start - spent.load_s
            job.times = replace(job.times, load_s=spent.load_s, rotate_s=rotate_s)

    def _begin_ready(self) -> None:
        """Begin requests whose documents are all there."""
        for job in [job for job in self._running if job.opening]:
            assert job.opening is not None, "it was opened"
            if job.opening.error is not None:
                self._end(job, _as_ours(job.opening.error), "failed")
            elif job.opening.is_lost:
                self._put_back(job)
            elif not job.opening.missing:
                try:
                    self._begin(job)
                except Exception as error:
                    self._end(job, _as_ours(error), "failed")
        self._drop_ended()

    def _begin(self, job: Task) -> None:
        """Find a request's beginning; of one that was pre-empted, its answer so far, too."""
        start, opening = perf_counter(), job.opening
        session = job.shared.begin(
            job.request,
            room=job.room + len(job.ids),
            order=job.order,
            reuse=job.reuse,
            said=job.ids,
            opening=opening,
        )
        job.session, job.opening = session, None
        self._model_s += perf_counter() - start
        if job.usage is None:
            job.usage = usage_of(job.request, session, labels=job.labels, reuse=job.reuse)
            encode_s = start - job.opened if opening and opening.waits else 0.0
            rotate_s = job.times.rotate_s + perf_counter() - start
            job.times = replace(job.times, encode_s=encode_s, rotate_s=rotate_s)

    def _needed(self, job: Task) -> int:
        """Return the bytes of a request's own rows."""
        prompt = job.request.prompt
        rows = prompt.num_tokens + job.room + len(job.ids) + job.shared.num_links * len(prompt.segments)
        if job.reuse:
            rows -= sum(map(len, prompt.segments))
        runner = job.shared.runner
        return rows * runner.geometry.bytes_per_token(runner.dtype)

    def _own_bytes(self) -> int:
        return sum(job.session.own.num_bytes if job.session else self._needed(job) for job in self._running)

    def _work(self) -> tuple[list[tuple[Task, int]], Work]:
        """Choose the rows of the next forward: a token of each answer, then prompts and documents, oldest first.

        Where both wait, prompts and documents get half of the rows each.
        """
        running = sorted(self._running, key=lambda job: job.number)
        work = [(job, 1) for job in running if job.is_decoding]
        left = self.limits.prefill_rows if work else self.limits.step_rows
        prompts = [(job, len(job.session.left)) for job in running if job.session and not job.is_decoding]
        half = (left + self._counts["steps"] % 2) // 2  # of one row in turns
        for_prompts = min(left - half, sum(count for _, count in prompts))
        drafts = self._drafts.next([job.opening for job in running if job.opening], left - for_prompts)
        left -= sum(count for _, count in drafts)
        for job, count in prompts:
            if left > 0:
                work.append((job, min(left, count)))
                left -= min(left, count)
        return work, drafts

    def _advance(self, work: Sequence[tuple[Task, int]], drafts: Work) -> list[Task]:
        """Run a forward; return the jobs that have a next token to choose. What breaks it fails alone."""
        start, rows = perf_counter(), sum(count for _, count in (*work, *drafts))
        pairs = [(job.session, number) for job, number in work if job.session]
        try:
            self._sessions.advance(pairs, [(making.draft, number) for making, number in drafts if making.draft])
        except Exception as error:
            if len(work) + len(drafts) > 1:
                ready = [job for one in work for job in self._advance([one], [])]
                return ready + [job for one in drafts for job in self._advance([], [one])]
            for job, _ in work:
                self._end(job, _as_ours(error), "failed")
            for making, _ in drafts:
                self._drafts.fail(making, error)
            self._drop_ended()
            return []
        else:
            self._drafts.advanced(drafts, perf_counter() - start, rows)
            self._counts.update(steps=1, rows=rows)
        finally:
            self._model_s += perf_counter() - start
        return [job for job, _ in work if job.session and not len(job.session.left)]

    def _hand_over(self, ready: Sequence[Task]) -> None:
        """Choose the next token of each answer, tell it, and end what has come to its end."""
        sessions = [job.session for job in ready if job.session]
        if not sessions:
            return
        going: list[tuple[Session, int]] = []
        logits = torch.stack([session.logits for session in sessions if session.logits is not None])
        for job, session, sampled in zip(ready, sessions, sample(logits, [job.sampler for job in ready]), strict=True):
            session.logits = None
            if isinstance(sampled, KVLinkError):
                session.keep = False
                self._end(job, sampled, "failed")
                continue
            reason = job.take(sampled)
            if reason is None:
                going.append((session, sampled.id))
            else:
                job.shared.end(session)
                job.finish(reason)
                job.session = None
                self._counts["finished"] += 1
        runner = self._sessions.runner
        for (session, token), embeds in zip(going, runner.embed([token for _, token in going]).split(1), strict=False):
            session.append(token, runner, embeds)  # looked up together
        self._drop_ended()

    def _end(self, job: Task, error: KVLinkError, count: str) -> None:
        """End a job without an answer."""
        job.let_go()
        job.fail(error)
        self._counts[count] += 1

    def _drop_ended(self) -> None:
        self._running = [job for job in self._running if not job.has_ended]
        if any(job.has_ended for job in self._waiting):
            self._waiting = deque(job for job in self._waiting if not job.has_ended)


def _share(job: Task) -> float:
    """Return the share of a request's document tokens that are resident."""
    if not job.reuse:
        return 0.0
    residency, names = job.shared.residency, job.names
    tokens = sum(names.values())
    return sum(count for name, count in names.items() if name in residency) / tokens if tokens else 0.0


def _as_ours(error: BaseException) -> KVLinkError:
    """Return an error that a caller can be told."""
    if isinstance(error, KVLinkError):
        return error
    return ModelError(f"this request could not be carried out ({type(error).__name__}: {error})")
