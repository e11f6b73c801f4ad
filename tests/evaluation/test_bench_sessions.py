"""`bench memory|dialogue|decode`: what is counted is what is held, and all arms do the same work."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlink import Engine, InputError
from kvlink.evaluation.bench.decode import bench_decode
from kvlink.evaluation.bench.dialogue import CHANGES, InFull, Script, Shared, bench_dialogue, runs_of
from kvlink.evaluation.bench.memory import ASSEMBLED_SESSIONS, bench_memory, storage_bytes
from kvlink.evaluation.plot_sessions import plot_dialogue, plot_memory
from kvlink.models.prompt import Prompter
from kvlink.store.memory import MemoryStore
from tiny import byte_tokenizer
from tiny_models import tiny_model

TIMES = {"median_s", "q1_s", "q3_s", "samples_s", "split_s"}
SESSIONS, DOCUMENTS, TOKENS, LINKS, ANSWER, TURNS = [1, 6], 4, 60, 2, 3, 6


@pytest.fixture(scope="module")
def memory(engine: Engine) -> list[dict[str, Any]]:
    return bench_memory(engine, sessions=SESSIONS, documents=DOCUMENTS, tokens=TOKENS, links=LINKS, answer=ANSWER)


@pytest.fixture(scope="module")
def runs() -> list[None]:
    """One for each call of progress."""
    return []


@pytest.fixture(scope="module")
def dialogue(engine: Engine, runs: list[None]) -> list[dict[str, Any]]:
    return bench_dialogue(
        engine,
        documents=DOCUMENTS,
        tokens=TOKENS,
        turns=TURNS,
        answer=ANSWER,
        links=LINKS,
        repeats=1,
        progress=lambda: runs.append(None),
    )


@pytest.fixture
def assembling(engine: Engine) -> Engine:
    """An engine that shares nothing."""
    return Engine(runner=engine.runner, prompter=engine.prompter, loader=engine.loader, report=engine.report)


def script_of(prompter: Prompter, **options: int) -> Script:
    sizes = {"documents": DOCUMENTS, "tokens": TOKENS, "turns": TURNS, "answer": ANSWER}
    return Script.write(prompter, **(sizes | options))


# --- memory ---------------------------------------------------------------------------------------------------------


def test_there_is_a_row_for_each_number_of_sessions_and_arm(memory: list[dict[str, Any]]) -> None:
    found = [(row["arm"], row["sessions"]) for row in memory]
    assert found == [(arm, sessions) for arm in ("shared", "assembled") for sessions in SESSIONS]
    assert all(row["bytes"] == row["documents_bytes"] + row["own_bytes"] for row in memory)
    assert json.loads(json.dumps(memory, allow_nan=False)) == memory


def test_sessions_per_gib_are_those_of_the_bytes(memory: list[dict[str, Any]]) -> None:
    for row in memory:
        assert row["sessions_per_gib"] * row["bytes"] == pytest.approx(row["sessions"] * 2**30)


def test_shared_documents_are_there_once_however_many_sessions_read_them(
    memory: list[dict[str, Any]], engine: Engine
) -> None:
    once = DOCUMENTS * TOKENS * engine.runner.geometry.bytes_per_token(engine.runner.dtype)
    assert {row["documents_bytes"] for row in memory if row["arm"] == "shared"} == {once}
    assembled = [row["documents_bytes"] for row in memory if row["arm"] == "assembled"]
    assert assembled == [sessions * once for sessions in SESSIONS]


def test_a_session_owns_its_own_tokens_and_little_else(memory: list[dict[str, Any]], engine: Engine) -> None:
    per_token = engine.runner.geometry.bytes_per_token(engine.runner.dtype)
    for row in memory:
        own = row["own_bytes"] / (row["own_tokens"] * per_token)
        assert 1 <= own < 1.15
        if row["arm"] == "shared":
            assert 1 < row["ratio"] < 1.15
    system = len(engine.prompter.system_ids(None))
    assert memory[0]["own_tokens"] > system + LINKS * DOCUMENTS + ANSWER


def test_what_was_extrapolated_says_from_how_many(memory: list[dict[str, Any]]) -> None:
    measured = {(row["arm"], row["sessions"]): row["measured_sessions"] for row in memory}
    assert measured["shared", 6] == 6
    assert measured["assembled", 6] == ASSEMBLED_SESSIONS


def test_the_process_grows_by_what_was_counted() -> None:
    """Keys and values as large as those of a real model, so that what the process takes besides is small."""
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), num_hidden_layers=8, head_dim=128)
    engine = Engine.from_pretrained(model, tokenizer=tokenizer)
    shared, assembled = bench_memory(engine, sessions=[24], documents=4, tokens=600, links=LINKS, answer=2)
    for row in (shared, assembled):
        assert row["bytes"] > 80e6
        assert 0.9 < row["rss_ratio"] < 1.1


def test_a_storage_is_counted_once_and_whole() -> None:
    one, other = torch.zeros(100), torch.zeros(10, dtype=torch.float64)
    assert storage_bytes([one, one[5:10], one.view(10, 10), other]) == 400 + 80
    assert storage_bytes([one[:1]]) == 400


def test_memory_is_drawn(memory: list[dict[str, Any]], tmp_path: Path) -> None:
    plot_memory(memory, tmp_path / "memory.svg", title="tiny")
    assert "<!-- documents copied into each -->" in (tmp_path / "memory.svg").read_text("utf-8")


# --- dialogue -------------------------------------------------------------------------------------------------------


def test_documents_change_in_every_other_turn(engine: Engine) -> None:
    script = script_of(engine.prompter, turns=10)
    assert [step.change for step in script.steps] == ["-", "join", "-", "leave", "-", "move", "-", "join", "-", "leave"]
    for before, step in zip(script.steps, script.steps[1:], strict=False):
        was = [*(at for turn in before.documents for at in turn)]
        now = [*(at for turn in step.documents for at in turn)]
        gone, new = set(was) - set(now), set(now) - set(was)
        assert (len(gone), len(new)) == (step.change == "leave", step.change == "join")
        assert (was != now) == (step.change in CHANGES)
        assert len(step.documents) == len(before.documents) + 1


def test_a_long_conversation_runs_out_of_no_documents(engine: Engine) -> None:
    steps = script_of(engine.prompter, documents=2, turns=40).steps
    assert all(step.documents[0] for step in steps)
    assert [step.change for step in steps][-2:] == ["-", "join"]


def test_a_turns_prompt_is_that_of_the_turn_before_with_its_answer(engine: Engine) -> None:
    script = script_of(engine.prompter)
    first, second = (script.prompt(number, engine.prompter) for number in (0, 1))
    assert second.history[0].documents == first.documents
    assert second.history[0].tail[: len(first.tail)] == first.tail
    assert second.history[0].tail[len(first.tail) :][:ANSWER] == script.answers[0]
    assert len(second.documents) == 1  # it joins in the turn that brings it


def test_all_arms_answer_the_same_prompts_and_agree_where_there_are_no_documents(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With documents taken out of the script, shared is exact: the logits of all arms are those of full attention."""
    script = script_of(engine.prompter)
    steps = tuple(type(step)(step.change, tuple(() for _ in step.documents), step.question) for step in script.steps)
    bare = type(script)(script.texts, steps, script.answers)
    seen: list[Tensor] = []

    def noted(logits: Tensor) -> int:
        seen.append(logits.clone())
        return 0

    monkeypatch.setattr("kvlink.evaluation.bench.dialogue.greedy", noted)
    found = []
    for arm in (
        InFull(engine, bare, keeps=False),
        InFull(engine, bare, keeps=True),
        Shared(engine, bare, store=MemoryStore(budget_bytes=1 << 30), links=None),
    ):
        seen.clear()
        arm.begin()
        for number in range(TURNS):
            arm.ask(number)
        found.append(torch.stack(seen))
    assert found[0].shape[0] == TURNS * ANSWER
    for other in found[1:]:
        assert float((other - found[0]).abs().max()) <= 1e-4


def test_a_row_has_means_and_every_turn(dialogue: list[dict[str, Any]]) -> None:
    assert [(row["arm"], row["state"], row["links"]) for row in dialogue] == [
        ("full", "-", 0),
        ("full+prefix_cache", "known_beginning", 0),
        ("shared", "known_beginning", LINKS),
    ]
    for row in dialogue:
        assert set(row) >= TIMES | {"documents", "tokens", "answer_tokens", "ttft", "turns", "reduction"}
        assert [turn["turn"] for turn in row["turns"]] == list(range(1, TURNS + 1))
        assert 0 < row["ttft"]["median_s"] < row["median_s"]
        assert row["median_s"] == pytest.approx(sum(turn["response_s"] for turn in row["turns"]) / TURNS)
    assert dialogue[0]["reduction"] == dialogue[1]["reduction_to_prefix_cache"] == 0
    assert json.loads(json.dumps(dialogue, allow_nan=False)) == dialogue


def test_what_each_arm_computes_is_what_it_does_not_know(dialogue: list[dict[str, Any]], engine: Engine) -> None:
    script = script_of(engine.prompter)
    prompts = [script.prompt(number, engine.prompter) for number in range(TURNS)]
    full, cached, shared = ([turn["computed_tokens"] for turn in row["turns"]] for row in dialogue)
    assert full == [prompt.num_tokens for prompt in prompts]
    assert cached[0] == full[0]
    for number, step in enumerate(script.steps):
        rows = len(prompts[number].layout(num_links=LINKS).request_rows())
        if number and step.change in ("-", "join"):
            before = prompts[number - 1].num_tokens + ANSWER - 1  # the last token of an answer is not computed
            assert cached[number] == full[number] - before
            own = len(prompts[number - 1].layout(num_links=LINKS).request_rows()) + ANSWER - 1
            assert shared[number] == rows - own
        else:
            assert shared[number] <= rows
            assert shared[number] < cached[number] <= full[number]


def test_progress_is_told_for_each_turn(dialogue: list[dict[str, Any]], runs: list[None]) -> None:
    assert dialogue
    assert len(runs) == runs_of(TURNS, 1)


def test_a_conversation_beyond_the_context_is_refused_with_both_figures(engine: Engine) -> None:
    with pytest.raises(InputError, match=rf"grows to \d+ tokens, the model takes {engine.report.context}"):
        bench_dialogue(engine, documents=5, tokens=2000, turns=1, answer=1, repeats=1)


def test_a_dialogue_is_drawn(dialogue: list[dict[str, Any]], tmp_path: Path) -> None:
    plot_dialogue(dialogue, tmp_path / "dialogue.svg", title="tiny")
    drawn = (tmp_path / "dialogue.svg").read_text("utf-8")
    assert "full prefill, mean" in drawn
    assert "documents shared, mean" in drawn


# --- decoding -------------------------------------------------------------------------------------------------------


def test_decoding_is_held_to_stock_transformers(engine: Engine) -> None:
    rows = bench_decode(engine, documents=2, tokens=[40], links=LINKS, answer=3, repeats=1)
    assert [row["arm"] for row in rows] == ["stock", "assembled", "shared"]
    assert rows[0]["ratio"] == 1
    for row in rows:
        assert set(row) >= TIMES | {"documents", "tokens", "links", "decode_s", "answer_tokens"}
        assert row["decode_s"] == row["median_s"] == row["ratio"] * rows[0]["median_s"] or row["ratio"] > 0


def test_all_arms_of_decoding_continue_the_same_prompt(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def noted(logits: Tensor) -> int:
        seen.append(logits.clone())
        return 0

    monkeypatch.setattr("kvlink.evaluation.bench.decode.greedy", noted)
    bench_decode(engine, documents=2, tokens=[40], links=LINKS, answer=3, repeats=1)
    stock, assembled, shared = (torch.stack(seen[start : start + 3]) for start in (0, 3, 6))
    assert float((assembled - stock).abs().max()) <= 1e-4
    assert float((shared - stock).abs().max()) <= 1e-4
    again = torch.stack(seen[9:])
    assert float((again - torch.stack(seen[:9])).abs().max()) <= 1e-5  # each round begins where the first did


def test_what_cannot_be_shared_is_refused(assembling: Engine) -> None:
    with pytest.raises(InputError, match="copied into each prompt"):
        bench_memory(assembling, sessions=[1], documents=1, tokens=40)
    with pytest.raises(InputError, match="copied into each prompt"):
        bench_dialogue(assembling, documents=4, tokens=40)
    with pytest.raises(InputError, match="copied into each prompt"):
        bench_decode(assembling, documents=1, tokens=[40])
