"""An answer scored twice, with its documents reused and in one causal forward: how far reuse moves a model's choices.

A generator that rests between forwards, so that requests go on meanwhile. Knows no text.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlink.core import scores
from kvlink.core.errors import DeviceBusy
from kvlink.engine.request import Request
from kvlink.engine.session import Sessions
from kvlink.engine.task import Task

MOST_TOKENS = 32
"""Tokens of an answer that are scored, from its beginning."""

ROWS = 256
"""Rows of one forward: what keeps running answers at their pace."""


@dataclass(frozen=True, slots=True)
class Scored:
    """How near reuse comes to the whole computation.

    Attributes:
        tokens: Of the answer, that were scored.
        agreement: Share of them at which both have the same most likely id.
        kl: Mean KL(full || reuse), in nats per token.
    """

    tokens: int
    agreement: float
    kl: float


def scoring(task: Task, *, most_tokens: int = MOST_TOKENS) -> Generator[None, None, Scored]:
    """Score a task that has been answered; each `next` is at most one forward, with the scheduler's lock held.

    Args:
        task: Of a shared engine.
        most_tokens: Tokens of its answer to look at.

    Raises:
        DeviceBusy: Its documents are not on the device any more, or other requests hold what they need.
    """
    assert task.answer is not None, "it has ended"
    ids = task.answer.ids[:most_tokens]
    reused = yield from _logits(task.shared, task.request, ids, reuse=True)
    full = yield from _logits(task.shared, task.request, ids, reuse=False)
    return Scored(len(ids), scores.agreement(full, reused), scores.kl(full, reused))


def _logits(sessions: Sessions, request: Request, ids: Sequence[int], *, reuse: bool) -> Generator[None, None, Tensor]:
    """Return the logits from which each of these ids was chosen [tokens, vocab]."""
    found: list[Tensor] = []
    opening = sessions.open(request, reuse=reuse)
    try:
        if opening.missing:  # they may be encoded in the very steps between which this runs: no waiting for them here
            raise DeviceBusy("an answer was to be scored, but its documents are not on the device any more")
        session = sessions.begin(request, room=len(ids), reuse=reuse, opening=opening)
    except BaseException:
        sessions.close(opening)
        raise
    session.keep = False
    try:
        for number in range(len(ids)):
            if number:
                session.append(ids[number - 1], sessions.runner)
            while session.logits is None:
                sessions.advance([(session, min(len(session.left), ROWS))])
                yield
            found.append(session.logits)
            session.logits = None
    finally:
        sessions.end(session)
    return torch.stack(found)
