"""The simulator: the same for the same seed, arithmetic that can be done by hand, and what it is there to show."""

import json
from collections import OrderedDict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlink.cluster.baselines import POLICIES, policy_named
from kvlink.cluster.costs import Costs
from kvlink.cluster.node import Node
from kvlink.cluster.policy_cost import STATES, bench_policy
from kvlink.cluster.simulate import Cluster, percentiles, simulate
from kvlink.cluster.traffic import Drawn, Traffic, draw
from kvlink.core.errors import InputError

ROOT = Path(__file__).parents[2]
COSTS = Costs(
    encode_s=0.01,
    load_s=0.001,
    load_latency_s=0.5,
    prompt_s=0.1,
    request_s=1.0,
    row_s=0.25,
    step_s=0.5,
    token_bytes=10,
)
TRAFFIC = Traffic(requests=1500, rate=0.8, documents=200, tokens=100, question=5, answer=4)
CLUSTER = Cluster(nodes=4, room=6000)


@cache
def result(name: str, cluster: Cluster = CLUSTER, traffic: Traffic = TRAFFIC, **options: Any) -> dict[str, Any]:
    return simulate(policy_named(name, seed=traffic.seed, **options), cluster, traffic, COSTS)


def scripted(arrivals: list[float], asked: list[list[int]], lengths: list[int], answer: int = 4) -> dict[str, Any]:
    """Return what one node makes of requests; none of them is too early to count."""
    traffic = Traffic(requests=len(arrivals), rate=1.0, documents=len(lengths), question=5)
    drawn = Drawn(
        np.array(lengths), np.array(arrivals), np.array(asked), np.full(len(arrivals), answer, dtype=np.int64), []
    )
    return simulate(policy_named("affinity"), Cluster(nodes=1, room=1000, store="empty"), traffic, COSTS, drawn=drawn)


def test_seconds_are_those_that_one_reckons_by_hand() -> None:
    row = scripted([0.0, 1.0], [[0], [0]], [100])
    # first: 1 + 5 x 0.1 + 100 x 0.01 = 2.5, then 4 x 0.25 of answer; second: begins at 3.5, and takes 1.5
    assert row["ttft_s"]["p50"] == pytest.approx((2.5 + 4.0) / 2)
    assert (row["hit_ratio"], row["encoded_tokens"], row["moved_bytes"]) == (0.5, 100, 0)
    assert row["imbalance"] == 1.0


def test_loads_go_on_beside_the_work_and_one_after_another() -> None:
    node, stored = Node(room=1000), {0: 0, 1: 0}
    first = node.serve(0.0, [(0, 0, 100), (1, 0, 100)], stored, COSTS, question=5, answer=4)
    assert first.begun == pytest.approx(2 * (0.5 + 0.1) + 1.5)
    assert (first.hits, first.loaded, first.encoded) == (0, 200, 0)
    second = node.serve(0.0, [(0, 1, 100)], stored, COSTS, question=5, answer=4)
    assert (second.hits, second.loaded, second.encoded) == (0, 0, 100), "an old text is no hit"
    assert stored[0] == 1


def test_a_node_holds_no_more_than_its_room_and_drops_what_rested_longest() -> None:
    dice, node, held = np.random.default_rng(0), Node(room=300), OrderedDict[int, int]()
    for _ in range(300):
        number = int(dice.integers(8))
        tokens = 40 + 10 * number
        hits = node.serve(0.0, [(number, 0, tokens)], None, COSTS, question=1, answer=1).hits
        assert bool(hits) == (number in held)
        held[number] = tokens
        held.move_to_end(number)
        while sum(held.values()) > 300:
            held.popitem(last=False)


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_seed_gives_the_same_and_nothing_is_lost_on_the_way(name: str) -> None:
    row, again = result(name), result.__wrapped__(name)
    assert json.dumps(row) == json.dumps(again)
    assert row["ttft_s"] != result(name, traffic=replace(TRAFFIC, seed=1))["ttft_s"]
    assert row["counted"] == 1200
    assert sum(row["reasons"].values()) == 1200
    assert row["retried"] == row["broken"] == row["refused"] == 0


def test_affinity_finds_what_others_do_not_and_moves_less() -> None:
    rows = {name: result(name) for name in POLICIES}
    others = [rows[name]["hit_ratio"] for name in POLICIES if name != "affinity"]
    assert rows["affinity"]["hit_ratio"] > max(others) + 0.2
    assert rows["affinity"]["moved_bytes"] < min(rows[name]["moved_bytes"] for name in POLICIES if name != "affinity")
    assert rows["affinity"]["imbalance"] < 1.6


def test_without_a_gap_hits_are_given_away() -> None:
    assert result("affinity", gap=0)["hit_ratio"] < result("affinity", gap=8)["hit_ratio"] - 0.05


@pytest.mark.parametrize("name", ["affinity", "round-robin"])
def test_a_lost_node_fails_nothing_that_had_not_begun(name: str) -> None:
    row = result(name, replace(CLUSTER, lost=(0.5,), back_s=500.0), replace(TRAFFIC, rate=0.5))
    assert (row["counted"], row["refused"]) == (1200, 0)
    assert row["retried"] > 0


def test_a_cluster_that_is_gone_refuses() -> None:
    row = result("affinity", Cluster(nodes=1, room=6000, lost=(0.5,), back_s=1e9))
    assert row["counted"] + row["broken"] + row["refused"] == pytest.approx(1200, abs=2)
    assert row["refused"] > 600


def test_changed_documents_cost_hits() -> None:
    assert result("affinity", traffic=replace(TRAFFIC, changes=0.1))["hit_ratio"] < result("affinity")["hit_ratio"]


def test_traffic_is_what_was_asked_for() -> None:
    traffic = Traffic(requests=4000, rate=2.0, documents=100, topic=10, each=3, zipf=1.0, changes=0.05)
    drawn = draw(traffic)
    assert drawn.arrivals[-1] == pytest.approx(2000, rel=0.1)
    assert len(drawn.changes) == pytest.approx(100, rel=0.4)
    assert drawn.lengths.mean() == pytest.approx(300, rel=0.2)
    assert drawn.answers.mean() == pytest.approx(64, rel=0.1)
    assert (drawn.asked // 10 == drawn.asked[:, :1] // 10).all(), "one topic"
    assert all(len(set(row)) == 3 for row in drawn.asked.tolist())
    counts = np.bincount(drawn.asked[:, 0] // 10, minlength=10)
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.2), "Zipf"


def test_costs_are_read_and_what_is_wrong_is_named(tmp_path: Path) -> None:
    committed = ROOT / "benchmarks" / "cluster-costs.json"
    assert Costs.read(committed).token_bytes == 46080
    good = json.loads(committed.read_text("utf-8"))["costs"]
    for costs, message in (
        ({**good, "row_s": -1}, "row_s"),
        ({**good, "row_s": True}, "row_s"),
        ({name: value for name, value in good.items() if name != "step_s"}, "lack step_s"),
        (None, "holds no costs"),
    ):
        (tmp_path / "costs.json").write_text(json.dumps({"costs": costs}), "utf-8")
        with pytest.raises(InputError, match=message):
            Costs.read(tmp_path / "costs.json")
    with pytest.raises(InputError, match="cannot be read"):
        Costs.read(tmp_path / "none.json")


def test_committed_costs_are_those_of_the_measured_files() -> None:
    def rows(name: str) -> list[dict[str, Any]]:
        return json.loads((ROOT / "benchmarks" / name).read_text("utf-8"))["results"]

    costs = Costs.read(ROOT / "benchmarks" / "cluster-costs.json")
    cold = {row["tokens"]: row for row in rows("store-break-even.json") if row["tier"] == "disk, cold"}
    assert costs.encode_s == pytest.approx(cold[300]["encode_s"] / 300, rel=0.01)
    slope = (cold[1000]["load_s"] - cold[100]["load_s"]) / 900
    assert costs.load_s == pytest.approx(slope, rel=0.01)
    assert costs.load_latency_s == pytest.approx(cold[100]["load_s"] - 100 * slope, rel=0.02)
    shared = {
        row["state"]: row
        for row in rows("ttft.json")
        if row["tokens"] == 200 and row["arm"] == "shared" and row["scenario"] is None
    }
    few, many = shared["known_beginning"], shared["warm"]
    slope = (many["median_s"] - few["median_s"]) / (many["computed_tokens"] - few["computed_tokens"])
    assert costs.prompt_s == pytest.approx(slope, rel=0.01)
    assert costs.request_s == pytest.approx(few["median_s"] - few["computed_tokens"] * slope, rel=0.01)


def test_percentiles_of_nothing_are_nothing() -> None:
    assert set(percentiles([]).values()) == {None}
    assert percentiles([1.0, 3.0])["p50"] == 2.0


def test_the_cost_of_a_choice_is_measured_in_each_state() -> None:
    rows = bench_policy([1, 3], requests=5, documents=20)
    assert [(row["nodes"], row["state"]) for row in rows] == [(nodes, state) for nodes in (1, 3) for state in STATES]
    assert all(0 < row["median_s"] <= row["p99_s"] for row in rows)
