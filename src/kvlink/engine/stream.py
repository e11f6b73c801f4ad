"""An answer in the making: decode, detokenise, stop.

Knows a prefilled prompt and how to decode; knows no documents and no stores.
"""

from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from kvlink.core.errors import InputError
from kvlink.engine.detokeniser import Detokeniser
from kvlink.engine.usage import Answer, Timings, Usage


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


class Stream(Iterator[str]):
    """Iterate for pieces of text; `answer` is there when the iteration has ended.

    Args:
        prompt: Computes the prompt when it is entered; entered with the first piece.
        decode: Appends a token to the buffer and returns the next logits.
        to_text: Turns ids into text, control ids left out.
        end_ids: Ids that end the answer.
        stop: Strings that end the answer and are not part of it.
        start: When the request arrived (`perf_counter`).
        warnings: What the request's owner should know.
    """

    def __init__(
        self,
        prompt: AbstractContextManager[Prefilled],
        *,
        decode: Callable[[Any, int], Float[Tensor, " vocab"]],
        to_text: Callable[[list[int]], str],
        end_ids: Collection[int],
        stop: tuple[str, ...],
        start: float,
        warnings: tuple[str, ...] = (),
    ) -> None:
        self._prompt = prompt
        self._decode = decode
        self._text = Detokeniser(to_text, stop)
        self._end_ids = end_ids
        self._start = start
        self._warnings = warnings
        self._answer: Answer | None = None
        self._pieces = self._run()

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
        return next(self._pieces)

    def close(self) -> None:
        """Stop early; the buffer is free again."""
        self._pieces.close()

    def _run(self) -> Generator[str]:
        ids: list[int] = []
        pieces: list[str] = []
        piece = ""
        reason: Literal["stop", "length"] = "length"
        with self._prompt as prompt:
            row = prompt.logits[-1]
            start = perf_counter()
            token = greedy(row)
            now = perf_counter()
            times = replace(prompt.times, sample_s=now - start, ttft_s=now - self._start)
            while True:
                ids.append(token)
                if token in self._end_ids:
                    reason = "stop"
                    break
                piece = self._text.push(token)
                if self._text.stopped:
                    reason = "stop"
                    break
                if len(ids) == prompt.room:
                    break
                if piece:
                    yield piece
                    pieces.append(piece)
                    piece = ""
                token = greedy(self._decode(prompt.cache, token))
            usage = replace(prompt.usage, completion_tokens=len(ids))
        last = piece + self._text.finish()
        times = replace(times, total_s=perf_counter() - self._start)
        self._answer = Answer("".join([*pieces, last]), tuple(ids), usage, times, reason, self._warnings)
        if last:
            yield last


def greedy(logits: Float[Tensor, " vocab"]) -> int:
    """Return the id with the largest logit."""
    return int(logits.argmax())
