"""Answers that follow a JSON schema: which ids may come next. The only file that knows llguidance."""

import json
from collections.abc import Collection, Mapping
from copy import copy
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from kvlink.core.errors import InputError, ModelError

_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""White space between two parts of a JSON text. Without an end, a model may go on with it until its room is used up."""


class Grammar:
    """One tokenizer's ids as JSON texts; made once per model, which takes up to a second.

    Args:
        tokenizer: A transformers tokenizer with one of the `tokenizers` library behind it.
        vocab: How many logits the model gives; those without a token are never allowed.
        end_ids: Ids that end an answer; allowed where the JSON text is whole.

    Raises:
        InputError: llguidance is not installed.
        ModelError: The tokenizer cannot be read.
    """

    def __init__(self, tokenizer: Any, *, vocab: int, end_ids: Collection[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise InputError("answers by a JSON schema need llguidance: pip install 'kvlink[json]'") from error
        if not end_ids:
            raise ModelError("no id ends an answer of this model, so none by a JSON schema could end: pass end_ids")
        backend = copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        try:
            self._tokenizer = llguidance.LLTokenizer(backend.to_str(), n_vocab=vocab, eos_token=sorted(end_ids))
        except ValueError as error:
            raise ModelError(
                f"this tokenizer cannot write by a JSON schema: {_in_short(error)}. Ask without json_schema"
            ) from error
        self._matcher = llguidance.LLMatcher
        self.vocab = vocab

    def matcher(self, schema: Mapping[str, Any]) -> "Matcher":
        """Return what follows one answer.

        Raises:
            InputError: The schema is none, uses what is not supported, or is too large.
        """
        try:
            text = json.dumps(dict(schema), allow_nan=False)  # what is nested too deeply for llguidance ends here
            grammar = self._matcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _WHITE_SPACE})
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"json_schema is no JSON object: {_in_short(error)}") from error
        matcher = self._matcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise InputError(f"json_schema cannot be followed: {_in_short(matcher.get_error())}. Change that part")
        return Matcher(matcher, self.vocab)


class Matcher:
    """Where one answer stands in its grammar. Made by `Grammar.matcher`."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab

    def allowed(self) -> Bool[Tensor, " vocab"]:
        """Return which ids may come next, on the CPU; where nothing may follow, those that end the answer.

        Raises:
            InputError: The schema takes more work at this place than is allowed.
        """
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)  # least bit first
        if self._matcher.is_error():
            raise InputError(
                f"json_schema cannot be followed any further: {_in_short(self._matcher.get_error())}. Make it simpler"
            )
        bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1  # [bytes, 8]
        return bits.flatten()[: self._vocab].bool()

    def accept(self, token: int) -> None:
        """Go on behind `token`, which was allowed."""
        if not self._matcher.consume_token(token):
            raise InputError(f"id {token} is not allowed by json_schema here: pass one of `allowed()`")


def _in_short(message: object) -> str:
    return " ".join(str(message).split())[:200].rstrip(".: ")
