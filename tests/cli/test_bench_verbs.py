"""`bench`: figures on standard output, every sample in the JSON, and a figure if one is asked for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
TTFT = ("bench", "ttft", "--documents", 2, "--tokens", "40,60", "--links", "0,2", "--repeats", 1)
ASSEMBLY = ("bench", "assembly", "--documents", 2, "--tokens", "40", "--repeats", 1)
ENCODE = ("bench", "encode", "--lengths", "40,60", "--repeats", 1)


@pytest.mark.parametrize(
    ("arguments", "rows"), [(TTFT, 2 * 7), (ASSEMBLY, 2), (ENCODE, 2)], ids=["ttft", "assembly", "encode"]
)
def test_a_benchmark_writes_its_rows_with_model_and_seed(
    run: Run, model: str, arguments: tuple[object, ...], rows: int
) -> None:
    found = json.loads(run(*arguments, "-m", model, "--json", "-").stdout)
    assert found["command"] == " ".join(map(str, arguments[:2]))
    assert (found["model"]["name"], found["seed"], len(found["results"])) == (model, 0, rows)


@pytest.mark.parametrize(
    ("arguments", "title"),
    [(TTFT, "time to first token"), (ASSEMBLY, "against copying"), (ENCODE, "against plain forwards")],
    ids=["ttft", "assembly", "encode"],
)
def test_a_benchmark_shows_a_table(run: Run, model: str, arguments: tuple[object, ...], title: str) -> None:
    result = run(*arguments, "-m", model)
    assert (result.exit_code, title in result.stdout) == (0, True)


def test_ttft_is_drawn_if_asked_for(run: Run, model: str, tmp_path: Path) -> None:
    run(*TTFT, "-m", model, "--plot", tmp_path / "ttft.svg")
    assert "</svg>" in (tmp_path / "ttft.svg").read_text("utf-8")


@pytest.mark.parametrize(
    "wrong",
    [("--tokens", "a"), ("--tokens", "0"), ("--tokens", ""), ("--tokens", "1,,2"), ("--links", "a"), ("--links", "-1")],
    ids=" ".join,
)
def test_a_list_of_numbers_that_is_none_is_a_usage_error(run: Run, model: str, wrong: tuple[str, str]) -> None:
    result = run("bench", "ttft", *wrong, "-m", model)
    assert result.exit_code == 2
    assert "is not a list of numbers" in result.stderr


def test_a_benchmark_leaves_no_store_behind(run: Run, model: str, tmp_path: Path) -> None:
    run(*ASSEMBLY, "-m", model)
    assert not (tmp_path / "cache").exists()
