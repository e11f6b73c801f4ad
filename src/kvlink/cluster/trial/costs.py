"""What one node's work costs, measured by its clients while it rests: the numbers that a simulation is given."""

from collections.abc import Callable, Sequence
from itertools import count
from statistics import median
from typing import Any

from kvlink.cluster.costs import Costs
from kvlink.cluster.trial.requests import Seen, all_at_once, body_of, one_after_another
from kvlink.core.errors import InputError

REPEATS = 7
ANSWER = 48
"""Tokens of the answers whose pace is measured."""

AT_ONCE = 8
"""Answers that share their forwards."""


def measured(
    url: str,
    model: str,
    *,
    text: Callable[[int, int], str],
    question: Callable[[int, int], str],
    documents: int,
    tokens: int,
    question_tokens: int,
    token_bytes: int,
) -> Costs:
    """Return the costs of one server.

    A document is loaded from nowhere here, so the costs of loads are those of encoding nothing: 0.

    Args:
        text: A document by its number and its tokens.
        question: A question by its number and its tokens.
        documents, tokens: Of each request.

    Raises:
        InputError: The server fails, or what it answers is too short to be timed.
    """
    numbers = count(1 << 20)

    def ask(many: int, question_tokens: int, answer: int, held: Sequence[str]) -> list[dict[str, Any]]:
        return [body_of(model, held, question(next(numbers), question_tokens), answer) for _ in range(many)]

    def fresh() -> list[str]:
        return [text(next(numbers), tokens) for _ in range(documents)]

    one_after_another(url, ask(2, question_tokens, 2, fresh()))  # so that nothing is the first of its kind
    encoded = [one_after_another(url, ask(1, question_tokens, 1, fresh()))[0] for _ in range(REPEATS)]
    held = fresh()
    hits = one_after_another(url, ask(REPEATS + 1, question_tokens, 1, held))[1:]
    longer = one_after_another(url, ask(REPEATS, 5 * question_tokens, 1, held))
    alone = one_after_another(url, ask(REPEATS, question_tokens, ANSWER, held))
    many = [all_at_once(url, ask(AT_ONCE, question_tokens, answer, held)) for answer in (1, ANSWER)]
    hit_s, longer_s = _ttft_s(hits), _ttft_s(longer)
    prompt_s = max(0.0, (longer_s - hit_s) / (4 * question_tokens))
    step_s = median(_pace_s(one) for one in alone)
    more = sum(one.answer for one in many[1]) - sum(one.answer for one in many[0])
    row_s = max(0.0, _last_s(many[1]) - _last_s(many[0])) / max(1, more)
    return Costs(
        encode_s=max(0.0, (_ttft_s(encoded) - hit_s) / (documents * tokens)),
        load_s=0.0,
        load_latency_s=0.0,
        prompt_s=prompt_s,
        request_s=max(0.0, hit_s - question_tokens * prompt_s),
        row_s=min(row_s, step_s),
        step_s=step_s,
        token_bytes=token_bytes,
    )


def _ttft_s(seen: Sequence[Seen]) -> float:
    for one in seen:
        if one.failed or one.ttft_s is None:
            raise InputError(f"a request of the calibration failed: {one.failed}")
    return median(one.ttft_s for one in seen if one.ttft_s is not None)


def _last_s(seen: Sequence[Seen]) -> float:
    return max(one.ended_at for one in seen)


def _pace_s(one: Seen) -> float:
    if one.failed or one.ttft_s is None or one.answer < 2:
        raise InputError(f"an answer of {one.answer} tokens has no pace: {one.failed or 'it ended too early'}")
    return (one.ended_at - one.asked_at - one.ttft_s) / (one.answer - 1)
