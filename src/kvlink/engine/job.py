"""A request under way, as its caller sees it. Any thread may read its pieces and cancel it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Event

from kvlink.core.errors import KVLinkError
from kvlink.engine.sampling import Sampled
from kvlink.engine.usage import Answer


@dataclass(frozen=True, slots=True)
class Piece:
    """What an answer has grown by.

    Attributes:
        text: To be shown now; may be empty while a character or a stop string may still become whole.
        token: The token that brought it, with its logprobs if asked for; None at the end.
    """

    text: str
    token: Sampled | None = None


@dataclass(eq=False, kw_only=True)
class Job:
    """One request under way; `Engine.job` makes it.

    Attributes:
        told: Called, in the thread that runs the steps, whenever there is something to read. It must not wait.
        answer, error: How it ended; both None before, one of them afterwards.
    """

    told: Callable[[], None] = lambda: None
    answer: Answer | None = field(default=None, init=False)
    error: KVLinkError | None = field(default=None, init=False)
    _pieces: SimpleQueue[Piece] = field(default_factory=SimpleQueue, init=False, repr=False)
    _cancelled: Event = field(default_factory=Event, init=False, repr=False)
    _ended: Event = field(default_factory=Event, init=False, repr=False)
    _news: Event = field(default_factory=Event, init=False, repr=False)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self._ended.is_set()

    @property
    def has_news(self) -> bool:
        """Whether there is something to read."""
        return not self._pieces.empty()

    @property
    def is_cancelled(self) -> bool:
        """Whether its caller wants no more of it."""
        return self._cancelled.is_set()

    def pieces(self) -> list[Piece]:
        """Return what has come since the last call. Never waits."""
        found: list[Piece] = []
        while True:
            try:
                found.append(self._pieces.get_nowait())
            except Empty:
                return found

    def wait(self, at_most_s: float) -> None:
        """Wait until something has come since the last wait, but not for ever."""
        self._news.wait(at_most_s)
        self._news.clear()

    def cancel(self) -> None:
        """Give it up: what it holds is let go with the next step, and it ends with the error `Cancelled`."""
        self._cancelled.set()
