"""A summary is means over the rows that were scored, with paired differences from full; what was not scored is said."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from benches import BLANK, COSTS, DISTANCES, METHODS, bench_of, by_method, results_of, row_of, rows_of

from kvlink import InputError
from kvlink.core import scores
from kvlink.evaluation.case import Case
from kvlink.evaluation.evaluate import (
    METRICS,
    Limits,
    asked_for,
    evaluate,
    evaluate_row,
    require_scored,
    summarise,
)
from kvlink.evaluation.methods import Method
from kvlink.evaluation.methods.base import Prefilled
from kvlink.evaluation.methods.full import Full
from kvlink.training.data import Row
from tiny import NO_SYSTEM

# --- the summary ----------------------------------------------------------------------------------------------------

AGREED = {
    *("task", "method", "n", "rows", "em", "f1", "substring", "rouge_l", "nll", "kl", "agreement"),
    *("ttft_s", "tokens_computed", "bytes_loaded", "against_full"),
}


def test_the_summary_has_the_agreed_fields(plain: list[dict[str, Any]]) -> None:
    assert [set(row) for row in summarise(plain)] == [AGREED] * len(METHODS)


def test_with_answers_the_summary_has_on_full_beside_the_agreed_fields(answered: list[dict[str, Any]]) -> None:
    for row in summarise(answered):
        assert set(row) == AGREED | {"on_full"}
        assert set(row["on_full"]) == DISTANCES


def test_there_is_a_row_for_each_task_and_method() -> None:
    found = evaluate(bench_of(), {"a": rows_of(1), "b": rows_of(2)}, METHODS, limits=Limits())
    summary = summarise([result for results in found for result in results])
    assert [(row["task"], row["method"], row["n"]) for row in summary] == [
        (task, method, n) for task, n in (("a", 1), ("b", 2)) for method in METHODS
    ]


def test_a_summary_is_the_mean_over_rows(plain: list[dict[str, Any]]) -> None:
    for row in summarise(plain):
        own = [result for result in plain if result["method"] == row["method"]]
        for field in DISTANCES | COSTS:
            assert row[field] == pytest.approx(sum(result[field] for result in own) / 3)


def test_scores_that_were_not_taken_are_null(plain: list[dict[str, Any]]) -> None:
    assert {row[field] for row in summarise(plain) for field in ("em", "f1", "substring", "rouge_l")} == {None}


def test_the_oracle_is_scored_and_has_no_answers(answered: list[dict[str, Any]]) -> None:
    oracle = by_method(summarise(answered))["block_mask"]
    assert oracle["nll"] > 0
    assert [oracle[field] for field in ("em", "f1", "substring", "rouge_l")] == [None] * 4


def test_full_is_at_no_distance_from_itself_in_the_summary(answered: list[dict[str, Any]]) -> None:
    full = by_method(summarise(answered))["full"]
    assert (full["kl"], full["agreement"], full["against_full"]) == (0, 1, {})


def test_differences_from_full_are_paired_intervals(plain: list[dict[str, Any]]) -> None:
    for row in summarise(plain):
        for metric, found in row["against_full"].items():
            own, full = ([r[metric] for r in plain if r["method"] == method] for method in (row["method"], "full"))
            interval = scores.paired_interval(own, full)
            assert found == {"difference": interval.difference, "low": interval.low, "high": interval.high}


def test_differences_are_given_for_every_score_that_was_taken(answered: list[dict[str, Any]]) -> None:
    summary = by_method(summarise(answered))
    assert set(summary["concat_reencoded"]["against_full"]) == set(METRICS)
    assert set(summary["block_mask"]["against_full"]) == DISTANCES


def test_without_full_among_the_methods_there_are_no_differences_but_distances() -> None:
    (row,) = summarise(results_of(rows_of(2), ["concat_reencoded"]))
    assert row["against_full"] == {}
    assert row["kl"] > 0


def test_no_rows_have_no_summary() -> None:
    assert summarise([]) == []


def test_the_summary_is_of_the_rows_that_are_asked_for_in_the_order_of_their_tasks() -> None:
    results = [{"task": task, "id": f"r{n}", "method": "full"} for task in ("a", "b", "c") for n in range(3)]
    found = asked_for(results, {"c": rows_of(1), "a": rows_of(2)})
    assert [(result["task"], result["id"]) for result in found] == [("c", "r0"), ("a", "r0"), ("a", "r1")]


@pytest.mark.parametrize("generate", [False, True])
def test_n_counts_the_rows_that_were_scored_and_rows_all(generate: bool) -> None:
    rows = [row_of(name="r0"), row_of(name="r1", answers=[]), BLANK]
    for row in summarise(results_of(rows, generate=generate)):
        assert (row["n"], row["rows"]) == (1, 3)


# --- scores that are no numbers --------------------------------------------------------------------------------------


class Overflowing(Method):
    """Gives logits of no finite number on one row."""

    def __init__(self, value: float, *, on: str = "r1") -> None:
        self.value = value
        self.on = on

    def prefill(self, case: Case, tail: tuple[int, ...], *, keep: int, room: int = 0) -> Prefilled:
        found = Full().prefill(case, tail, keep=keep, room=room)
        if case.row.id == self.on:
            return replace(found, logits=torch.full_like(found.logits, self.value))
        return found


def overflowing(value: float, *, generate: bool = False) -> list[dict[str, Any]]:
    methods = {"full": Full(), "overflowing": Overflowing(value)}
    found = (evaluate_row(bench_of(), "t", row, methods, limits=Limits(), generate=generate) for row in rows_of(3))
    return [result for results in found for result in results]


@pytest.mark.parametrize("generate", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scores_that_are_no_finite_numbers_are_null_and_told(value: float, generate: bool) -> None:
    found = overflowing(value, generate=generate)
    (bad,) = [result for result in found if "error" in result]
    assert (bad["id"], bad["method"], bad["nll"], bad["kl"]) == ("r1", "overflowing", None, None)
    assert bad["error"].startswith("nll, kl")
    assert "no finite number" in bad["error"]
    assert ("on_full.nll" in bad["error"]) == generate
    json.dumps(found, allow_nan=False)


def test_a_row_whose_scores_are_no_finite_numbers_is_not_among_those_scored() -> None:
    summary = by_method(summarise(overflowing(math.nan)))
    assert (summary["overflowing"]["n"], summary["overflowing"]["rows"]) == (2, 3)
    assert summary["overflowing"]["nll"] == pytest.approx(
        sum(result["nll"] for result in overflowing(math.nan) if result["method"] == "full" and result["id"] != "r1")
        / 2
    )
    assert summary["overflowing"]["against_full"]["nll"] == {"difference": 0, "low": 0, "high": 0}


def test_a_row_that_full_could_not_be_scored_on_is_compared_with_nothing() -> None:
    found = [{**result, "method": {"full": "other"}.get(result["method"], "full")} for result in overflowing(math.nan)]
    summary = by_method(summarise(found))
    assert (summary["other"]["n"], summary["full"]["n"]) == (3, 2)
    assert summary["other"]["against_full"]["agreement"] == {"difference": 0, "low": 0, "high": 0}


# --- nothing to score -----------------------------------------------------------------------------------------------


def test_a_task_without_any_scored_row_is_an_error_that_says_why() -> None:
    found = results_of(rows_of(2), bench=bench_of(template=NO_SYSTEM))
    with pytest.raises(InputError, match=r"nothing could be scored on t: a system prompt was given, .*refuses it"):
        require_scored(summarise(found))


def test_rows_without_answers_are_said_to_be_the_reason() -> None:
    with pytest.raises(InputError, match="nothing could be scored on t: no row has an answer, see --generate"):
        require_scored(summarise(results_of([row_of(answers=[])])))


def test_all_tasks_without_a_scored_row_are_named() -> None:
    summary = summarise([{**r, "task": task} for task in ("a", "b") for r in results_of([row_of(answers=[])])])
    with pytest.raises(InputError, match=r"on a: .* \| b: "):
        require_scored(summary)


@pytest.mark.parametrize(
    ("rows", "generate"), [([row_of(), BLANK], False), ([row_of(answers=[])], True)], ids=["one scored", "answered"]
)
def test_one_row_that_was_scored_or_answered_is_enough(rows: list[Row], generate: bool) -> None:
    require_scored(summarise(results_of(rows, generate=generate)))
