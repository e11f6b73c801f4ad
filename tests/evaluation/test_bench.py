"""The benchmarks measure what they say, on a tiny model in no time, and give the fields that were agreed on."""

from pathlib import Path
from typing import Any

import pytest

from kvlink import Engine, InputError
from kvlink.evaluation.bench.assembly import bench_assembly, bench_encode
from kvlink.evaluation.bench.texts import document_of, question_of
from kvlink.evaluation.bench.ttft import bench_ttft
from kvlink.evaluation.plot import plot_ttft
from kvlink.models.prompt import Prompter
from tiny import byte_tokenizer, metaspace_tokenizer

TIMES = {"median_s", "q1_s", "q3_s", "samples_s", "split_s"}


@pytest.fixture(scope="module")
def ttft(engine: Engine) -> list[dict[str, Any]]:
    return bench_ttft(engine, documents=2, tokens=[40], links=(2,), repeats=1)


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
