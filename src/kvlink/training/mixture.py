"""Several sources as one list, by weight; and what is held out, so that nothing of it is learned from.

Hold out before composing where distractors or passages are shared: `part` deals documents, rows or articles into two,
and what is composed from one part has nothing of the other. `split` parts examples that exist already.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from kvlink.core.errors import InputError
from kvlink.training.compose import rank, seeded
from kvlink.training.data import QUESTION
from kvlink.training.example import Example

T = TypeVar("T")

PAPER = {"text": 20.0, "instructions": 30.0, "multi-turn": 25.0, "qa": 10.0, "qa in blocks": 10.0, "summaries": 5.0}
"""Weights of the paper's mixture in per cent (arXiv 2502.16002).

The first three hold no documents: they keep a model whose weights change from forgetting. Where the model is frozen
they teach nothing.
"""

Apart = Literal["documents", "sets"]


@dataclass(frozen=True, slots=True)
class Share:
    """A source's part of a mixture; weights are relative to each other."""

    name: str
    weight: float
    examples: Sequence[Example]


@dataclass(frozen=True, slots=True)
class Mixed:
    """A mixture.

    Attributes:
        taken: Examples of each source that are in it.
        missing: Examples that a source's weight asks for and that it does not have; nothing stands in for them.
    """

    examples: tuple[Example, ...]
    taken: Mapping[str, int]
    missing: Mapping[str, int]


def mix(shares: Sequence[Share], *, total: int, seed: int = 0) -> Mixed:
    """Take `total` examples from several sources by weight, each source spread evenly over the whole.

    Which examples of a source are taken is drawn; none is taken twice.

    Raises:
        InputError: A weight is negative or all are zero, two shares have one name, or two examples one id.
    """
    if total < 0 or not all(share.weight >= 0 for share in shares) or not sum(share.weight for share in shares) > 0:
        weights = {share.name: share.weight for share in shares}
        raise InputError(f"{total} examples by the weights {weights}: no weight is below 0, and their sum is above it")
    _require_distinct((share.name for share in shares), "shares have the name")
    wanted = _by_weight(total, [share.weight for share in shares])
    placed: list[tuple[float, int, Example]] = []
    for index, (share, number) in enumerate(zip(shares, wanted, strict=True)):
        order = seeded(seed, "mix", share.name).sample(share.examples, len(share.examples))
        taken = order[:number]
        placed += [((at + 0.5) / len(taken), index, example) for at, example in enumerate(taken)]
    examples = tuple(example for _, _, example in sorted(placed, key=lambda one: one[:2]))
    _require_distinct((example.id for example in examples), "examples have the id")
    taken_of = {share.name: min(n, len(share.examples)) for share, n in zip(shares, wanted, strict=True)}
    missing = {
        share.name: n - taken_of[share.name]
        for share, n in zip(shares, wanted, strict=True)
        if n > taken_of[share.name]
    }
    return Mixed(examples, taken_of, missing)


def _by_weight(total: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers that sum to `total`, the largest remainders rounded up."""
    exact = [total * weight / sum(weights) for weight in weights]
    numbers = [int(number) for number in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: (numbers[index] - exact[index], index))
    for index in by_remainder[: total - sum(numbers)]:
        numbers[index] += 1
    return numbers


def _require_distinct(names: Iterable[str], what: str) -> None:
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise InputError(f"{len(repeated)} times two {what} {repeated[0]!r}; give each its own")


def part(things: Iterable[T], *, key: Callable[[T], str], share: float, seed: int = 0) -> tuple[list[T], list[T]]:
    """Deal things into what is learned from and what is held out, by the hash of their key.

    Things with one key stay together. More things later do not move those that were dealt before.

    Args:
        share: Of the keys, held out; on average.
    """
    if not 0 <= share <= 1:
        raise InputError(f"a share of {share} cannot be held out; it is between 0 and 1")
    learned: list[T] = []
    held_out: list[T] = []
    for thing in things:
        low = int.from_bytes(rank(seed, key(thing))[:8], "big") < share * 2**64
        (held_out if low else learned).append(thing)
    return learned, held_out


@dataclass(frozen=True, slots=True)
class Split:
    """Examples that are learned from and examples that are held out; no example is in neither."""

    learned: tuple[Example, ...]
    held_out: tuple[Example, ...]


def split(examples: Sequence[Example], *, held_out: int, apart: Apart = "documents", seed: int = 0) -> Split:
    """Hold examples out so that no question of theirs is in the rest.

    Which ones is decided by the hashes of ids; what hangs together stays together, so there may be fewer than asked
    for.

    Args:
        held_out: Examples to hold out.
        apart: `documents`: nor is any document of theirs. `sets`: nor is the same set of documents, whatever its
            order; for self-study, where one folder's documents come again and again.

    Raises:
        InputError: All examples hang together, so that none can be held out, or as many are asked for as there are.
    """
    if not 0 <= held_out < max(1, len(examples)):
        raise InputError(f"{held_out} of {len(examples)} examples cannot be held out; leave some to learn from")
    groups = _hanging_together(examples, apart)
    groups.sort(key=lambda group: min(rank(seed, examples[at].id) for at in group))
    kept_out: set[int] = set()
    for group in groups:
        if len(kept_out) + len(group) <= held_out:
            kept_out.update(group)
    if held_out and not kept_out:
        raise InputError(
            f"none of {len(examples)} examples can be held out: they hang together by their {apart} and questions. "
            "Hold documents or articles out before composing" + (", or ask for sets apart" * (apart == "documents"))
        )
    return Split(
        tuple(example for at, example in enumerate(examples) if at not in kept_out),
        tuple(example for at, example in enumerate(examples) if at in kept_out),
    )


def _hanging_together(examples: Sequence[Example], apart: Apart) -> list[list[int]]:
    """Return positions of examples in groups that share nothing with each other."""
    parent = list(range(len(examples)))

    def root(at: int) -> int:
        while parent[at] != at:
            parent[at] = parent[parent[at]]
            at = parent[at]
        return at

    first: dict[object, int] = {}
    for at, example in enumerate(examples):
        for mark in _marks(example, apart):
            parent[root(at)] = root(first.setdefault(mark, at))
    groups: dict[int, list[int]] = {}
    for at in range(len(examples)):
        groups.setdefault(root(at), []).append(at)
    return list(groups.values())


_ASKED = QUESTION.partition("{")[0]


def _marks(example: Example, apart: Apart) -> Iterable[object]:
    """Yield what ties an example to others.

    An instruction, such as to summarize, is asked about many documents: it ties only where its answer is the same.
    """
    yield "id", example.id
    for question in example.questions:
        yield "question", question.text, "" if question.text.startswith(_ASKED) else question.answer
    texts = [document.text for document in example.documents]
    if apart == "sets":
        yield "set", frozenset(texts)
    else:
        yield from (("document", text) for text in texts)
