"""The benchmarks measure what they say, on a tiny model in no time, and give the fields that were agreed on."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvlink import Engine, InputError
from kvlink.evaluation.bench.assembly import bench_assembly, bench_encode
from kvlink.evaluation.bench.texts import document_of, question_of
from kvlink.evaluation.bench.ttft import bench_ttft, drop_page_cache, runs_of
from kvlink.evaluation.plot import plot_ttft
from kvlink.models.prompt import Prompter
from tiny import byte_tokenizer, metaspace_tokenizer

TIMES = {"median_s", "q1_s", "q3_s", "samples_s", "split_s"}


@pytest.fixture(scope="module")
def runs() -> list[None]:
    """One for each call of progress."""
    return []


@pytest.fixture(scope="module")
def ttft(engine: Engine, runs: list[None]) -> list[dict[str, Any]]:
    return bench_ttft(engine, documents=2, tokens=[40, 90], links=(0, 3), repeats=1, progress=lambda: runs.append(None))


# --- texts ----------------------------------------------------------------------------------------------------------

TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "merges": byte_tokenizer(merges=[("t", "h"), ("th", "e"), ("a", "n"), ("an", "d"), ("Ċ", "Ċ")]),
    "metaspace": metaspace_tokenizer(),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("tokens", [4, 17, 100, 333])
def test_a_made_up_document_has_exactly_as_many_tokens_as_were_asked_for(name: str, tokens: int) -> None:
    prompter = Prompter(tokenizer=TOKENIZERS[name])
    for seed in range(5):
        assert len(prompter.document_ids(document_of(prompter, tokens, seed=seed))) == tokens


def test_another_seed_gives_another_document(engine: Engine) -> None:
    texts = {document_of(engine.prompter, 100, seed=seed).text for seed in range(5)}
    assert len(texts) == 5


def test_the_same_seed_gives_the_same_document(engine: Engine) -> None:
    assert document_of(engine.prompter, 100, seed=3) == document_of(engine.prompter, 100, seed=3)


def test_a_length_that_no_document_has_is_an_error(engine: Engine) -> None:
    with pytest.raises(InputError, match="exactly 1 tokens"):
        document_of(engine.prompter, 1, seed=0)


@pytest.mark.parametrize("tokens", [5, 30, 200])
def test_a_made_up_question_has_about_as_many_tokens_as_were_asked_for(engine: Engine, tokens: int) -> None:
    prompter = engine.prompter
    found = len(prompter.tail_ids(question_of(prompter, tokens))) - len(prompter.tail_ids("x")) + 1
    assert tokens - 10 < found <= tokens


# --- time to first token --------------------------------------------------------------------------------------------


def test_each_row_of_ttft_has_the_agreed_fields(ttft: list[dict[str, Any]]) -> None:
    for row in ttft:
        assert set(row) == {"documents", "tokens", "arm", "state", "links", "reduction"} | TIMES


def test_there_is_a_row_for_each_length_arm_state_and_number_of_links(ttft: list[dict[str, Any]]) -> None:
    kinds = [("full", "-", 0)] + [("assembled", state, links) for links in (0, 3) for state in ("cold", "host", "warm")]
    found = [(row["documents"], row["tokens"], row["arm"], row["state"], row["links"]) for row in ttft]
    assert found == [(2, tokens, *kind) for tokens in (40, 90) for kind in kinds]


def test_the_reduction_is_one_minus_the_share_of_the_full_arm(ttft: list[dict[str, Any]]) -> None:
    for tokens in (40, 90):
        rows = [row for row in ttft if row["tokens"] == tokens]
        for row in rows:
            assert row["reduction"] == pytest.approx(1 - row["median_s"] / rows[0]["median_s"])
        assert rows[0]["reduction"] == 0


def test_the_parts_of_a_reused_prompt_are_told_and_are_no_more_than_the_whole(ttft: list[dict[str, Any]]) -> None:
    for row in ttft:
        if row["arm"] == "full":
            assert row["split_s"] == {}
        else:
            assert set(row["split_s"]) == {"tokenise_s", "load_s", "rotate_s", "forward_s", "sample_s"}
            assert 0 < sum(row["split_s"].values()) <= row["median_s"]


def test_every_sample_is_kept(ttft: list[dict[str, Any]]) -> None:
    assert all(row["samples_s"] == [row["median_s"]] for row in ttft)


@pytest.mark.usefixtures("ttft")
def test_the_engines_own_store_is_left_alone(engine: Engine) -> None:
    assert engine.store.names() == set()


def test_progress_is_told_as_often_as_was_announced(ttft: list[dict[str, Any]], runs: list[None]) -> None:
    assert len(runs) == runs_of([40, 90], (0, 3), 1)


def test_ttft_results_are_json(ttft: list[dict[str, Any]]) -> None:
    assert json.loads(json.dumps(ttft, allow_nan=False)) == ttft


def test_dropping_the_page_cache_leaves_the_files_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.safetensors").write_bytes(b"bytes")
    drop_page_cache(tmp_path)
    assert (tmp_path / "a" / "b.safetensors").read_bytes() == b"bytes"


# --- assembling and encoding ----------------------------------------------------------------------------------------


def test_assembling_is_compared_with_a_copy_of_the_same_bytes(engine: Engine) -> None:
    rows = bench_assembly(engine, documents=2, tokens=[40], repeats=1)
    assert [set(row) for row in rows] == [{"documents", "tokens", "arm", "bytes", "ratio"} | TIMES] * 2
    assert [(row["arm"], row["documents"], row["tokens"]) for row in rows] == [("copy", 2, 40), ("assemble", 2, 40)]
    assert {row["bytes"] for row in rows} == {2 * 40 * engine.runner.geometry.bytes_per_token(engine.runner.dtype)}
    assert rows[0]["ratio"] == 1


def test_encoding_is_compared_with_plain_forwards_over_the_same_documents(engine: Engine) -> None:
    rows = bench_encode(engine, lengths=[40, 60, 41], repeats=1)
    assert [set(row) for row in rows] == [{"documents", "tokens", "arm", "tokens_per_s", "ratio"} | TIMES] * 2
    assert [(row["arm"], row["documents"], row["tokens"]) for row in rows] == [("plain", 3, 141), ("encode", 3, 141)]
    assert rows[0]["ratio"] == 1
    assert rows[1]["tokens_per_s"] == pytest.approx(141 / rows[1]["median_s"])


# --- figures --------------------------------------------------------------------------------------------------------


def test_ttft_is_drawn_as_svg(ttft: list[dict[str, Any]], tmp_path: Path) -> None:
    plot_ttft(ttft, tmp_path / "new" / "ttft.svg", title="tiny")
    drawn = (tmp_path / "new" / "ttft.svg").read_text("utf-8")
    assert drawn.startswith("<?xml")
    assert "</svg>" in drawn


def test_the_same_rows_draw_the_same_figure(ttft: list[dict[str, Any]], tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        plot_ttft(ttft, tmp_path / name, title="tiny")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("place", ["file/ttft.svg", "folder.svg", "ttft.txt"])
def test_a_figure_that_cannot_be_written_is_an_error_that_names_it(
    ttft: list[dict[str, Any]], tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(InputError, match=f"cannot be written to .*{place}"):
        plot_ttft(ttft, tmp_path / place, title="tiny")
