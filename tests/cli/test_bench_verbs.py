"""`bench`: figures on standard output, every sample in the JSON, and a figure if one is asked for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlink.core.errors import InputError

Run = Callable[..., Any]
TTFT = ("bench", "ttft", "--documents", 2, "--tokens", "40", "--links", "2", "--no-scenarios", "--repeats", 1)
CHANGED = ("bench", "ttft", "--documents", 2, "--tokens", "40", "--links", "2", "--repeats", 1)
DECODE = ("bench", "decode", "--documents", 2, "--tokens", "40,60", "--answer", 2, "--repeats", 1)
MEMORY = ("bench", "memory", "--sessions", "1,3", "--documents", 2, "--tokens", 40, "--answer", 2)
DIALOGUE = ("bench", "dialogue", "--documents", 4, "--tokens", 40, "--turns", 4, "--answer", 2, "--repeats", 1)
ASSEMBLY = ("bench", "assembly", "--documents", 2, "--tokens", "40", "--repeats", 1)
ENCODE = ("bench", "encode", "--lengths", "40,60", "--repeats", 1)


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [(TTFT, 12), (CHANGED, 27), (DECODE, 6), (MEMORY, 4), (DIALOGUE, 3), (ASSEMBLY, 2), (ENCODE, 2)],
    ids=["ttft", "changed", "decode", "memory", "dialogue", "assembly", "encode"],
)
def test_a_benchmark_writes_its_rows_with_model_and_seed(
    run: Run, model: str, arguments: tuple[object, ...], rows: int
) -> None:
    found = json.loads(run(*arguments, "-m", model, "--json", "-").stdout)
    assert found["command"] == " ".join(map(str, arguments[:2]))
    assert (found["model"]["name"], found["seed"], len(found["results"])) == (model, 0, rows)


@pytest.mark.parametrize(
    ("arguments", "title"),
    [
        (TTFT, "time to first token"),
        (DECODE, "decoding"),
        (MEMORY, "sessions on 2 x 40 tokens"),
        (DIALOGUE, "mean of all turns"),
        (ASSEMBLY, "against copying"),
        (ENCODE, "against plain forwards"),
    ],
    ids=["ttft", "decode", "memory", "dialogue", "assembly", "encode"],
)
def test_a_benchmark_shows_a_table(run: Run, model: str, arguments: tuple[object, ...], title: str) -> None:
    result = run(*arguments, "-m", model)
    assert (result.exit_code, title in result.stdout) == (0, True)


@pytest.mark.parametrize("arguments", [TTFT, MEMORY, DIALOGUE], ids=["ttft", "memory", "dialogue"])
def test_a_figure_is_drawn_if_asked_for(run: Run, model: str, tmp_path: Path, arguments: tuple[object, ...]) -> None:
    run(*arguments, "-m", model, "--plot", tmp_path / "figure.svg")
    assert "</svg>" in (tmp_path / "figure.svg").read_text("utf-8")


@pytest.mark.parametrize("arguments", [TTFT, MEMORY, DIALOGUE], ids=["ttft", "memory", "dialogue"])
def test_a_figure_that_could_not_be_drawn_is_refused_before_anything_is_measured(
    run: Run, model: str, tmp_path: Path, arguments: tuple[object, ...]
) -> None:
    with pytest.raises(InputError, match=r"name it \.svg or \.png"):
        run(*arguments, "-m", model, "--plot", tmp_path / "figure.txt")


@pytest.mark.parametrize("arguments", [CHANGED, DECODE, MEMORY, DIALOGUE], ids=["ttft", "decode", "memory", "dialogue"])
def test_tables_fit_a_hundred_columns(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = run(*arguments, "-m", model).stdout.splitlines()
    assert max(map(len, shown)) <= 100
    assert not any("…" in line for line in shown)
    borders = [line for line in shown if line.startswith("┏")]
    heads = [shown[at + 2] for at, line in enumerate(shown) if line.startswith("┏")]
    assert borders
    assert all(head.startswith("┡") for head in heads)  # no heading is broken into two lines


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
