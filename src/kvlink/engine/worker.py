"""Who runs the steps: the callers themselves, one at a time, or a thread that does nothing else.

Without the thread, whoever waits for a piece of an answer runs steps until it has come; each moves all requests on.
With it (`start`), callers only wait: what a server needs.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition, Thread
from typing import Any, TypeVar

from kvlink.engine.job import Job
from kvlink.engine.scheduler import Scheduler
from kvlink.engine.task import Task

Found = TypeVar("Found")

WAIT_S = 0.05
"""How long a caller waits at most before it looks whether it should run a step itself."""


class Worker:
    """Runs the steps of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._news = Condition()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._thread: Thread | None = None
        self._stopping = False

    def submit(self, job: Task) -> None:
        """Let a job wait for its turn; errors as those of `Scheduler.submit`."""
        self.scheduler.submit(job)
        with self._news:
            self._news.notify_all()

    def step(self) -> bool:
        """Run one step; return whether there was anything to do."""
        with self.scheduler.lock:
            return self.scheduler.step()

    def call(self, function: Callable[[], Found]) -> Future[Found]:
        """Let a function run between two steps, in the thread that runs them; at once if there is none."""
        future: Future[Found] = Future()
        with self._news:
            if has_thread := self._thread is not None:
                self._calls.append((function, future))
                self._news.notify_all()
        if not has_thread:
            _carry_out(function, future)
        return future

    def drive(self, job: Job) -> None:
        """Let things go on until a job has something to read, or is let go after it was cancelled."""
        while not (job.has_news or job.has_ended):
            if self._thread is not None:
                with self._news:
                    self._news.notify_all()
                job.wait(WAIT_S)
            else:
                with self.scheduler.lock:
                    if not (job.has_news or job.has_ended):
                        self.scheduler.step()

    def start(self) -> None:
        """Let a thread run the steps from now on. A second time does nothing."""
        if self._thread is None:
            self._stopping = False
            self._thread = Thread(target=self._run, name="kvlink-engine", daemon=True)
            self._thread.start()

    def stop(self, *, drain: bool = True) -> None:
        """End the thread: when nothing is left to do, or at once, which gives up what is under way."""
        thread = self._thread
        if thread is None:
            return
        if not drain:
            with self.scheduler.lock:
                self.scheduler.close()
        with self._news:
            self._stopping = True
            self._news.notify_all()
        thread.join()
        with self._news:
            self._thread = None
            left, self._calls = self._calls, deque()
        for function, future in left:  # asked for when the thread had ended
            _carry_out(function, future)

    def close(self) -> None:
        """Give up what is under way and take nothing more."""
        self.stop(drain=False)
        with self.scheduler.lock:
            self.scheduler.close()

    def _run(self) -> None:
        while True:
            with self._news:
                while self.scheduler.is_idle and not self._calls:
                    if self._stopping:
                        return
                    self._news.wait()
                call = self._calls.popleft() if self._calls else None
            if call is not None:
                _carry_out(*call)
            self.step()


def _carry_out(function: Callable[[], Any], future: "Future[Any]") -> None:
    """Run a function for whoever waits for its result, unless nobody does any more."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:  # it is the caller's
            future.set_exception(error)
