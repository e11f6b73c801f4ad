"""A real server on a loopback port, in a thread, over a tiny model with a tokenizer of bytes."""

import asyncio
import json
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.client import HTTPConnection
from threading import Thread
from typing import Any

import torch
import uvicorn
from openai import OpenAI

from kvlink import Engine
from kvlink.server.app import make_app
from kvlink.server.auth import Keys
from kvlink.server.listening import speaking
from kvlink.server.served import Served
from tiny import byte_tokenizer
from tiny_models import tiny_model

MODEL = "tiny"
LOOPBACK = "127.0.0.1"
TOKENIZER = byte_tokenizer()


def tiny_engine(store: Any = None) -> Engine:
    """Load an engine that answers in milliseconds; in float64, so that equal logprobs are no luck."""
    model = tiny_model("llama", dtype=torch.float64, vocab_size=len(TOKENIZER))
    return Engine.from_pretrained(model, tokenizer=TOKENIZER, store=store)


class Live:
    """A server that answers; `http` is what speaks to its clients."""

    def __init__(self, served: Served, port: int, key: str, http: uvicorn.Server) -> None:
        self.served, self.port, self.http = served, port, http
        self.openai = OpenAI(base_url=f"http://{LOOPBACK}:{port}/v1", api_key=key or "none", max_retries=0, timeout=60)

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Send a request; a body of bytes goes as it is. Return status, JSON and headers."""
        connection = HTTPConnection(LOOPBACK, self.port, timeout=60)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            sent = {
                "content-type": "application/json",
                **{name.replace("_", "-"): one for name, one in headers.items()},
            }
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            text = response.read()
            is_json = response.getheader("content-type") == "application/json"
            found = {name.lower(): one for name, one in response.getheaders()}
            return response.status, json.loads(text) if is_json else text.decode(), found
        finally:
            connection.close()


@contextmanager
def live(
    served: Served, *, key: str = "", keys: Keys | None = None, drain_s: int = 10, **options: Any
) -> Generator[Live]:
    """Serve until the block is left, to whoever has the key."""
    app = make_app(served, keys=keys or Keys([key] if key else []), **options)
    server = uvicorn.Server(speaking(app, host=LOOPBACK, port=0, drain_s=drain_s))
    thread = Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    until(lambda: server.started)
    one = Live(served, server.servers[0].sockets[0].getsockname()[1], key, server)
    try:
        yield one
    finally:
        one.openai.close()
        server.should_exit = True
        thread.join()


def until(is_so: Callable[[], bool], *, within_s: float = 120) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.01)
