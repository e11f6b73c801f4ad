"""Processes that are killed again and again while requests come: long, and so only where KVLINK_TORTURE is set."""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import httpx
import pytest

from kvlink.cluster.trial.processes import Program, gateway, servers
from kvlink.evaluation.bench.store_model import write_tiny_model

pytestmark = [
    pytest.mark.enable_socket,
    pytest.mark.skipif(not os.environ.get("KVLINK_TORTURE"), reason="takes minutes: make torture"),
]

ROUNDS = 12


def test_no_request_fails_that_had_not_begun_though_servers_are_killed_again_and_again(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", seed=0)
    dice, ended = random.Random(0), Event()
    with (
        servers(3, ["--model", str(model), "--links", "none"], tmp_path) as started,
        gateway(started, "affinity", tmp_path) as front,
        ThreadPoolExecutor(6) as pool,
    ):
        asking = [pool.submit(ask_until, ended, front, seed) for seed in range(6)]
        for _ in range(ROUNDS):
            victim = dice.choice(started)
            victim.kill()
            victim.start()
            victim.wait()
            front.wait(backends=3)
        ended.set()
        counts = [one.result() for one in asking]
    assert sum(counts) > 20 * ROUNDS


def ask_until(ended: Event, front: Program, seed: int) -> int:
    """Ask one request after another; return how many. Each is answered whole, though its server may be killed."""
    dice, count = random.Random(seed), 0
    body = {"model": "model", "messages": [{"role": "user", "content": "When?"}], "max_tokens": 4, "temperature": 0}
    with httpx.Client(base_url=front.url, timeout=120, trust_env=False) as client:
        while not ended.is_set():
            documents = [{"text": f"Hut {dice.randrange(50)} opens at seven."} for _ in range(3)]
            answer = client.post("/v1/chat/completions", json={**body, "documents": documents})
            assert answer.status_code == 200, answer.text
            count += 1
    return count
