"""`bench throughput`: a table that fits, every setting in the JSON, and a figure if one is asked for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
SIZES = ("--documents", 2, "--tokens", 24, "--question", 10, "--answer", 3, "--pool", 12, "--requests", 3)
VERB = ("bench", "throughput", *SIZES, "--concurrency", "1,2", "--warmup", 2, "--full-requests", 1)


def test_it_writes_its_rows_with_settings_and_draws_them(run: Run, model: str, tmp_path: Path) -> None:
    plot = tmp_path / "t.svg"
    found = json.loads(run(*VERB, "-m", model, "--json", "-", "--plot", plot).stdout)
    assert (found["schema"], found["command"], found["seed"]) == (1, "bench throughput", 0)
    assert [(row["arm"], row["concurrency"]) for row in found["results"]] == [("shared", 1), ("shared", 2), ("full", 1)]
    assert (found["settings"]["zipf"], found["settings"]["resident"], found["settings"]["pool"]) == (1.1, 0.5, 12)
    assert "</svg>" in plot.read_text("utf-8")


def test_its_table_is_at_most_100_columns_wide(run: Run, model: str) -> None:
    shown = run(*VERB, "-m", model, "--loop", "open", "--rate", "5").stdout
    assert "first token" in shown
    assert "open" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_one_arm_alone_is_measured(run: Run, model: str) -> None:
    found = json.loads(run(*VERB, "-m", model, "--arms", "full", "--json", "-").stdout)
    assert [row["arm"] for row in found["results"]] == ["full"]


@pytest.mark.parametrize(
    "wrong", [("--arms", "shared,fast"), ("--rate", "3"), ("--concurrency", "0"), ("--loop", "round")], ids=" ".join
)
def test_what_makes_no_sense_is_a_usage_error(run: Run, model: str, wrong: tuple[str, str]) -> None:
    assert run(*VERB, *wrong, "-m", model).exit_code == 2
