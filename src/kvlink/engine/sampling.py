"""How the next token is chosen: what a request asks for, what is remembered of it, and one call for a whole batch.

A row is chosen from its own logits, settings and random numbers alone, so a request gets the same tokens in any batch.
The order is: penalties, ids that are not allowed, temperature, min_p, top_k, top_p, draw. It knows no models.
"""

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvlink.core import sampling
from kvlink.core.errors import InputError, KVLinkError, ModelError
from kvlink.engine.grammar import Matcher

MAX_NEW_TOKENS = 128
"""Tokens of an answer where the caller does not say."""

MOST_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How an answer is generated; by default greedily.

    Attributes:
        temperature: Divides the logits; 0 takes the likeliest token, whatever the filters say.
        top_p: Keep the likeliest tokens that have this much together, of what the other filters left.
        top_k: Keep that many likeliest tokens; None keeps all.
        min_p: Keep tokens at least that many times as likely as the likeliest.
        repetition_penalty: Divides the logits of generated tokens (multiplies negative ones); 1 is none. What only
            the prompt holds is not penalised: documents are there to be quoted.
        presence_penalty: Is subtracted from the logits of generated tokens.
        frequency_penalty: Is subtracted once for each time a token was generated.
        seed: The same seed gives the same tokens; None is a new one each time.
        logprobs: How many alternatives to tell per token; 0 tells the chosen token's logprob alone, None nothing.
        stop: Strings that end the answer and are not part of it.
        max_new_tokens: The answer's longest length.
        min_new_tokens: No id ends the answer before it has that many tokens; stop strings still do.
        json_schema: The answer is a JSON text that follows it.

    Raises:
        InputError: A value is out of its range, or two exclude each other.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    max_new_tokens: int = MAX_NEW_TOKENS
    min_new_tokens: int = 0
    json_schema: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, is_valid, wanted in (
            ("temperature", 0 <= self.temperature < inf, "0 (the likeliest token) or more"),
            ("top_p", 0 < self.top_p <= 1, "more than 0, up to 1 (all)"),
            ("top_k", self.top_k is None or self.top_k >= 1, "1 or more, or None (all)"),
            ("min_p", 0 <= self.min_p <= 1, "0 (all) to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < inf, "more than 0; 1 is none"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "-2 to 2; 0 is none"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "-2 to 2; 0 is none"),
            (
                "logprobs",
                self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS,
                f"0 to {MOST_LOGPROBS}, or None",
            ),
            ("stop", not isinstance(self.stop, str), "a tuple of strings"),
            ("max_new_tokens", self.max_new_tokens >= 1, "1 or more: an answer has at least one token"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "0 to max_new_tokens"),
        ):
            if not is_valid:
                raise InputError(f"{name} is {getattr(self, name)!r}; pass {wanted}")
        if self.json_schema is not None and self.min_new_tokens:
            raise InputError(
                f"min_new_tokens is {self.min_new_tokens} and there is a json_schema, which decides where the answer "
                "may end: pass one of them"
            )

    @property
    def penalises(self) -> bool:
        """Whether a token that was generated gets another logit."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token.

    Attributes:
        logprob: Its logarithmic probability as the model gave it: before penalties, temperature and filters.
        top: The likeliest tokens and theirs, likeliest first; as many as were asked for.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """What is remembered of one request between its tokens: random numbers, counts, its place in the grammar.

    Args:
        end_ids: Ids that end the answer; not allowed before `min_new_tokens`.
        matcher: Follows `params.json_schema`.

    Attributes:
        counts: How often each id was generated.

    Raises:
        InputError: There is a schema without a matcher, or the reverse.
    """

    def __init__(
        self, params: SamplingParams, *, end_ids: Collection[int] = (), matcher: Matcher | None = None
    ) -> None:
        if (params.json_schema is None) != (matcher is None):
            raise InputError("json_schema and its matcher go together: pass Grammar.matcher(params.json_schema)")
        self.params = params
        self.matcher = matcher
        self.num_generated = 0
        self.counts: Counter[int] = Counter()
        self._end_ids = sorted(end_ids)
        self._random = random.Random(params.seed)  # noqa: S311 - repeatable, not secret

    def uniform(self) -> float:
        """Return the next random number of [0, 1)."""
        return self._random.random()

    def banned(self) -> list[int]:
        """Return the ids that may not come next whatever the grammar says."""
        return self._end_ids if self.num_generated < self.params.min_new_tokens else []

    def accept(self, token: int) -> None:
        """Remember that `token` was generated; `sample` does so by itself."""
        self.counts[token] += 1
        self.num_generated += 1
        if self.matcher is not None:
            self.matcher.accept(token)


def sample(logits: Float[Tensor, "requests vocab"], samplers: Sequence[Sampler]) -> list[Sampled | KVLinkError]:
    """Choose the next token of each request, and let its sampler remember it.

    Args:
        logits: The model's, one row per sampler; not changed.

    Returns:
        A token, or why there is none: an error of one request leaves the others as they are, and is not raised.
        ModelError: logits that are no numbers, or nothing that is allowed. InputError: a schema that became too much.
    """
    failed: dict[int, KVLinkError] = {}
    shaped = _shaped(logits, samplers, failed)
    ids = shaped.argmax(-1)
    for row, peak in enumerate(shaped.gather(-1, ids[:, None])[:, 0].tolist()):
        if not -inf < peak < inf and row not in failed:
            failed[row] = ModelError(
                f"the best logit of the next token is {peak}, so none can be chosen: check the weights and the dtype"
            )
    drawn = [row for row, one in enumerate(samplers) if one.params.temperature > 0 and row not in failed]
    if drawn:
        ids[drawn] = _drawn(shaped[drawn].float(), [samplers[row] for row in drawn])
    told = _logprobs(logits, ids, samplers, failed)
    found: list[Sampled | KVLinkError] = []
    for row, (token, one) in enumerate(zip(ids.tolist(), samplers, strict=True)):
        try:
            if row in failed:
                raise failed[row]
            one.accept(token)
            found.append(told.get(row) or Sampled(token))
        except KVLinkError as error:
            found.append(error)
    return found


def _shaped(
    logits: Float[Tensor, "rows vocab"], samplers: Sequence[Sampler], failed: dict[int, KVLinkError]
) -> Float[Tensor, "rows vocab"]:
    """Return the logits with penalties, and `-inf` for ids that may not come next.

    Rows whose grammar gives up are entered in `failed`.
    """
    if not any(one.params.penalises or one.matcher or one.banned() for one in samplers):
        return logits
    shaped = logits.to(torch.float32, copy=True)
    _penalise(shaped, [(row, one) for row, one in enumerate(samplers) if one.params.penalises and one.counts])
    if banned := [(row, token) for row, one in enumerate(samplers) for token in one.banned()]:
        shaped[*zip(*banned, strict=True)] -= inf  # subtracted, not filled in: what is no number stays none
    masks: dict[int, Tensor] = {}
    for row, one in enumerate(samplers):
        if one.matcher is not None:
            try:
                masks[row] = one.matcher.allowed()
            except InputError as error:
                failed[row] = error
    if masks:
        allowed = torch.stack([*masks.values()]).to(logits.device)
        shaped[[*masks]] += torch.zeros_like(shaped[[*masks]]).masked_fill_(~allowed, -inf)
    return shaped


def _penalise(logits: Float[Tensor, "rows vocab"], samplers: Sequence[tuple[int, Sampler]]) -> None:
    """Give the generated tokens of these rows their penalties, in place."""
    found = [
        (row, token, count, asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty)
        for row, one in samplers
        for asked in (one.params,)
        for token, count in one.counts.items()
    ]
    if found:
        rows, tokens, *settings = zip(*found, strict=True)
        counts, repetition, presence, frequency = torch.tensor(settings, dtype=logits.dtype, device=logits.device)
        logits[rows, tokens] = sampling.penalise(
            logits[rows, tokens], counts, repetition=repetition, presence=presence, frequency=frequency
        )


def _drawn(logits: Float[Tensor, "rows vocab"], samplers: Sequence[Sampler]) -> Tensor:
    """Return one id per row, drawn from what its filters leave."""
    chosen = [one.params for one in samplers]
    logits = sampling.scale(logits, [params.temperature for params in chosen])
    if rows := [row for row, params in enumerate(chosen) if params.min_p > 0]:
        logits[rows] = sampling.keep_min_p(logits[rows], [chosen[row].min_p for row in rows])
    if limits := {row: params.top_k for row, params in enumerate(chosen) if params.top_k is not None}:
        logits[[*limits]] = sampling.keep_top_k(logits[[*limits]], [*limits.values()])
    if rows := [row for row, params in enumerate(chosen) if params.top_p < 1]:
        logits[rows] = sampling.keep_top_p(logits[rows], [chosen[row].top_p for row in rows])
    return sampling.draw(logits, [one.uniform() for one in samplers])


def _logprobs(
    logits: Float[Tensor, "rows vocab"], ids: Tensor, samplers: Sequence[Sampler], failed: Collection[int]
) -> dict[int, Sampled]:
    """Return the tokens of the rows that ask for logprobs, with them."""
    asked = {
        row: one.params.logprobs
        for row, one in enumerate(samplers)
        if one.params.logprobs is not None and row not in failed
    }
    if not asked:
        return {}
    rows = [*asked]
    logs = logits[rows].float().log_softmax(-1)
    own = logs.gather(-1, ids[rows, None])[:, 0].tolist()
    best = logs.topk(min(max(asked.values()), logs.shape[-1]))
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return {
        row: Sampled(token, logprob, tuple(zip(names[:most], values[:most], strict=True)))
        for (row, most), token, logprob, (names, values) in zip(
            asked.items(), ids[rows].tolist(), own, tops, strict=True
        )
    }
