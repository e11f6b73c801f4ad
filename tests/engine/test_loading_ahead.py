"""While requests run, the documents of those that wait are read by other threads; no step waits for a store."""

import threading
from collections.abc import Iterator, Sequence

import pytest
from engines import engine_of
from scheduled import MORE, NEW, engine_with, ids_of, run, scheduler_of, submit

from kvlink.core.errors import StoreUnusable
from kvlink.engine.engine import Engine
from kvlink.engine.task import Task
from kvlink.store import Lease, MemoryStore

ASKED = (MORE[:2], "Which hut is red?")
OTHER = (MORE[2:], "Which hut is green?")
PLAIN: tuple[list[str], str] = ([], "Who are you?")


class SlowStore(MemoryStore):
    """Holds reads of other threads than the test's until it is opened, and notes who read."""

    source = "disk"

    def __init__(self) -> None:
        super().__init__(budget_bytes=1 << 24)
        self.opened = threading.Event()
        self.opened.set()
        self.fails = False
        self.readers: list[str] = []

    def get(self, name: str, accept: Sequence[str]) -> Lease | None:
        self.readers.append(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            assert self.opened.wait(60.0)
            if self.fails:
                raise StoreUnusable("the network is gone")
        return super().get(name, accept)


@pytest.fixture
def store() -> SlowStore:
    return SlowStore()


@pytest.fixture
def base(store: SlowStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr("kvlink.engine.prefetch.QUICK_S", 0.0)
    with engine_of(store=store) as engine:
        engine.encode(MORE)
        store.readers.clear()
        yield engine
        store.opened.set()


def running(engine: Engine) -> Task:
    """Return a job that has begun to answer and goes on."""
    job = submit(engine, PLAIN, max_new_tokens=200)[0]
    while not job.ids:
        scheduler_of(engine).step()
    return job


def alone(base: Engine, request: tuple[list[str], str]) -> tuple[int, ...]:
    job = submit(engine := engine_with(base), request)[0]
    run(engine, job)
    return ids_of(job)


def test_answers_go_on_while_documents_are_read_and_the_request_then_gets_its_own(
    base: Engine, store: SlowStore
) -> None:
    wanted = alone(base, ASKED)
    store.readers.clear()
    engine = engine_with(base)
    first = running(engine)
    store.opened.clear()
    asked = submit(engine, ASKED)[0]
    for _ in range(5):
        before = len(first.ids)
        scheduler_of(engine).step()
        assert (len(first.ids), asked.opening, asked.session) == (before + 1, None, None)
    store.opened.set()
    assert asked.ahead is not None
    assert asked.ahead.wait(60.0)
    run(engine, asked)
    assert ids_of(asked) == wanted
    assert asked.usage is not None
    assert {row.source for row in asked.usage.documents} == {"disk"}
    assert set(store.readers) == {"kvlink-prefetch"}
    assert base.loader.ahead.used_bytes == 0
    first.cancel()


def test_one_whose_documents_are_there_goes_first_but_only_so_often(base: Engine, store: SlowStore) -> None:
    engine = engine_with(base, most_overtaken=2)
    first = running(engine)
    store.opened.clear()
    asked = submit(engine, ASKED)[0]
    others = [submit(engine, PLAIN, max_new_tokens=1)[0] for _ in range(4)]
    for _ in range(20):
        scheduler_of(engine).step()
    assert [job.has_ended for job in others] == [True, True, False, False]
    assert (asked.overtaken, asked.has_ended) == (2, False)
    store.opened.set()
    run(engine, asked, *others)
    assert len(ids_of(asked)) == NEW
    first.cancel()


def test_one_alone_reads_at_once(base: Engine, store: SlowStore) -> None:
    """There is nothing to do in the meantime, so nothing is handed to other threads."""
    engine = engine_with(base)
    asked = submit(engine, ASKED)[0]
    scheduler_of(engine).step()
    assert set(store.readers) == {"MainThread"}
    run(engine, asked)


def test_one_that_waits_for_its_documents_reads_them_itself_when_nothing_else_goes_on(
    base: Engine, store: SlowStore
) -> None:
    engine = engine_with(base)
    asked, other = submit(engine, ASKED, OTHER)
    run(engine, asked, other)
    assert len(ids_of(asked)) == len(ids_of(other)) == NEW
    assert base.loader.ahead.used_bytes == 0


@pytest.mark.parametrize("end", ["cancelled", "closed", "too late"])
def test_what_ends_before_its_turn_leaves_nothing_loaded(base: Engine, store: SlowStore, end: str) -> None:
    engine = engine_with(base)
    running(engine)
    store.opened.clear()
    asked = submit(engine, ASKED, deadline_s=0.0 if end == "too late" else None)[0]
    scheduler_of(engine).step()
    if end == "closed":
        scheduler_of(engine).close()
    else:
        asked.cancel()
        scheduler_of(engine).step()
    assert asked.has_ended
    store.opened.set()
    base.loader.ahead.close()
    assert (base.loader.ahead.used_bytes, base.loader.ahead._flights) == (0, {})


def test_what_cannot_be_loaded_ahead_is_got_when_it_is_its_turn(base: Engine, store: SlowStore) -> None:
    wanted = alone(base, ASKED)
    engine = engine_with(base)
    first = running(engine)
    store.fails = True
    asked = submit(engine, ASKED)[0]
    run(engine, asked)
    assert ids_of(asked) == wanted
    first.cancel()


def test_what_is_resident_or_faster_to_encode_is_not_loaded(base: Engine, store: SlowStore) -> None:
    engine = engine_with(base)
    run(engine, *submit(engine, ASKED))
    first = running(engine)
    store.readers.clear()
    asked = submit(engine, ASKED)[0]
    run(engine, asked)
    assert store.readers == []
    for _ in range(3):
        base.loader.rates.loaded("disk", 1000, 10.0)
        base.loader.rates.encoded(1000, 1e-6)
    other = submit(engine, OTHER)[0]
    run(engine, other)
    assert "kvlink-prefetch" not in store.readers
    first.cancel()
