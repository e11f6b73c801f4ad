"""The gateway over real servers: documents decide where, everything comes through, and what fails goes on elsewhere."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateways import LOOPBACK, MODEL, TOKENIZER, Broken, counted, gateway, tiny_server, until
from starlette.requests import Request

from kvlink.cluster.gateway import body_of
from kvlink.core.errors import InputError
from kvlink.engine.library import Library
from kvlink.server.refusals import Refused
from kvlink.server.served import Served
from store.servers import free_port
from tiny_models import tiny_model

pytestmark = pytest.mark.enable_socket

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "When?"}],
    "temperature": 0,
    "max_tokens": 3,
}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[str, Served]]]:
    with ExitStack() as opening:
        yield [opening.enter_context(tiny_server(tmp_path_factory.mktemp("library"))) for _ in range(2)]


@pytest.fixture
def client(servers: list[tuple[str, Served]]) -> Iterator[httpx.Client]:
    with gateway(*(url for url, _ in servers)) as one:
        yield one


def shelves(served: Served) -> Library:
    assert served.library is not None
    return served.library


def about(text: str, **more: Any) -> dict[str, Any]:
    return {**ASKED, "documents": [{"text": text}], **more}


def sources(answer: httpx.Response) -> list[str]:
    return [row["source"] for row in answer.json()["usage"]["kvlink"]["documents"]]


def per_backend(client: httpx.Client) -> list[float]:
    return sorted(counted(client, "kvlink_route_requests_total").values())


def test_a_document_is_encoded_once_though_there_are_two_servers(servers: list[tuple[str, Served]]) -> None:
    with gateway(
        *(url for url, _ in servers), excess=None
    ) as client:  # homes depend on ports: all may be on one server
        for number in range(6):
            text = f"Hut {number} opens at seven."
            found = [sources(client.post(CHAT, json=about(text)))[0] for _ in range(4)]
            assert found == ["encoded", "device", "device", "device"]
        assert sum(per_backend(client)) == 24


def test_what_comes_through_is_what_a_server_says(client: httpx.Client, servers: list[tuple[str, Served]]) -> None:
    body = about("The office opens at eight.", stream=True, max_tokens=12, stream_options={"include_usage": True})
    direct = httpx.post(servers[0][0] + CHAT, json=body)
    routed = client.post(CHAT, json=body)
    assert routed.headers["content-type"] == direct.headers["content-type"]

    def said(answer: httpx.Response) -> list[Any]:
        rows = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert rows[-1] == "[DONE]"
        return [choice for row in rows[:-1] for choice in json.loads(row)["choices"]]

    assert said(routed) == said(direct)
    assert client.get("/v1/models").json()["data"][0]["id"] == MODEL
    wrong = client.post(CHAT, json={**ASKED, "model": "other"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
    assert client.post(CHAT, content=b"{").status_code == 400
    assert client.post(CHAT, content=b"x" * (2 << 20)).status_code == 413
    assert client.get("/nothing").json()["error"]["type"] == "not_found_error"
    ready = client.get("/ready").json()
    assert (ready["ready"], ready["backends"]) == (True, 2)
    assert ready["serves"] == servers[0][1].serves.to_json()


def test_a_conversation_stays_where_it_began(client: httpx.Client, servers: list[tuple[str, Served]]) -> None:
    messages: list[dict[str, str]] = [{"role": "user", "content": "Which hut?"}]
    cached: list[int] = []
    for _ in range(3):
        answer = client.post(CHAT, json={**ASKED, "messages": messages}).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        messages[-2] = {"role": "assistant", "content": messages[-2]["content"]}
    reasons = [label for label in counted(client, "kvlink_route_requests_total") if 'reason="session"' in label]
    assert len(reasons) == 1
    assert cached[2] > 0, "its beginning was known there"


def test_texts_go_to_all_servers_and_new_ones_count_at_once(
    client: httpx.Client, servers: list[tuple[str, Served]]
) -> None:
    for text, status in (("The hut opens at five.", 201), ("The hut opens at six.", 200)):
        assert client.put("/v1/documents/a%2Fhut", json={"text": text}).status_code == status
        for _, served in servers:
            assert shelves(served).get("a/hut").text == text
        assert client.get("/v1/documents/a/hut").json()["text"] == text
        assert client.post(CHAT, json={**ASKED, "documents": ["a/hut"]}).status_code == 200
    assert client.post("/v1/documents", json={"documents": [{"id": "b", "text": "Snow."}]}).status_code == 200
    assert [shelves(served).get("b").text for _, served in servers] == ["Snow.", "Snow."]
    assert client.post("/v1/warm", json={"documents": ["a/hut"]}).status_code == 200
    assert client.delete("/v1/documents/a/hut").json()["deleted"]
    assert client.delete("/v1/documents/a/hut").status_code == 404
    assert client.post(CHAT, json={**ASKED, "documents": ["a/hut"]}).status_code == 404


def test_no_text_is_changed_while_a_server_is_away(servers: list[tuple[str, Served]]) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        absent = f"http://{LOOPBACK}:{taken.getsockname()[1]}"
    with gateway(servers[0][0], absent) as client:
        refused = client.put("/v1/documents/x", json={"text": "New."})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "away")
        assert client.get("/v1/documents/x").status_code == 404
        assert client.post(CHAT, json=ASKED).status_code == 200


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{",
        b"HTTP/1.1 503 Closing\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 429 Full\r\ncontent-length: 0\r\n\r\n",
    ],
    ids=["nothing", "half", "closing", "full"],
)
def test_what_a_server_has_not_begun_to_answer_goes_to_another(
    servers: list[tuple[str, Served]], answer: bytes
) -> None:
    with Broken(answer, servers[0][1].serves) as broken, gateway(broken.url, servers[0][0]) as client:
        for number in range(24):  # some are at home there, wherever the ports lie
            assert client.post(CHAT, json=about(f"Broken {number}.")).status_code == 200
        assert broken.asked > 0
        assert sum(counted(client, "kvlink_route_retries_total").values()) == broken.asked


def test_a_server_that_hangs_is_left_and_its_requests_go_on(servers: list[tuple[str, Served]]) -> None:
    with (
        Broken(None, servers[0][1].serves) as broken,
        gateway(broken.url, servers[0][0]) as client,
        ThreadPoolExecutor(24) as pool,
    ):
        asking = [pool.submit(client.post, CHAT, json=about(f"Hung {number}.")) for number in range(24)]
        until(lambda: broken.asked)
        broken.is_silent = True
        assert [one.result().status_code for one in asking] == [200] * 24
        assert client.get("/ready").json()["backends"] == 1
        broken.is_silent = False
        until(lambda: client.get("/ready").json()["backends"] == 2)


def test_what_breaks_in_the_middle_of_a_stream_is_told_in_it() -> None:
    first = b'data: {"choices": []}\n\n'
    with Broken(HEAD + b"%x\r\n%b\r\n" % (len(first), first)) as broken, gateway(broken.url) as client:
        lines = client.post(CHAT, json={**ASKED, "stream": True}).text.split("\n\n")
        assert lines[0] == first.decode().strip()
        assert json.loads(lines[1][6:])["error"]["code"] == "backend_lost"
        assert broken.asked == 1, "what has begun is not asked again"


def test_when_all_are_full_the_client_is_told_so_and_when_none_is_there_too() -> None:
    with Broken(b"HTTP/1.1 429 Full\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n") as one:
        with gateway(one.url) as client:
            full = client.post(CHAT, json=ASKED)
            assert (full.status_code, full.headers["retry-after"]) == (429, "7")
        absent = one.url
    with gateway(absent) as client:
        none = client.post(CHAT, json=ASKED)
        assert (none.status_code, none.json()["error"]["code"]) == (503, "no_backend")
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200


def test_a_client_that_leaves_frees_its_work(servers: list[tuple[str, Served]], client: httpx.Client) -> None:
    def cancelled() -> int:
        return sum(served.engine.stats().cancelled for _, served in servers)

    def submitted() -> int:
        return sum(served.engine.stats().submitted for _, served in servers)

    body = {**ASKED, "max_tokens": 400}
    before = cancelled()
    with client.stream("POST", CHAT, json={**body, "stream": True}) as answer:
        assert next(answer.iter_raw())
    until(lambda: cancelled() == before + 1)
    data, had = json.dumps(body).encode(), submitted()
    with socket.create_connection((client.base_url.host, client.base_url.port)) as leaving:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {LOOPBACK}\r\ncontent-type: application/json\r\n"
        leaving.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        until(lambda: submitted() == had + 1)
    until(lambda: cancelled() == before + 2)


def test_a_key_is_asked_for(servers: list[tuple[str, Served]]) -> None:
    with gateway(servers[0][0], key="secret") as client:
        assert client.post(CHAT, json=ASKED).status_code == 401
        assert client.get("/metrics").status_code == 401
        assert client.get("/ready").status_code == 200
        assert client.post(CHAT, json=ASKED, headers={"authorization": "Bearer secret"}).status_code == 200


@pytest.mark.parametrize("urls", [[], ["ftp://x"], ["localhost:8000"], ["http://a", "http://a/"]])
def test_addresses_that_are_none_are_refused(urls: list[str]) -> None:
    with pytest.raises(InputError, match=r"--backends|like http"), gateway(*urls):
        pass


def test_the_verb_routes_until_a_signal(servers: list[tuple[str, Served]]) -> None:
    port = free_port()
    words = ["route", "--backends", ",".join(url for url, _ in servers), "--port", str(port)]
    process = subprocess.Popen([sys.executable, "-m", "kvlink", *words], stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://{LOOPBACK}:{port}", timeout=60, trust_env=False, verify=False) as client:
            until(lambda: _backends(client) == 2, within_s=120)
            assert client.post(CHAT, json=about("A hut.")).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not os.environ.get("KVLINK_TORTURE"), reason="loads a model three times: make torture")
def test_a_killed_server_fails_no_request_that_had_not_begun(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    tiny_model("llama", vocab_size=len(TOKENIZER)).save_pretrained(model)
    TOKENIZER.save_pretrained(model)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ports = [free_port() for _ in range(3)]
    urls = [f"http://{LOOPBACK}:{port}" for port in ports[:2]]
    serve = [sys.executable, "-m", "kvlink", "serve", "--model", str(model)]
    commands = [
        *([*serve, "--store", str(tmp_path / str(port)), "--port", str(port)] for port in ports[:2]),
        [
            sys.executable,
            "-m",
            "kvlink",
            "route",
            "--backends",
            ",".join(urls),
            "--port",
            str(ports[2]),
            "--check",
            "1",
        ],
    ]
    processes = [subprocess.Popen(one, env=environment, stderr=subprocess.DEVNULL) for one in commands]
    try:
        with httpx.Client(base_url=f"http://{LOOPBACK}:{ports[2]}", timeout=60, trust_env=False) as client:
            until(lambda: _backends(client) == 2, within_s=120)
            with ThreadPoolExecutor(4) as pool:
                asking = [pool.submit(client.post, CHAT, json=about(f"Hut {at % 10}.")) for at in range(60)]
                until(lambda: sum(one.done() for one in asking) > 15)
                processes[0].kill()
                statuses = [one.result().status_code for one in asking]
            assert statuses == [200] * 60
            assert _backends(client) == 1
            body = {**ASKED, "max_tokens": 400, "stream": True}
            with client.stream("POST", CHAT, json=body) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: ")
                processes[1].kill()
                said = [line for line in lines if line]
            assert json.loads(said[-1][6:])["error"]["code"] == "backend_lost"
            gone = client.post(CHAT, json=ASKED)
            assert (gone.status_code, gone.json()["error"]["code"]) == (503, "no_backend")
            processes[2].send_signal(signal.SIGTERM)
            assert processes[2].wait(30) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _backends(client: httpx.Client) -> int:
    try:
        return client.get("/ready").json()["backends"]
    except httpx.TransportError:
        return 0


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([{"type": "http.request", "body": b"ab", "more_body": True}, {"type": "http.disconnect"}], "client_closed"),
        ([{"type": "http.request", "body": b"abc", "more_body": True}], "too_large"),
        ([{"type": "http.request", "body": b"ab"}], ""),
    ],
)
def test_a_body_is_whole_or_refused(messages: list[dict[str, Any]], code: str) -> None:
    coming = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(coming)

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    if not code:
        assert asyncio.run(body_of(request, 2)) == b"ab"
        return
    with pytest.raises(Refused) as refused:
        asyncio.run(body_of(request, 2))
    assert refused.value.body["error"]["code"] == code
