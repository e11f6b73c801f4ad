"""What a prompt consists of where keys and values are looked up: ids, stored entries as they were read, link tokens.

A token that is computed with its request depends on everything before it and on nothing behind it. So a sequence of
items names the keys and values of its last token: equal items, equal numbers. Knows no tensors and no text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens that are computed with the request, by their ids: S, labels, T, answers, earlier turns. May be empty."""

    ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored entry as it was read. Its keys and values stand in a store; here it only takes positions.

    Attributes:
        name: Fingerprint.
        codec: What it was decoded from: other numbers behind it if another.
    """

    name: str
    codec: str
    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"entry {self.name}.{self.codec} has {self.num_tokens} tokens; it needs at least one")

    def __len__(self) -> int:
        return self.num_tokens


@dataclass(frozen=True, slots=True)
class Links:
    """One group of link tokens; known as a whole or not at all."""

    bundle: str
    level: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"a group of {self.count} link tokens of {self.bundle}; leave the item out where K is 0")

    def __len__(self) -> int:
        return self.count


Item: TypeAlias = Run | Entry | Links


def merged(items: Iterable[Item]) -> list[Item]:
    """Return the items with neighbouring runs as one and without empty ones: how ids were cut up names nothing."""
    found: list[Item] = []
    for item in items:
        if isinstance(item, Run) and found and isinstance(last := found[-1], Run):
            found[-1] = Run(last.ids + item.ids)
        elif len(item):
            found.append(item)
    return found


def behind(items: Sequence[Item], count: int) -> list[Item]:
    """Return what follows the first `count` positions, up to the last token that is computed with the request.

    The positions end at the end of an item or within a run.
    """
    rest = list(items)
    while rest and isinstance(rest[-1], Entry):
        rest.pop()
    while rest and count >= len(rest[0]):
        count -= len(rest.pop(0))
    if count and rest and isinstance(first := rest[0], Run):
        rest[0] = Run(first.ids[count:])
    return rest


def num_rows(items: Iterable[Item]) -> int:
    """Return how many of the tokens are computed with the request."""
    return sum(len(item) for item in items if not isinstance(item, Entry))


def edge(item: Item, at: int = 0) -> Item | int:
    """Return what tells an item from others that stand in the same place: a run's id there, else the item."""
    return item.ids[at] if isinstance(item, Run) else item


def num_shared(item: Item, at: int, other: Item, start: int) -> int:
    """Return for how many positions an item, from `at` on, goes on like another from `start` on."""
    if not (isinstance(item, Run) and isinstance(other, Run)):
        return len(item) if item == other else 0
    length = min(len(item) - at, len(other) - start)
    mine, theirs = item.ids[at : at + length], other.ids[start : start + length]
    if mine == theirs:
        return length
    return next(index for index, (one, another) in enumerate(zip(mine, theirs, strict=True)) if one != another)


def first_rows(items: Sequence[Item], rows: int) -> list[Item]:
    """Return the items up to the first `rows` tokens that are computed with the request."""
    found: list[Item] = []
    for item in items:
        if isinstance(item, Run):
            item = Run(item.ids[:rows])  # noqa: PLW2901
        if not isinstance(item, Entry):
            if len(item) > rows:
                break
            rows -= len(item)
        found.append(item)
    return found


def num_links_in(items: Sequence[Item], rows: int) -> int:
    """Return how many of the first `rows` tokens are link tokens."""
    return sum(len(item) for item in first_rows(items, rows) if isinstance(item, Links))
