"""A state machine that compares the tree of known beginnings with sets, and two ways to drive one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from known_rows import PLENTY, ROW_BYTES, Truth, atoms, real_bytes

from kvlink.engine import tree
from kvlink.engine.beginnings import Beginnings, Match
from kvlink.engine.items import Entry, Item, Links, Run, merged, num_rows

ROOTS = ("one", "other")
NODE_ROWS = 4
TIGHT = 20 * ROW_BYTES

SEEDS = st.integers(0, 1 << 40)
"""Of what a rule does: items drawn one by one would leave no time for many steps."""


def some_items(draw: Random, most: int) -> list[Item]:
    """Draw items of so few kinds that prompts often begin alike."""
    kinds: list[Callable[[], Item]] = [
        lambda: Run(tuple(draw.choices((0, 1), weights=(4, 1), k=draw.randrange(10)))),
        lambda: Entry(draw.choice("aab"), draw.choice(("raw", "raw", "int8")), 5),
        lambda: Links(draw.choice("xxy"), draw.randrange(2), 2),
    ]
    return [draw.choices(kinds, weights=(2, 1, 1))[0]() for _ in range(draw.randrange(most))]


def documents_of(items: Sequence[Item]) -> list[tuple[Item, ...]]:
    """Return what may be documents: perhaps a run, an entry, perhaps link tokens."""
    found: list[tuple[Item, ...]] = []
    for at, item in enumerate(items):
        if isinstance(item, Entry):
            label = items[at - 1 : at] if at > 1 and isinstance(items[at - 1], Run) else ()
            links = items[at + 1 : at + 2] if at + 1 < len(items) and isinstance(items[at + 1], Links) else ()
            found.append((*label, item, *links))
    return found


def first(items: Sequence[Item], count: int) -> list[Item]:
    """Return the items of the first positions; only a run is cut."""
    found: list[Item] = []
    for item in items:
        if isinstance(item, Run):
            found.append(Run(item.ids[: max(0, count)]))
        elif len(item) <= count:
            found.append(item)
        count -= len(item)
        if count <= 0:
            break
    return found


class TreeMachine(RuleBasedStateMachine):
    """The model: numbers of all beginnings that were inserted. With room for all the tree must know just these."""

    def __init__(self, budget_bytes: int, twist: Callable[[Item], Item] = lambda item: item) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes
        self.twist = twist
        self.tree = Beginnings(budget_bytes=budget_bytes)
        self.truth = Truth()
        self.known: set[int] = set()
        self.above: dict[int, frozenset[str]] = {}
        self.held: list[tuple[str, Sequence[Item], Match, bool]] = []
        self.history: list[list[Item]] = [[]]
        self.seldom = [self.drop, self.longest]

    def teardown(self) -> None:
        for _, _, match, _ in self.held:
            match.release()
        self.tree.clear()
        stats = self.tree.stats()
        assert (stats.nodes, stats.used_bytes, stats.leased_bytes) == (0, 0, 0)
        assert not self.tree._top.children

    def prompt(self, draw: Random) -> tuple[str, list[Item]]:
        """Draw a prompt that begins like one of the last ones."""
        base = draw.choice(self.history[-4:])
        return draw.choice(ROOTS), [*first(base, draw.randrange(25)), *some_items(draw, 5)]

    @rule(seed=SEEDS)
    def insert(self, seed: int) -> None:
        root, items = self.prompt(Random(seed))
        self.history.append(items)
        self.truth.insert(self.tree, self.twisted(items), root)
        names: frozenset[str] = frozenset()
        for at, item in enumerate(items):
            names |= {item.name} if isinstance(item, Entry) else set()
            before = sum(1 for one in items[:at] for _ in atoms(one))
            for number, is_row in self.truth.path(root, items[: at + 1])[before:]:
                self.above[number] = names
                self.known |= {number} if is_row else set()
        roomy = (num_rows(items) + 2 * NODE_ROWS) * ROW_BYTES <= self.budget_bytes
        if not self.held and roomy:
            assert self.truth.found(self.tree, self.twisted(items), root) == num_rows(items)

    @rule(seed=SEEDS)
    def match(self, seed: int) -> None:
        draw = Random(seed)
        root, items = self.prompt(draw)
        if draw.random() < 0.2:
            items = [replace(item, codec="int8") if isinstance(item, Entry) else item for item in items]
        at_most = draw.choice((None, None, draw.randrange(12)))
        match = self.tree.match(root, self.twisted(items), at_most=at_most)
        self.truth.check(match, items, root)
        expected = self.expected(root, items, at_most)
        assert match.num_rows == expected if self.budget_bytes == PLENTY else match.num_rows <= expected
        if match.num_rows and len(self.held) < 3 and draw.random() < 0.5:
            self.held.append((root, items, match, True))
        else:
            match.release()

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 2))
    def release(self, which: int) -> None:
        root, items, match, _ = self.held.pop(which % len(self.held))
        self.truth.check(match, items, root)
        match.release()
        match.release()

    @rule(seed=SEEDS)
    def drop(self, seed: int) -> None:
        draw = Random(seed)
        if draw.random() < 0.1:
            self.tree.clear()
            gone = set(self.above)
        else:
            name = draw.choice("ab")
            self.tree.drop_entries([name])
            gone = {number for number, names in self.above.items() if name in names}
        self.known -= gone
        self.held = [
            (root, items, match, is_there and not gone & set(self.truth.numbers(root, items)[: match.num_rows]))
            for root, items, match, is_there in self.held
        ]

    @rule(seed=SEEDS)
    def longest(self, seed: int) -> None:
        draw = Random(seed)
        root = draw.choice(ROOTS)
        items = merged(max(self.history[-6:], key=lambda items: sum(isinstance(item, Entry) for item in items)))
        head = items[:1] if items and isinstance(items[0], Run) else []
        documents = documents_of(items)[:4]
        draw.shuffle(documents)
        order = self.tree.longest(root, head, [self.twisted(document) for document in documents])
        assert sorted(order) == list(range(len(documents)))
        if self.budget_bytes == PLENTY:
            alive = self.truth.with_all_above(self.known)
            scores = {one: self.score(root, [*head], documents, one, alive) for one in permutations(sorted(order))}
            assert scores[tuple(order)] == max(scores.values())

    @invariant()
    def counts_what_is_there(self) -> None:
        stats = self.tree.stats()
        matches = [match for _, _, match, _ in self.held]
        assert stats.used_bytes == real_bytes(self.tree, matches) <= self.budget_bytes
        assert stats.used_bytes >= stats.leased_bytes >= real_bytes(None, matches)
        assert stats.leased_bytes == 0 or matches

    @invariant()
    def keeps_what_is_leased(self) -> None:
        for root, items, held, is_there in self.held:
            self.truth.check(held, items, root)
            if is_there:
                assert self.truth.found(self.tree, self.twisted(items), root) >= held.num_rows

    @invariant()
    def children_go_before_their_parents(self) -> None:
        at = {node: index for index, node in enumerate(self.tree._order)}
        for node, index in at.items():
            above = [one for one in tree.upwards(node) if one in at]
            assert all(index <= at[one] for one in above)
            assert all(one.leases >= node.leases for one in above)

    def check(self) -> None:
        self.counts_what_is_there()
        self.keeps_what_is_leased()
        self.children_go_before_their_parents()

    def twisted(self, items: Sequence[Item]) -> list[Item]:
        return [self.twist(item) for item in items]

    def expected(self, root: str, items: Sequence[Item], at_most: int | None) -> int:
        """Count rows up to the first unknown one; link tokens are known together."""
        left = PLENTY if at_most is None else at_most
        beginning, rows = [], 0
        for item in merged(items):
            beginning.append(item)
            if isinstance(item, Entry):
                continue
            numbers = self.truth.numbers(root, beginning)[-len(item) :]
            known = next((at for at, number in enumerate(numbers) if number not in self.known), len(numbers))
            taken = min(known, left)
            if isinstance(item, Links) and taken < len(item):
                return rows
            rows, left = rows + taken, left - taken
            if taken < len(item):
                return rows
        return rows

    def score(
        self, root: str, beginning: list[Item], documents: Sequence[Any], order: Sequence[int], alive: set[int]
    ) -> int:
        """Count positions behind the head: of whole documents, and of the next one up to its last known row."""
        if any(number not in alive for number, _ in self.truth.path(root, beginning)):
            return 0
        total = 0
        for index in order:
            known = at = 0
            for item in documents[index]:
                before = len(self.truth.path(root, beginning))
                beginning.append(item)
                for number, is_row in self.truth.path(root, beginning)[before:]:
                    if number not in alive:
                        return total + known
                    at += 1 if is_row else len(item)
                    known = at if is_row else known
            total += at
        return total


def run(machine: Callable[[], RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=15, stateful_step_count=20, deadline=None))


def walk(machine: Any, *, steps: int = 600) -> None:
    """Take many more steps than hypothesis has time for, and check everything after each."""
    draw = Random(0)
    often, seldom = [machine.insert, machine.match], machine.seldom
    for _ in range(steps):
        chance = draw.random()
        if machine.held and chance < 0.2:
            machine.release(draw.randrange(3))
        else:
            draw.choice(seldom if seldom and chance > 0.92 else often)(draw.getrandbits(40))
        machine.check()
    machine.teardown()
