"""An answer in the making, as its caller reads it: text piece by piece, then the whole.

Two things make pieces: a job that the scheduler runs (shared engines), and a prompt that is decoded here (assembled
ones).
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from kvlink.core.errors import InputError, KVLinkError
from kvlink.engine.sampling import sample
from kvlink.engine.task import FinishReason, Task
from kvlink.engine.usage import Answer, Timings, Usage

Pieces = Generator[str, None, Answer]


class Stream(Iterator[str]):
    """Iterate for pieces of text; `answer` is there when the iteration has ended.

    Args:
        pieces: Yields text and returns the answer.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._answer: Answer | None = None

    @property
    def answer(self) -> Answer:
        """The whole answer.

        Raises:
            InputError: The stream has not been read to its end.
        """
        if self._answer is None:
            raise InputError("the answer is there when the stream has been read to its end")
        return self._answer

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            if end.value is not None:
                self._answer = end.value
            raise StopIteration from None

    def close(self) -> None:
        """Stop early; what the request holds is free again."""
        self._pieces.close()


def told(job: Task, submit: Callable[[Task], None], drive: Callable[[Task], None]) -> Pieces:
    """Give the pieces of a job; it is submitted with the first.

    Args:
        drive: Lets the scheduler go on until there is something to read.

    Raises:
        KVLinkError: The job failed, in its own way.
    """
    submit(job)
    try:
        while not job.has_ended:
            drive(job)
            yield from (piece.text for piece in job.pieces() if piece.text)
        yield from (piece.text for piece in job.pieces() if piece.text)
    finally:
        job.cancel()
        while not job.has_ended:
            job.pieces()  # unread ones would be news
            drive(job)
    if job.answer is None:
        raise job.error or KVLinkError("the request ended without an answer")
    return job.answer


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A computed prompt.

    Attributes:
        cache: What a decode appends to, with room for the answer.
        logits: The prompt's last row, or no row if its last token was left out.
        usage: Without the completion.
        times: Without first token and total.
    """

    cache: Any
    logits: Float[Tensor, "kept vocab"]
    room: int
    usage: Usage
    times: Timings


def decoded(
    prompt: AbstractContextManager[Prefilled], job: Task, *, decode: Callable[[Any, int], Float[Tensor, " vocab"]]
) -> Pieces:
    """Compute a prompt with the first piece, and decode behind it, one token at a time.

    Args:
        prompt: Computes the prompt of the job when it is entered.
        decode: Appends a token to the buffer and returns the next logits.
    """
    reason: FinishReason | None = None
    with prompt as prefilled:
        job.usage, job.times, logits = prefilled.usage, prefilled.times, prefilled.logits[-1]
        while reason is None:
            sampled = sample(logits[None], [job.sampler])[0]
            if isinstance(sampled, KVLinkError):
                raise sampled
            reason = job.take(sampled)
            yield from (piece.text for piece in job.pieces() if piece.text)
            if reason is None:
                logits = decode(prefilled.cache, sampled.id)
    job.finish(reason)
    yield from (piece.text for piece in job.pieces() if piece.text)
    assert job.answer is not None, "it is finished"
    return job.answer


def greedy(logits: Float[Tensor, " vocab"]) -> int:
    """Return the id with the largest logit."""
    return int(logits.argmax())
