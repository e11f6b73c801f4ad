"""`bench throughput` serves what it counts: whole answers, new orders, a device tier too small, memory given back."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kvlink import Engine
from kvlink.core.errors import InputError, KVLinkError
from kvlink.evaluation.bench import throughput
from kvlink.evaluation.bench.throughput import Full, bench_throughput, percentiles, require_given_back, runs_of
from kvlink.evaluation.bench.throughput_load import Serving, Traffic
from kvlink.evaluation.plot_throughput import plot_throughput
from kvlink.models.links import LinkTokens

TRAFFIC = Traffic(requests=8, warmup=4, documents=3, tokens=24, question=12, answer=6, pool=12, resident=0.5)
HOW: dict[str, Any] = {
    "concurrency": [1, 3],
    "loop": "open",
    "rate": None,
    "arms": ["shared", "full"],
    "full_requests": 4,
}


@pytest.fixture(scope="module")
def base(engine: Engine) -> Engine:
    """An engine with link tokens."""
    return Engine(
        runner=engine.runner,
        prompter=engine.prompter,
        loader=engine.loader,
        report=engine.report,
        end_ids=engine.prompter.end_ids,
        links=LinkTokens.random(engine.runner.embedding, num_links=2),
    )


@pytest.fixture(scope="module")
def calls() -> list[None]:
    """One for each call of progress."""
    return []


@pytest.fixture(scope="module")
def rows(base: Engine, calls: list[None]) -> list[dict[str, Any]]:
    return bench_throughput(base, TRAFFIC, **HOW, progress=lambda: calls.append(None))


def row_of(rows: list[dict[str, Any]], concurrency: int, loop: str = "closed", arm: str = "shared") -> dict[str, Any]:
    return next(row for row in rows if (row["arm"], row["concurrency"], row["loop"]) == (arm, concurrency, loop))


@contextmanager
def served(base: Engine, traffic: Traffic = TRAFFIC, concurrency: int = 3, rate: float | None = None) -> Iterator[Any]:
    """Serve and give what was asked, with the parts of the engine that did it."""
    texts = traffic.texts(base)
    with (
        throughput._encoded(base, texts, lambda: None) as loader,
        throughput._shared(base, loader, traffic, texts, concurrency) as (engine, scheduler, sessions),
    ):
        serving = Serving(engine, scheduler, traffic, texts, concurrency, rate)
        serving.run()
        yield serving, scheduler, sessions


# --- rows -----------------------------------------------------------------------------------------------------------


def test_there_is_a_row_for_each_level_and_loop_and_one_of_full(rows: list[dict[str, Any]]) -> None:
    kinds = [("shared", 1, "closed"), ("shared", 1, "open"), ("shared", 3, "closed"), ("shared", 3, "open")]
    found = [(row["arm"], row["concurrency"], row["loop"]) for row in rows]
    assert found == [*kinds, ("full", 1, "closed")]


def test_each_row_has_the_agreed_fields(rows: list[dict[str, Any]]) -> None:
    both = {"concurrency", "arm", "loop", "requests", "requests_per_s", "output_tokens_per_s", "ttft_s", "itl_s"}
    for row in rows:
        assert both | {"hit_ratio", "times_full", "links"} <= set(row)
        assert set(row["ttft_s"]) == set(row["itl_s"]) == {"p50", "p90", "p99", "p999"}
        assert {"device", "host", "disk", "remote"} <= set(row["hit_ratio"])
        if row["arm"] == "shared":
            assert {"scheduler_share", "rows_per_step", "calls_per_layer", "overhead_per_step_s"} <= set(row)
            assert 0 < row["scheduler_share"] < 1
            assert row["links"] == 2


def test_rates_are_ratios_of_what_was_counted(rows: list[dict[str, Any]]) -> None:
    full = rows[-1]
    assert full["requests"] == len(full["samples_s"]["total"]) == HOW["full_requests"]
    assert full["requests_per_s"] == pytest.approx(4 / sum(full["samples_s"]["total"]))
    for row in rows[:-1]:
        assert row["times_full"] == pytest.approx(row["requests_per_s"] / full["requests_per_s"])
        assert len(row["samples_s"]["ttft"]) == row["requests"] == TRAFFIC.requests
        assert row["gaps"]["all"] == TRAFFIC.requests * (TRAFFIC.answer - 1)


def test_an_open_loop_without_a_rate_gets_a_share_of_what_the_closed_one_served(rows: list[dict[str, Any]]) -> None:
    for count in (1, 3):
        assert row_of(rows, count, "open")["rate"] == pytest.approx(0.7 * row_of(rows, count)["requests_per_s"])


def test_progress_is_called_as_often_as_was_said(rows: list[dict[str, Any]], calls: list[None]) -> None:
    assert len(calls) == runs_of(TRAFFIC, **HOW)
    assert runs_of(TRAFFIC, **{**HOW, "arms": ["full"]}) == 5


def test_a_closed_loop_keeps_so_many_under_way(rows: list[dict[str, Any]]) -> None:
    assert row_of(rows, 1)["running_per_step"] <= 1
    assert 1.5 < row_of(rows, 3)["running_per_step"] <= 3
    assert row_of(rows, 3)["rows_per_step"] > row_of(rows, 1)["rows_per_step"]


def test_one_alone_is_attended_in_a_call_for_each_document_and_two_for_its_own_rows(rows: list[dict[str, Any]]) -> None:
    assert TRAFFIC.documents < row_of(rows, 1)["calls_per_layer"] <= TRAFFIC.documents + 2
    assert row_of(rows, 3)["calls_per_layer"] > TRAFFIC.documents + 2


def test_prompts_of_others_go_through_between_tokens_only_where_there_are_others(rows: list[dict[str, Any]]) -> None:
    assert row_of(rows, 1)["gaps"]["prefill"] == 0
    assert row_of(rows, 1)["itl_prefill_s"]["p50"] is None
    assert 0 < row_of(rows, 3)["gaps"]["prefill"] < row_of(rows, 3)["gaps"]["all"]


def test_documents_are_evicted_where_the_pool_does_not_fit(rows: list[dict[str, Any]], base: Engine) -> None:
    for row in rows[:-1]:
        found = row["hit_ratio"]
        assert row["evictions"] > 0
        assert found["device"] > 0
        assert found["disk"] + found["encoded"] > 0
        assert 0 < sum(found.values()) <= 1
    fits = replace(TRAFFIC, resident=1.0)
    assert bench_throughput(base, fits, concurrency=[3], arms=["shared"])[0]["evictions"] == 0


def test_percentiles_that_few_samples_do_not_tell_are_left_open() -> None:
    assert percentiles([1.0] * 999) == {"p50": 1.0, "p90": 1.0, "p99": None, "p999": None}
    assert percentiles([1.0] * 1000)["p99"] == 1.0
    assert percentiles([1.0] * 9999)["p999"] is None
    assert percentiles([1.0] * 10_000)["p999"] == 1.0
    assert set(percentiles([]).values()) == {None}


# --- the work -------------------------------------------------------------------------------------------------------


def test_the_full_arm_computes_whole_answers_of_the_stock_model(base: Engine) -> None:
    texts = TRAFFIC.texts(base)
    plain = Engine(runner=base.runner, prompter=base.prompter, loader=base.loader, report=base.report)
    for number, order in enumerate(islice(TRAFFIC.orders(), 3)):
        wanted = plain.generate(
            [texts[at] for at in order], TRAFFIC.asks(base), reuse=False, max_new_tokens=TRAFFIC.answer
        )
        assert Full(base, TRAFFIC, texts).answer(number) == list(wanted.ids)
        assert len(wanted.ids) == TRAFFIC.answer


def test_the_shared_arm_answers_each_counted_request_whole_and_as_an_engine_does(base: Engine) -> None:
    alone = Engine(
        runner=base.runner, prompter=base.prompter, loader=base.loader, report=base.report, links=base.assembler.links
    )
    with served(base) as (serving, _, _):
        orders = list(islice(TRAFFIC.orders(), TRAFFIC.warmup, TRAFFIC.warmup + TRAFFIC.requests))  # type: ignore[operator]
        assert len(serving.counted) == TRAFFIC.requests
        for one, order in zip(serving.counted, orders, strict=True):
            assert len(one.job.answer.ids) == len(one.times) == TRAFFIC.answer
            wanted = alone.generate(
                [serving.texts[at] for at in order], TRAFFIC.asks(base), max_new_tokens=TRAFFIC.answer
            )
            assert one.job.answer.ids == wanted.ids
            assert one.times == sorted(one.times)
            assert one.due < one.times[0]


def test_no_order_comes_twice_and_popular_documents_come_more_often() -> None:
    orders = list(islice(TRAFFIC.orders(), 400))
    assert len(set(orders)) == 400
    assert all(len(set(order)) == TRAFFIC.documents for order in orders)
    counts = Counter(at for order in orders for at in order)
    assert counts[0] > 2 * counts[TRAFFIC.pool - 1]
    assert orders == list(islice(TRAFFIC.orders(), 400))
    assert orders != list(islice(replace(TRAFFIC, seed=1).orders(), 400))


def test_an_open_loop_waits_for_arrivals_and_counts_from_them(base: Engine) -> None:
    slow = replace(TRAFFIC, requests=4, warmup=1)
    with served(base, slow, concurrency=2, rate=20.0) as (serving, _, _):
        gaps = list(islice(slow.gaps(20.0), len(serving.asked)))
        found = [after.due - before.due for before, after in zip(serving.asked, serving.asked[1:], strict=False)]
        assert found == pytest.approx(gaps[1:])
        assert serving.stop.at - serving.start.at >= sum(gaps[2:5])


def test_more_arrivals_than_can_be_served_wait_and_the_run_ends(base: Engine) -> None:
    with served(base, replace(TRAFFIC, requests=4, warmup=1), concurrency=1, rate=1e6) as (serving, _, _):
        assert len(serving.asked) == 1 + 4 + 1
        assert all(len(one.times) == TRAFFIC.answer for one in serving.counted)


@pytest.mark.parametrize(
    "wrong", [{"documents": 13}, {"resident": 0.1}, {"pool": 4, "resident": 1.0, "requests": 12}], ids=str
)
def test_traffic_that_cannot_be_served_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="pool"):
        replace(TRAFFIC, **wrong)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_all_is_given_back_and_what_is_not_is_told(base: Engine) -> None:
    with served(base) as (serving, scheduler, sessions):
        require_given_back(scheduler, sessions)
        assert serving.most_own_bytes > 0
        session = sessions.begin(serving.counted[0].job.request, room=1)
        with pytest.raises(KVLinkError, match="still held"):
            require_given_back(scheduler, sessions)
        sessions.end(session)


def test_a_run_that_keeps_a_lease_fails(base: Engine) -> None:
    with pytest.raises(KVLinkError, match="still held"), served(base) as (serving, _, sessions):
        sessions.begin(serving.counted[0].job.request, room=1)


# --- figure ---------------------------------------------------------------------------------------------------------


def test_the_figure_is_drawn_with_and_without_the_full_arm(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    plot_throughput(rows, tmp_path / "both.svg", title="tiny")
    plot_throughput(rows[:1], tmp_path / "shared.svg", title="tiny")
    plot_throughput(rows[-1:], tmp_path / "full.svg", title="tiny")
    both, shared = ((tmp_path / f"{name}.svg").read_text("utf-8") for name in ("both", "shared"))
    assert "</svg>" in both
    assert both != shared
