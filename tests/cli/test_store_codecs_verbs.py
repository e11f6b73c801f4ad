"""`store recompress` and `store calibrate`: smaller objects, and verdicts that a store remembers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlink.cli import show
from kvlink.cli.store import recompressed
from kvlink.store import DiskStore, MemoryStore, RecompressingStore, TieredStore, under_pressure

Run = Callable[..., Any]


@pytest.fixture
def store(run: Run, model: str, corpus: Path, tmp_path: Path) -> Path:
    """A store of three objects, long enough for codecs to count."""
    for name in ("one", "two", "three"):
        (corpus / f"{name}.md").write_text(f"This is paper {name}. " * 12)
    run("encode", corpus, "-m", model, "--store", tmp_path / "store")
    return tmp_path / "store"


def codecs_in(store: Path) -> list[str]:
    return sorted(file.name.split(".")[1] for file in (store / "objects").rglob("*.safetensors"))


def size_of(store: Path) -> int:
    return sum(file.stat().st_size for file in (store / "objects").rglob("*.safetensors"))


def result_of(done: Any, command: str) -> dict[str, Any]:
    found = json.loads(done.stdout)
    assert found["command"] == command
    return found


# --- recompress -----------------------------------------------------------------------------------------------------


def test_it_writes_every_object_smaller_and_says_how_much(run: Run, store: Path) -> None:
    before, number = size_of(store), len(codecs_in(store))
    done = run("store", "recompress", "--to", "int8", "--store", store, "--json", "-")
    (row,) = result_of(done, "store recompress")["results"]
    assert codecs_in(store) == ["int8"] * number
    assert row["written"] == {"int8": number}
    assert (row["before_bytes"], row["after_bytes"]) == (before, size_of(store))
    assert row["freed_bytes"] == before - size_of(store) > 0
    done = run("store", "recompress", "--to", "int8,int4", "--store", store)
    assert f"recompressed {number} to int4, 0 left as they were" in done.stdout


def test_a_ladder_is_taken_to_its_end_unless_the_store_is_small_enough(run: Run, store: Path) -> None:
    before, number = size_of(store), len(codecs_in(store))
    done = run("store", "recompress", "--to", "int8,int4", "--down-to", (before - 1) / 1e9, "--store", store)
    assert (done.exit_code, codecs_in(store)) == (0, ["int8"] + ["raw"] * (number - 1))
    run("store", "recompress", "--to", "int8,int4", "--store", store)
    assert set(codecs_in(store)) <= {"int8", "int4"}


def test_a_second_run_has_nothing_to_do(run: Run, store: Path) -> None:
    run("store", "recompress", "--to", "int8", "--store", store)
    assert "recompressed nothing" in run("store", "recompress", "--to", "int8", "--store", store).stdout


@pytest.mark.parametrize("to", ["raw", "zip", "pruned50", "int8,int8", ","])
def test_what_is_no_ladder_is_a_usage_error(run: Run, store: Path, to: str) -> None:
    done = run("store", "recompress", "--to", to, "--store", store)
    assert (done.exit_code, "--to" in done.stderr) == (2, True)
    assert set(codecs_in(store)) == {"raw"}


def test_a_folder_that_is_not_there_is_a_usage_error_and_is_not_made(run: Run, tmp_path: Path) -> None:
    done = run("store", "recompress", "--store", tmp_path / "nowhere")
    assert (done.exit_code, (tmp_path / "nowhere").exists()) == (2, False)


# --- calibrate ------------------------------------------------------------------------------------------------------


def calibrated(run: Run, model: str, store: Path, *more: object) -> Any:
    return run("store", "calibrate", "-m", model, "--store", store, "--tasks", "needle(documents=2,tokens=20)",
               "--limit", 2, *more)  # fmt: skip


def sources(run: Run, model: str, store: Path, corpus: Path) -> set[str]:
    """Return where the documents of an answer came from, blank ones left out."""
    done = run("ask", "When?", "--docs", corpus, "-m", model, "--store", store, "-n", 1, "--json", "-")
    usage = json.loads(done.stdout)["results"][0]["usage"]
    return {row["source"] for row in usage["kvlink"]["documents"]} - {"skipped"}


def test_a_verdict_is_no_error_whichever_it_is(run: Run, model: str, store: Path) -> None:
    done = calibrated(run, model, store, "--codecs", "int8,int4", "--thresholds", "int8=0,int4=1", "--json", "-")
    found = result_of(done, "store calibrate")
    assert done.exit_code == 0
    assert [(row["codec"], row["verdict"]["rows"]) for row in found["results"]] == [("int8", 2), ("int4", 2)]
    assert found["results"][0]["passed"]
    assert found["settings"]["thresholds"] == {"int8": 0.0, "int4": 1.0}


def test_it_shows_a_table_with_figures(run: Run, model: str, store: Path) -> None:
    done = calibrated(run, model, store, "--codecs", "int8", "--thresholds", "int8=0")
    line = next(line for line in done.stdout.splitlines() if "int8" in line)
    assert "passed" in line
    assert " to 1.000" in line


def test_readers_take_what_has_passed_and_encode_what_has_not(run: Run, model: str, store: Path, corpus: Path) -> None:
    calibrated(run, model, store, "--codecs", "int8", "--thresholds", "int8=0")
    run("store", "recompress", "--to", "int8", "--store", store)
    assert sources(run, model, store, corpus) == {"disk"}
    calibrated(run, model, store, "--codecs", "int8", "--thresholds", "int8=1", "--limit", 3)
    run("store", "recompress", "--to", "int8,int4", "--store", store)
    assert sources(run, model, store, corpus) == {"encoded"}


@pytest.mark.parametrize(
    ("given", "what"),
    [(("--codecs", "raw"), "--codecs"), (("--codecs", "zip"), "--codecs"), (("--thresholds", "int8"), "--thresholds")],
    ids=" ".join,
)
def test_wrong_codecs_and_thresholds_are_usage_errors(
    run: Run, model: str, store: Path, given: tuple[str, str], what: str
) -> None:
    done = calibrated(run, model, store, *given)
    assert (done.exit_code, what in done.stderr) == (2, True)


# --- under pressure -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["1", "0"])
def test_a_full_store_recompresses_what_the_gate_has_passed_unless_it_is_switched_off(
    run: Run, store: Path, model: str, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    assert calibrated(run, model, store, "--thresholds", "half=0,int8=0,int4=0").exit_code == 0
    number = len(codecs_in(store))
    monkeypatch.setenv("KVLINK_RECOMPRESS", variable)
    with show.open_engine(model, store, None, size_of(store) / 1e9) as engine:
        if isinstance(engine.store, RecompressingStore):
            engine.store.settle()
        told = recompressed(engine.store.stats())
    assert bool(told) == (set(codecs_in(store)) != {"raw"}) == (variable == "1")
    left = number - sum(told.values())
    assert (f"{left} raw" if left else "half") in run("store", "ls", "--store", store).stdout


def test_what_each_tier_has_recompressed_is_added_up(tmp_path: Path) -> None:
    tiers = TieredStore(MemoryStore(budget_bytes=1000), DiskStore(tmp_path))
    assert recompressed(tiers.stats()) == {}
    under_pressure(tiers, ladder=("int8",))
    for number, tier in enumerate(tiers._tiers, start=1):
        for _ in range(number):
            tier.store._tally.wrote("int8", 10)
    assert recompressed(tiers.stats()) == {"int8": 3}


def test_what_is_neither_on_nor_off_is_a_usage_error(run: Run, store: Path, model: str, corpus: Path) -> None:
    done = run("encode", corpus, "-m", model, "--store", store, KVLINK_RECOMPRESS="maybe")
    assert (done.exit_code, "KVLINK_RECOMPRESS" in done.stderr) == (2, True)
