"""The trial: requests at their moments, what is counted of them, costs as clients see them; all of it if asked."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateways import MODEL, Broken, gateway, tiny_server
from typer.testing import CliRunner

from kvlink.cli import app
from kvlink.cluster.simulate import WARM
from kvlink.cluster.traffic import Traffic, draw
from kvlink.cluster.trial.costs import measured
from kvlink.cluster.trial.requests import Seen, body_of, one_after_another, play
from kvlink.cluster.trial.run import _off, _recovery, swept
from kvlink.core.errors import InputError

pytestmark = pytest.mark.enable_socket

TRAFFIC = Traffic(requests=100, rate=1.0, documents=20, topic=5, each=2, tokens=50)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with tiny_server(tmp_path_factory.mktemp("library")) as (one, _):
        yield one


def body(number: int, answer: int = 3) -> dict[str, Any]:
    return body_of(MODEL, [f"Hut {number} opens at seven.", f"Inn {number} is closed."], "When?", answer)


def test_requests_are_sent_at_their_moments_and_seen_to_their_end(url: str) -> None:
    told: list[str] = []
    with gateway(url) as client:
        address = str(client.base_url)
        one_after_another(address, [body(0)])
        seen = play(address, lambda number: body(number // 2), [0.0, 0.3, 0.3], at=[(0.1, lambda: told.append("now"))])
    assert told == ["now"]
    assert [one.asked_at for one in seen] == [0.0, 0.3, 0.3]
    assert [one.failed for one in seen] == [""] * 3
    assert [one.backend for one in seen] == [1] * 3
    assert seen[0].hits == seen[1].hits == seen[1].tokens > 0, "an earlier one had brought them"
    assert seen[2].hits == 0
    assert all(one.ttft_s and 0 < one.ttft_s <= one.ended_at - one.asked_at and one.answer == 3 for one in seen)


def test_what_fails_is_seen_with_its_reason(url: str) -> None:
    first = b'data: {"choices": []}\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    with Broken(head + b"%x\r\n%b\r\n" % (len(first), first)) as broken, gateway(broken.url) as client:
        (seen,) = one_after_another(str(client.base_url), [body(0)])
        assert seen.failed == "broken"
        assert seen.ttft_s is not None, "it had begun"
    (refused,) = one_after_another(url, [{**body(0), "model": "other"}])
    assert (refused.failed, refused.ttft_s) == ("status 404", None)


def test_costs_of_a_server_are_measured_by_its_client(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("REPEATS", 1), ("ANSWER", 8), ("AT_ONCE", 2)):
        monkeypatch.setattr(f"kvlink.cluster.trial.costs.{name}", value)
    costs = measured(
        url,
        MODEL,
        text=lambda number, tokens: f"{number} ".ljust(tokens, "x"),
        question=lambda number, tokens: f"{number} ".ljust(tokens, "y"),
        documents=2,
        tokens=400,
        question_tokens=20,
        token_bytes=512,
    )
    assert 0 <= costs.row_s <= costs.step_s
    assert costs.step_s > 0
    assert costs.token_bytes == 512


def test_costs_are_what_requests_differ_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a request took 0.1 s, a token of a question 1 ms, of a document 2 ms, of an answer 5 ms."""
    known: set[str] = set()

    def seen(asked: list[dict[str, Any]], *, row_s: float = 0.0) -> list[Seen]:
        found, rows = [], 0
        for one in asked:
            texts = {document["text"] for document in one["documents"]}
            ttft_s = 0.1 + 0.001 * len(one["messages"][0]["content"]) + 0.002 * sum(map(len, texts - known))
            known.update(texts)
            rows += one["max_tokens"]
            ended_at = ttft_s + 0.005 * (one["max_tokens"] - 1) + row_s * rows
            found.append(Seen(0.0, ended_at, ttft_s, answer=one["max_tokens"]))
        return found

    for name, answers in (("one_after_another", 0.0), ("all_at_once", 0.004)):
        monkeypatch.setattr(
            f"kvlink.cluster.trial.costs.{name}", lambda _, asked, row_s=answers: seen(asked, row_s=row_s)
        )
    costs = measured(
        "nowhere",
        MODEL,
        text=lambda number, tokens: f"{number} ".ljust(tokens, "x"),
        question=lambda number, tokens: f"{number} ".ljust(tokens, "y"),
        documents=2,
        tokens=400,
        question_tokens=20,
        token_bytes=512,
    )
    assert (costs.encode_s, costs.prompt_s, costs.request_s) == pytest.approx((0.002, 0.001, 0.1))
    assert costs.step_s == pytest.approx(0.005)
    assert 0.004 < costs.row_s <= costs.step_s


def test_the_first_requests_ask_about_every_document_and_the_others_stay() -> None:
    drawn = draw(TRAFFIC)
    found = swept(drawn, TRAFFIC)
    first = int(WARM * TRAFFIC.requests)
    assert set(found.asked[:first].ravel().tolist()) == set(range(20))
    assert (found.asked[first:] == drawn.asked[first:]).all()
    assert all(len(set(row)) == 2 for row in found.asked.tolist())
    with pytest.raises(InputError, match="ask for 60 or more"):
        swept(draw(replace(TRAFFIC, requests=50)), replace(TRAFFIC, requests=50))


def test_a_loss_is_made_up_for_when_a_window_behind_the_worst_one_has_most_of_the_hits_again() -> None:
    def seen(ratios: list[float]) -> list[Seen]:
        return [Seen(float(at), at + 0.5, 0.1, hits=int(100 * one), tokens=100) for at, one in enumerate(ratios)]

    found = _recovery(seen([1.0] * 50 + [0.0] * 20 + [1.0] * 60), 10, 50.0, window=10)
    assert (found["hit_ratio_before"], found["hit_ratio_lowest"]) == (1.0, 0.0)
    assert found["recovered_after_s"] == 19.0, "nine of ten"
    assert _recovery(seen([1.0] * 50 + [0.0] * 60), 10, 50.0, window=10)["recovered_after_s"] is None
    assert _recovery(seen([1.0] * 50 + [0.95] * 60), 10, 50.0, window=10)["recovered_after_s"] == 0.0


def test_simulated_figures_are_held_to_the_real_ones() -> None:
    real = {"hit_ratio": 0.8, "imbalance": 1.0, "ttft_s": {"p50": 0.1, "p99": None}}
    simulated = {"hit_ratio": 0.9, "imbalance": 1.1, "ttft_s": {"p50": 0.05, "p99": 1.0}}
    off = _off(real, simulated)
    assert off["hit_ratio"] == pytest.approx(0.125)
    assert off["imbalance"] == pytest.approx(0.1)
    assert off["ttft_p50"] == pytest.approx(-0.5)
    assert off["ttft_p99"] is None


@pytest.mark.skipif(not os.environ.get("KVLINK_TORTURE"), reason="starts servers for minutes: make torture")
def test_the_whole_trial_under_load_writes_rows_costs_and_a_figure(tmp_path: Path) -> None:
    sizes = ["--servers", "2", "--requests", "120", "--documents", "20", "--topic", "5", "--tokens", "100"]
    found, costs, plot = (tmp_path / name for name in ("found.json", "costs.json", "plot.svg"))
    outputs = ["--json", str(found), "--costs", str(costs), "--plot", str(plot)]
    run = CliRunner().invoke(app, ["bench", "cluster", "--policies", "affinity,round-robin", *sizes, *outputs])
    assert run.exit_code == 0, run.output
    rows = json.loads(found.read_text())["results"]
    assert [(row["policy"], "lost_at_s" in row) for row in rows] == [
        ("affinity", False),
        ("round-robin", False),
        ("affinity", True),
    ]
    assert np.isfinite(list(json.loads(costs.read_text())["costs"].values())).all()
    assert rows[-1]["failed"] == 0
    assert rows[0]["real"]["hit_ratio"] > rows[1]["real"]["hit_ratio"]
    assert "</svg>" in plot.read_text()
