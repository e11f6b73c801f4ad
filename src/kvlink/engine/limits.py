"""How much goes on at once in a scheduler, and what went on. Plain values."""

from dataclasses import dataclass

from kvlink.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Limits:
    """How much goes on at once.

    Attributes:
        max_running: Requests whose rows go through one forward.
        max_queue: Requests that wait; one more is refused.
        own_bytes: What the own rows of running requests may take together.
        step_rows: Rows of one forward while nobody decodes.
        prefill_rows: Rows of prompts, and of documents to be encoded, in a forward that decodes, too: what keeps
            running answers at their pace.
        most_overtaken: Times that a waiting request may be overtaken by one whose documents are resident.
        look_ahead: Waiting requests among which such a one is looked for.
        patience: Steps that the first request waits for memory before the youngest one gives its own back.
    """

    max_running: int = 64
    max_queue: int = 1024
    own_bytes: int = 1 << 30
    step_rows: int = 512
    prefill_rows: int = 64
    most_overtaken: int = 8
    look_ahead: int = 16
    patience: int = 32

    def __post_init__(self) -> None:
        """Check them.

        Raises:
            InputError: Nothing would ever run.
        """
        for name in ("max_running", "step_rows", "prefill_rows"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, so no request would ever run: pass 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """What goes on, and what happened since the beginning.

    Attributes:
        waiting, running: Requests; those whose documents are being encoded are running.
        encoding: Segments that are being encoded, or wait for it.
        own_bytes: Own rows of running requests, those included that are only reserved.
        steps, rows: Forwards, and rows in them.
        submitted, finished, failed, cancelled, preempted: Requests.
        model_s, other_s: Seconds of steps in forwards (loads and the keeping of entries included), and in all else.
    """

    waiting: int
    running: int
    encoding: int
    own_bytes: int
    steps: int
    rows: int
    submitted: int
    finished: int
    failed: int
    cancelled: int
    preempted: int
    model_s: float
    other_s: float
