"""Following a journal, step by step: what another one does between two of them is not undone, and nothing is missed."""

import json
import sqlite3
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from live import until

from kvlink.engine.catalogue import Catalogue
from kvlink.engine.library import Library
from kvlink.engine.record import Record
from kvlink.engine.schema import FILE
from kvlink.server.following import Follower, _gone, _key, _written
from kvlink.server.refusals import Refused
from kvlink.store.journal import Change, Head, Journal
from store.servers import RedisServer

OLD = [Record("hut", "From before."), Record("inn", "From before.")]
HUT, INN = OLD
NEW = Record("hut", "From another server.")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as one:
        yield one


@pytest.fixture
def journal(server: RedisServer, request: pytest.FixtureRequest) -> Iterator[Journal]:
    with closing(Journal(server.url, prefix=request.node.name)) as one:
        yield one


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    """Two documents that no engine has read."""
    fill(tmp_path / "own", *OLD)
    with Library(tmp_path / "own") as one:
        yield one


def fill(folder: Path, *records: Record) -> None:
    with closing(Catalogue(folder)) as catalogue:
        for record in records:
            catalogue.put(record, reading="none", segments=[])


def at_once(function: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
    return future


def key(record: Record) -> str:
    return _key(record.scope, record.id)


def removal(record: Record) -> tuple[str, bytes]:
    return key(record), _gone(record.scope, record.id)


def texts(journal: Journal) -> dict[str, str | None]:
    return {told["id"]: told["text"] for told in (json.loads(change.text) for change in journal.since(0))}


def test_what_another_server_changes_while_a_library_joins_stays(
    library: Library, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = journal.since

    def since(number: int) -> Generator[Change]:
        yield from read(number)
        journal.append(key(NEW), _written(NEW))
        journal.append(*removal(INN))

    with monkeypatch.context() as patch:
        patch.setattr(journal, "since", since)
        Follower(library, journal, at_once).catch_up()
    assert texts(journal) == {"hut": NEW.text, "inn": None}


def test_a_document_that_another_process_removes_while_its_library_joins_holds_nothing_up(
    library: Library, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings = library.listings

    def listed() -> Any:
        found = listings()
        library.remove("hut")
        return found

    monkeypatch.setattr(library, "listings", listed)
    Follower(library, journal, at_once).catch_up()
    assert texts(journal) == {"inn": INN.text}


def test_a_removal_that_the_library_cannot_note_is_not_taken_as_done(library: Library, journal: Journal) -> None:
    follower = Follower(library, journal, at_once)
    follower.catch_up()
    follower.catch_up()
    journal.append(*removal(HUT))
    library._catalogue._database.execute("PRAGMA busy_timeout = 0")
    with closing(sqlite3.connect(library.folder / FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for _ in range(2):
            with pytest.raises(Refused, match="locked") as refused:
                follower.catch_up()
            assert (refused.value.status, refused.value.code) == (503, "no_journal")
        assert library.known(["hut", "inn"]) == ["hut", "inn"]
    follower.catch_up()
    assert library.known(["hut", "inn"]) == ["inn"]


def test_those_who_wait_share_the_next_question_and_not_the_one_that_was_asked_before(
    library: Library, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = Follower(library, journal, at_once)
    follower.catch_up()
    ask, asked, free = journal.head, [0], Event()

    def slow() -> Head:
        found = ask()
        asked.append(found.number)
        free.wait()
        return found

    monkeypatch.setattr(journal, "head", slow)
    with ThreadPoolExecutor(20) as pool:
        first = pool.submit(follower.catch_up)
        until(lambda: len(asked) == 2)
        journal.append(*removal(HUT))  # the question under way does not tell of it
        waiting = [pool.submit(follower.catch_up) for _ in range(19)]
        until(lambda: all(one.running() for one in waiting))
        assert not any(one.done() for one in (first, *waiting))
        free.set()
        for one in waiting:
            one.result()
    assert library.known(["hut"]) == []
    assert asked[1:3] == [2, 3]
    assert len(asked) < len(waiting) / 2


def test_texts_of_a_library_that_joins_beside_are_added_where_they_are_unknown(
    library: Library, journal: Journal, tmp_path: Path
) -> None:
    mill = Record("mill", "It grinds.", "The mill", {"page": 1}, "atlas", b"t" * 16)
    fill(tmp_path / "other", HUT, Record("inn", "Older."), mill)
    journal.append(*removal(HUT))
    follower = Follower(library, journal, at_once)
    follower.joining = tmp_path / "other"
    with pytest.MonkeyPatch.context() as patch:
        put: list[tuple[Any, ...]] = []
        patch.setattr(library, "put", lambda *given, scope: put.append((*given, scope)))
        follower.catch_up()
    assert texts(journal) == {"hut": None, "inn": INN.text, "mill": mill.text}
    assert put == [("mill", mill.text, mill.title, mill.metadata, mill.parent, mill.scope)]
    assert follower.joining is None
    with closing(Catalogue(tmp_path / "other")) as catalogue:
        assert [one.id for one in catalogue.listings()] == ["hut", "inn", "mill"]


def test_a_folder_that_holds_no_library_has_no_texts_that_join(
    library: Library, journal: Journal, tmp_path: Path
) -> None:
    follower = Follower(library, journal, at_once)
    follower.joining = tmp_path / "none"
    follower.catch_up()
    assert texts(journal) == {"hut": HUT.text, "inn": INN.text}
    assert not (tmp_path / "none").exists()
