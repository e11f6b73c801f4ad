"""Answers in the shapes of OpenAI's API, whole and in chunks. Values in, JSON values out."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from kvlink.engine.job import Piece
from kvlink.engine.sampling import Sampled
from kvlink.engine.task import Task

Decode = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Reply:
    """What all parts of one response share.

    Args:
        token_text: Text of one id.
        ends: Ids that end an answer; they are no part of it.
        note: What the usage is to say besides, about all of them.
    """

    model: str
    is_chat: bool
    token_text: Decode
    ends: frozenset[int]
    note: str = ""
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, jobs: Sequence[Task], pieces: Sequence[Sequence[Piece]], *, logprobs: bool) -> dict[str, Any]:
        """Return the response of jobs that have ended.

        Args:
            pieces: Of each job all that it told.
        """
        choices: list[dict[str, Any]] = []
        for index, (job, told) in enumerate(zip(jobs, pieces, strict=True)):
            assert job.answer is not None, "it has ended"
            text = job.answer.text
            said = (
                {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}
            )
            tokens = [piece.token for piece in told if piece.token is not None]
            logs = self._logprobs(tokens) if logprobs else None
            choices.append({"index": index, **said, "logprobs": logs, "finish_reason": job.answer.finish_reason})
        return self._body(choices, chunk=False, usage=usage_of(jobs, note=self.note))

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the chunk that opens a choice; completions have none."""
        if not self.is_chat:
            return None
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def chunk(self, index: int, piece: Piece, *, logprobs: bool, offset: int = 0) -> dict[str, Any] | None:
        """Return what an answer has grown by, or None if there is nothing to show yet."""
        has_logs = logprobs and piece.token is not None and piece.token.id not in self.ends
        if not (piece.text or has_logs):
            return None
        said = {"delta": {"content": piece.text}} if self.is_chat else {"text": piece.text}
        logs = self._logprobs([piece.token], offset) if has_logs and piece.token is not None else None
        return self._chunk(index, said, logprobs=logs)

    def ending(self, index: int, job: Task) -> dict[str, Any]:
        """Return the chunk that says why an answer ended."""
        assert job.answer is not None, "it has ended"
        return self._chunk(index, {"delta": {}} if self.is_chat else {"text": ""}, reason=job.answer.finish_reason)

    def usage(self, jobs: Sequence[Task]) -> dict[str, Any]:
        """Return the chunk that tells what all choices took."""
        return self._body([], chunk=True, usage=usage_of(jobs, note=self.note))

    def _chunk(
        self, index: int, said: dict[str, Any], *, logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        return self._body([{"index": index, **said, "logprobs": logprobs, "finish_reason": reason}], chunk=True)

    def _body(self, choices: list[dict[str, Any]], *, chunk: bool, usage: Any = None) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.is_chat else "text_completion"
        body: dict[str, Any] = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        return body if usage is None else {**body, "usage": usage}

    def _logprobs(self, tokens: Sequence[Sampled], offset: int = 0) -> dict[str, Any]:
        told = [token for token in tokens if token.id not in self.ends]
        if self.is_chat:
            content = [
                {**self._token(token.id, token.logprob), "top_logprobs": [self._token(*top) for top in token.top]}
                for token in told
            ]
            return {"content": content, "refusal": None}
        texts = [self.token_text(token.id) for token in told]
        offsets = [offset + sum(map(len, texts[:place])) for place in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in told],
            "top_logprobs": [{self.token_text(one): logprob for one, logprob in token.top} for token in told],
            "text_offset": offsets,
        }

    def _token(self, one: int, logprob: float | None) -> dict[str, Any]:
        text = self.token_text(one)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else [*text.encode()]}


def usage_of(jobs: Sequence[Task], *, note: str = "") -> dict[str, Any]:
    """Return what the choices of one request took: their prompt is counted once, as the first of them had it."""
    answers = [job.answer for job in jobs if job.answer is not None]
    usage = answers[0].usage.to_json()
    usage["completion_tokens"] = sum(answer.usage.completion_tokens for answer in answers)
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    if note:
        usage["kvlink"]["note"] = note
    return usage
