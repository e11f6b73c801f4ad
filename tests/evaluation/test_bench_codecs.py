"""`bench codecs` measures what it says, on a tiny model in no time."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlink import Engine
from kvlink.core.entry import CacheEntry
from kvlink.evaluation.bench.codecs import ARMS, bench_codecs, codecs_of, errors, runs_of
from kvlink.evaluation.bench.texts import document_of
from kvlink.store import CODECS, encode

TOKENS = (70, 33)
TIMES = {"median_s", "q1_s", "q3_s", "samples_s", "split_s"}
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
    assert all(set(row) == fields | ERRORS | TIMES for row in rows)


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
    for name in ERRORS:
        found = [by_codec[codec][name] for codec in CODECS]
        assert found[0] == 0
        assert found == sorted(found)
        assert len(set(found)) == len(CODECS)


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
    assert codecs_of(dtype) == wanted


def test_the_number_of_threads_is_given_back(engine: Engine) -> None:
    before = torch.get_num_threads()
    found = bench_codecs(engine, tokens=(33,), threads=(1, 2), repeats=1)
    assert {row["threads"] for row in found} == {1, 2}
    assert torch.get_num_threads() == before
