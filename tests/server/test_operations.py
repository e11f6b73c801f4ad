"""What an operator relies on: keys, limits, hostile bodies, clients that vanish, a queue that is full, a drain."""

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from live import LOOPBACK, MODEL, Live, live, tiny_engine, until

from kvlink.core.errors import InputError
from kvlink.engine.scheduler import Limits
from kvlink.server.auth import Keys, check_address
from kvlink.server.served import Served

pytestmark = pytest.mark.enable_socket

ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "When?"}], "temperature": 0}
LONG: dict[str, Any] = {**ASKED, "max_tokens": 400}
CHAT = "/v1/chat/completions"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Served]:
    """An engine that a test may bend."""
    with tiny_engine() as engine:
        yield Served(engine=engine, model=MODEL)


def vanish(server: Live, body: Any, *, after: bytes = b"") -> None:
    """Send a request, perhaps read up to some bytes, and close the connection."""
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {LOOPBACK}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((LOOPBACK, server.port), timeout=30) as connection:
        connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        found = b""
        while after not in found:
            found += connection.recv(4096)


def rests(server: Live) -> bool:
    stats = server.served.engine.stats()
    return (stats.running, stats.waiting, stats.own_bytes) == (0, 0, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_work(server: Live, stream: bool) -> None:
    assert server.send("POST", CHAT, LONG)[1]["usage"]["completion_tokens"] == 400, "it would not end by itself"
    until(lambda: rests(server))
    before = server.served.engine.stats()
    for _ in range(10):
        vanish(server, {**LONG, "n": 2, "stream": stream}, after=b'"content"' if stream else b"")
    until(lambda: rests(server) and server.served.engine.stats().cancelled >= before.cancelled + 10)
    after = server.served.engine.stats()
    done = sum(getattr(after, name) - getattr(before, name) for name in ("finished", "cancelled", "failed"))
    assert done == after.submitted - before.submitted
    assert server.send("POST", CHAT, {**ASKED, "max_tokens": 1})[0] == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b"\xff\xfe", 400),
        (b'{"a":' * 20_000 + b"1" + b"}" * 20_000, 400),
        (b'{"model": "tiny", "messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
        (b'{"model": "tiny", "messages": "x"}', 400),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}', (200, 400)),
        (b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}', (400, 404)),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', 400),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 6000 + b"}", 400),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "\\u0000\\r\\nx": 1}', 400),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": ""}]}', 400),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "documents": [5]}', 400),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "documents": {"id": "x"}}', 400),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stop": [1]}', 400),
        (b"x" * (2 << 20), 413),
    ],
    ids=range(19),
)
def test_no_body_breaks_the_server(server: Live, body: bytes, status: Any) -> None:
    found, error, _ = server.send("POST", CHAT, body)
    assert found in (status if isinstance(status, tuple) else (status,)), error
    if found != 200:
        assert set(error["error"]) == {"message", "type", "param", "code"}


def test_a_body_without_an_announced_length_has_the_same_limit(server: Live) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {LOOPBACK}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((LOOPBACK, server.port), timeout=30) as connection:
        connection.sendall(
            f"{head}transfer-encoding: chunked\r\n\r\n".encode() + (b"10000\r\n" + b"x" * 0x10000 + b"\r\n") * 17
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


def test_paths_and_methods_that_there_are_not_are_told_in_the_same_shape(server: Live) -> None:
    for method, path, status in (("GET", "/nothing", 404), ("PATCH", CHAT, 405), ("GET", "/docs", 404)):
        found, error, _ = server.send(method, path)
        assert (found, error["error"]["type"]) == (
            status,
            "not_found_error" if status == 404 else "invalid_request_error",
        )


def test_a_request_id_comes_back_if_it_is_one(server: Live, caplog: pytest.LogCaptureFixture) -> None:
    def rows() -> dict[str, tuple[str, int]]:
        told = [json.loads(record.getMessage()) for record in caplog.records if record.name == "kvlink.server"]
        return {row["id"]: (row["route"], row["status"]) for row in told}

    with caplog.at_level(logging.INFO, "kvlink.server"):
        headers = server.send("POST", CHAT, {**ASKED, "max_tokens": 1}, x_request_id="mine-1")[2]
        other = server.send("GET", "/health", x_request_id="no id; at all")[2]["x-request-id"]
        until(lambda: {"mine-1", other} <= rows().keys())
    assert headers["x-request-id"] == "mine-1"
    assert other.isalnum()
    assert (rows()["mine-1"], rows()[other]) == ((CHAT, 200), ("/health", 200))
    assert "When?" not in caplog.text


def test_health_readiness_and_metrics_are_told(server: Live) -> None:
    server.send("POST", CHAT, {**ASKED, "max_tokens": 3, "documents": [{"text": "The office opens at seven."}]})
    assert server.send("GET", "/health")[0] == 200
    assert server.send("GET", "/ready")[0] == 200
    text = server.send("GET", "/metrics")[1]
    rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(rows["kvlink_ttft_seconds_count"]) >= 1
    assert float(rows["kvlink_inter_token_seconds_count"]) >= 2
    assert float(rows['kvlink_prompt_tokens_total{kind="computed"}']) > 0
    assert float(rows["kvlink_requests_running"]) == 0
    assert 'kvlink_tier_evictions_total{tier="device"}' in rows
    assert any(name.startswith("kvlink_documents_total{source=") for name in rows)


def test_other_sites_learn_nothing(server: Live) -> None:
    headers = server.send("GET", "/v1/models", Origin="https://elsewhere.example")[2]
    assert not [name for name in headers if name.startswith("access-control")]
    assert server.send("OPTIONS", CHAT, Origin="https://elsewhere.example")[0] == 405
    assert server.send("POST", CHAT, json.dumps(ASKED).encode(), content_type="text/plain")[0] == 400


def test_a_key_is_asked_for_but_by_a_supervisor(own: Served) -> None:
    with live(own, key="secret", hosts=["localhost", LOOPBACK]) as server:
        assert server.openai.models.list().data
        with pytest.raises(openai.AuthenticationError):
            server.openai.with_options(api_key="wrong").models.list()
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            status, body, headers = server.send("GET", path)
            assert (status, body["error"]["code"]) == (401, "missing_api_key")
            assert headers["www-authenticate"] == "Bearer"
        assert server.send("GET", "/health")[0] == 200
        assert server.send("GET", "/health", host="elsewhere.example")[0] == 400


def test_a_full_queue_says_when_to_come_again(own: Served) -> None:
    with live(own) as server:
        own.engine._steps.scheduler.limits = Limits(max_queue=0)
        status, body, headers = server.send("POST", CHAT, ASKED)
        assert (status, body["error"]["code"]) == (429, "queue_full")
        assert int(headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            server.openai.chat.completions.create(**ASKED, stream=True)


def test_a_request_that_is_too_late_is_given_up(own: Served) -> None:
    own.deadline_s = 1e-6
    with live(own) as server:
        for stream in (False, True):
            status, body, _ = server.send("POST", CHAT, {**ASKED, "stream": stream})
            assert (status, body["error"]["code"]) == (504, "deadline_exceeded")


def test_a_prompt_that_is_longer_than_the_server_takes_is_refused(own: Served) -> None:
    own.max_prompt_tokens = 250
    with live(own) as server:
        long = {"messages": [{"role": "user", "content": "word " * 60}]}
        for path, body in ((CHAT, {**ASKED, **long}), ("/v1/completions", {"model": MODEL, "prompt": "word " * 60})):
            status, found, _ = server.send("POST", path, body)
            assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
            assert "takes 250" in found["error"]["message"]
        assert server.send("POST", CHAT, {**ASKED, "max_tokens": 1})[0] == 200


def test_what_fails_in_the_middle_of_a_stream_is_told_in_it(own: Served) -> None:
    with live(own) as server:
        chunks = server.openai.chat.completions.create(**LONG, stream=True)
        assert next(chunks).choices[0].delta.role == "assistant"
        with own.engine._steps.scheduler.lock:
            own.engine._steps.scheduler.close()
        with pytest.raises(openai.APIError, match="closed"):
            list(chunks)


def test_other_machines_are_served_with_a_key_or_on_purpose() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        check_address(host, Keys(), insecure=False)
    for host in ("0.0.0.0", "::", "10.0.0.1", "server.example"):
        with pytest.raises(InputError, match="--api-key"):
            check_address(host, Keys(), insecure=False)
        check_address(host, Keys(["secret"]), insecure=False)
        check_address(host, Keys(), insecure=True)
    with pytest.raises(InputError, match="blank"):
        Keys([""])


def test_a_drain_has_an_end(own: Served) -> None:
    """What is not answered by then is cut, and is not whole."""
    with live(own, drain_s=1) as server:
        data = json.dumps({**LONG, "max_tokens": 1000, "n": 16, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {LOOPBACK}\r\ncontent-type: application/json\r\n"
        with socket.create_connection((LOOPBACK, server.port), timeout=30) as connection:
            connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            found = connection.recv(1 << 16)
            server.http.should_exit = True
            while part := connection.recv(1 << 16):
                found = found[-1000:] + part
        assert b"[DONE]" not in found
        until(lambda: own.engine.stats().running == 0)
