"""A server as a process of its own: what is killed has lost nothing that was acknowledged, and all it says is JSON."""

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import TOKENIZER, until

from kvlink.evaluation.bench.serve_process import MODEL, ServerProcess, serving
from kvlink.server.listening import MOST_FILES
from tiny_models import tiny_model

pytestmark = pytest.mark.enable_socket

CHAT = "/v1/chat/completions"
TEXTS = {
    f"papers/{number}.md": f"Office {number} opens at {number + 5} o'clock, but not on Mondays." for number in range(6)
}
LONG: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "When?"}],
    "temperature": 0,
    "max_tokens": 400,
}
LATE = "The late one was put a moment ago."


def client(server: ServerProcess) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60, trust_env=False)


def ask(http: httpx.Client, *ids: str) -> Any:
    asked = {"messages": [{"role": "user", "content": "When?"}], "temperature": 0, "max_tokens": 8}
    found = http.post(CHAT, json={"model": MODEL, **asked, "documents": ids})
    assert found.status_code == 200, found.text
    return found.json()


def states(http: httpx.Client) -> dict[str, str]:
    return {row["id"]: row["status"] for row in http.get("/v1/documents").json()["data"]}


def is_gone(server: ServerProcess) -> bool:
    """Whether a process has ended; whoever started it has not been told yet."""
    return Path(f"/proc/{server.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


def files_allowed(server: ServerProcess) -> int:
    (row,) = [one for one in Path(f"/proc/{server.pid}/limits").read_text().splitlines() if "open files" in one]
    return int(row.split()[3])


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("served")
    tiny_model("llama", vocab_size=len(TOKENIZER)).save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    library = str(folder / "library")
    return ["--model", str(folder / "model"), "--library", library, "--links", "none", "--drain", "300"]


def test_a_killed_server_finds_all_again_and_sigterm_lets_a_stream_come_to_its_end(
    options: list[str], tmp_path: Path
) -> None:
    with serving(options, log=tmp_path / "first", threads=1) as first, client(first) as http:
        for one, text in TEXTS.items():
            assert http.put(f"/v1/documents/{one}", json={"text": text}).status_code == 201
        until(lambda: set(states(http).values()) == {"ready"})
        before = ask(http, *TEXTS)["choices"]
        with http.stream("POST", CHAT, json={**LONG, "stream": True, "n": 4}) as stream:
            assert next(stream.iter_bytes())
            assert http.put("/v1/documents/late", json={"text": LATE}).status_code == 201
            os.kill(first.pid, signal.SIGKILL)
    with serving(options, log=tmp_path / "second", threads=1) as second, client(second) as http:
        assert files_allowed(second) == min(MOST_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        assert states(http).keys() == {*TEXTS, "late"}
        found = ask(http, *TEXTS)
        assert {row["source"] for row in found["usage"]["kvlink"]["documents"]} == {"disk"}
        assert found["choices"] == before
        assert http.get("/v1/documents/late").json()["text"] == LATE
        until(lambda: states(http)["late"] == "ready")
        assert 'kvlink_tier_quarantined_total{tier="disk"} 0.0' in http.get("/metrics").text
        whole = http.post(CHAT, json=LONG).json()["choices"][0]["message"]["content"]
        with http.stream("POST", CHAT, json={**LONG, "stream": True}) as stream:
            events = (line[6:] for line in stream.iter_lines() if line.startswith("data: "))
            next(events)
            os.kill(second.pid, signal.SIGTERM)
            *chunks, done = events
        said = "".join(json.loads(one)["choices"][0]["delta"].get("content", "") for one in chunks)
        assert (said, done) == (whole, "[DONE]")
        until(lambda: is_gone(second))
    lines = (tmp_path / "second").read_text("utf-8").splitlines()
    told = [json.loads(line) for line in lines if not line.startswith(("documents may take", "serving "))]
    assert {row["route"] for row in told if "route" in row} >= {CHAT, "/v1/documents"}
    assert "When?" not in "".join(lines)


def test_an_address_that_is_taken_is_told_at_once(tmp_path: Path) -> None:
    from socket import socket

    from typer.testing import CliRunner

    from kvlink.cli import app
    from kvlink.core.errors import InputError

    with socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        found = CliRunner().invoke(app, ["serve", "--model", str(tmp_path / "none"), "--port", str(port)])
    assert isinstance(found.exception, InputError)
    assert "pass another --port" in str(found.exception)
    found = CliRunner().invoke(app, ["serve", "--host", "192.0.2.1", "--insecure", "--model", str(tmp_path / "none")])
    assert isinstance(found.exception, InputError)
    assert "cannot be listened on" in str(found.exception)
