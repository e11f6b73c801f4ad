"""`bench store`: one arm at a time; every sample in the JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
VERB = ("bench", "store", "--repeats", 1)


def rows_of(result: Any) -> list[dict[str, Any]]:
    found = json.loads(result.stdout)
    assert (found["schema"], found["command"], found["seed"]) == (1, "bench store", 0)
    assert found["model"]["digest"]
    return found["results"]


def test_without_a_choice_it_measures_loading(run: Run, model: str) -> None:
    rows = rows_of(run(*VERB, "-m", model, "--tokens", "40", "--json", "-"))
    assert {row["what"] for row in rows} == {"load", "decode", "copy"}
    assert "int8" in run(*VERB, "-m", model, "--tokens", "40").stdout


def test_break_even_says_from_where_reuse_pays(run: Run, model: str, tmp_path: Path) -> None:
    given = (*VERB, "-m", model, "--break-even", "--tokens", "40,60", "--remote", f"file://{tmp_path}")
    assert {row["tier"] for row in rows_of(run(*given, "--json", "-"))} == {"host", "disk", "disk, cold", "remote"}
    assert "where reuse pays" in run(*given).stdout


@pytest.mark.allow_hosts(["127.0.0.1"])
def test_prefetch_serves_traffic_and_draws_it(run: Run, tmp_path: Path) -> None:
    plot = tmp_path / "p.svg"
    given = ("bench", "store", "--prefetch", "--requests", 20, "--network", "1000,0.5", "--plot", plot)
    rows = rows_of(run(*given, "--json", "-"))
    assert [row["prefetch"] for row in rows] == [False, True]
    assert rows[0]["network"] == {"bytes_per_s": 1e9, "latency_s": 0.0005}
    assert "</svg>" in plot.read_text("utf-8")


def test_soak_tells_each_quarter(run: Run) -> None:
    result = run("bench", "store", "--soak", "--requests", 20)
    assert result.exit_code == 0
    assert "requests in orders never seen" in result.stdout


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (("--prefetch", "--soak"), "choose one of"),
        (("--prefetch", "--network", "fast"), "is not MB/s and ms"),
        (("--prefetch", "--network", "0,1"), "is not MB/s and ms"),
        (("--tokens", "a"), "is not a list of numbers"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(run: Run, model: str, wrong: tuple[str, ...], why: str) -> None:
    result = run("bench", "store", *wrong, "-m", model)
    assert (result.exit_code, why in " ".join(result.stderr.replace("│", " ").split())) == (2, True)
