"""`bench store` measures what it says: on a tiny model, a real Redis and a network that is known."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlink import Document, Engine
from kvlink.core.errors import InputError
from kvlink.evaluation.bench import store_network
from kvlink.evaluation.bench.store import (
    TIERS,
    bench_break_even,
    bench_load,
    runs_of_break_even,
    runs_of_load,
)
from kvlink.evaluation.bench.store_model import CONFIG, write_tiny_model
from kvlink.evaluation.bench.store_network import Network, behind, redis_server
from kvlink.evaluation.bench.store_prefetch import Traffic, _interval, _requests, bench_prefetch
from kvlink.evaluation.bench.store_prefetch import runs_of as runs_of_prefetch
from kvlink.evaluation.bench.store_proxy import Link
from kvlink.evaluation.bench.store_soak import bench_soak
from kvlink.evaluation.bench.store_soak import runs_of as runs_of_soak
from kvlink.evaluation.plot import plot_prefetch
from kvlink.store.redis import RedisStore

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])
"""The network between a store and its server is one of the loopback."""

TRAFFIC = Traffic(requests=20, documents=8, tokens=60, each=2, blocks=2)
NETWORKS = (Network(1e9, 0.0005), Network(1e8, 0.002))


@pytest.fixture(scope="module")
def runs() -> list[None]:
    """One for each call of progress."""
    return []


@pytest.fixture(scope="module")
def traffic(runs: list[None]) -> list[dict[str, Any]]:
    return bench_prefetch(TRAFFIC, networks=NETWORKS, progress=lambda: runs.append(None))[1]


def test_a_tiny_model_is_the_same_for_the_same_seed_and_reads_bytes(tmp_path: Path) -> None:
    engines = [
        Engine.from_pretrained(write_tiny_model(tmp_path / name, seed=seed), device="cpu")
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    digests = [engine.model_info["digest"] for engine in engines]
    assert digests[0] == digests[1] != digests[2]
    lengths = [len(engines[0].prompter.document_ids(Document(text))) for text in ("seven", "seven!")]
    assert lengths[1] - lengths[0] == 1
    per_token = engines[0].runner.geometry.bytes_per_token(torch.float32)
    assert per_token == 4 * 2 * CONFIG["num_hidden_layers"] * CONFIG["num_key_value_heads"] * CONFIG["head_dim"]


# --- load and break-even --------------------------------------------------------------------------------------------


def test_loads_decodings_and_copies_of_each_codec_are_measured(engine: Engine) -> None:
    calls: list[None] = []
    rows = bench_load(engine, tokens=60, repeats=1, progress=lambda: calls.append(None))
    assert len(calls) == runs_of_load(engine, 60, 1)
    assert {row["what"] for row in rows} == {"load", "decode", "copy"}
    assert {"raw", "half", "int8", "int4"} <= {row["codec"] for row in rows}
    assert all(row["of_copy"] > 0 for row in rows if row["what"] == "load")


def test_break_even_compares_each_tier_with_an_encode(engine: Engine, tmp_path: Path) -> None:
    calls: list[None] = []
    remote = f"file://{tmp_path}"
    rows = bench_break_even(engine, tokens=(40, 60), remote=remote, repeats=2, progress=lambda: calls.append(None))
    assert len(calls) == runs_of_break_even((40, 60), remote, 2)
    assert [(row["tokens"], row["tier"]) for row in rows] == [
        (n, tier) for n in (40, 60) for tier in (*TIERS, "remote")
    ]
    for row in rows:
        assert row["ratio"] == row["load_s"] / row["encode_s"]
        assert row["pays"] == (row["ratio"] < 1)
        assert row["break_even_bytes_per_s"] == row["bytes"] / row["encode_s"]
    assert list(tmp_path.rglob("*.safetensors")) == []


# --- the network ----------------------------------------------------------------------------------------------------


def test_a_link_delays_by_rate_and_latency_and_queues_what_comes_at_once() -> None:
    link = Link(100.0, 2.0)
    assert link.due(50, 10.0) == pytest.approx(12.5)
    assert link.due(50, 10.0) == pytest.approx(13.0)
    assert link.due(0, 20.0) == pytest.approx(22.0)


def test_what_passes_the_proxy_is_whole_and_late() -> None:
    network = Network(1e8, 0.05)
    with redis_server() as place, behind(network, place) as url, RedisStore(url) as store:
        client = store._client
        client.set("x", data := bytes(range(256)) * 4096)
        start = client.time()
        assert client.get("x") == data
        stop = client.time()
    seconds = (stop[0] - start[0]) + (stop[1] - start[1]) / 1e6
    assert seconds >= 2 * network.latency_s + len(data) / network.bytes_per_s


def test_without_a_redis_server_it_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_network.shutil, "which", lambda _: None)
    with pytest.raises(InputError, match="needs a real redis-server on PATH"):
        bench_prefetch(TRAFFIC)


# --- traffic --------------------------------------------------------------------------------------------------------


def test_there_is_a_row_for_each_network_and_arm(traffic: list[dict[str, Any]], runs: list[None]) -> None:
    assert [(row["network"]["latency_s"], row["prefetch"]) for row in traffic] == [
        (network.latency_s, ahead) for network in NETWORKS for ahead in (False, True)
    ]
    assert len(runs) == runs_of_prefetch(TRAFFIC, len(NETWORKS))
    for row in traffic:
        assert len(row["samples_s"]) == TRAFFIC.requests
        assert row["traffic"]["load"] == 0.7
        assert row["capacity_per_s"] > 0
        assert 0 < row["utilisation"] < 1
        assert math.isclose(sum(row["sources"].values()), 1.0)
        assert set(row["sources"]) <= {"host", "remote"}
        assert "remote" in row["sources"]
        low, high = row["p999_interval_s"]
        assert low <= row["ttft_s"]["p999"] <= high


def test_changes_are_against_the_arm_without(traffic: list[dict[str, Any]]) -> None:
    for before, after in zip(traffic[::2], traffic[1::2], strict=True):
        assert set(before["change"].values()) == {0.0}
        assert after["change"]["p99"] == after["ttft_s"]["p99"] / before["ttft_s"]["p99"] - 1


def test_few_documents_are_asked_for_most_and_none_twice_in_one_request() -> None:
    drawn = _requests(TRAFFIC, 500, seed=1)
    assert drawn == _requests(TRAFFIC, 500, seed=1)
    counts = [sum(at in one for one in drawn) for at in range(TRAFFIC.documents)]
    assert counts[0] > 2 * counts[-1]
    assert all(len(set(one)) == TRAFFIC.each for one in drawn)


def test_an_interval_of_equal_samples_is_a_point() -> None:
    assert _interval([0.5] * 120, seed=0) == [0.5, 0.5]
    assert _interval([0.5] * 3, seed=0) == [0.5, 0.5]


def test_traffic_is_drawn(traffic: list[dict[str, Any]], tmp_path: Path) -> None:
    plot_prefetch(traffic, tmp_path / "two.svg")
    plot_prefetch(traffic[:2], tmp_path / "one.svg")
    two, one = ((tmp_path / name).read_text("utf-8") for name in ("two.svg", "one.svg"))
    assert "</svg>" in one
    assert len(two) > len(one)


# --- soak -----------------------------------------------------------------------------------------------------------


def test_a_soak_tells_hits_by_quarter_bytes_and_memory() -> None:
    calls: list[None] = []
    about, (row,) = bench_soak(requests=40, documents=20, tokens=50, each=3, progress=lambda: calls.append(None))
    assert len(calls) == runs_of_soak(40)
    assert "/" not in about["name"]  # the folder of the model is gone by now
    assert len(row["hit_ratio"]["quarters"]) == len(row["memory_bytes"]) == 4
    assert 0 < row["hit_ratio"]["quarters"][0] < 1
    assert row["bounded"] is True
    assert all(0 < row["most_bytes"][tier] <= row["budget_bytes"][tier] for tier in ("host", "disk"))
    assert row["evictions"]["disk"] > 0
    assert row["drift"] == row["hit_ratio"]["quarters"][-1] - row["hit_ratio"]["quarters"][0]
