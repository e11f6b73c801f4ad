"""The tree of known beginnings against plain sets and dicts, and planted faults that the comparison must see."""

from collections.abc import Callable, Sequence
from itertools import takewhile
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from known_rows import PLENTY, ROW_BYTES, Truth
from tree_machine import NODE_ROWS, SEEDS, TIGHT, TreeMachine, run, walk

from kvlink.engine import beginnings, tree
from kvlink.engine.beginnings import Beginnings, Match
from kvlink.engine.items import Entry, Item, Links, num_rows
from kvlink.engine.tree import Rows


class UseMachine(RuleBasedStateMachine):
    """The model: last use of each group of link tokens, each a node of its own; it foretells all evictions."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Beginnings(budget_bytes=10 * ROW_BYTES)
        self.truth = Truth()
        self.uses: dict[tuple[Item, ...], int] = {}
        self.clock = 0
        self.held: list[tuple[tuple[Item, ...], Match]] = []
        self.evictions = 0
        self.seldom: list[Any] = []

    @rule(seed=SEEDS)
    def insert(self, seed: int) -> None:
        items = self.prompt(Random(seed))
        self.truth.insert(self.tree, items, "root")
        path: list[tuple[Item, ...]] = []
        for beginning in beginnings_of(items):
            if beginning not in self.uses and not self.make_room(len(beginning[-1]), path):
                break
            self.uses[beginning] = 0
            path.append(beginning)
        self.touch(path)

    @rule(seed=SEEDS)
    def match(self, seed: int) -> None:
        draw = Random(seed)
        items = self.prompt(draw)
        match = self.tree.match("root", items)
        self.truth.check(match, items, "root")
        path = list(takewhile(self.uses.__contains__, beginnings_of(items)))
        self.touch(path)
        assert match.num_rows == (num_rows(path[-1]) if path else 0)
        if path and len(self.held) < 2 and draw.random() < 0.3:
            self.held.append((path[-1], match))
        else:
            match.release()

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 2))
    def release(self, which: int) -> None:
        self.held.pop(which % len(self.held))[1].release()

    @invariant()
    def check(self) -> None:
        stats = self.tree.stats()
        assert stats.used_bytes == sum(len(path[-1]) for path in self.uses) * ROW_BYTES
        assert (stats.nodes, stats.evictions) == (len(self.uses), self.evictions)
        leased = [path for path in self.uses if self.is_leased(path, [])]
        assert stats.leased_bytes == sum(len(path[-1]) for path in leased) * ROW_BYTES

    def prompt(self, draw: Random) -> tuple[Item, ...]:
        kinds = [Links(bundle, 0, count) for bundle, count in zip("vwxyz", (1, 2, 3, 4, 4), strict=True)]
        return tuple(draw.choices([*kinds, Entry("a", "raw", 5)], k=draw.randrange(5)))

    def is_leased(self, path: tuple[Item, ...], own: Sequence[tuple[Item, ...]]) -> bool:
        return path in own or any(held[: len(path)] == path for held, _ in self.held)

    def touch(self, path: Sequence[tuple[Item, ...]]) -> None:
        self.clock += 1
        self.uses.update(dict.fromkeys(path, self.clock))

    def make_room(self, rows: int, own: Sequence[tuple[Item, ...]]) -> bool:
        missing = sum(len(path[-1]) for path in self.uses) + rows - 10
        idle = [path for path in self.uses if not self.is_leased(path, own)]
        victims = []
        for path in sorted(idle, key=lambda path: (self.uses[path], -len(path))):
            if missing <= 0:
                break
            victims.append(path)
            missing -= len(path[-1])
        if missing > 0:
            return False
        for path in victims:
            del self.uses[path]
        self.evictions += len(victims)
        return True


def beginnings_of(items: tuple[Item, ...]) -> list[tuple[Item, ...]]:
    """Return the beginnings that end with link tokens."""
    return [items[: at + 1] for at, item in enumerate(items) if isinstance(item, Links)]


@pytest.fixture(autouse=True)
def _short_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "RUN_ROWS", NODE_ROWS)


@pytest.mark.parametrize("budget_bytes", [PLENTY, TIGHT], ids=["plenty", "tight"])
def test_the_tree_agrees_with_a_set_of_beginnings(budget_bytes: int) -> None:
    run(lambda: TreeMachine(budget_bytes))
    walk(TreeMachine(budget_bytes))


def test_evictions_are_those_of_a_dict_of_last_uses() -> None:
    run(UseMachine)
    walk(UseMachine())


class CodecBlind(Entry):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entry) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


class LevelBlind(Links):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Links) and self.bundle == other.bundle

    def __hash__(self) -> int:
        return hash(self.bundle)


class BundleBlind(Links):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Links) and self.level == other.level

    def __hash__(self) -> int:
        return hash(self.level)


def blind(kind: type[Any]) -> Callable[[Item], Item]:
    def twist(item: Item) -> Item:
        if not isinstance(item, kind.__base__):
            return item
        return kind(*(getattr(item, name) for name in kind.__base__.__slots__))

    return twist


@pytest.mark.parametrize("kind", [CodecBlind, LevelBlind, BundleBlind])
def test_a_lookup_that_overlooks_part_of_an_item_is_seen(kind: type[Any]) -> None:
    with pytest.raises(AssertionError):
        walk(TreeMachine(PLENTY, blind(kind)))


match = Beginnings.match


def one_root(self: Beginnings, root: str, items: list[Item], at_most: int | None = None) -> Match:
    return match(self, "one", items, at_most=at_most)


def view(self: Rows, start: int, stop: int) -> Rows:
    return Rows(self.keys[:, :, start:stop], self.values[:, :, start:stop])


def one_off(self: Rows, start: int, stop: int) -> Rows:
    at = max(0, start - 1)
    return Rows(self.keys[:, :, at : at + stop - start].clone(), self.values[:, :, start:stop].clone())


def at_once(self: Beginnings, rows: Rows) -> None:
    rows.holders -= 1
    if rows.holders >= 0 and not any(node.rows is rows for node in self._order):
        self._used_bytes -= rows.num_bytes


FAULTS = {
    "roots are shared": (Beginnings, "match", one_root),
    "views of the buffer are kept": (Rows, "copy", view),
    "rows are one off": (Rows, "copy", one_off),
    "the budget is ignored": (Beginnings, "_make_room", lambda self, size: True),
    "leases are ignored": (beginnings, "settle", lambda node, leases=0: tree.settle(node)),
    "leased memory is not counted": (Beginnings, "_let_go", at_once),
    "deleted entries stay": (Beginnings, "drop_entries", lambda self, names: None),
    "documents stay as given": (beginnings, "best_order", lambda *given: ()),
    "uses are not noted": (Beginnings, "_touch", lambda self, node: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        walk(TreeMachine(PLENTY if fault == "documents stay as given" else TIGHT))


def test_a_tree_that_drops_the_newest_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Beginnings, "_touch", oldest_again)
    with pytest.raises(AssertionError):
        walk(UseMachine())


def oldest_again(self: Beginnings, node: tree.Node) -> None:
    for one in reversed([one for one in tree.upwards(node) if one in self._order]):
        self._order.move_to_end(one, last=False)
