"""Clients that read slowly, or not at all: nobody waits for them, and what waits for them is bounded."""

import json
import re
import socket
from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest
from live import LOOPBACK, MODEL, Live, live, tiny_engine, until

from kvlink.server.served import Served

pytestmark = pytest.mark.enable_socket

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "When?"}], "temperature": 0}
WIDE: dict[str, Any] = {**ASKED, "max_tokens": 100, "stream": True, "logprobs": True, "top_logprobs": 20}
"""A stream of some 150 kB, more than all buffers between a server and its client hold."""

READERS = 4
BUFFERED = 80 << 10
"""Bytes that asyncio keeps of a stream before it waits (64 KiB), and one more event."""


@pytest.fixture
def narrow() -> Iterator[Live]:
    """A server whose connections hold few bytes in the system."""
    with tiny_engine() as engine, live(Served(engine=engine, model=MODEL)) as one:
        for listening in one.http.servers[0].sockets:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        yield one


def opened(server: Live, body: Any, *, takes: int = 4096) -> socket.socket:
    """Send a request by a connection that takes few bytes before they are read."""
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {LOOPBACK}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, takes)
    connection.settimeout(60)
    connection.connect((LOOPBACK, server.port))
    connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def read(connection: socket.socket) -> list[str]:
    """Return the texts of a stream that is read to its end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    parts: list[bytes] = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    connection.close()
    events = re.findall(r"^data: (.*)$", b"".join(parts).decode(), re.MULTILINE)
    assert events.pop().strip() == "[DONE]"
    return [one["choices"][0]["delta"].get("content") or "" for one in map(json.loads, events)]


def waiting(server: Live) -> list[int]:
    """Return how many bytes wait in each connection for their client."""
    return [one.transport.get_write_buffer_size() for one in list(server.http.server_state.connections)]


def rests(server: Live) -> bool:
    stats = server.served.engine.stats()
    return (stats.running, stats.waiting, stats.own_bytes) == (0, 0, 0)


def test_clients_that_read_nothing_stall_nobody_and_hold_no_more_than_a_buffer(narrow: Live) -> None:
    wanted = read(opened(narrow, WIDE, takes=1 << 20))
    engine, held = narrow.served.engine, Event()
    engine.call(held.wait)
    streams = [opened(narrow, WIDE) for _ in range(READERS)]
    until(lambda: engine.stats().waiting == READERS)
    held.set()
    status, body, _ = narrow.send("POST", CHAT, {**ASKED, "max_tokens": 3})
    assert (status, body["usage"]["completion_tokens"]) == (200, 3)
    until(lambda: rests(narrow))  # every answer has been computed, though nobody has read any
    until(lambda: len(waiting(narrow)) == READERS and all(waiting(narrow)))
    assert max(waiting(narrow)) <= BUFFERED
    for one in streams[::2]:
        assert read(one) == wanted
    for one in streams[1::2]:
        one.close()
    until(lambda: not waiting(narrow) and not narrow.http.server_state.tasks)


def test_a_client_that_reads_a_byte_at_a_time_gets_the_whole_stream(narrow: Live) -> None:
    slow = opened(narrow, {**WIDE, "max_tokens": 30})
    told = b""
    while b"\r\n\r\n" not in told:
        told += slow.recv(1)
    for _ in range(2000):
        slow.recv(1)
    assert narrow.send("POST", CHAT, {**ASKED, "max_tokens": 3})[0] == 200
    rest = b""
    while part := slow.recv(7):
        rest = rest[-100:] + part
    slow.close()
    assert b"data: [DONE]" in rest
