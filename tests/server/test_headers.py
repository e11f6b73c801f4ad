"""What clients put into headers, ids, names and keys comes back escaped in a body, or not at all."""

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from live import LOOPBACK, MODEL, Live, live, tiny_engine

from kvlink.engine.library import Library
from kvlink.server.auth import Keys
from kvlink.server.listening import hosts_of
from kvlink.server.served import Served

pytestmark = pytest.mark.enable_socket

OURS = {
    "allow",
    "cache-control",
    "connection",
    "content-length",
    "content-security-policy",
    "content-type",
    "date",
    "retry-after",
    "transfer-encoding",
    "www-authenticate",
    "x-request-id",
}
"""All headers that the server ever sends."""

LOOPBACK_NAMES = hosts_of(LOOPBACK, Keys())
SPLIT = "%0d%0aset-cookie:%20evil=1%0d%0a%0d%0aHTTP/1.1%20200%20OK"


def raw(server: Live, method: str, path: str, *lines: bytes, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
    """Send bytes as they are; return status, headers and body of all that comes back."""
    start = f"{method} {path} HTTP/1.1\r\n".encode()
    head = [*lines, b"content-type: application/json", f"content-length: {len(body)}".encode(), b"connection: close"]
    with socket.create_connection((LOOPBACK, server.port), timeout=30) as connection:
        connection.sendall(start + b"".join(line + b"\r\n" for line in head) + b"\r\n" + body)
        found = b""
        while part := connection.recv(1 << 16):
            found += part
    top, _, rest = found.partition(b"\r\n\r\n")
    first, *others = top.decode("latin-1").split("\r\n")
    return int(first.split(" ")[1]), {one.split(": ")[0].lower(): one.split(": ", 1)[1] for one in others}, rest


def check(status: int, headers: dict[str, str], body: bytes) -> None:
    assert status < 500
    assert headers.keys() <= OURS
    assert "evil" not in json.dumps(headers)
    assert b"\r\nHTTP/1.1" not in body, "there is one response"


@pytest.mark.parametrize(
    "line",
    [
        b"x-request-id: a\r\n set-cookie: evil=1",
        b"x-request-id: a\nset-cookie: evil=1",
        b"x-request-id: a\rset-cookie: evil=1",
        b"x-request-id: evil\x00",
        b"x-request-id: evil\xff\xfe",
        b"x-request-id: " + b"evil" * 4000,
        b"x-request-id: a%0d%0aset-cookie: evil=1",
        b"authorization: Bearer evil\xff\r\n evil",
        b"authorization: evil",
        b"traceparent: evil",
        b"origin: https://evil.example",
        b"content-type: evil",
        b"accept: evil",
        b"x-forwarded-host: evil.example",
        b"evil evil: 1",
        b": evil",
        b"transfer-encoding: evil",
        b"upgrade: evil\r\nconnection: upgrade",
    ],
    ids=range(18),
)
def test_no_header_of_a_client_comes_back(server: Live, line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvlink.server"):
        for method, path, body in (("GET", "/v1/models", b""), ("POST", "/v1/chat/completions", b"{}")):
            check(*raw(server, method, path, f"host: {LOOPBACK}".encode(), line, body=body))
    for record in caplog.records:
        if record.name == "kvlink.server":
            assert "\n" not in record.getMessage()
            assert "evil" not in record.getMessage()
    assert server.send("GET", "/health")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        f"/v1/models/{SPLIT}",
        f"/v1/documents/{SPLIT}",
        f"/v1/documents?after={SPLIT}",
        f"/v1/documents?limit={SPLIT}",
        f"/{SPLIT}",
        f"/health/{SPLIT}",
        f"/health?{SPLIT}",
        "/health/?evil",
        "/v1/models/?evil",
        "//evil.example/health/",
        "/v1/chat/completions/",
        "http://evil.example/health/",
    ],
)
def test_no_path_comes_back_in_a_header_and_nobody_is_sent_elsewhere(server: Live, path: str) -> None:
    for method in ("GET", "DELETE", "POST", "HEAD", "EVIL"):
        status, headers, body = raw(server, method, path, b"host: evil.example")
        check(status, headers, body)
        assert status < 300 or status >= 400


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Path]]:
    """A server with a key and a library, and the folder in which that lies."""
    folder = tmp_path_factory.mktemp("outer")
    with (
        tiny_engine(folder / "a" / "b" / "library" / "entries") as engine,
        Library(folder / "a" / "b" / "library", engine) as library,
        live(Served(engine=engine, library=library, model=MODEL), key="k") as one,
    ):
        yield one, folder


@pytest.mark.parametrize(
    "name",
    ["../../evil", "..\\evil", "/etc/passwd", "a/../../b", "~/evil", "{{7*7}}", "';drop table documents;--", "%n", "é"],
)
def test_an_id_is_a_name_and_no_path_template_or_statement(shelf: tuple[Live, Path], name: str) -> None:
    server, folder = shelf
    path, key = f"/v1/documents/{quote(name, safe='')}", {"authorization": "Bearer k"}
    text, title = "The {{7*7}} opens at seven.\r\nset-cookie: evil=1", "{% raw %}\r\nx: y"
    status, body, headers = server.send(
        "PUT", path, {"text": text, "title": title, "metadata": {"../x": "\r\n"}}, **key
    )
    assert (status, body["id"]) == (201, name)
    assert headers.keys() <= OURS
    found = server.send("GET", path, **key)[1]
    assert (found["id"], found["text"], found["title"]) == (name, text, title)
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "{{7*7}}?"}],
        "max_tokens": 1,
        "documents": [name],
    }
    used = server.send("POST", "/v1/chat/completions", asked, **key)[1]["usage"]["kvlink"]["documents"]
    assert [row["id"] for row in used] == [name]
    assert server.send("DELETE", path, **key)[1]["deleted"]
    assert {one.name for one in folder.rglob("*") if "library" not in one.parts} == {"a", "b"}


@pytest.mark.parametrize("name", ["a\r\nb", "a\nb", "\x00", "a\x7f", "a\u202e", "\u2028", " ", "x" * 513])
def test_an_id_that_is_no_printable_text_is_refused(shelf: tuple[Live, Path], name: str) -> None:
    server, _ = shelf
    key = {"authorization": "Bearer k"}
    path = f"/v1/documents/{quote(name, safe='')}"
    assert server.send("PUT", path, {"text": "x"}, **key)[0] in (400, 404)  # a path of two lines is no route
    (row,) = server.send("POST", "/v1/documents", {"documents": [{"id": name, "text": "x"}]}, **key)[1]["data"]
    assert (row["outcome"], row["error"]["code"]) == ("refused", "invalid_id")
    assert server.send("GET", "/v1/documents", **key)[1]["data"] == []


@pytest.mark.parametrize("field", ["id", "text", "title", "metadata"])
def test_half_a_character_is_kept_or_refused_and_breaks_nothing(shelf: tuple[Live, Path], field: str) -> None:
    server, _ = shelf
    value: Any = {"a": "\ud800"} if field == "metadata" else "x \ud800"
    body = {"documents": [{"id": "half", "text": "The office opens at seven.", field: value}]}
    status, found, _ = server.send("POST", "/v1/documents", body, authorization="Bearer k")
    assert status in (200, 400), found
    for row in server.send("GET", "/v1/documents", authorization="Bearer k")[1]["data"]:
        path = f"/v1/documents/{quote(row['id'], safe='')}"
        kept = server.send("GET", path, authorization="Bearer k")[1][field]
        assert kept in (value, "x \ufffd", "x ?"), "it is kept, or another character stands for it"
        assert server.send("DELETE", path, authorization="Bearer k")[0] == 200


def test_a_name_that_is_not_the_servers_is_told_what_to_do() -> None:
    with tiny_engine() as engine, live(Served(engine=engine, model=MODEL), hosts=LOOPBACK_NAMES) as known:
        for host, status in (("localhost:80", 200), ("[::1]:8000", 200), ("evil.example", 400), ("[", 400), ("", 400)):
            found, headers, body = raw(known, "GET", "/health", f"host: {host}".encode())
            assert found == status
            check(found, headers, body)
            if status == 400:
                assert "--api-key" in json.loads(body)["error"]["message"]
                assert b"evil" not in body
