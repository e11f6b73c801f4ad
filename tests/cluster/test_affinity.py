"""Routing by documents: the fast policy does what the rules say, and each rule is seen to matter."""

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_policy import PlainAffinity, PlainTable

from kvlink.cluster import heat
from kvlink.cluster.affinity import Affinity
from kvlink.cluster.baselines import POLICIES, policy_named
from kvlink.cluster.table import Table

SLOTS, WINDOW = 64, 8
NODES = tuple("abcde")
DOCUMENTS = tuple(f"d{number}" for number in range(6))
FAULTS = ("late", "early", "blind", "restless", "relative load", "one home", "dead", "remembers", "greedy")


@pytest.fixture(autouse=True, scope="module")
def _short_window() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heat, "LEAST_WINDOW", WINDOW)
        patch.setattr(heat, "PER_NODE", 0)
        yield


nodes = st.sampled_from(NODES)
names = st.sampled_from(DOCUMENTS)
weighed = st.lists(st.tuples(names, st.integers(1, 9)), max_size=4)
asks = st.tuples(
    st.just("ask"), weighed, st.sampled_from([None, "s", "t"]), st.sampled_from([(), (), ("a",), ("b", "c")])
)
events = st.one_of(
    asks,
    asks,
    st.tuples(st.just("end"), st.integers(0, 5)),
    st.tuples(st.just("note"), nodes, names),
    st.tuples(st.just("forget"), names),
    st.tuples(st.just("join"), nodes),
    st.tuples(st.just("leave"), nodes),
)


def play(fast: Affinity, plain: PlainAffinity, happened: list[Any]) -> list[tuple[str | None, str | None]]:
    """Let both see the same, and return what each chose."""
    chosen: list[tuple[str | None, str | None]] = []
    under_way: list[tuple[Any, tuple[str, int]]] = []
    for what, *about in happened:
        if what == "ask":
            documents, session, without = about
            first = fast.choose(documents, session=session, without=without)
            second = plain.choose(documents, session=session, without=without)
            chosen.append((first and first.node, second))
            if first and second:
                under_way.append((first, (second, plain.born[second])))
        elif what == "end":
            if under_way:
                first, second = under_way.pop(about[0] % len(under_way))
                fast.done(first)
                plain.done(*second)
        elif what == "note":
            fast.note(about[0], [about[1]])
            plain.note(*about)
        else:
            getattr(fast, what)(*about)
            getattr(plain, what)(*about)
    return chosen


@given(gap=st.integers(0, 3), happened=st.lists(events, max_size=60))
def test_the_fast_policy_does_what_the_rules_say(gap: int, happened: list[Any]) -> None:
    fast, plain = Affinity(gap=gap, slots=SLOTS), PlainAffinity(gap=gap, slots=SLOTS, window=WINDOW)
    for node in ("a", "b", "c"):
        fast.join(node)
        plain.join(node)
    for first, second in play(fast, plain, happened):
        assert first == second
    assert fast.queues() == plain.queues


def long_history(seed: int) -> list[Any]:
    dice = Random(seed)
    happened: list[Any] = [("join", node) for node in NODES]
    for _ in range(600):
        documents = [(name, dice.randint(1, 9)) for name in dice.sample(DOCUMENTS, dice.randint(1, 3))]
        session, place, node = dice.choice([None, None, "s", "t"]), dice.randrange(9), dice.choice(NODES)
        happened.append(("ask", documents, session, ()))
        happened += [("end", place)] * (dice.random() < 0.9) + [("note", node, documents[0][0])] * (place < 3)
        happened += [("leave", node), ("join", dice.choice(NODES))] * (dice.random() < 0.05)
    return happened


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_each_rule_is_seen_to_matter(fault: str) -> None:
    fast = Affinity(gap=2, slots=SLOTS)
    plain = PlainAffinity(gap=2, slots=SLOTS, window=WINDOW, fault=fault)
    differ = any(first != second for first, second in play(fast, plain, long_history(0)))
    assert differ == bool(fault)


def test_nobody_is_asked_when_nobody_is_left() -> None:
    policy = Affinity(slots=SLOTS)
    assert policy.choose([("d", 1)]) is None
    policy.join("a")
    assert policy.choose([("d", 1)], without=["a"]) is None
    first = policy.choose([("d", 1)])
    assert first is not None
    policy.leave("a")
    assert policy.choose([("d", 1)]) is None
    policy.join("a")
    policy.done(first)  # of a life that is over
    assert policy.queues() == {"a": 0}


def test_the_reason_and_the_share_are_told() -> None:
    policy = Affinity(gap=0, slots=SLOTS)
    for node in ("a", "b"):
        policy.join(node)
    policy.note("a", ["d"])
    policy.note("b", ["e"])

    def told(*documents: tuple[str, int], session: str | None = None) -> tuple[str, str, float]:
        choice = policy.choose(documents, session=session)
        assert choice is not None
        return choice.node, choice.reason, choice.share

    assert told(("d", 3), ("e", 1), session="s") == ("a", "documents", 0.75)
    assert told(("d", 3), ("e", 1)) == ("b", "load", 0.25)
    assert told(("e", 1), session="s") == ("a", "session", 0.0)
    assert told() == ("b", "idle", 0.0)


def test_documents_and_conversations_beyond_what_is_remembered_are_forgotten_oldest_first() -> None:
    policy = Affinity(slots=SLOTS, most_documents=2, most_sessions=1, gap=100)
    for node in NODES:
        policy.join(node)
    away = next(node for node in NODES if node != NODES[policy._table.home("x")])
    policy.note(away, ["x", "y"])
    policy.note(away, ["x", "z"])
    assert [policy._residency.nodes(name) is not None for name in "xyz"] == [True, False, True]
    for session in ("s", "t"):
        policy.choose([("x", 1)], session=session)
    reasons = [policy.choose([("x", 1)], session=session) for session in ("t", "s")]
    assert [choice and choice.reason for choice in reasons] == ["session", "documents"]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=20))
def test_slots_belong_to_the_node_with_the_highest_hash_and_move_for_no_other_reason(
    steps: list[tuple[bool, int]],
) -> None:
    table, plain, inside = Table(32), PlainTable(32), set[int]()
    for is_joining, node in steps:
        before = table.owners()
        if is_joining and node not in inside:
            table.join(node, str(node))
            inside.add(node)
            moved = before != table.owners()
            assert (table.owners()[moved] == node).all()
        elif not is_joining and node in inside:
            table.leave(node)
            inside.discard(node)
            assert ((before == node) == (before != table.owners())).all()
        if inside:
            assert table.owners().tolist() == [int(plain.owner(slot, [*map(str, inside)])) for slot in range(32)]


def test_slots_are_spread_fairly_and_a_modulo_would_move_nearly_all() -> None:
    table = Table(1 << 14)
    for node in range(64):
        table.join(node, f"node-{node}")
    owners = table.owners()
    counts = np.bincount(owners, minlength=64)
    assert counts.min() > 0.75 * counts.mean()
    assert counts.max() < 1.25 * counts.mean()
    table.join(64, "node-64")
    assert 0.005 < (owners != table.owners()).mean() < 0.03
    places = np.arange(1 << 14)
    assert (places % 64 != places % 65).mean() > 0.9


def test_a_document_in_every_request_is_at_home_on_all_nodes_and_one_in_few_requests_on_one() -> None:
    counts = heat.Heat()
    for request in range(WINDOW):
        counts.count({"hot", f"cold-{request}"}, 4)
    assert (counts.homes("hot", 4), counts.homes("cold-0", 4)) == (4, 1)
    for _ in range(2 * WINDOW + 1):
        counts.count({"other"}, 4)
    assert counts.homes("hot", 4) == 1, "it has cooled down"


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_counts_queues_and_leaves_out_the_dead(name: str) -> None:
    policy = policy_named(name, seed=1)
    assert policy.choose([("d", 1)]) is None
    for node in NODES:
        policy.join(node)
    policy.leave("a")
    policy.leave("never there")
    found = [policy.choose([("d", 1)], without=["b"]) for _ in range(60)]
    assert {choice.node for choice in found if choice} == {"c", "d", "e"}
    for choice in found:
        assert choice is not None
        policy.done(choice)
    policy.join("a")
    assert {choice.node for choice in (policy.choose([]) for _ in range(60)) if choice} == set(NODES)


def test_a_report_is_what_a_node_holds_and_what_came_since_the_one_before_stays() -> None:
    policy = Affinity(slots=SLOTS)
    for node in NODES:
        policy.join(node)

    def held() -> set[str]:
        return {name for name in DOCUMENTS if policy._residency.nodes(name) is not None}

    policy.note("a", ["d0", "d1"])
    policy.report("a", ["d0"], is_all=False)
    assert held() == {"d0", "d1"}, "there may be more"
    policy.report("a", ["d0"], is_all=True)
    assert held() == {"d0"}
    policy.note("a", ["d2"])
    policy.report("a", ["d0"], is_all=True)
    assert held() == {"d0", "d2"}, "it is on its way"
    policy.report("a", ["d0"], is_all=True)
    assert held() == {"d0"}
    policy.report("gone", ["d3"], is_all=True)
    policy.leave("a")
    assert held() == set()


def test_a_node_that_got_more_than_its_share_is_passed_over_unless_that_is_switched_off() -> None:
    def chosen(**options: Any) -> set[str]:
        policy = Affinity(slots=SLOTS, gap=1000, **options)
        for node in ("a", "b", "c", "d"):
            policy.join(node)
        for at in range(WINDOW):
            policy.note("a", [f"own-{at}"])
        found = [policy.choose([(f"own-{at}", 1)]) for at in range(WINDOW)]  # each is asked for once: none is hot
        return {one.node for one in found if one}

    assert chosen(excess=None) == {"a"}
    assert len(chosen()) > 1
