"""`bench codecs` measures what it says, on a tiny model in no time."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlink import Engine
from kvlink.core.entry import CacheEntry
from kvlink.core.scores import kl
from kvlink.evaluation.bench.codecs import ARMS, bench_codecs, codecs_of, distances, errors, runs_of
from kvlink.evaluation.bench.texts import document_of
from kvlink.store import CODECS, encode
from tiny import byte_tokenizer
from tiny_models import tiny_model

TOKENS = (70, 33)
TIMES = {"median_s", "q1_s", "q3_s", "samples_s", "split_s"}
DISTANCES = {"kl", "agreement"}
ERRORS = {f"{of}_error_{kind}" for of in ("key", "value") for kind in ("mean", "max")}


@pytest.fixture(scope="module")
def runs() -> list[None]:
    """One for each call of progress."""
    return []


@pytest.fixture(scope="module")
def rows(engine: Engine, runs: list[None]) -> list[dict[str, Any]]:
    return bench_codecs(engine, tokens=TOKENS, threads=(1,), repeats=2, progress=lambda: runs.append(None))


def test_there_is_a_row_for_each_length_codec_and_thing_that_is_timed(rows: list[dict[str, Any]]) -> None:
    found = [(row["tokens"], row["codec"], row["threads"], row["what"]) for row in rows]
    assert found == [(tokens, codec, 1, what) for tokens in TOKENS for codec in CODECS for what in ARMS]
    fields = {"tokens", "codec", "entry_bytes", "object_bytes", "size", "threads", "what", "gb_per_s", "of_copy"}
    assert all(set(row) == fields | ERRORS | DISTANCES | TIMES for row in rows)


@pytest.mark.usefixtures("rows")
def test_progress_is_told_as_often_as_was_said(engine: Engine, runs: list[None]) -> None:
    assert len(runs) == runs_of(engine, TOKENS, (1,), 2)


def test_speeds_follow_from_medians(rows: list[dict[str, Any]]) -> None:
    for at in range(0, len(rows), len(ARMS)):
        pack, unpack, copy, load = rows[at : at + len(ARMS)]
        for row in (pack, unpack, load):
            assert row["gb_per_s"] == pytest.approx(row["entry_bytes"] / row["median_s"] / 1e9)
        assert copy["gb_per_s"] == pytest.approx(copy["object_bytes"] / copy["median_s"] / 1e9)
        assert load["of_copy"] == pytest.approx(copy["median_s"] / load["median_s"])
        assert len(load["samples_s"]) == 2


def test_sizes_are_those_of_objects_against_raw_ones_of_16_bits(engine: Engine, rows: list[dict[str, Any]]) -> None:
    ids = engine.prompter.document_ids(document_of(engine.prompter, 70, seed=0))
    entry = engine.runner.encode([ids], prefix=engine.loader.sink)[0]
    half = CacheEntry(entry.keys.bfloat16(), entry.values.bfloat16(), ids)
    least = encode(half, replace(engine.loader.identity, dtype="bfloat16")).nbytes
    for row in rows:
        if row["tokens"] == 70:
            assert row["size"] == encode(entry, engine.loader.identity, codec=row["codec"]).nbytes / least


def test_the_worse_the_codec_the_greater_the_error(rows: list[dict[str, Any]]) -> None:
    by_codec = {row["codec"]: row for row in rows if row["tokens"] == 70}
    whole = [codec for codec in CODECS if not CODECS[codec].prunes]
    for name in (*ERRORS, "kl"):
        found = [by_codec[codec][name] for codec in whole]
        assert found[0] == 0
        assert found == sorted(found)
        assert len(set(found)) == len(whole)


def test_pruned_codecs_are_judged_by_what_a_question_makes_of_them_and_not_by_their_rows(
    rows: list[dict[str, Any]],
) -> None:
    by_codec = {row["codec"]: row for row in rows if row["tokens"] == 70}
    pruned = [by_codec[codec] for codec in CODECS if CODECS[codec].prunes]
    assert all(row[name] is None for row in pruned for name in ERRORS)
    assert min(row["kl"] for row in pruned) > by_codec["int8"]["kl"] > by_codec["raw"]["kl"]
    assert by_codec["raw"]["agreement"] == 1 > by_codec["pruned25"]["agreement"]


def test_distances_are_kl_and_agreement_of_the_first_to_the_second() -> None:
    reference, logits = torch.tensor([[0.0, 2.0], [1.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    found = distances(reference, logits)
    assert found["agreement"] == 0.5
    assert found["kl"] == pytest.approx(kl(reference, logits))
    assert found["kl"] != pytest.approx(kl(logits, reference))


def test_pruned_codecs_are_not_measured_on_a_model_that_cannot_attend_so() -> None:
    tokenizer = byte_tokenizer()
    with Engine.from_pretrained(tiny_model("mistral", vocab_size=len(tokenizer)), tokenizer=tokenizer) as engine:
        found = bench_codecs(engine, tokens=(33,), repeats=1)
        assert {row["codec"] for row in found} == {"raw", "half", "int8", "int4"}
        assert runs_of(engine, (33,), (1,), 1) == 4 * len(ARMS) * 2


def test_an_error_is_relative_to_the_length_of_its_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    made = CacheEntry(torch.tensor([[[[3.0, 4.0], [30.0, 40.0]]]]), torch.ones(1, 1, 2, 2), (1, 2))

    def off(packed: dict[str, Tensor], **_: object) -> CacheEntry:
        return CacheEntry(made.keys + torch.tensor([[1.0, 0.0], [1.0, 0.0]]), made.values, made.token_ids)

    monkeypatch.setattr(type(CODECS["half"]), "unpack", lambda _, packed, **given: off(packed, **given))
    found = errors("half", made)
    assert (found["key_error_max"], found["key_error_mean"]) == pytest.approx((1 / 5, (1 / 5 + 1 / 50) / 2))
    assert (found["value_error_max"], found["value_error_mean"]) == (0, 0)


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [(torch.float32, ["raw", "half", "int8", "int4"]), (torch.bfloat16, ["raw", "int8", "int4"])],
    ids=str,
)
def test_a_codec_that_gains_nothing_is_not_measured(dtype: torch.dtype, wanted: list[str]) -> None:
    assert codecs_of(dtype, prunable=False) == wanted
    assert codecs_of(dtype) == [*wanted, "pruned75", "pruned50", "pruned25"]


def test_the_number_of_threads_is_given_back(engine: Engine) -> None:
    before = torch.get_num_threads()
    found = bench_codecs(engine, tokens=(33,), threads=(1, 2), repeats=1)
    assert {row["threads"] for row in found} == {1, 2}
    assert torch.get_num_threads() == before
