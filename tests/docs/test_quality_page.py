"""The figures on the page of quality are those of the committed results, and the results are those of the rows."""

import json
import re
from statistics import mean
from typing import Any

import pytest
from pages import DOCS, ROOT

from kvlink.evaluation.evaluate import summarise

PAGE = DOCS / "why" / "quality.md"
METHODS = ("concat_local", "concat_reencoded(sink=none)", "concat_reencoded")
RESULTS: dict[str, Any] = json.loads((ROOT / "benchmarks" / "evaluate.json").read_text("utf-8"))
HEAD, *ROWS = map(json.loads, (ROOT / "benchmarks" / "evaluate-rows.jsonl").read_text("utf-8").splitlines())
BY_PAIR = {(row["task"], row["method"]): row for row in RESULTS["results"]}
TASKS = list(dict.fromkeys(row["task"] for row in RESULTS["results"]))


def table() -> dict[str, list[str]]:
    """Return the cells of the page's table, by the set in the first one."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return {first: rest for first, *rest in cells}


def test_the_table_shows_every_set_of_the_results() -> None:
    assert {*table()} == {*TASKS, "**mean**"}


def test_the_table_shows_the_figures_of_the_results() -> None:
    for task in TASKS:
        against = BY_PAIR[task, "concat_reencoded"]["against_full"]["nll"]
        assert table()[task] == [
            str(BY_PAIR[task, "full"]["n"]),
            *(f"{BY_PAIR[task, method]['kl']:.2f}" for method in METHODS),
            *(f"{BY_PAIR[task, method]['agreement']:.2f}" for method in METHODS),
            f"{against['difference']:+.2f} ({against['low']:+.2f} to {against['high']:+.2f})",
        ]


def test_the_last_line_of_the_table_is_the_mean_over_sets() -> None:
    def over_sets(field: str, method: str) -> str:
        return f"{mean(BY_PAIR[task, method][field] for task in TASKS):.2f}"

    nll = mean(BY_PAIR[task, "concat_reencoded"]["against_full"]["nll"]["difference"] for task in TASKS)
    means = [over_sets(field, method) for field in ("kl", "agreement") for method in METHODS]
    assert table()["**mean**"] == ["", *means, f"{nll:+.2f}"]


def test_the_oracle_is_as_near_to_reuse_as_the_page_says() -> None:
    (told,) = re.findall(r"\bto (\d+e-\d+):", PAGE.read_text("utf-8"))
    found = max(
        abs(BY_PAIR[task, "block_mask"][field] - BY_PAIR[task, "concat_reencoded"][field])
        for task in TASKS
        for field in ("nll", "kl")
    )
    assert f"{found:.0e}" == told


def test_what_the_limit_took_is_what_the_page_says() -> None:
    full = [row for row in ROWS if row["method"] == "full"]
    dropped = {task: sum(row["dropped"] > 0 for row in full if row["task"] == task) for task in TASKS}
    news = [row["documents"] for row in full if row["task"] == "multi_news" and row["dropped"]]
    text = " ".join(PAGE.read_text("utf-8").split())
    assert f"{dropped.pop('musique')} of the {BY_PAIR['musique', 'full']['n']} rows of musique" in text
    assert f"{dropped.pop('2wikimultihopqa')} each of 2wikimultihopqa and hotpotqa" in text
    assert f"{dropped.pop('multi_news')} of multi_news" in text
    assert f"{news.count(0)} of those rows were left without any document and {news.count(1)} with one" in text
    assert dropped.pop("hotpotqa") == 2
    assert not any(dropped.values())
    assert not any("over_limit" in row for row in ROWS)


def test_the_results_are_the_summary_of_the_rows() -> None:
    for found, wanted in zip(summarise(ROWS), RESULTS["results"], strict=True):
        against, told = found.pop("against_full"), wanted["against_full"]
        assert {**found, "against_full": None} == pytest.approx({**wanted, "against_full": None})
        assert against.keys() == told.keys()
        assert all(against[metric] == pytest.approx(told[metric]) for metric in told)
    assert {key: RESULTS["settings"][key] for key in HEAD["settings"]} == HEAD["settings"]


def test_the_rows_hold_no_texts() -> None:
    numbers = {"nll", "kl", "agreement", "ttft_s", "tokens_computed", "bytes_loaded"}
    about = {"task", "id", "digest", "method", "documents", "dropped", "prompt_tokens", "gold"}
    assert {name for row in ROWS for name in row} == numbers | about
    assert all(isinstance(row[name], (int, float)) for row in ROWS for name in numbers)
    assert all(re.fullmatch(r"[\w-]+", row["id"]) for row in ROWS)
