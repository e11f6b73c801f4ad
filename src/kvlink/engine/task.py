"""A request under way, as the engine sees it: what was asked, how far it is, and what its caller is told of it."""

import logging
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import Literal

from kvlink.core.errors import KVLinkError
from kvlink.engine.detokeniser import Detokeniser
from kvlink.engine.hold import Opening
from kvlink.engine.job import Job, Piece
from kvlink.engine.prefetch import Prefetch
from kvlink.engine.request import Order, Request
from kvlink.engine.sampling import Sampled, Sampler
from kvlink.engine.session import Session, Sessions
from kvlink.engine.usage import Answer, Timings, Usage

log = logging.getLogger(__name__)

FinishReason = Literal["stop", "length"]


@dataclass(eq=False)
class Task(Job):
    """A job that can be worked on.

    Attributes:
        request: What was asked, as ids.
        sampler: How tokens are chosen.
        detokeniser: Turns them into text.
        sessions: Of the scope that its documents belong to; None in an assembled engine.
        end_ids: Ids that end the answer.
        order, reuse, labels: As in `Engine.job`.
        deadline: Moment (`perf_counter`) at which it is given up, or None.
        start: When the request arrived.
        times: What was spent so far.
        number: Its place in the order of arrival.
        ahead: What is loaded of its documents while it waits.
        opening: While its documents are got.
        opened: When they were asked for.
        session: While it runs.
        ids: Tokens of the answer.
        usage: Of the prompt, once it was begun.
        overtaken: Requests that came later and were begun earlier.
        blocked: Steps for which it waited for memory as the first.
        text: The answer so far.
    """

    request: Request
    sampler: Sampler
    detokeniser: Detokeniser
    sessions: Sessions | None = None
    end_ids: frozenset[int] = frozenset()
    order: Order = "given"
    reuse: bool = True
    labels: bool = False
    deadline: float | None = None
    start: float = field(default_factory=perf_counter)
    times: Timings = field(default_factory=Timings)
    number: int = 0
    ahead: Prefetch | None = None
    opening: Opening | None = None
    opened: float = 0.0
    session: Session | None = None
    ids: list[int] = field(default_factory=list)
    usage: Usage | None = None
    overtaken: int = 0
    blocked: int = 0
    text: list[str] = field(default_factory=list)

    @property
    def shared(self) -> Sessions:
        """Its sessions, which a job has that a scheduler runs."""
        assert self.sessions is not None, "an assembled engine has no scheduler"
        return self.sessions

    @cached_property
    def names(self) -> dict[str, int]:
        """Names of its documents' segments, and their tokens."""
        loader = self.shared.residency.loader
        return {loader.name(ids): len(ids) for ids in self.request.prompt.segments}

    @property
    def is_loading(self) -> bool:
        """Whether its documents are on their way from the store."""
        return self.ahead is not None and not self.ahead.done

    @property
    def is_decoding(self) -> bool:
        """Whether its next row is a token of the answer."""
        return self.session is not None and bool(self.session.ids) and len(self.session.left) == 1

    @property
    def room(self) -> int:
        """Rows for what is still to come of the answer."""
        return self.sampler.params.max_new_tokens - len(self.ids)

    def let_go(self) -> None:
        """End its session, or what was held for one. A second time does nothing."""
        if self.ahead is not None:
            self.ahead.cancel()
        if self.opening is not None:
            self.shared.close(self.opening)
        if self.session is not None:
            self.shared.end(self.session)
        self.ahead = self.opening = self.session = None

    def take(self, sampled: Sampled) -> FinishReason | None:
        """Add a token to the answer; return why the answer ends with it, or None."""
        if not self.ids:
            self.times = replace(self.times, ttft_s=perf_counter() - self.start)
        self.ids.append(sampled.id)
        if sampled.id in self.end_ids:
            self._tell(Piece("", sampled))
            return "stop"
        self._tell(Piece(self.detokeniser.push(sampled.id), sampled))
        if self.detokeniser.stopped:
            return "stop"
        return "length" if len(self.ids) >= self.sampler.params.max_new_tokens else None

    def finish(self, reason: FinishReason) -> None:
        """End it with an answer."""
        assert self.usage is not None, "it was begun"
        rest = self.detokeniser.finish()
        if rest:
            self._tell(Piece(rest))
        usage = replace(self.usage, completion_tokens=len(self.ids))
        times = replace(self.times, total_s=perf_counter() - self.start)
        self.answer = Answer("".join(self.text), tuple(self.ids), usage, times, reason, self.request.warnings)
        self._end()

    def fail(self, error: KVLinkError) -> None:
        """End it with an error."""
        self.error = error
        self._end()

    def _tell(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self._pieces.put(piece)
        self._call()

    def _end(self) -> None:
        self._ended.set()
        self._call()

    def _call(self) -> None:
        """Say that there is something to read. Who cannot be told is not there any more, and harms nobody else."""
        self._news.set()
        try:
            self.told()
        except Exception:
            log.warning("who asked cannot be told of its answer, so its request is given up", exc_info=True)
            self.cancel()
