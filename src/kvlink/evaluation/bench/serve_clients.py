"""Clients as they should not be: some vanish at any moment, many open a stream and read nothing of it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from time import perf_counter, sleep
from typing import Any

from kvlink.core.document import Document
from kvlink.engine.limits import Limits
from kvlink.evaluation.bench.serve import CHAT, chat_body, spread
from kvlink.evaluation.bench.serve_process import Connection, ServerProcess

LONG = 200
"""Tokens of an answer whose client leaves, or that keeps other streams waiting."""

RESTS_WITHIN_S = 60.0


def vanishing(
    server: ServerProcess, documents: Sequence[Document], question: str, *, clients: int, progress: Callable[[], None]
) -> dict[str, Any]:
    """Let clients connect and vanish; return what the server still holds of them once it rests, or after a minute.

    One in ten leaves in the middle of its stream, the others in the middle of their request, or right behind it.
    """
    before = _state(server)
    body = chat_body(documents, question, max_tokens=LONG, temperature=2.0)
    reading = clients // 10
    with ExitStack() as opened:
        streams = [opened.enter_context(closing(server.sent(CHAT, body))) for _ in range(reading)]
        for one in streams:
            one.recv(1)
            progress()
    for number in range(clients - reading):
        server.sent(CHAT, body, part=0.5 if number % 2 else 1.0).close()
        progress()
    return {
        "arm": "vanished",
        "clients": clients,
        "in_a_stream": reading,
        "before": before,
        **_rested(server, before),
    }


def idle_streams(server: ServerProcess, question: str, *, streams: int, progress: Callable[[], None]) -> dict[str, Any]:
    """Open many streams, read nothing of them while all are open, then all; return how many came to their end.

    As many as the server runs at once ask for something long, so that the others wait.
    """
    before = _state(server)
    bodies = [chat_body([], question, max_tokens=tokens, temperature=2.0) for tokens in (LONG, 2)]
    running = Limits().max_running
    with ExitStack() as opened:
        connections: list[Connection] = []
        for number in range(streams):
            connections.append(opened.enter_context(closing(server.sent(CHAT, bodies[number >= running]))))
            progress()
        most_open, health = 0, list[float]()
        for _ in range(10):
            most_open = max(most_open, server.open_files - before["open_files"])
            start = perf_counter()
            server.get("/health")
            health.append(perf_counter() - start)
            sleep(0.1)
        held = _state(server)
        whole = 0
        for one in connections:
            whole += b"data: [DONE]" in _read(one)
            progress()
    return {
        "arm": "idle",
        "streams": streams,
        "open_at_once": most_open,
        "whole": whole,
        "health_s": spread(health),
        "bytes_per_stream": (held["memory_bytes"] - before["memory_bytes"]) / streams,
        "before": before,
        "held": held,
        **_rested(server, before),
    }


def _rested(server: ServerProcess, before: Mapping[str, int]) -> dict[str, Any]:
    """Wait until requests hold nothing and no file more is open than before, a minute at most; return what is left."""
    start = perf_counter()
    while True:
        left = server.held()
        sleep(0.05)  # the connection that asked is closed by then
        after, seconds = _state(server), perf_counter() - start
        rests = not left and after["open_files"] <= before["open_files"]
        if rests or seconds > RESTS_WITHIN_S:
            return {"left": left, "rests_after_s": seconds, "after": after}


def _state(server: ServerProcess) -> dict[str, int]:
    return {"memory_bytes": server.memory_bytes, "open_files": server.open_files, "threads": server.threads}


def _read(connection: Connection) -> bytes:
    parts: list[bytes] = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)
