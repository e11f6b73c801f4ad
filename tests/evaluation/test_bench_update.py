"""`bench update` measures an edit on a tiny model in no time; the verb writes its rows."""

from typing import Any

import pytest

from kvlink import Engine
from kvlink.evaluation.bench.texts import document_of
from kvlink.evaluation.bench.update import bench_update, edited, runs_of

TIMES = {"median_s", "q1_s", "q3_s", "samples_s", "split_s"}
SHARES = (0.1, 0.7)


@pytest.fixture(scope="module")
def runs() -> list[None]:
    return []


@pytest.fixture(scope="module")
def before(engine: Engine) -> set[str]:
    return engine.store.names()


@pytest.fixture(scope="module")
def rows(engine: Engine, before: set[str], runs: list[None]) -> list[dict[str, Any]]:
    return bench_update(engine, tokens=400, shares=SHARES, repeats=2, progress=lambda: runs.append(None))


def test_there_is_a_row_for_each_place_and_arm(rows: list[dict[str, Any]]) -> None:
    assert [(row["at"], row["arm"]) for row in rows] == [(at, arm) for at in SHARES for arm in ("whole", "update")]
    fields = {"at", "arm", "tokens", "computed", "share", "ratio", "key_error", "value_error"}
    assert all(set(row) == fields | TIMES for row in rows)


@pytest.mark.usefixtures("rows")
def test_progress_is_told_as_often_as_was_said(runs: list[None]) -> None:
    assert len(runs) == runs_of(SHARES, 2)


def test_computed_is_what_lies_behind_the_edit(engine: Engine, rows: list[dict[str, Any]]) -> None:
    document = document_of(engine.prompter, 400, seed=0)
    old = engine.prompter.document_ids(document)
    for whole, update in zip(rows[::2], rows[1::2], strict=True):
        new = engine.prompter.document_ids(edited(document, whole["at"]))
        kept = next(place for place, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
        assert (whole["computed"], update["computed"]) == (len(new), len(new) - kept)
        assert update["share"] == pytest.approx(1 - kept / len(new))
        assert update["share"] == pytest.approx(1 - whole["at"], abs=0.06)


def test_the_difference_to_a_fresh_entry_is_rounding(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["arm"] == "update" or row["key_error"] == row["value_error"] == 0
        assert max(row["key_error"], row["value_error"]) < 1e-5


@pytest.mark.usefixtures("rows")
def test_the_engines_own_store_is_left_alone(engine: Engine, before: set[str]) -> None:
    assert engine.store.names() == before
