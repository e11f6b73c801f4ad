"""Libraries that follow one journal: a text is new everywhere once it was taken anywhere, and never old afterwards."""

import json
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import redis
from gateways import LOOPBACK, MODEL, gateway, send, tiny_server, until

from kvlink.engine.library import Library
from kvlink.server.served import Served
from kvlink.store.journal import Change, Head, Journal
from store.servers import RedisServer

pytestmark = pytest.mark.enable_socket

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "When?"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def texts() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def journal(texts: RedisServer) -> RedisServer:
    """A journal that is empty."""
    with closing(redis.Redis.from_url(texts.url)) as client:
        client.flushall()
    return texts


@pytest.fixture
def two(journal: RedisServer, tmp_path: Path) -> Iterator[list[tuple[str, Served]]]:
    with ExitStack() as opening:
        yield [opening.enter_context(tiny_server(tmp_path / name, journal=journal.url)) for name in "ab"]


def put(url: str, one: str, text: str, **more: Any) -> httpx.Response:
    return send("PUT", f"{url}/v1/documents/{one}", json={"text": text, **more})


def text_at(url: str, one: str) -> str | None:
    found = send("GET", f"{url}/v1/documents/{one}")
    return found.json()["text"] if found.status_code == 200 else None


def ask(url: str, *documents: Any) -> httpx.Response:
    return send("POST", url + CHAT, json={**ASKED, "documents": documents})


def test_a_text_that_one_took_is_everybodys_at_once(two: list[tuple[str, Served]]) -> None:
    (here, _), (there, other) = two
    assert put(here, "hut", "It opens at five.", metadata={"year": 2}).status_code == 201
    assert text_at(there, "hut") == "It opens at five."
    assert send("GET", f"{there}/v1/documents/hut").json()["metadata"] == {"year": 2}
    for number in range(10):
        assert put((here, there)[number % 2], "hut", f"It opens at {number}.").json()["outcome"] == "changed"
        assert text_at((there, here)[number % 2], "hut") == f"It opens at {number}."
    assert put(here, "hut", "It opens at 9.").json()["outcome"] == "unchanged"
    assert ask(there, "hut").status_code == 200
    assert other.follower is not None
    head = other.follower._number
    put(here, "hut", "It opens at 9.")
    assert other.follower._number == head, "nothing has changed"


def test_a_document_that_one_removed_is_gone_everywhere_its_bytes_too(two: list[tuple[str, Served]]) -> None:
    (here, _), (there, other) = two
    put(here, "hut", "It opens at five.")
    assert ask(there, "hut").json()["usage"]["kvlink"]["documents"][0]["source"] == "encoded"
    assert other.engine.store.names()
    assert send("DELETE", f"{here}/v1/documents/hut").json()["deleted"]
    assert ask(there, "hut").status_code == 404
    until(lambda: not other.engine.store.names())
    assert other.engine.sessions is not None
    assert other.engine.sessions.residency.stats().num_residents == 0
    assert send("DELETE", f"{there}/v1/documents/hut").status_code == 404


def test_bytes_of_what_is_gone_go_within_a_bounded_time_where_nobody_asks(two: list[tuple[str, Served]]) -> None:
    (here, _), (there, other) = two
    put(here, "hut", "It opens at five.")
    ask(there, "hut")
    send("DELETE", f"{here}/v1/documents/hut")
    until(lambda: not other.engine.store.names())  # nobody has asked this one


def test_a_server_that_was_away_answers_no_old_text(journal: RedisServer, tmp_path: Path) -> None:
    with tiny_server(tmp_path / "a", journal=journal.url) as (here, _):
        with tiny_server(tmp_path / "b", journal=journal.url) as (there, _):
            put(there, "hut", "It opens at five.")
            put(there, "inn", "It is closed.")
        put(here, "hut", "It opens at six.")
        send("DELETE", f"{here}/v1/documents/inn")
        with tiny_server(tmp_path / "b", journal=journal.url) as (there, _):
            assert [text_at(there, one) for one in ("hut", "inn")] == ["It opens at six.", None]


def test_what_a_library_had_before_joins_the_journal_and_a_new_server_has_all(
    journal: RedisServer, tmp_path: Path
) -> None:
    with tiny_server(tmp_path / "a") as (here, _):
        put(here, "old", "From before.", title="Old")
    with (
        tiny_server(tmp_path / "a", journal=journal.url) as (here, _),
        tiny_server(tmp_path / "b", journal=journal.url) as (there, _),
    ):
        assert text_at(here, "old") == "From before."
        assert text_at(there, "old") == "From before."


def test_without_the_journal_no_text_is_used_and_all_else_is_answered(
    two: list[tuple[str, Served]], journal: RedisServer
) -> None:
    (here, _), _ = two
    put(here, "hut", "It opens at five.")
    journal.freeze()
    try:
        refused = ask(here, "hut")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_journal")
        assert put(here, "hut", "It opens at six.").status_code == 503
        assert ask(here, {"text": "Snow."}).status_code == 200
        assert send("GET", f"{here}/ready").status_code == 200
    finally:
        journal.thaw()
    until(lambda: ask(here, "hut").status_code == 200)


def test_a_slow_journal_holds_up_nobody_who_names_no_ids(
    two: list[tuple[str, Served]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here, served), _ = two
    put(here, "hut", "It opens at five.")
    texts, free = served.journal, Event()
    assert texts is not None
    head = texts.head

    def slow() -> Head:
        free.wait()
        return head()

    monkeypatch.setattr(texts, "head", slow)
    many = 2 * 32 + 1  # more than any pool has threads
    with ThreadPoolExecutor(many + 1) as pool:
        try:
            waiting = [pool.submit(ask, here, "hut") for _ in range(many - 8)]
            waiting += [pool.submit(put, here, "hut", "It opens at six.") for _ in range(8)]
            until(lambda: all(one.running() for one in waiting))
            inline = pool.submit(ask, here, {"text": "Snow."})
            until(inline.done)
            assert inline.result().status_code == 200
            assert not any(one.done() for one in waiting)
        finally:
            free.set()
        assert {one.result().status_code for one in waiting} == {200}


def test_a_server_is_ready_once_it_has_all_that_the_journal_has(
    journal: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_server(tmp_path / "a", journal=journal.url) as (here, _):
        put(here, "hut", "It opens at five.")
    free, since = Event(), Journal.since

    def slow(self: Journal, number: int) -> Generator[Change]:
        free.wait()
        yield from since(self, number)

    monkeypatch.setattr(Journal, "since", slow)
    with tiny_server(tmp_path / "b", journal=journal.url) as (there, served):
        try:
            told = send("GET", f"{there}/ready")
            assert (told.status_code, told.json()["ready"]) == (503, False)
            assert ask(there, {"text": "Snow."}).status_code == 200
        finally:
            free.set()
        until(lambda: send("GET", f"{there}/ready").status_code == 200)
        assert served.library is not None
        assert served.library.known(["hut"])


def test_a_server_whose_journal_is_away_when_it_starts_answers_all_that_names_no_ids(tmp_path: Path) -> None:
    with tiny_server(tmp_path / "a", journal=f"unix://{tmp_path}/nobody") as (here, _):
        until(lambda: send("GET", f"{here}/ready").status_code == 200)
        assert ask(here, "hut").json()["error"]["code"] == "no_journal"
        assert ask(here, {"text": "Snow."}).status_code == 200


def test_texts_that_are_there_are_not_read_again_by_a_server_that_comes_back(
    journal: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        tiny_server(tmp_path / "a", journal=journal.url) as (here, _),
        tiny_server(tmp_path / "b", journal=journal.url) as (there, _),
    ):
        for one in ("hut", "inn"):
            put(here, one, "It opens at five.")
            text_at(there, one)
    with tiny_server(tmp_path / "a", journal=journal.url) as (here, _):
        put(here, "inn", "It is closed.")
    read: list[str] = []
    keep = Library.put

    def seen(self: Library, one: str, *given: Any, **more: Any) -> Any:
        read.append(one)
        return keep(self, one, *given, **more)

    monkeypatch.setattr(Library, "put", seen)
    with tiny_server(tmp_path / "b", journal=journal.url) as (there, _):
        assert [text_at(there, one) for one in ("hut", "inn")] == ["It opens at five.", "It is closed."]
    assert read == ["inn"]


def test_a_journal_that_has_lost_everything_gets_it_back(
    two: list[tuple[str, Served]], journal: RedisServer, tmp_path: Path
) -> None:
    (here, _), (there, _) = two
    put(here, "hut", "It opens at five.")
    text_at(there, "hut")
    with closing(redis.Redis.from_url(journal.url)) as client:
        client.flushall()
    assert text_at(there, "hut") == "It opens at five."
    with tiny_server(tmp_path / "c", journal=journal.url) as (new, _):
        assert text_at(new, "hut") == "It opens at five."


def test_a_text_that_cannot_be_kept_is_heard_of_by_nobody(two: list[tuple[str, Served]]) -> None:
    (here, _), (there, other) = two
    assert put(here, "long", "x" * 20_000).status_code == 400
    assert text_at(there, "long") is None
    assert other.follower is not None
    assert other.follower._number == 0


def test_through_a_gateway_one_server_is_told_though_another_is_away(
    two: list[tuple[str, Served]], tmp_path: Path
) -> None:
    absent = f"http://{LOOPBACK}:9"
    with gateway(absent, *(url for url, _ in two)) as client:
        until(lambda: len({served.follower.epoch for _, served in two if served.follower}) == 1)
        until(lambda: client.put("/v1/documents/hut", json={"text": "It opens at five."}).status_code < 300)
        for number in range(5):
            assert client.put("/v1/documents/hut", json={"text": f"At {number}."}).status_code == 200
            assert [text_at(url, "hut") for url, _ in two] == [f"At {number}."] * 2
            assert client.post(CHAT, json={**ASKED, "documents": ["hut"]}).status_code == 200
        many = {"documents": [{"id": f"d{number}", "text": "Snow."} for number in range(3)]}
        assert [row["outcome"] for row in client.post("/v1/documents", json=many).json()["data"]] == ["added"] * 3
        assert client.delete("/v1/documents/hut").json()["deleted"]
        assert client.post(CHAT, json={**ASKED, "documents": ["hut"]}).status_code == 404


def test_what_lies_in_the_journal_is_one_text_per_id(two: list[tuple[str, Served]], journal: RedisServer) -> None:
    for number in range(20):
        put(two[number % 2][0], "hut", f"It opens at {number}.")
    with closing(redis.Redis.from_url(journal.url)) as client:
        kept = [json.loads(text) for text in client.hvals("kvlink:{journal}:1:texts")]
    assert [(one["id"], one["text"]) for one in kept] == [("hut", "It opens at 19.")]
