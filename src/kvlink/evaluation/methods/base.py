"""What a method is: given a row's ids, it computes the prompt its own way and returns logits of the last rows."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, get_args

from jaxtyping import Float
from torch import Tensor

from kvlink.core.errors import InputError
from kvlink.engine.stream import greedy
from kvlink.evaluation.case import Case, Ids
from kvlink.models.cache import SlotCache
from kvlink.models.prompt import Sink


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A prompt as a method computed it.

    Attributes:
        logits: Of the last rows that were asked for.
        tokens_computed: Tokens that went through the model for it.
        bytes_loaded: Bytes of entries that were taken instead.
        cache: What decoding goes on from; None for a method that does not generate.
    """

    logits: Float[Tensor, "kept vocab"]
    tokens_computed: int
    bytes_loaded: int
    cache: SlotCache | None = None


def sink_named(kind: str) -> str:
    """Return the name of a sink prefix.

    Raises:
        InputError: There is none of this name.
    """
    if kind not in get_args(Sink):
        raise InputError(f"there is no sink prefix {kind!r}; there are {', '.join(get_args(Sink))}")
    return kind


def number(text: str, name: str, *, least: float = 0.0, most: float = float("inf"), above: bool = False) -> float:
    """Return a parameter that is a number.

    Args:
        above: Whether it has to be greater than `least`.

    Raises:
        InputError: It is none, or beyond its bounds.
    """
    try:
        found = float(text)
    except ValueError:
        found = float("nan")
    if not (least < found <= most if above else least <= found <= most):
        bounds = f"more than {least:g}" if above else f"at least {least:g}"
        raise InputError(
            f"{name}={text}: a number of {bounds}{f' and at most {most:g}' if most < 1e9 else ''} is needed"
        )
    return found


def whole_number(text: str, name: str, *, least: int = 0) -> int:
    """Return a parameter that is a whole number.

    Raises:
        InputError: It is none, or too small.
    """
    if not text.isdecimal() or int(text) < least:
        raise InputError(f"{name}={text}: a whole number of at least {least} is needed")
    return int(text)


def one_of(text: str, name: str, *choices: str) -> str:
    """Return a parameter that is one of some words.

    Raises:
        InputError: It is none of them.
    """
    if text not in choices:
        raise InputError(f"{name}={text}; choose {' or '.join(choices)}")
    return text


class Method(ABC):
    """One arm of the comparison. Constructors take keyword parameters as texts.

    Attributes:
        takes: Parameters that may stand without their names, in their order.
        generates: Whether it can answer; one that keeps no cache is only scored.
    """

    takes: ClassVar[tuple[str, ...]] = ()
    generates = True

    @property
    def facts(self) -> Mapping[str, int | str]:
        """What results shall say of it besides its name, once it has seen a row."""
        return {}

    def prepare(self, case: Case) -> None:  # noqa: B027 (many methods have nothing to prepare)
        """Get what a warm cache would hold (entries, keys and values of S); not counted as time to first token."""

    @abstractmethod
    def prefill(self, case: Case, tail: Ids, *, keep: int, room: int = 0) -> Prefilled:
        """Compute the row's prompt with T = `tail`.

        Args:
            case: The row.
            tail: The row's own T, perhaps with ids of an answer behind it.
            keep: How many of the last rows' logits to return.
            room: Rows to keep free for decoding.
        """

    def score(self, case: Case, continuation: Ids) -> Prefilled:
        """Return the logits that predict each id of a continuation of the row's prompt (teacher forcing)."""
        return self.prefill(case, (*case.prompt.tail, *continuation[:-1]), keep=len(continuation))

    def step(self, case: Case, cache: SlotCache, token_id: int) -> Float[Tensor, " vocab"]:
        """Append one id behind what a prefill left and return its logits."""
        return case.bench.runner.decode(cache, token_id)

    def generate(self, case: Case, *, limit: int, end_ids: Ids) -> Ids:
        """Return the greedy continuation of the row's prompt, its end included."""
        prefilled = self.prefill(case, case.prompt.tail, keep=1, room=limit)
        assert prefilled.cache is not None, "a method that generates keeps a cache"
        row = prefilled.logits[-1]
        ids: list[int] = []
        while True:
            ids.append(greedy(row))
            if ids[-1] in end_ids or len(ids) == limit:
                break
            row = self.step(case, prefilled.cache, ids[-1])
        case.bench.release(prefilled.cache)
        return tuple(ids)
