"""`bench ttft`: every state is what it says, rivals are exact, and the limit is arithmetic."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlink import Engine
from kvlink.core.layout import Kind, Layout, Prompt
from kvlink.evaluation.bench.limit import attended, attention_flops, limit_arm
from kvlink.evaluation.bench.page_cache import cached_share, drop_page_cache
from kvlink.evaluation.bench.prefix_cache import PrefixCache, common_beginning
from kvlink.evaluation.bench.texts import other_question, question_of
from kvlink.evaluation.bench.ttft import QUESTION_TOKENS, SCENARIOS, bench_ttft, runs_of
from kvlink.evaluation.bench.watched import SPLIT
from kvlink.evaluation.plot import plot_ttft
from tiny_models import largest

TIMES = {"median_s", "q1_s", "q3_s", "samples_s", "split_s"}
FIELDS = {"scenario", "documents", "tokens", "arm", "state", "links", "reduction", "limit_s", "over_limit"} | TIMES
LENGTHS, LINKS, DOCUMENTS = [40, 90], (0, 3), 2


@pytest.fixture(scope="module")
def runs() -> list[None]:
    """One for each call of progress."""
    return []


@pytest.fixture(scope="module")
def rows(engine: Engine, runs: list[None]) -> list[dict[str, Any]]:
    before = engine.store.names()
    found = bench_ttft(
        engine,
        documents=DOCUMENTS,
        tokens=LENGTHS,
        links=LINKS,
        scenario_tokens=50,
        repeats=1,
        progress=lambda: runs.append(None),
    )
    assert engine.store.names() == before, "the engine's own store is not left alone"
    return found


def chosen(rows: list[dict[str, Any]], **wanted: object) -> list[dict[str, Any]]:
    """Return the rows with these fields; there is at least one."""
    found = [row for row in rows if wanted.items() <= row.items()]
    assert found
    return found


def tail(engine: Engine) -> int:
    """Tokens of T."""
    return len(engine.prompter.tail_ids(question_of(engine.prompter, QUESTION_TOKENS)))


def test_each_row_has_the_agreed_fields(rows: list[dict[str, Any]]) -> None:
    more = {"computed_tokens", "sources", "page_cache_share", "bytes", "read_digest_rate", "over_read"}
    for row in rows:
        assert FIELDS <= set(row) <= FIELDS | more


def test_there_is_a_row_for_each_length_arm_state_and_number_of_links(rows: list[dict[str, Any]]) -> None:
    kinds = {("full", "-", 0), ("read", "cold", 0), ("full+prefix_cache", "known_beginning", 0)}
    for links in LINKS:
        kinds |= {("assembled", state, links) for state in ("cold", "host", "warm")}
        kinds |= {("shared", state, links) for state in ("cold", "host", "warm", "known_beginning")}
        kinds |= {("limit", state, links) for state in ("warm", "known_beginning")}
    for tokens in LENGTHS:
        found = [(row["arm"], row["state"], row["links"]) for row in chosen(rows, tokens=tokens, scenario=None)]
        assert (set(found), len(found)) == (kinds, len(kinds))


def test_progress_is_told_as_often_as_was_announced(
    rows: list[dict[str, Any]], runs: list[None], engine: Engine
) -> None:
    assert rows
    assert len(runs) == runs_of(engine, LENGTHS, LINKS, 1)


def test_results_are_json(rows: list[dict[str, Any]]) -> None:
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


# --- states ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["shared", "assembled"])
def test_cold_reads_from_the_disk_and_computes_s_too(rows: list[dict[str, Any]], engine: Engine, arm: str) -> None:
    system = len(engine.prompter.system_ids(None))
    for row in chosen(rows, arm=arm, state="cold"):
        assert row["sources"] == {"disk": DOCUMENTS}
        assert row["computed_tokens"] == system + row["links"] * DOCUMENTS + tail(engine)
        assert row["split_s"]["read_s"] + row["split_s"]["verify_s"] > 0


@pytest.mark.parametrize("arm", ["shared", "assembled"])
def test_host_takes_objects_from_memory_and_knows_s(rows: list[dict[str, Any]], engine: Engine, arm: str) -> None:
    for row in chosen(rows, arm=arm, state="host"):
        assert row["sources"] == {"host": DOCUMENTS}
        assert row["computed_tokens"] == row["links"] * DOCUMENTS + tail(engine)


def test_warm_computes_exactly_links_and_t(rows: list[dict[str, Any]], engine: Engine) -> None:
    for row in chosen(rows, arm="shared", state="warm"):
        assert row["sources"] == {"device": DOCUMENTS}
        assert row["computed_tokens"] == row["links"] * DOCUMENTS + tail(engine)
        assert row["split_s"]["read_s"] == row["split_s"]["verify_s"] == row["split_s"]["rotate_s"] == 0


@pytest.mark.parametrize("arm", ["shared", "full+prefix_cache"])
def test_behind_a_known_beginning_t_alone_is_computed(rows: list[dict[str, Any]], engine: Engine, arm: str) -> None:
    for row in chosen(rows, arm=arm, state="known_beginning", scenario=None):
        assert row["computed_tokens"] == tail(engine)


def test_the_parts_of_a_time_are_no_more_than_the_whole(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["arm"] in ("shared", "assembled"):
            assert tuple(row["split_s"]) == SPLIT
            assert min(row["split_s"].values()) >= 0
            assert 0 < sum(row["split_s"].values()) <= row["median_s"] * 1.001


def test_cold_rows_tell_bytes_and_the_speed_of_reading_and_verifying(rows: list[dict[str, Any]]) -> None:
    for row in chosen(rows, arm="shared", state="cold"):
        read = chosen(rows, arm="read", tokens=row["tokens"])[0]
        assert row["bytes"] == read["bytes"] > 0
        assert row["read_digest_rate"] == read["bytes"] / read["median_s"]
        assert 0 <= row["page_cache_share"] <= 1
        (warm,) = chosen(rows, arm="shared", state="warm", tokens=row["tokens"], links=row["links"])
        more = row["over_read"] * row["bytes"] / row["read_digest_rate"]
        assert row["median_s"] == pytest.approx(warm["median_s"] + more)


def test_the_page_cache_says_what_it_still_holds(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(100_000))
    before = cached_share(tmp_path)
    drop_page_cache(tmp_path)
    assert before == 1
    assert cached_share(tmp_path) in (0, 1)  # 1 where the file system is memory
    assert (tmp_path / "a.safetensors").read_bytes() == bytes(100_000)


# --- changed documents ----------------------------------------------------------------------------------------------


def test_scenarios_compute_what_they_must_and_no_more(rows: list[dict[str, Any]], engine: Engine) -> None:
    system, length = len(engine.prompter.system_ids(None)), 50
    left = {"repeat": 0, "first_dropped": DOCUMENTS - 1, "first_exchanged": DOCUMENTS, "one_before": DOCUMENTS + 1}
    for scenario in SCENARIOS:
        (cached,) = chosen(rows, scenario=scenario, arm="full+prefix_cache")
        made_up = 3 if scenario == "first_dropped" else 10  # ids that made-up documents may have in common
        behind = left[scenario] * length + tail(engine)
        assert behind - made_up <= cached["computed_tokens"] <= behind < system + behind
        for row in chosen(rows, scenario=scenario, arm="shared"):
            assert row["sources"] == {"device": row["documents"]}
            assert row["computed_tokens"] == left[scenario] * row["links"] + tail(engine)


def test_each_scenario_is_held_to_full_prefill_of_as_many_documents(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["scenario"] and row["arm"] in ("shared", "full+prefix_cache"):
            (full,) = chosen(rows, arm="full", tokens=50, documents=row["documents"])
            assert row["reduction"] == pytest.approx(1 - row["median_s"] / full["median_s"])


def test_scenarios_can_be_left_out(engine: Engine) -> None:
    rows = bench_ttft(engine, documents=2, tokens=[40], links=(2,), repeats=1)
    assert {row["scenario"] for row in rows} == {None}
    assert len(rows) * 2 == runs_of(engine, [40], (2,), 1, scenarios=False)


# --- the rival ------------------------------------------------------------------------------------------------------


def test_another_question_begins_with_another_token(engine: Engine) -> None:
    prompter = engine.prompter
    question = question_of(prompter, 30)
    first, second = prompter.tail_ids(question), prompter.tail_ids(other_question(prompter, question, 30))
    assert first[0] != second[0]
    assert abs(len(first) - len(second)) <= 1


def test_a_prefix_cache_is_exact_and_computes_what_is_behind_the_common_beginning(engine: Engine) -> None:
    cache = PrefixCache(engine.runner, capacity=64)
    first = [3 + 7 * at % 90 for at in range(40)]
    for ids, computed in [(first, 40), (first, 1), ([*first[:25], 9, 8, 7], 3), (first[:10], 1), ([5, *first], 41)]:
        found = cache.prefill(ids)
        with torch.inference_mode():
            wanted = engine.runner.forward(cache=None, input_ids=torch.tensor([ids]))[0, -1]
        assert cache.computed == computed
        assert largest(found - wanted) <= 1e-4
    found = cache.append(11)
    with torch.inference_mode():
        wanted = engine.runner.forward(cache=None, input_ids=torch.tensor([[5, *first, 11]]))[0, -1]
    assert largest(found - wanted) <= 1e-4


def test_a_prefix_cache_that_is_restored_knows_what_it_knew(engine: Engine) -> None:
    cache = PrefixCache(engine.runner, capacity=64)
    first = list(range(5, 45))
    cache.prefill(first)
    before = cache.snapshot()
    cache.prefill([*first[:3], *range(50, 90)])
    cache.restore(before)
    found = cache.prefill([*first, 60])
    assert cache.computed == 1
    with torch.inference_mode():
        wanted = engine.runner.forward(cache=None, input_ids=torch.tensor([[*first, 60]]))[0, -1]
    assert largest(found - wanted) <= 1e-4
    cache.forget()
    cache.prefill(first)
    assert cache.computed == 40


def test_common_beginnings_are_counted() -> None:
    pairs = [((1, 2, 3), [1, 2, 4]), ((1, 2), (1, 2, 3)), ((), (1,)), ((2, 1), (1, 1))]
    assert [common_beginning(*pair) for pair in pairs] == [2, 2, 0, 0]


# --- the limit ------------------------------------------------------------------------------------------------------


def test_new_rows_are_counted_as_the_mask_shows_them() -> None:
    layout = Layout.build(system=3, documents=[[5], [4, 6], [2]], tail=7, num_links=2)
    mask, new = layout.mask(), layout.request_rows()[5:]
    wanted = [(int(mask[new, span.start].sum()), len(span)) for span in layout.of(Kind.SEGMENT)]
    assert attended(layout, known=5) == wanted


def test_the_arithmetic_is_that_of_two_products_in_each_layer(engine: Engine) -> None:
    layout = Layout.build(system=3, documents=[[5]], tail=7)
    shape, heads = engine.runner.geometry, engine.runner.config.num_attention_heads
    wanted = 2 * 7 * 5 * shape.layers * heads * (shape.head_dim + shape.value_dim)
    assert attention_flops(engine.runner, layout, known=3) == wanted


def test_a_limit_consists_of_a_forward_and_of_products(engine: Engine) -> None:
    prompt = Prompt((1, 2, 3), (((4, 5, 6),),), (7, 8))
    found = limit_arm(engine.runner, prompt, links=None, known=3)()
    assert found is not None
    seconds, parts = found
    assert seconds == pytest.approx(sum(parts.values()))
    assert min(parts.values()) > 0
    assert set(parts) == {"forward_s", "attention_s"}


def test_each_shared_row_is_held_to_the_limit_of_its_state(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["arm"] != "shared":
            assert row["limit_s"] is row["over_limit"] is None
            continue
        knows = row["state"] == "known_beginning" and row["scenario"] in (None, "repeat")
        state = "known_beginning" if knows else "warm"
        same = {name: row[name] for name in ("tokens", "links", "scenario")}
        (limit,) = chosen(rows, arm="limit", state=state, **same)
        assert row["limit_s"] == limit["median_s"]
        assert row["over_limit"] == row["median_s"] / limit["median_s"]


# --- the figure -----------------------------------------------------------------------------------------------------


def test_the_figure_names_every_state(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    plot_ttft(rows, tmp_path / "ttft.svg", title="tiny")
    drawn = (tmp_path / "ttft.svg").read_text("utf-8")
    for state in ("full prefill", "reuse, cold", "reuse, host", "reuse, warm", "reuse, known beginning"):
        assert f"<!-- {state} -->" in drawn
