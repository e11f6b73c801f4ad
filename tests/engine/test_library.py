"""A library answers from the texts that it holds now, and computes only what an edit has changed."""

import sqlite3
import stat
from pathlib import Path

import pytest
import torch
from engines import NEW, QUESTION, TEXTS, TOKENIZER, engine_of, shared_model
from libraries import edited, library_of, names_of, stored, text_of

from kvlink import Document, Engine, InputError, MemoryStore, StoreUnusable
from kvlink.engine.library import Library
from kvlink.store.codec import encode
from tiny_models import largest

LONG = text_of(220)


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return library_of(tmp_path / "library")


# --- puts -----------------------------------------------------------------------------------------------------------


def test_a_put_says_what_it_did(library: Library) -> None:
    assert (library.put("a", LONG).outcome, library.put("a", LONG).outcome) == ("added", "unchanged")
    put = library.put("a", edited(LONG, 0.5))
    assert put.outcome == "changed"
    assert 0 < put.change < 20
    assert put.tokens == len(edited(LONG, 0.5)) + 2
    assert put.segments == 1


def test_an_unchanged_put_makes_no_work(library: Library) -> None:
    library.put("a", LONG)
    assert [worked.computed for worked in library.work()] == [len(LONG) + 2]
    library.put("a", LONG)
    assert library.status().jobs == 0
    assert library.work() == []


def test_metadata_and_parents_are_kept_and_change_without_work(library: Library) -> None:
    library.put("a", LONG, "Title", {"page": 3}, "book")
    library.work()
    assert library.put("a", LONG, "Title", {"page": 4}, "book").outcome == "unchanged"
    found = library.get("a")
    assert (found.title, found.text, dict(found.metadata), found.parent) == ("Title", LONG, {"page": 4}, "book")
    assert library.work() == []


def test_a_title_is_part_of_the_text(library: Library) -> None:
    library.put("a", LONG, "One")
    assert library.put("a", LONG, "Two").outcome == "changed"


@pytest.mark.parametrize("name", ["caf\udce9.md", "[red]/a.md", "", "ü" * 300], ids=ascii)
def test_any_text_may_be_an_id(library: Library, name: str) -> None:
    library.put(name, LONG)
    assert [row.id for row in library.rows()] == [name]
    assert library.get(name).id == name
    assert library.remove(name)


def test_blank_and_overlong_texts_are_refused_and_the_old_text_stays(library: Library) -> None:
    library.put("a", LONG)
    for text, reason in ((" \n", "blank"), ("x" * 9000, "context")):
        with pytest.raises(InputError, match=reason):
            library.put("a", text)
    assert library.get("a").text == LONG


def test_ids_of_different_scopes_are_different_documents(library: Library) -> None:
    tenant = bytes(range(16))
    library.put("a", LONG)
    library.put("a", edited(LONG, 0.5), scope=tenant)
    library.work()
    assert (library.get("a").text, library.get("a", tenant).text) == (LONG, edited(LONG, 0.5))
    rows = library.rows()
    assert [(row.id, row.scope, row.state) for row in rows] == [("a", bytes(16), "ready"), ("a", tenant, "ready")]


def test_one_text_in_two_scopes_has_two_entries(library: Library) -> None:
    library.put("a", LONG)
    library.put("a", LONG, scope=bytes(range(16)))
    library.work()
    assert len(library.store.names()) == 2
    library.remove("a")
    assert len(library.store.names()) == 1
    answer = library.generate(QUESTION, ["a"], scope=bytes(range(16)), max_new_tokens=2)
    assert answer.usage.documents[0].source == "disk"


# --- requests -------------------------------------------------------------------------------------------------------


def test_an_answer_from_the_library_is_that_of_its_texts(library: Library) -> None:
    for number, text in enumerate(TEXTS):
        library.put(f"d{number}", text)
    wanted = engine_of().generate(TEXTS, QUESTION, max_new_tokens=NEW).ids
    assert library.generate(QUESTION, max_new_tokens=NEW).ids == wanted


def test_documents_come_in_the_order_of_the_ids_that_are_asked_for(library: Library) -> None:
    for name in "abc":
        library.put(name, f"Text of {name}.")
    assert [document.name for document in library.documents()] == ["a", "b", "c"]
    assert library.documents(["c", "a"]) == [Document("Text of c.", name="c"), Document("Text of a.", name="a")]
    with pytest.raises(InputError, match="has no x, y"):
        library.documents(["a", "x", "y"])


def test_a_new_request_uses_the_new_text_at_once_and_says_rebuilding(library: Library) -> None:
    library.put("a", LONG)
    library.work()
    library.put("a", edited(LONG, 0.7))
    assert library.rows()[0].state == "pending"
    answer = library.generate(QUESTION, ["a"], max_new_tokens=NEW)
    fresh = engine_of().generate([edited(LONG, 0.7)], QUESTION, max_new_tokens=NEW)
    assert answer.ids == fresh.ids
    (row,) = answer.usage.documents
    assert row.source == "encoded"
    assert row.reason.startswith("rebuilding: ")
    assert row.reason.endswith(f" of {len(LONG) + 2} tokens kept")
    again = library.generate(QUESTION, ["a"], max_new_tokens=2)
    assert (again.usage.documents[0].source, again.usage.documents[0].reason) == ("disk", "")


def test_a_request_does_the_work_of_its_documents(library: Library) -> None:
    library.put("a", LONG)
    library.put("b", text_of(20, seed=1))
    library.generate(QUESTION, ["a"], max_new_tokens=1)
    assert library.status().jobs == 1
    assert [worked.id for worked in library.work()] == ["b"]


def test_a_document_that_is_new_is_not_in_the_store_and_not_rebuilding(library: Library) -> None:
    library.put("a", LONG)
    assert library.generate(QUESTION, max_new_tokens=1).usage.documents[0].reason == "not in the store"


def test_nothing_that_is_not_in_the_library_stays_in_its_store(library: Library) -> None:
    library.put("a", LONG)
    stream = library.stream(QUESTION, ["a"], max_new_tokens=2)
    library.remove("a")
    assert "".join(stream) == stream.answer.text
    assert library.store.names() == set()


# --- rebuilds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("num_links", [0, 3], ids=["whole", "segments"])
def test_a_rebuilt_entry_is_the_fresh_one(tmp_path: Path, name: str, num_links: int) -> None:
    library = library_of(tmp_path, name=name, num_links=num_links)
    text = text_of(600) if num_links else LONG
    library.put("a", text, "A title")
    library.work()
    library.put("a", edited(text, 0.7), "A title")
    (worked,) = library.work()
    assert 0 < worked.computed < 0.5 * worked.tokens
    engine = library.engine
    names = names_of(library, "a")
    assert (len(names) > 2) == bool(num_links)
    for ids in engine.prompter.segments(library.get("a").document, cut=engine.cuts_documents):
        fresh = engine.runner.encode([ids], prefix=engine.loader.sink)[0]
        found = stored(engine, engine.loader.name(ids))
        assert largest(found.keys - fresh.keys) <= 1e-4 * largest(fresh.keys)  # tables of float32
        assert largest(found.values - fresh.values) <= 1e-4 * largest(fresh.values)
    assert library.store.names() == set(names)


def test_of_a_thousand_tokens_changed_at_70_percent_at_most_35_percent_are_computed(tmp_path: Path) -> None:
    library = library_of(tmp_path)
    text = text_of(240)[:998]
    library.put("a", text)
    library.work()
    library.put("a", edited(text, 0.7))
    (worked,) = library.work()
    assert worked.tokens == 1000
    assert worked.computed == 1000 - 698
    assert worked.computed <= 0.35 * worked.tokens
    assert worked.kept + worked.computed == worked.tokens


def test_segments_that_are_equal_keep_their_entries(tmp_path: Path) -> None:
    library = library_of(tmp_path, num_links=3)
    text = text_of(700)
    library.put("a", text)
    library.work()
    before = set(names_of(library, "a"))
    library.put("a", edited(text, 0.5))
    (worked,) = library.work()
    after = names_of(library, "a")
    equal = len(before.intersection(after))
    assert len(after) > 3
    assert equal >= len(after) - 2
    assert worked.computed <= 2 * 1024
    assert library.store.names() == set(after)


def test_a_text_that_is_cut_off_is_not_computed_again(library: Library) -> None:
    library.put("a", LONG)
    library.work()
    library.put("a", LONG[:500])
    (worked,) = library.work()
    assert worked.computed == 2  # the empty line behind each document


def test_two_edits_in_a_row_continue_from_the_entry_that_was_made(library: Library) -> None:
    library.put("a", LONG)
    library.work()
    library.put("a", edited(LONG, 0.9))
    library.put("a", edited(LONG, 0.6))
    (worked,) = library.work()
    assert worked.kept == int(0.6 * len(LONG))
    assert library.store.names() == set(names_of(library, "a"))


def test_the_smallest_change_comes_first_and_new_documents_last(library: Library) -> None:
    for name in "bcd":
        library.put(name, text_of(150, seed=ord(name)))
    library.work()
    library.put("a", "A new one.")
    library.put("c", text_of(150, seed=7))
    library.put("d", edited(text_of(150, seed=ord("d")), 0.5))
    assert [worked.id for worked in library.work(1)] == ["d"]
    assert [worked.id for worked in library.work()] == ["c", "a"]
    assert library.status().jobs == 0


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ("gone", "the earlier version's entry is gone"),
        ("int8", "of the earlier version only int8 is kept"),
        ("other", "it begins as no earlier version does"),
    ],
)
def test_work_says_why_a_document_was_encoded_whole(tmp_path: Path, spoil: str, reason: str) -> None:
    model = shared_model("llama", dtype=torch.float32)  # the codecs of fewer bits take no float64
    library = Library(tmp_path, Engine.from_pretrained(model, tokenizer=TOKENIZER, store=tmp_path / "entries"))
    library.put("a", LONG)
    library.work()
    (name,) = names_of(library, "a")
    engine = library.engine
    if spoil != "other":
        entry = stored(engine, name)
        library.store.delete(name)
        if spoil == "int8":
            library.store.put(name, "int8", encode(entry, engine.loader.identity, codec="int8"))
    library.put("a", f"Q{LONG[1:]}" if spoil == "other" else edited(LONG, 0.5))
    usage = library.generate(QUESTION, max_new_tokens=1).usage if spoil == "int8" else None
    if usage:
        assert usage.documents[0].reason == f"rebuilding: encoded whole, {reason}"
    else:
        (worked,) = library.work()
        assert worked.computed == worked.tokens
        assert worked.reason == f"rebuilding: encoded whole, {reason}"
    library.work()
    assert library.store.names() == set(names_of(library, "a"))


def test_a_library_knows_two_models_and_keeps_both_apart(tmp_path: Path) -> None:
    first = library_of(tmp_path)
    first.put("a", LONG)
    first.work()
    second = Library(tmp_path, engine_of("qwen3", store=tmp_path / "entries"))
    assert second.rows()[0].state == "ready"  # as the first model read it
    assert second.generate(QUESTION, max_new_tokens=1).usage.documents[0].reason == "not in the store"
    assert len(second.store.names()) == 2
    first.put("a", edited(LONG, 0.8))
    first.work()
    second.work()
    assert second.store.names() == {*names_of(first, "a"), *names_of(second, "a")}
    second.remove("a")
    assert second.store.names() == set()


# --- status ---------------------------------------------------------------------------------------------------------


def test_rows_and_status_tell_states_and_bytes(library: Library) -> None:
    library.put("a", LONG)
    library.put("b", text_of(50, seed=3))
    library.work(1)
    states = {row.id: (row.state, row.bytes > 0) for row in library.rows()}
    assert sorted(states.values()) == [("pending", False), ("ready", True)]
    status = library.status()
    assert (status.documents, status.ready, status.pending, status.jobs, status.removing) == (2, 1, 1, 1, 0)
    library.work()
    status = library.status()
    assert status.bytes == sum(row.bytes for row in library.rows()) == library.store.stats().used_bytes


def test_near_duplicates_are_told_with_the_bytes_that_they_cost(library: Library) -> None:
    library.put("a", LONG)
    library.put("b", edited(LONG, 0.5))
    library.put("c", text_of(220, seed=9))
    library.put("same", LONG)
    library.work()
    sizes = {row.id: row.bytes for row in library.rows()}
    near = library.status().near
    assert {(pair.one, pair.other) for pair in near} == {("a", "b"), ("b", "same")}
    assert all(pair.bytes == sizes["b"] for pair in near)
    assert len(library.store.names()) == 3


def test_without_an_engine_a_library_lists_and_removes_and_does_not_read(tmp_path: Path) -> None:
    made = library_of(tmp_path)
    made.put("a", LONG)
    made.work()
    made.close()
    with Library(tmp_path) as library:
        assert [(row.id, row.state) for row in library.rows()] == [("a", "ready")]
        with pytest.raises(InputError, match="without an engine"):
            library.put("b", LONG)
        library.remove("a")
        assert library.rows() == []
        assert library.store.names() == set()


def test_an_engine_brings_its_own_store(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="own store"):
        Library(tmp_path, engine_of(), store=MemoryStore(budget_bytes=1 << 20))


# --- the folder -----------------------------------------------------------------------------------------------------


def test_only_its_owner_can_read_the_folder(tmp_path: Path) -> None:
    library_of(tmp_path / "a" / "library").put("a", LONG)
    assert stat.S_IMODE((tmp_path / "a" / "library").stat().st_mode) == 0o700
    files = [path for path in (tmp_path / "a" / "library").iterdir() if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert len(files) >= 2


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(StoreUnusable, match=r"not a\s+library"):
        Library(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("spoil", ["bytes", "foreign", "format"])
def test_a_database_of_something_else_is_refused(tmp_path: Path, spoil: str) -> None:
    path = tmp_path / "library.db"
    if spoil == "bytes":
        path.write_bytes(b"no database at all" * 100)
    else:
        if spoil == "format":
            Library(tmp_path).close()
        database = sqlite3.connect(path)
        database.execute("CREATE TABLE theirs (x)" if spoil == "foreign" else "PRAGMA user_version = 99")
        database.close()
    with pytest.raises(StoreUnusable):
        Library(tmp_path)


def test_a_library_outlives_its_process(tmp_path: Path) -> None:
    made = library_of(tmp_path)
    made.put("a", LONG, "T", {"k": [1, None]}, "p")
    made.close()
    again = library_of(tmp_path)
    found = again.get("a")
    assert (found.text, found.title, dict(found.metadata), found.parent) == (LONG, "T", {"k": [1, None]}, "p")
    assert [worked.id for worked in again.work()] == ["a"]
