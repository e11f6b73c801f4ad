"""What a gateway does about a server that ends, hangs or comes back as another one, while it has requests there."""

import asyncio
import errno
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from threading import Event
from typing import Any

import httpx
import pytest
from gateways import MODEL, NOTHING, Broken, gateway, serving, until

from kvlink.cluster.affinity import Affinity
from kvlink.cluster.backends import KEEPALIVE, Backends, is_silence

pytestmark = pytest.mark.enable_socket

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "When?"}], "stream": True}
PART = b'data: {"choices": []}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(part: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(part), part)


def backends(client: httpx.Client) -> int:
    return client.get("/ready").json()["backends"]


class Slow:
    """A server that answers one request after it was told to, and counts them."""

    def __init__(self) -> None:
        self.asked, self.may_answer = 0, Event()

    async def __call__(self, scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] == "lifespan":
            return
        if scope["path"] != "/ready":
            self.asked += 1
            while not self.may_answer.is_set():
                await asyncio.sleep(0.01)
        body = json.dumps({"ready": True, "serves": NOTHING.to_json()}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("PUT", "/v1/documents/hut")])
def test_a_server_that_is_told_to_end_answers_what_it_has(method: str, path: str) -> None:
    slow = Slow()
    with ExitStack() as front, ExitStack() as server, ThreadPoolExecutor(2) as pool:
        front.callback(slow.may_answer.set)
        client = front.enter_context(gateway(server.enter_context(serving(slow))))
        asking = pool.submit(client.request, method, path, json={})
        until(lambda: slow.asked)
        ending = pool.submit(server.close)
        until(lambda: backends(client) == 0)
        slow.may_answer.set()
        assert asking.result().status_code == 200
        ending.result()
        assert slow.asked == 1


def test_a_stream_whose_server_hangs_ends_with_an_error() -> None:
    ended = Event()

    def one_part() -> Iterator[bytes]:
        yield HEAD + chunk(PART)
        ended.wait(120)

    with ExitStack() as opening:
        opening.callback(ended.set)
        client = opening.enter_context(gateway(opening.enter_context(Broken(one_part())).url))
        said = client.post(CHAT, json=ASKED).text.split("\n\n")
        assert said[0] == PART.decode().strip()
        assert json.loads(said[1][6:])["error"]["code"] == "backend_lost"


def test_a_stream_that_goes_on_is_not_given_up_though_its_server_answers_no_check() -> None:
    ended = Event()

    def parts() -> Iterator[bytes]:
        yield HEAD
        while not ended.is_set():
            yield chunk(PART)
            time.sleep(0.02)
        yield chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    with ExitStack() as opening, ThreadPoolExecutor(1) as pool:
        opening.callback(ended.set)
        client = opening.enter_context(gateway(opening.enter_context(Broken(parts())).url, check_s=0.3))
        asking = pool.submit(client.post, CHAT, json=ASKED)
        until(lambda: backends(client) == 0)
        time.sleep(1.0)  # a few more checks
        ended.set()
        said = asking.result().text.split("\n\n")
        assert said[-2] == "data: [DONE]"
        assert set(said[:-2]) == {PART.decode().strip()}


def test_a_server_of_other_weights_does_not_take_over_while_the_first_one_is_away() -> None:
    with (
        Broken(None) as first,
        Broken(None, replace(NOTHING, weights="others")) as other,
        ExitStack() as front,
    ):
        other.is_silent = True  # the first one decides, however busy the machine is
        client = front.enter_context(gateway(first.url, other.url))
        assert backends(client) == 1
        other.is_silent = False
        first.is_silent = True
        until(lambda: backends(client) == 0)
        seen = other.checked
        until(lambda: other.checked > seen + 2)
        assert backends(client) == 0
        first.is_silent = False
        until(lambda: backends(client) == 1)
        assert client.get("/ready").json()["serves"] == NOTHING.to_json()


def test_the_system_asks_whether_the_machine_behind_a_quiet_connection_is_there() -> None:
    async def options() -> tuple[int, dict[str, int]]:
        with Broken(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") as server:
            asking = Backends([server.url], Affinity(slots=1 << 10))
            await asking.check()
            answer = await asking.send(server.url, "GET", "/", body=b"", headers={})
            one = answer.extensions["network_stream"].get_extra_info("socket")
            told = {name: one.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in KEEPALIVE}
            is_on = one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            await asking.read(server.url, answer)
            await asking.close()
            return is_on, told

    assert asyncio.run(options()) == (1, KEEPALIVE)


def tried(*found: OSError) -> httpx.ConnectError:
    """Return what is raised where a name has one or more addresses."""
    error, outer = httpx.ConnectError("no"), OSError("All connection attempts failed")
    outer.__cause__ = found[0] if len(found) == 1 else ExceptionGroup("several", found)
    error.__cause__ = outer
    return error


NO_ROUTE = OSError(errno.EHOSTUNREACH, "no route")
REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "refused")


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (httpx.ConnectTimeout(""), True),
        (tried(NO_ROUTE), True),
        (tried(NO_ROUTE, NO_ROUTE), True),
        (tried(REFUSED), False),
        (tried(NO_ROUTE, REFUSED), False),
        (tried(socket.gaierror(socket.EAI_NONAME, "no such name")), False),
        (httpx.ReadError(""), False),
    ],
)
def test_a_machine_that_refuses_is_there_and_one_without_a_route_is_silent(error: Exception, is_so: bool) -> None:
    assert is_silence(error) == is_so
