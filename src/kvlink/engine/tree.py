"""The nodes of a tree of items, and the ways through it.

A node stands for one item, or for a part of a run of ids. Knows no budget, no order of use and no locks.
"""

from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvlink.engine.items import Item, Run, edge, merged, num_shared

RUN_ROWS = 256
"""Longest run that one node holds, so that a split copies little and a run may be kept in part."""


@dataclass(slots=True, eq=False)
class Rows:
    """Keys and values that belong to no other node. They are counted until the last holder lets go of them."""

    keys: Float[Tensor, "layers kv_heads rows head_dim"]
    values: Float[Tensor, "layers kv_heads rows value_dim"]
    holders: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """Return views of the first rows."""
        return self.keys[:, :, :count], self.values[:, :, :count]

    def copy(self, start: int, stop: int) -> "Rows":
        """Copy some rows. Views would keep the other rows alive, and a request writes to its buffer again."""
        keys, values = (
            tensor[:, :, start:stop].detach().clone(memory_format=torch.contiguous_format)
            for tensor in (self.keys, self.values)
        )
        return Rows(keys, values)


@dataclass(slots=True, eq=False)
class Node:
    """An item behind those of all nodes above it.

    Attributes:
        edge: Where it stands among the children of its parent.
        rows: None for an entry and for a root; such a node is there only for what is below it.
        leases: Who stands on it or below it.
    """

    edge: Hashable
    item: Item
    parent: "Node | None"
    rows: Rows | None = None
    leases: int = 0
    children: "dict[Hashable, Node]" = field(default_factory=dict)

    @property
    def is_bare(self) -> bool:
        """Whether it is there for nothing."""
        return self.rows is None and not self.children and not self.leases


class Place(NamedTuple):
    """The place behind the first `taken` positions of a node."""

    node: Node
    taken: int


def follow(place: Place, items: Sequence[Item]) -> Generator[tuple[Place, int]]:
    """Walk down as far as the items are known; yield each place and how many positions led there."""
    for item in merged(items):
        done = 0
        while done < len(item):
            if place.taken == len(place.node.item):
                child = place.node.children.get(edge(item, done))
                if child is None:
                    return
                place = Place(child, 0)
            count = num_shared(place.node.item, place.taken, item, done)
            if not count:
                return
            done += count
            place = Place(place.node, place.taken + count)
            yield place, count


def reach(place: Place, items: Sequence[Item]) -> tuple[Place, int, int]:
    """Return the last known place, how many positions lead there, and how many to the last known row."""
    at = known = 0
    for reached, count in follow(place, items):
        place = reached
        at += count
        known = known if place.node.rows is None else at
    return place, at, known


def cut(items: Sequence[Item]) -> Generator[Item]:
    """Yield items as nodes hold them: long runs in parts."""
    for item in items:
        if isinstance(item, Run):
            yield from (Run(item.ids[at : at + RUN_ROWS]) for at in range(0, len(item), RUN_ROWS))
        else:
            yield item


def rows_of(node: Node) -> Rows:
    """Return the rows of a node that stands for tokens of a request."""
    assert node.rows is not None, "entries and roots hold no rows"
    return node.rows


def upwards(node: Node) -> Generator[Node]:
    """Yield a node and those above it, without the top."""
    while node.parent is not None:
        yield node
        node = node.parent


def settle(node: Node, *, leases: int = 0) -> None:
    """Add to the leases of a node and of all above it; take out what is there for nothing any more."""
    for one in upwards(node):
        one.leases += leases
        if one.is_bare and one.parent is not None and one.parent.children.get(one.edge) is one:
            del one.parent.children[one.edge]


def best_order(
    start: Place, head: Sequence[Item], documents: Sequence[Sequence[Item]], labels: Sequence[Run]
) -> tuple[int, ...]:
    """Return the documents along the longest path behind a head, in its order; see `Beginnings.longest`.

    A place that two orders lead to is searched once: the tree's own places bound the search.
    """
    start, length, _ = reach(start, head)
    if length < sum(map(len, head)):
        return ()
    items = [merged(document) for document in documents]
    by_edge: dict[Hashable, list[int]] = {}
    for index, document in enumerate(items):
        by_edge.setdefault(edge(document[0]) if document else None, []).append(index)
    best, most, seen = (), 0, {start}
    paths: list[tuple[Place | None, int, tuple[int, ...]]] = [(start, 0, ())]
    while paths:
        place, total, order = paths.pop()
        if total > most:
            best, most = order, total
        if place is None:
            continue
        lead, lead_length, lead_known = reach(place, label := labels[len(order) : len(order) + 1])
        if lead_length < sum(map(len, label)):
            continue
        further: list[tuple[Place | None, int, tuple[int, ...]]] = []
        for index in _next(lead, by_edge):
            if index in order:
                continue
            reached, length, known = reach(lead, items[index])
            if length < sum(map(len, items[index])):
                known = lead_length + known if known else lead_known
                further.append((None, total + known, (*order, index)))
            elif reached not in seen:
                seen.add(reached)
                further.append((reached, total + lead_length + length, (*order, index)))
        paths.extend(reversed(further))  # of equal orders the one that was given comes first
    return best


def _next(place: Place, by_edge: dict[Hashable, list[int]]) -> list[int]:
    """Return which documents may go on from a place."""
    inside = place.taken < len(place.node.item)
    edges = by_edge if inside else [edge for edge in place.node.children if edge in by_edge]
    return sorted(index for edge in edges for index in by_edge[edge])
