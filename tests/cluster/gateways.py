"""Servers and gateways on loopback ports, in threads: real ones over tiny models, and ones that misbehave."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import torch
import uvicorn

from kvlink import Engine
from kvlink.cluster.affinity import Affinity
from kvlink.cluster.backends import Backends
from kvlink.cluster.gateway import Gateway
from kvlink.engine.library import Library
from kvlink.server.app import make_app
from kvlink.server.auth import Keys
from kvlink.server.served import Served
from kvlink.server.serves import Serves
from kvlink.store.journal import Journal
from tiny import byte_tokenizer
from tiny_models import tiny_model

LOOPBACK = "127.0.0.1"
MODEL = "tiny"
TOKENIZER = byte_tokenizer()
NOTHING = Serves(model=MODEL, weights="none", entries="none", links="")


def until(is_so: Callable[[], Any], *, within_s: float = 60) -> None:
    """Wait for something that another thread or process does."""
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.02)


@contextmanager
def serving(app: Any, *, port: int = 0) -> Generator[str]:
    """Serve an application until the block is left; yield its URL."""
    config = uvicorn.Config(app, host=LOOPBACK, port=port, log_level="critical", timeout_graceful_shutdown=60)
    server = uvicorn.Server(config)
    thread = Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://{LOOPBACK}:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def tiny_server(
    folder: Path, *, store: Any = None, journal: str = "", seed: int = 0, port: int = 0, **options: Any
) -> Generator[tuple[str, Served]]:
    """Serve a tiny model with a library, as `kvlink serve` does.

    Args:
        store: In the folder if None.
        journal: URL of the one that its library follows.
        seed: Of its weights.
        options: Of `Engine.from_pretrained`.
    """
    torch.set_num_threads(1)
    model = tiny_model("llama", dtype=torch.float64, vocab_size=len(TOKENIZER), seed=seed)
    with ExitStack() as opening:
        kept = folder / "entries" if store is None else store
        engine = opening.enter_context(Engine.from_pretrained(model, tokenizer=TOKENIZER, store=kept, **options))
        library = opening.enter_context(Library(folder, engine))
        texts = opening.enter_context(closing(Journal(journal))) if journal else None
        served = Served(engine=engine, library=library, journal=texts, model=MODEL)
        url = opening.enter_context(serving(make_app(served), port=port))
        send("POST", f"{url}/v1/chat/completions", json={})  # what is built on first use is not safe from other threads
        yield url, served


@contextmanager
def gateway(*urls: str, key: str = "", check_s: float = 0.2, **options: Any) -> Generator[httpx.Client]:
    """Route to servers until the block is left; yield a client of the gateway. All have been checked once."""
    policy = Affinity(slots=1 << 10, **options)
    backends = Backends(urls, policy, check_s=check_s)
    front = Gateway(backends, policy, keys=Keys([key] if key else []), max_bytes=1 << 20)
    with serving(front.app()) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        until(lambda: all(one in backends.up or backends._whys[one] for one in backends.urls))
        yield client


def send(method: str, url: str, **options: Any) -> httpx.Response:
    """Send one request; loading certificates for it would take longer than the answer."""
    return httpx.request(method, url, timeout=60, trust_env=False, verify=False, **options)


def counted(client: httpx.Client, name: str) -> dict[str, float]:
    """Return the values of one metric by what it is labelled with."""
    rows = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name + "{")]
    return {line[len(name) : line.rindex(" ")]: float(line.rsplit(" ", 1)[1]) for line in rows}


class Broken:
    """A server that says it is ready, and then does what it is told to each request: nothing, or a few bytes.

    Args:
        answer: Sent before the connection is closed, in parts or whole; None holds it open. Between parts nothing else
            is answered.
        serves: What it says it serves.

    Attributes:
        asked: Requests so far.
        checked: Questions so far whether it is ready.
        is_silent: Whether it leaves those without an answer.
    """

    def __init__(self, answer: bytes | Iterable[bytes] | None, serves: Serves = NOTHING) -> None:
        self.answer, self.asked, self.checked, self.is_silent = answer, 0, 0, False
        body = json.dumps({"ready": True, "serves": serves.to_json()}).encode()
        self._ready = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        self._socket = socket.create_server((LOOPBACK, 0))
        self._held: list[socket.socket] = []
        self.url = f"http://{LOOPBACK}:{self._socket.getsockname()[1]}"
        Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with suppress(OSError):  # the other side was faster
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        self._held.append(connection)
        head = connection.recv(1 << 16)
        is_check = head.startswith(b"GET /ready")
        self.asked += not is_check
        self.checked += is_check
        answer = self._ready if is_check and not self.is_silent else None if is_check else self.answer
        if answer is not None:
            for part in [answer] if isinstance(answer, bytes) else answer:
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            connection.close()

    def __enter__(self) -> "Broken":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        for one in self._held:
            one.close()
