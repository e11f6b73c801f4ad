"""Replicas on a real Ray: the API of one machine, documents decide where, one that is killed fails its own alone."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from typing import Any

import httpx
import pytest
from gateways import LOOPBACK, until

from kvlink.cluster.ray_app.passed import Passed
from kvlink.evaluation.bench.store_model import write_tiny_model
from store.servers import free_port

pytestmark = pytest.mark.enable_socket

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "When?"}],
    "temperature": 0,
    "max_tokens": 3,
}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, httpx.Client]]:
    """Two replicas of a tiny model that share a library, in processes of their own: the first one's id, a client."""
    folder, port = tmp_path_factory.mktemp("ray"), free_port()
    model = write_tiny_model(folder / "tiny", seed=0)
    words = ["--replicas", "2", "--model", str(model), "--links", "none", "--library", str(folder / "library")]
    command = [sys.executable, "-m", "kvlink", "cluster", "up", *words, "--port", str(port), "--device-memory", "0.1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = folder / "log"
    with log.open("wb") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
    try:
        with httpx.Client(base_url=f"http://{LOOPBACK}:{port}", timeout=120, trust_env=False, verify=False) as one:
            until(lambda: process.poll() is not None or is_ready(one), within_s=600)
            assert process.poll() is None, log.read_text()
            yield process.pid, one
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


@pytest.fixture
def client(up: tuple[int, httpx.Client]) -> httpx.Client:
    return up[1]


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def about(number: int, **more: Any) -> dict[str, Any]:
    return {**ASKED, "documents": [{"text": f"Hut {number} opens at seven."}], **more}


SECOND = """
import sys
from kvlink.cluster.ray_app import up
up.NAME = "second"
up.up({}, host="127.0.0.1", port=8000, insecure=True, address=sys.argv[1])
"""
"""Another application on a Ray that runs, at a path that is taken: it ends as soon as it has come."""


def source(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["kvlink"]["documents"][0]["source"]


def below(ancestor: int) -> dict[int, str]:
    """Return the command lines of the processes below another one."""
    found = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in found.splitlines()[1:]]
    family = {ancestor}
    for _ in range(3):
        family |= {int(pid) for pid, parent, _ in rows if int(parent) in family}
    return {int(pid): words for pid, _, words in rows if int(pid) in family}


def replicas(ancestor: int) -> list[int]:
    """Return the processes below another one that are replicas."""
    return [pid for pid, words in below(ancestor).items() if words.startswith("ray::ServeReplica:kvlink:Rep")]


def ray_of(ancestor: int) -> str:
    """Return the address of the Ray that a process has started."""
    found = (re.search(r"--gcs-address=(\S+)", words) for words in below(ancestor).values())
    return next(one[1] for one in found if one is not None)


def test_a_document_is_encoded_once_though_there_are_two_replicas(client: httpx.Client) -> None:
    numbers = count(100)

    def go_home() -> bool:
        """Ask about eight new documents, three times each; whether all came back to where they had been encoded."""
        found = [[source(client.post(CHAT, json=about(at))) for _ in range(3)] for at in islice(numbers, 8)]
        assert [one.count("encoded") for one in found] == [1] * 8
        return found == [["encoded", "device", "device"]] * 8

    until(go_home, within_s=240)  # a replica that has come a moment ago takes its share of them


def test_it_is_the_api_of_one_machine(client: httpx.Client) -> None:
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert len(client.get("/ready").json()["serves"]["digest"]) == 32
    wrong = client.post(CHAT, json={**ASKED, "model": "other"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
    assert client.post(CHAT, content=b"{").status_code == 400
    assert client.get("/nothing").json()["error"]["type"] == "not_found_error"
    body = about(0, stream=True, stream_options={"include_usage": True})
    rows = [line[6:] for line in client.post(CHAT, json=body).text.splitlines() if line.startswith("data: ")]
    assert rows[-1] == "[DONE]"
    assert json.loads(rows[-2])["usage"]["completion_tokens"] == 3
    said = "".join(row["choices"][0]["delta"].get("content", "") for row in map(json.loads, rows[:-2]))
    assert said == client.post(CHAT, json=about(0)).json()["choices"][0]["message"]["content"]


def test_a_text_that_one_replica_took_is_that_of_all(client: httpx.Client) -> None:
    for text, status in (("It opens at five.", 201), ("It opens at six.", 200)):
        assert client.put("/v1/documents/a%2Fhut", json={"text": text}).status_code == status
        assert {client.get("/v1/documents/a/hut").json()["text"] for _ in range(6)} == {text}
        assert client.post(CHAT, json={**ASKED, "documents": ["a/hut"]}).status_code == 200
    assert client.delete("/v1/documents/a/hut").json()["deleted"]
    assert {client.post(CHAT, json={**ASKED, "documents": ["a/hut"]}).status_code for _ in range(4)} == {404}


def test_a_replica_that_is_killed_fails_nothing_that_had_not_begun(up: tuple[int, httpx.Client]) -> None:
    process, client = up
    until(lambda: len(replicas(process)) == 2)
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(client.post, CHAT, json=about(number % 10)) for number in range(40)]
        until(lambda: sum(one.done() for one in asking) > 8)
        os.kill(replicas(process)[0], signal.SIGKILL)
        assert [one.result().status_code for one in asking] == [200] * 40
    until(lambda: len(replicas(process)) == 2, within_s=240)  # a newcomer has fewer requests than its share


@pytest.mark.skipif(not os.environ.get("KVLINK_TORTURE"), reason="Ray tries for half a minute: make torture")
def test_a_missing_token_is_told_on_ray(up: tuple[int, httpx.Client]) -> None:
    environment = {name: one for name, one in os.environ.items() if name != "RAY_AUTH_MODE"}
    command = [sys.executable, "-m", "kvlink", "cluster", "up", "--address", ray_of(up[0]), "--insecure"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert (ended.returncode, "RAY_AUTH_MODE=token" in ended.stderr) == (1, True), ended.stderr


def test_the_end_of_one_application_on_a_ray_that_runs_is_not_that_of_others(up: tuple[int, httpx.Client]) -> None:
    process, client = up
    command = [sys.executable, "-c", SECOND, ray_of(process)]
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}  # as that of a Ray that a program has started
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert "Prefix / is being used" in ended.stderr
    assert client.post(CHAT, json=about(0)).status_code == 200


@pytest.mark.skipif(not os.environ.get("KVLINK_TORTURE"), reason="replicas start again: make torture")
def test_a_stream_on_ray_whose_replica_is_killed_ends_with_an_error_and_the_next_request_waits_for_another(
    up: tuple[int, httpx.Client],
) -> None:
    process, client = up
    with client.stream("POST", CHAT, json=about(0, stream=True, max_tokens=2000)) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        for one in replicas(process):
            os.kill(one, signal.SIGKILL)
        said = [line for line in lines if line]
    assert json.loads(said[-1][6:])["error"]["code"] == "backend_lost"
    assert client.post(CHAT, json=about(0)).status_code == 200


def test_what_is_passed_on_is_the_same_for_all_attempts() -> None:
    def passed() -> Passed:
        return Passed(method="GET", path="/", query=b"", headers=(), body=b"")

    assert passed().token != passed().token
