"""Documents under ids over HTTP: put, ask, list, warm, delete; and no answer from a text that has been replaced."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from live import MODEL, Live, live, tiny_engine, until

from kvlink.engine.library import Library
from kvlink.engine.sampling import SamplingParams
from kvlink.server.served import Served

pytestmark = pytest.mark.enable_socket

QUESTION = "When?"
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 2,
    "logprobs": True,
}


@pytest.fixture
def shelves(tmp_path: Path) -> Iterator[Live]:
    """A server with a library of its own."""
    with (
        tiny_engine(tmp_path / "entries") as engine,
        Library(tmp_path, engine) as library,
        live(Served(engine=engine, library=library, model=MODEL)) as one,
    ):
        yield one


def states(server: Live) -> dict[str, str]:
    return {row["id"]: row["status"] for row in server.send("GET", "/v1/documents")[1]["data"]}


def ask(server: Live, *documents: Any) -> Any:
    status, body, _ = server.send("POST", "/v1/chat/completions", {**ASKED, "documents": documents})
    assert status == 200, body
    return body


def first_logprob(body: Any) -> float:
    return body["choices"][0]["logprobs"]["content"][0]["logprob"]


def test_a_document_is_put_asked_about_listed_and_deleted(shelves: Live) -> None:
    text = "The office opens at seven.\n" * 4
    assert shelves.send("PUT", "/v1/documents/a/office.md", {"text": text, "title": "Office"})[0] == 201
    assert (
        shelves.send("PUT", "/v1/documents/a/office.md", {"text": text, "title": "Office"})[1]["outcome"] == "unchanged"
    )
    assert shelves.send("GET", "/v1/documents/a/office.md")[1]["text"] == text
    until(lambda: states(shelves) == {"a/office.md": "ready"})
    named, inline = ask(shelves, "a/office.md"), ask(shelves, {"title": "Office", "text": text})
    assert ask(shelves, {"id": "a/office.md"})["choices"] == named["choices"]
    assert first_logprob(named) == pytest.approx(first_logprob(inline), abs=1e-5)
    (row,) = named["usage"]["kvlink"]["documents"]
    assert (row["id"], row["source"]) != ("a/office.md", "encoded")
    assert row["id"] == "a/office.md"
    status, body, _ = shelves.send("DELETE", "/v1/documents/a/office.md")
    assert (status, body["deleted"]) == (200, True)
    for method, path in (("GET", "/v1/documents/a/office.md"), ("DELETE", "/v1/documents/a/office.md")):
        assert shelves.send(method, path)[0] == 404
    assert shelves.send("POST", "/v1/chat/completions", {**ASKED, "documents": ["a/office.md"]})[0] == 404
    assert states(shelves) == {}


def test_warming_encodes_what_is_absent_and_says_what_was_there(shelves: Live) -> None:
    engine = shelves.served.engine
    held = Event()
    engine.call(held.wait)  # nothing is rebuilt meanwhile
    shelves.send("PUT", "/v1/documents/hut", {"text": "The hut lies below the pass."})
    with ThreadPoolExecutor(1) as pool:
        warming = pool.submit(shelves.send, "POST", "/v1/warm", {"documents": ["hut"]})
        held.set()
        status, body, _ = warming.result()
    assert status == 200
    assert [row["id"] for row in body["data"]] == ["hut"]
    assert states(shelves) == {"hut": "ready"}
    (row,) = shelves.send("POST", "/v1/warm", {"documents": ["hut"]})[1]["data"]
    assert row["reason"] == "already in the store"
    assert shelves.send("POST", "/v1/warm", {"documents": ["none"]})[0] == 404


def test_what_cannot_be_kept_is_refused_and_changes_nothing(shelves: Live) -> None:
    assert shelves.send("PUT", "/v1/documents/hut", {"text": "The hut lies below the pass."})[0] == 201
    for path, body in (
        ("/v1/documents/hut", {"text": " "}),
        ("/v1/documents/hut", {"text": "x", "scope": "all"}),
        ("/v1/documents/hut", {"title": "x"}),
        ("/v1/documents/%00", {"text": "x"}),
        (f"/v1/documents/{'x' * 600}", {"text": "x"}),
        ("/v1/documents/hut", {"text": "word " * 20_000}),
    ):
        status, error, _ = shelves.send("PUT", path, body)
        assert status == 400, path
        assert error["error"]["type"] == "invalid_request_error"
    assert shelves.send("GET", "/v1/documents/hut")[1]["text"] == "The hut lies below the pass."


def test_without_a_library_ids_are_unknown(tmp_path: Path) -> None:
    with tiny_engine() as engine, live(Served(engine=engine, model=MODEL)) as server:
        assert server.send("GET", "/v1/documents")[0] == 404
        assert server.send("POST", "/v1/chat/completions", {**ASKED, "documents": ["x"]})[0] == 404
        assert server.send("POST", "/v1/chat/completions", {**ASKED, "documents": [{"text": "x"}]})[0] == 200


def test_no_answer_uses_a_text_that_was_replaced_before_it_was_asked(shelves: Live) -> None:
    """40 updates under load. Each text gives its own first logprob, so an answer tells which text it has read."""
    texts: list[str] = []
    wanted: list[float] = []
    for number in range(400):
        text = f"The office number {number * 37 % 101} opens at {number} o'clock."
        job = shelves.served.engine.job([text], QUESTION, max_new_tokens=2, sampling=SamplingParams(logprobs=0))
        shelves.served.engine.submit(job)
        until(lambda job=job: job.has_ended)
        value = job.pieces()[0].token.logprob
        if all(abs(value - other) > 1e-4 for other in wanted):  # else two texts could not be told apart
            texts.append(text)
            wanted.append(value)
        if len(texts) == 41:
            break
    assert len(texts) == 41
    put = acknowledged = 0
    over = Event()
    shelves.send("PUT", "/v1/documents/office", {"text": texts[0]})

    def read() -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        while not over.is_set():
            least = acknowledged
            value = first_logprob(ask(shelves, "office"))
            read = min(range(41), key=lambda number: math.fabs(wanted[number] - value))
            assert abs(wanted[read] - value) < 2e-5
            found.append((least, read, put))
        return found

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        try:
            for number in range(1, 41):
                put = number
                assert shelves.send("PUT", "/v1/documents/office", {"text": texts[number]})[0] == 200
                acknowledged = number
                value = first_logprob(ask(shelves, "office"))
                assert abs(wanted[number] - value) < 2e-5, f"update {number} was acknowledged, and not read"
        finally:
            over.set()
        seen = [row for reader in readers for row in reader.result()]
    assert len(seen) >= 40
    assert all(least <= read <= most for least, read, most in seen)
    assert len({read for _, read, _ in seen}) > 5
