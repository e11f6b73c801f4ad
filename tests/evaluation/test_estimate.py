"""A plan is measured speed times what the rows hold: in a closed form for a machine whose speed is known."""

import pytest
from benches import BLANK, bench_of, row_of, rows_of

from kvlink.evaluation import estimate as module
from kvlink.evaluation.case import Case
from kvlink.evaluation.estimate import Estimate, estimate, total
from kvlink.evaluation.evaluate import Limits
from kvlink.training.data import Row

PER_TOKEN, PER_PAIR = 0.5, 0.001


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of known speed."""
    monkeypatch.setattr(module, "_speed", lambda bench: (PER_TOKEN, PER_PAIR))


def planned(
    rows: list[Row], *, methods: int = 3, limits: Limits | None = None, generate: bool = False, context: int = 2048
) -> Estimate:
    bench = bench_of(context=context)
    (found,) = estimate(bench, {"t": rows}, methods=methods, limits=limits or Limits(), generate=generate)
    return found


def length(row: Row) -> int:
    return Case(bench_of(), row).prompt.num_tokens


@pytest.mark.usefixtures("known")
def test_a_plan_counts_rows_methods_and_tokens() -> None:
    rows = rows_of(3)
    found = planned(rows)
    assert (found.task, found.rows, found.methods, found.tokens) == ("t", 3, 3, sum(map(length, rows)))


@pytest.mark.usefixtures("known")
def test_each_method_costs_a_forward_and_all_share_one_for_encoding() -> None:
    tokens = length(row_of())
    assert planned([row_of()]).minutes == pytest.approx((PER_TOKEN * tokens + PER_PAIR * tokens**2) * (3 + 1) / 60)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("task", ["qa", "summarization"])
def test_answers_cost_more(task: str) -> None:
    rows = [row_of(task=task)]
    assert planned(rows, generate=True).minutes > planned(rows).minutes


@pytest.mark.usefixtures("known")
def test_documents_that_will_be_dropped_cost_nothing() -> None:
    assert planned([row_of()], limits=Limits(max_documents=1)).tokens < length(row_of())


@pytest.mark.usefixtures("known")
def test_each_task_has_a_row_and_no_rows_take_no_time() -> None:
    found = estimate(bench_of(), {"a": rows_of(1), "b": []}, methods=2, limits=Limits(), generate=False)
    assert [(one.task, one.rows, one.minutes > 0) for one in found] == [("a", 1, True), ("b", 0, False)]


@pytest.mark.usefixtures("known")
def test_a_row_that_gives_no_prompt_costs_nothing() -> None:
    assert planned([row_of(), BLANK]).minutes == planned([row_of()]).minutes


def test_the_total_is_the_sum_of_all_tasks() -> None:
    assert total([Estimate("a", 1, 1, 1, 2.0), Estimate("b", 1, 1, 1, 3.5)]) == 5.5


def test_the_measured_speed_is_above_zero() -> None:
    per_token, per_pair = module._speed(bench_of())
    assert per_token > 0
    assert per_pair >= 0
