"""`bench serve`: both arms do the same work, the server is accounted for, and every setting stands in the JSON."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvlink.core.errors import InputError, KVLinkError
from kvlink.evaluation.bench.serve import Told, closed_loop, spread
from kvlink.evaluation.bench.serve_process import ServerProcess, metrics_of, serving

Run = Callable[..., Any]
SIZES = ("--clients", 2, "--rounds", 2, "--counted", 4, "--requests", 30, "--vanish", 10, "--streams", 12)
TEXTS = ("--documents", 2, "--tokens", 20, "--question", 8, "--answer", 3, "--pool", 40)


def orders() -> Iterator[tuple[int, ...]]:
    return ((number,) for number in count())


@pytest.mark.enable_socket
def test_a_server_is_measured_against_its_engine(run: Run, model: str, tmp_path: Path) -> None:
    plot, out = tmp_path / "serve.svg", tmp_path / "serve.json"
    result = run("bench", "serve", *SIZES, *TEXTS, "-m", model, "--layers", 1, "--json", out, "--plot", plot)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text("utf-8"))
    assert (found["model"]["name"], found["model"]["layers"]) == (model, 1)
    engine, server, soak, vanished, idle = found["results"]
    assert (found["command"], found["settings"]["clients"], found["settings"]["threads"] > 0) == (
        "bench serve",
        2,
        True,
    )
    for row in (engine, server):
        assert (row["requests"], row["errors"], len(row["samples_per_s"])) == (8, {}, 2)
        assert row["asked"] >= 8 + 2 * 2
        assert 0 < row["ttft_s"]["p50"] <= row["total_s"]["p50"]
        assert row["processor_s"] > 0
    assert server["completion_tokens"] == engine["completion_tokens"] == 3
    assert server["cost"]["samples"] == pytest.approx(
        [1 - one / other for one, other in zip(server["samples_per_s"], engine["samples_per_s"], strict=True)]
    )
    assert len(server["ttft_added_s"]["samples"]) == 8
    assert all(
        0 < added < seen
        for added, seen in zip(server["ttft_added_s"]["samples"], server["samples_s"]["ttft"], strict=True)
    )
    assert server["asked"] + soak["requests"] >= 30
    assert (soak["errors"], min(soak["memory_bytes"]) > 1 << 20) == ({}, True)
    assert (vanished["clients"], vanished["in_a_stream"], vanished["left"]) == (10, 1, {})
    assert vanished["after"]["open_files"] <= vanished["before"]["open_files"]
    assert (idle["streams"], idle["whole"], idle["left"]) == (12, 12, {})
    assert 0 < idle["open_at_once"] <= 12
    assert "</svg>" in plot.read_text("utf-8")
    assert max(len(line) for line in result.stdout.splitlines() if line.startswith(("│", "┃"))) <= 80
    assert "the server costs" in result.stdout
    assert re.search(r"10 clients vanished: nothing left", result.stdout)


def test_a_closed_loop_counts_what_ends_while_all_are_busy() -> None:
    def ask(order: tuple[int, ...]) -> Told:
        (number,) = order
        return Told(number + 0.0, number + 0.5, number + 1.0, 1000, error="cut" if number == 3 else "")

    seen: list[None] = []
    loop = closed_loop(ask, orders(), 1, 2, 4, lambda: seen.append(None))
    assert [told.start for told in loop.counted] == [2, 3, 4, 5]
    assert (loop.seconds, loop.asked, loop.errors, len(seen)) == (4, 6, {"cut": 1}, 6)


def test_a_loop_in_which_nothing_is_answered_fails() -> None:
    with pytest.raises(KVLinkError, match=r"none of 3 requests was answered: \{'refused': \d+\}"):
        closed_loop(lambda _: Told(0.0, 0.9, 1.0, 1000, error="refused"), orders(), 2, 0, 3, lambda: None)


def test_a_spread_is_told_with_its_samples() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "q1": 1.5, "q3": 2.5, "samples": [3.0, 1.0, 2.0]}


def test_metrics_are_read_with_their_labels() -> None:
    assert dict(metrics_of('# HELP x\nx 1.0\ny{a="b c"} 2\n')) == {"x": 1.0, 'y{a="b c"}': 2.0}


@pytest.mark.enable_socket
def test_nobody_at_an_address_and_a_server_that_does_not_start_are_told(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="refused"):
        ServerProcess(1, 1, tmp_path / "log").held()
    with (
        pytest.raises(KVLinkError, match=r"did not start: [\s\S]*No such option"),
        serving(["--pork"], log=tmp_path / "log", threads=1),
    ):
        pass


def test_more_layers_than_there_are_cannot_be_taken(run: Run, model: str) -> None:
    with pytest.raises(InputError, match="no 9 layers"):
        run("bench", "serve", *SIZES, *TEXTS, "-m", model, "--layers", 9)


@pytest.mark.parametrize("wrong", [("--pool", 2), ("--documents", 41), ("--resident", 0.01)], ids=str)
def test_what_makes_no_sense_is_refused_before_a_model_is_loaded(run: Run, wrong: tuple[str, object]) -> None:
    with pytest.raises(InputError):
        run("bench", "serve", *SIZES, *TEXTS, *wrong, "-m", "nowhere")
