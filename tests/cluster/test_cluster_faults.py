"""What goes wrong between machines: a store that is gone, slow or full; clocks apart; other weights; old texts."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import httpx
import pytest
import redis
from gateways import LOOPBACK, MODEL, counted, gateway, send, tiny_server, until

from kvlink.store.redis import RedisStore
from store.servers import RedisServer, free_port
from tiny_bundles import tiny_bundle

pytestmark = pytest.mark.enable_socket

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "When?"}],
    "temperature": 0,
    "max_tokens": 1,
}
UPDATES = 400 if os.environ.get("KVLINK_TORTURE") else 40
"""Of a document while requests come."""

DAY_S = 86_400.0


@pytest.fixture
def entries() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def remote(server: RedisServer, **options: Any) -> list[RedisStore]:
    return [RedisStore(server.url, connect_timeout_s=0.3, timeout_s=0.3, pause_s=0.5, **options)]


def ask(url: str, *documents: Any, **more: Any) -> httpx.Response:
    return send("POST", url + CHAT, json={**ASKED, "documents": documents, **more})


def source(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["kvlink"]["documents"][0]["source"]


def stop(server: RedisServer) -> Callable[[], object]:
    server.stop()
    return server.start


def freeze(server: RedisServer) -> Callable[[], object]:
    server.freeze()
    return server.thaw


def fill(server: RedisServer) -> Callable[[], object]:
    with closing(redis.Redis.from_url(server.url)) as client:
        client.config_set("maxmemory", 1)

    def empty() -> None:
        with closing(redis.Redis.from_url(server.url)) as client:
            client.config_set("maxmemory", 0)

    return empty


@pytest.mark.parametrize("fault", [stop, freeze, fill], ids=["gone", "slow", "full"])
def test_requests_are_answered_while_the_shared_store_is(
    fault: Callable[[RedisServer], Callable[[], object]], entries: RedisServer, tmp_path: Path
) -> None:
    with ExitStack() as opening:
        urls = [opening.enter_context(tiny_server(tmp_path / name, store=remote(entries)))[0] for name in ("a", "b")]
        client = opening.enter_context(gateway(*urls))

        def through(number: int) -> str:
            return source(client.post(CHAT, json={**ASKED, "documents": [{"text": f"Hut {number} opens at seven."}]}))

        assert [through(number) for number in range(4)] == ["encoded"] * 4
        heal = fault(entries)
        start = time.monotonic()
        assert [through(number) for number in range(8)] == ["device"] * 4 + ["encoded"] * 4
        assert time.monotonic() - start < 20, "an outage costs a timeout, not one for each call"
        heal()
        numbers = iter(range(100, 10_000))

        def is_shared_again() -> bool:
            text = {"text": f"Inn {next(numbers)} is closed."}
            return [source(ask(url, text)) for url in urls] == ["encoded", "remote"]

        until(is_shared_again)


@pytest.mark.parametrize("apart_s", [0.0, DAY_S], ids=["one clock", "clocks a day apart"])
def test_of_two_servers_that_need_one_new_document_at_once_one_encodes_it(
    apart_s: float, entries: RedisServer, tmp_path: Path
) -> None:
    clocks: list[Callable[[], float]] = [time.time, lambda: time.time() - apart_s]
    with ExitStack() as opening:
        urls = [
            opening.enter_context(tiny_server(tmp_path / str(at), store=remote(entries, clock=clock)))[0]
            for at, clock in enumerate(clocks)
        ]
        together = Barrier(2)

        def one(url: str, number: int) -> str:
            together.wait(60)
            return source(ask(url, {"text": f"Hut {number} opens at seven. " * 8}))

        with ThreadPoolExecutor(2) as pool:
            for number in range(12):
                found = list(pool.map(one, urls, [number] * 2))
                assert sorted(found) == ["encoded", "remote"]


def test_a_router_that_was_restarted_finds_what_is_where(tmp_path: Path) -> None:
    with (
        tiny_server(tmp_path / "a") as (here, _),
        tiny_server(tmp_path / "b") as (there, _),
    ):
        texts = [{"text": f"Hut {number} opens at seven."} for number in range(12)]
        for wanted in ("encoded", "device", "device"):
            with gateway(here, there) as client:
                for text in texts:
                    assert source(client.post(CHAT, json={**ASKED, "documents": [text]})) == wanted


def test_a_server_of_other_weights_or_links_stays_out(tmp_path: Path) -> None:
    with (
        tiny_server(tmp_path / "a") as (good, served),
        tiny_server(tmp_path / "b", seed=1) as (weights, _),
        tiny_server(
            tmp_path / "c",
            sink="none",
            links=tiny_bundle(served.engine.runner, digest=served.engine.loader.identity.model),
        ) as (links, _),
        gateway(good, weights, links, check_s=5.0) as client,  # the first one decides, however busy the machine is
    ):
        answers = [client.post(CHAT, json={**ASKED, "documents": [{"text": f"Hut {at}."}]}) for at in range(12)]
        assert {answer.headers["x-kvlink-backend"] for answer in answers} == {"1"}
        assert sum(counted(client, "kvlink_route_up").values()) == 1


def test_a_server_that_comes_back_with_other_weights_answers_nothing_even_before_it_is_checked(tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as opening:
        good = opening.enter_context(tiny_server(tmp_path / "a"))[0]
        with ExitStack() as first:
            first.enter_context(tiny_server(tmp_path / "b", port=port))
            client = opening.enter_context(gateway(good, f"http://{LOOPBACK}:{port}", check_s=60.0))
            assert backends(client) == {"1", "2"}
        opening.enter_context(tiny_server(tmp_path / "c", port=port, seed=1))
        assert backends(client) == {"1"}


def backends(client: httpx.Client) -> set[str]:
    """Return who answers questions about two dozen documents."""
    asked = [client.post(CHAT, json={**ASKED, "documents": [{"text": f"Hut {at}."}]}) for at in range(24)]
    assert {answer.status_code for answer in asked} == {200}
    return {answer.headers["x-kvlink-backend"] for answer in asked}


LOGS: dict[str, Any] = {"logprobs": True, "top_logprobs": 8}

Numbers = tuple[float, ...]


def text_of(version: int) -> str:
    return f"The hut opens {version} minutes after the bell of {version * 7919 % 1000}."


def numbers_in(answer: httpx.Response) -> Numbers:
    """Return what tells which text an answer was made of."""
    assert answer.status_code == 200, answer.text
    (token,) = answer.json()["choices"][0]["logprobs"]["content"]
    return tuple(round(one["logprob"], 7) for one in token["top_logprobs"])


def changed_under_load(put: Callable[[str], int], urls: list[str], count: int) -> list[tuple[int, int, Numbers]]:
    """Change a document while it is asked about.

    Returns:
        For each answer the oldest and the newest version that were current between the request and its answer, and
        what tells which one it was made of.
    """
    begun = acknowledged = 0
    ended, found = Event(), list[tuple[int, int, Numbers]]()

    def read(url: str) -> None:
        while not ended.is_set():
            oldest = acknowledged
            numbers = numbers_in(ask(url, "hut", **LOGS))
            found.append((oldest, begun, numbers))

    assert put(text_of(0)) < 300
    with ThreadPoolExecutor(len(urls)) as pool:
        reading = [pool.submit(read, url) for url in urls]
        for version in range(1, count):
            begun = version
            assert put(text_of(version)) < 300
            acknowledged = version
        ended.set()
        for one in reading:
            one.result()
    return found


def stale(found: list[tuple[int, int, Numbers]], reference: str) -> list[tuple[int, int]]:
    """Return the answers that were made of no text that was current, by a server without a library that changes."""
    known: dict[int, Numbers] = {}

    def numbers_of(version: int) -> Numbers:
        if version not in known:
            known[version] = numbers_in(ask(reference, {"text": text_of(version)}, **LOGS))
        return known[version]

    old = [(low, high) for low, high, told in found if told not in map(numbers_of, range(low, high + 1))]
    assert len(set(known.values())) == len(known), "each text has numbers of its own"
    return old


def test_no_answer_is_made_of_an_old_text_though_it_changes_under_load(entries: RedisServer, tmp_path: Path) -> None:
    with ExitStack() as opening:
        reference = opening.enter_context(tiny_server(tmp_path / "reference"))[0]
        urls = [
            opening.enter_context(tiny_server(tmp_path / name, store=remote(entries), journal=entries.url))[0]
            for name in ("a", "b")
        ]
        client = opening.enter_context(gateway(*urls))
        until(lambda: client.get("/ready").json()["backends"] == 2)

        def put(text: str) -> int:
            return client.put("/v1/documents/hut", json={"text": text}).status_code

        found = changed_under_load(put, [*urls, str(client.base_url)], UPDATES)
        assert len(found) > UPDATES / 8, "there was load"
        assert stale(found, reference) == []


def test_an_old_text_would_be_seen(tmp_path: Path) -> None:
    with ExitStack() as opening:
        urls = [opening.enter_context(tiny_server(tmp_path / name))[0] for name in ("a", "b", "reference")]
        for url in urls:
            send("PUT", f"{url}/v1/documents/hut", json={"text": text_of(0)})

        def put(text: str) -> int:  # nobody tells the other one
            time.sleep(0.05)
            return send("PUT", f"{urls[0]}/v1/documents/hut", json={"text": text}).status_code

        ask(urls[1], "hut", **LOGS)  # the first answer takes long
        assert stale(changed_under_load(put, [urls[1]], 10), urls[2])
