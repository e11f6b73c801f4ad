"""`cluster simulate` and `route`: tables that fit, rows and a figure, and what is refused before anything begins."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlink.cluster.baselines import POLICIES
from kvlink.core.errors import InputError

Run = Callable[..., Any]
COSTS = Path(__file__).parents[2] / "benchmarks" / "cluster-costs.json"
SIZES = ("--requests", 200, "--documents", 100, "--lose", 1, "--changes", 60)
VERB = ("cluster", "simulate", "--costs", COSTS, *SIZES)


def test_it_writes_a_row_for_each_policy_and_number_of_nodes_and_draws_them(run: Run, tmp_path: Path) -> None:
    plot = tmp_path / "nodes.svg"
    found = json.loads(run(*VERB, "--nodes", "2,3", "--json", "-", "--plot", plot).stdout)
    assert (found["schema"], found["command"], found["seed"]) == (1, "cluster simulate", 0)
    assert [(row["cluster"]["nodes"], row["policy"]) for row in found["results"]] == [
        (nodes, name) for nodes in (2, 3) for name in POLICIES
    ]
    again = json.loads(run(*VERB, "--nodes", "2,3", "--json", "-").stdout)
    assert again["results"] == found["results"]
    assert "</svg>" in plot.read_text("utf-8")


def test_one_number_of_nodes_is_drawn_over_time_and_the_table_is_at_most_100_columns_wide(
    run: Run, tmp_path: Path
) -> None:
    plot = tmp_path / "time.svg"
    shown = run(*VERB, "--nodes", 2, "--policies", "affinity", "--store", "none", "--plot", plot).stdout
    assert "affinity" in shown
    assert "random" not in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert "</svg>" in plot.read_text("utf-8")


def test_the_cost_of_a_choice_needs_no_costs_of_nodes(run: Run) -> None:
    found = json.loads(run("cluster", "simulate", "--cost", "--nodes", 2, "--requests", 100, "--json", "-").stdout)
    assert [row["state"] for row in found["results"]] == ["known", "everywhere", "unknown"]


@pytest.mark.parametrize(
    "wrong", [("--policies", "best"), ("--nodes", "0"), ("--store", "half"), ("--lose", "9")], ids=" ".join
)
def test_what_makes_no_sense_is_a_usage_error(run: Run, wrong: tuple[str, str]) -> None:
    assert run(*VERB, *wrong).exit_code == 2
    assert run("cluster", "simulate").exit_code == 2


def test_a_gateway_for_other_machines_needs_a_key(run: Run) -> None:
    with pytest.raises(InputError, match="--api-key"):
        run("route", "--backends", "http://127.0.0.1:1", "--host", "0.0.0.0")
    with pytest.raises(InputError, match="like http"):
        run("route", "--backends", "localhost:8000")
