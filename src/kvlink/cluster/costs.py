"""What a node's work costs, as measured: the only numbers of a simulation that no formula knows."""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvlink.core.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds and bytes of one node.

    Attributes:
        encode_s: Of the node's time, per token of a document that has to be encoded.
        load_s: Per token that comes from a shared store; loads go on beside the node's other work, one after another.
        load_latency_s: Per document that comes from there.
        prompt_s: Of the node's time, per token of a question and its links.
        request_s: Of the node's time, per request.
        row_s: Of the node's time, per token of an answer; many answers share a forward.
        step_s: Between two tokens of an answer.
        token_bytes: Keys and values of one token.
    """

    encode_s: float
    load_s: float
    load_latency_s: float
    prompt_s: float
    request_s: float
    row_s: float
    step_s: float
    token_bytes: int

    @classmethod
    def read(cls, path: str | Path) -> "Costs":
        """Read a JSON file, whose `costs` are those above.

        Raises:
            InputError: It cannot be read, or lacks one, or one of them is no number of at least 0.
        """
        names = [field.name for field in fields(cls)]
        try:
            found: Any = json.loads(Path(path).read_text("utf-8"))["costs"]
            missing = [name for name in names if name not in found]
            if missing:
                raise InputError(f"the costs in {path} lack {', '.join(missing)}")
            wrong = [name for name in names if not _is_cost(found[name])]
            if wrong:
                raise InputError(f"{wrong[0]} in {path} is {found[wrong[0]]!r}, not a number of at least 0")
            return cls(**{name: found[name] for name in names})
        except OSError as error:
            raise InputError(f"the costs cannot be read from {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f'{path} holds no costs: expected {{"costs": {{"encode_s": ..., ...}}}}') from error

    def hit_s(self, new_tokens: int, answer_tokens: int) -> float:
        """Return how much of a node's time a request takes whose documents are all there."""
        return self.request_s + new_tokens * self.prompt_s + answer_tokens * self.row_s


def _is_cost(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
