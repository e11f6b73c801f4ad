"""Who runs the steps: the callers themselves, one at a time, or a thread that does nothing else.

Without the thread, whoever waits for a piece of an answer runs steps until it has come; each moves all requests on.
With it (`start`), callers only wait: what a server needs.
"""

from threading import Condition, Thread

from kvlink.engine.job import Job
from kvlink.engine.scheduler import Scheduler
from kvlink.engine.task import Task

WAIT_S = 0.05
"""How long a caller waits at most before it looks whether it should run a step itself."""


class Worker:
    """Runs the steps of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._news = Condition()
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
        self._thread = None

    def close(self) -> None:
        """Give up what is under way and take nothing more."""
        self.stop(drain=False)
        with self.scheduler.lock:
            self.scheduler.close()

    def _run(self) -> None:
        while True:
            with self._news:
                while self.scheduler.is_idle:
                    if self._stopping:
                        return
                    self._news.wait()
            self.step()
