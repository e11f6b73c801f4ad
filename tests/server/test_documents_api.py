"""Documents under ids over HTTP: put, ask, list, warm, delete; and no answer from a text that has been replaced."""

import math
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from live import MODEL, Live, live, tiny_engine, until

from kvlink.core.errors import StoreUnusable
from kvlink.engine.library import Library
from kvlink.engine.limits import Limits
from kvlink.engine.sampling import SamplingParams
from kvlink.engine.schema import FILE
from kvlink.server.served import Served
from kvlink.store.disk import DiskStore

pytestmark = pytest.mark.enable_socket

QUESTION = "When?"
DOCUMENTS, ROUNDS = 20, 10
GAP = 1e-4
"""By how much the logprobs of two texts differ at least; the same text computed otherwise differs by much less."""

ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 1,
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


def test_a_document_that_could_not_be_removed_is_told_and_stays(shelves: Live, tmp_path: Path) -> None:
    """Against: bytes that cannot be deleted now keep no document."""
    library, path = shelves.served.library, "/v1/documents/hut"
    assert library is not None
    shelves.send("PUT", path, {"text": "The hut lies below the pass."})
    until(lambda: states(shelves) == {"hut": "ready"})
    library._catalogue._database.execute("PRAGMA busy_timeout = 0")
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert shelves.send("DELETE", path)[0] == 500
        assert shelves.send("GET", path)[0] == 200
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shelves.served.engine.store, "delete", unusable)
        assert shelves.send("DELETE", path)[:2] == (
            200,
            {"id": "hut", "object": "document", "deleted": True, "gone": False},
        )
    assert shelves.send("GET", path)[0] == 404


def unusable(_: str) -> None:
    raise StoreUnusable("the disk is gone")


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


def test_many_documents_are_put_at_once_each_for_itself(shelves: Live) -> None:
    wanted = [
        {"id": "a", "text": "The hut lies below the pass.", "metadata": {"page": 1}},
        {"id": "b", "text": " "},
        {"id": "\n", "text": "x"},
        {"id": "c", "text": "The office opens at seven.", "title": "Office"},
    ]
    status, body, _ = shelves.send("POST", "/v1/documents", {"documents": wanted})
    assert status == 200
    assert [row["outcome"] for row in body["data"]] == ["added", "refused", "refused", "added"]
    assert "blank" in body["data"][1]["error"]["message"]
    assert body["data"][2]["error"]["code"] == "invalid_id"
    assert shelves.send("GET", "/v1/documents/a")[1]["metadata"] == {"page": 1}
    again = shelves.send("POST", "/v1/documents", {"documents": wanted[:1]})[1]
    assert [row["outcome"] for row in again["data"]] == ["unchanged"]
    assert shelves.send("POST", "/v1/documents", {"documents": []})[0] == 400
    assert shelves.send("POST", "/v1/documents", {"documents": [{"text": "x"}]})[0] == 400
    until(lambda: states(shelves) == {"a": "ready", "c": "ready"})


def test_a_list_comes_in_pages(shelves: Live) -> None:
    ids = [f"{number:02}" for number in range(7)]
    shelves.send("POST", "/v1/documents", {"documents": [{"id": one, "text": f"Text {one}."} for one in ids]})
    found: list[str] = []
    has_more, after = True, ""
    while has_more:
        body = shelves.send("GET", f"/v1/documents?limit=3&after={after}")[1]
        found += [row["id"] for row in body["data"]]
        has_more, after = body["has_more"], found[-1]
    assert found == ids
    assert shelves.send("GET", "/v1/documents?limit=0")[0] == 400


def test_a_document_is_queued_then_encoding_then_ready(shelves: Live) -> None:
    engine, held = shelves.served.engine, Event()
    engine.call(held.wait)
    try:
        documents = [{"id": one, "text": f"The {one} opens at seven."} for one in ("hall", "office")]
        shelves.send("POST", "/v1/documents", {"documents": documents})
        until(lambda: sorted(states(shelves).values()) == ["encoding", "queued"])
    finally:
        held.set()
    until(lambda: states(shelves) == {"hall": "ready", "office": "ready"})


def test_a_document_that_cannot_be_kept_says_why_and_is_answered_all_the_same(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "entries", budget_bytes=20_000)
    with (
        tiny_engine(store) as engine,
        Library(tmp_path, engine) as library,
        live(Served(engine=engine, library=library, model=MODEL)) as server,
    ):
        server.send("PUT", "/v1/documents/long", {"text": "The office opens at seven. " * 10})
        until(lambda: states(server) == {"long": "failed"})
        (row,) = server.send("GET", "/v1/documents")[1]["data"]
        assert "budget" in row["reason"]
        (used,) = ask(server, "long")["usage"]["kvlink"]["documents"]
        assert used["source"] in ("encoded", "device")
        server.send("PUT", "/v1/documents/long", {"text": "Short."})
        until(lambda: states(server) == {"long": "ready"})


def test_near_duplicates_are_told_with_what_they_cost(shelves: Live) -> None:
    text = " ".join(f"Sentence {number} of the handbook says something of its own." for number in range(40))
    for one, said in (("a", text), ("b", f"{text} Once more."), ("c", "Bread is baked on Tuesdays. " * 30)):
        shelves.send("PUT", f"/v1/documents/{one}", {"text": said})
    until(lambda: set(states(shelves).values()) == {"ready"})
    body = shelves.send("GET", "/v1/library")[1]
    (pair,) = body["near_duplicates"]
    assert pair["ids"] == ["a", "b"]
    assert 0 < pair["bytes"] < body["bytes"]
    assert body["states"] == {"queued": 0, "encoding": 0, "ready": 3, "failed": 0}
    assert body["documents"] == 3


def first_logprobs(server: Live, texts: list[str]) -> list[float | None]:
    """Return what tells a text: the first logprob of an answer from it alone; None where the answer is empty."""
    engine = server.served.engine
    options: dict[str, Any] = {"max_new_tokens": 1, "sampling": SamplingParams(logprobs=0)}
    jobs = [engine.job([text], QUESTION, **options) for text in texts]
    for job in jobs:
        engine.submit(job)
    until(lambda: all(job.has_ended for job in jobs))
    firsts = [job.pieces()[0].token for job in jobs]
    return [None if one.id in engine.prompter.end_ids else one.logprob for one in firsts]


def versions_of(server: Live, document: int) -> tuple[list[str], list[float]]:
    """Return texts of one document that can be told apart by their answers, and how."""
    texts: list[str] = []
    told: list[float] = []
    candidates = [f"Office {document} number {number * 37 % 101} opens at {number} o'clock." for number in range(14)]
    for text, value in zip(candidates, first_logprobs(server, candidates), strict=True):
        if len(texts) <= ROUNDS and value is not None and all(abs(value - other) > GAP for other in told):
            texts.append(text)
            told.append(value)
    assert len(texts) == ROUNDS + 1
    return texts, told


def test_no_answer_uses_a_text_that_was_replaced_before_it_was_asked(shelves: Live) -> None:
    """200 updates under load: each of 20 documents is changed 10 times, and every answer is checked by its content."""
    texts, told = zip(*(versions_of(shelves, number) for number in range(DOCUMENTS)), strict=True)
    put, acknowledged = [0] * DOCUMENTS, [0] * DOCUMENTS
    over = Event()

    def read(number: int) -> int:
        value = first_logprob(ask(shelves, str(number)))
        version = min(range(ROUNDS + 1), key=lambda one: math.fabs(told[number][one] - value))
        assert abs(told[number][version] - value) < GAP / 4
        return version

    def change(version: int, *, at_once: bool) -> None:
        bodies = [{"id": str(number), "text": texts[number][version]} for number in range(DOCUMENTS)]
        if at_once:
            put[:] = [version] * DOCUMENTS
            assert shelves.send("POST", "/v1/documents", {"documents": bodies})[0] == 200
            acknowledged[:] = put
        for number in range(DOCUMENTS):
            if not at_once:
                put[number] = version
                assert shelves.send("PUT", f"/v1/documents/{number}", {"text": texts[number][version]})[0] == 200
                acknowledged[number] = version
            if number % 5 == version % 5:
                assert read(number) == version, f"update {version} of {number} was acknowledged, and not read"

    def load() -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        for turn in count():
            if over.is_set():
                return found
            number = turn * 7 % DOCUMENTS
            least = acknowledged[number]
            found.append((least, read(number), put[number]))
        return found

    change(0, at_once=True)
    with ThreadPoolExecutor(1) as pool:
        readers = [pool.submit(load)]
        try:
            for version in range(1, ROUNDS + 1):
                change(version, at_once=version % 2 == 0)
        finally:
            over.set()
        seen = [row for reader in readers for row in reader.result()]
    assert len(seen) >= DOCUMENTS
    assert all(least <= version <= most for least, version, most in seen)
    assert len({version for _, version, _ in seen}) > ROUNDS / 3


def test_answers_keep_their_pace_while_a_long_document_is_encoded(shelves: Live) -> None:
    """Its rows go through the model by and by, in no forward more than their share; without answers many at once."""
    engine, most = shelves.served.engine, Limits().prefill_rows + 1
    rows: list[int] = []

    def seen(_: Any, __: Any, given: dict[str, Any]) -> None:
        rows.append(given["input_ids" if given.get("inputs_embeds") is None else "inputs_embeds"].shape[1])

    def largest(name: str) -> int:
        rows.clear()
        text = f"The {name} office opens at seven. " * 40
        assert shelves.send("PUT", f"/v1/documents/{name}", {"text": text})[0] == 201
        until(lambda: states(shelves)[name] == "ready")
        assert sum(rows) > len(text)
        return max(rows)

    hook = engine.runner.model.register_forward_pre_hook(seen, with_kwargs=True)
    try:
        asked = {**ASKED, "logprobs": None, "max_tokens": 600, "stream": True}
        with shelves.openai.chat.completions.create(**asked) as chunks:
            next(chunks)
            assert largest("first") <= most
        until(lambda: engine.stats().running == 0)
        assert largest("second") > most
    finally:
        hook.remove()
