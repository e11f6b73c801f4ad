"""Loading ahead: in order, once, within a budget, and without a trace when it is cancelled."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from engines import QUESTION, TEXTS, engine_of, loaded, some_ids

from kvlink import Engine
from kvlink.core.entry import CacheEntry
from kvlink.core.errors import InputError, StoreUnusable
from kvlink.core.fingerprint import Identity, fingerprint
from kvlink.engine.flight import Wanted
from kvlink.engine.prefetch import STALE_S, Prefetcher
from kvlink.engine.rates import Rates
from kvlink.store import Lease, MemoryStore, TieredStore, encode

IDENTITY = Identity(model="a1" * 32, rope="b2" * 32, sink_ids=(1, 7), dtype="float32")


def object_of(number: int) -> tuple[Wanted, memoryview]:
    entry = CacheEntry(torch.full((2, 2, 4, 3), 1.0 * number), torch.ones(2, 2, 4, 3), tuple(range(number, number + 4)))
    data = encode(entry, IDENTITY)
    return Wanted(fingerprint(IDENTITY, entry.token_ids), data.nbytes, entry.num_bytes), data


OBJECTS = [object_of(number) for number in range(10, 16)]
WANTED = [wanted for wanted, _ in OBJECTS]
SIZE = OBJECTS[0][1].nbytes


@pytest.fixture(autouse=True)
def large_objects(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small objects in memory stand for large ones, except where an engine decides."""
    if "make" in request.fixturenames:
        monkeypatch.setattr("kvlink.engine.prefetch.AT_HAND_BYTES", 0)
        monkeypatch.setattr("kvlink.engine.prefetch.QUICK_S", 0.0)


@pytest.fixture(autouse=True)
def others() -> set[threading.Thread]:
    """Threads that stores of earlier tests have left, and which end by themselves."""
    return set(threading.enumerate())


def assert_no_threads(others: set[threading.Thread]) -> None:
    """Threads that are about to end may still be counted: wait for these."""
    for thread in set(threading.enumerate()) - others:
        if thread.name == "kvlink-prefetch":
            thread.join(3.0)  # less than an idle one waits
            assert not thread.is_alive()


class Gate:
    """A store in memory that notes what is read, and holds reads until it is opened."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.store = MemoryStore(budget_bytes=1 << 20)
        for wanted, data in OBJECTS:
            self.store.put(wanted.name, "raw", data)
        self.reads: list[int] = []
        self.begun, self.opened = threading.Event(), threading.Event()
        if is_open:
            self.opened.set()
        get = self.store.get

        def wait_then_get(name: str, accept: Sequence[str]) -> Lease | None:
            self.reads.append([wanted.name for wanted in WANTED].index(name))
            self.begun.set()
            assert self.opened.wait(60.0)
            return get(name, accept)

        self.store.get = wait_then_get  # type: ignore[method-assign]

    @property
    def leases(self) -> int:
        with self.store._lock:
            return sum(slot.leases for slot in self.store._slots.values())


@pytest.fixture
def make(others: set[threading.Thread]) -> Iterator[Callable[..., Prefetcher]]:
    made: list[Prefetcher] = []

    def prefetcher(gate: Gate, *, budget: int = 3, **options: object) -> Prefetcher:
        given = {"store": gate.store, "accept": ("raw",), "rates": Rates(), "budget_bytes": budget * SIZE} | options
        made.append(Prefetcher(**given))
        return made[-1]

    yield prefetcher
    for one in made:
        one.close()
    assert_no_threads(others)


def taken(ahead: Prefetcher, number: int) -> float | None:
    """Use what was loaded, and return a number of it."""
    held = ahead.take(WANTED[number].name)
    if held is None:
        return None
    value = held.entry.keys[0, 0, 0, 0].item()
    held.release()
    return value


def test_what_was_loaded_ahead_is_read_once_and_held_until_it_is_used(make: Callable[..., Prefetcher]) -> None:
    gate = Gate()
    ahead = make(gate)
    handle = ahead.prefetch(WANTED[:2])
    assert handle.wait(60.0)
    assert (handle.done, ahead.used_bytes, gate.leases) == (True, 2 * SIZE, 2)
    assert taken(ahead, 0) == 10
    assert (ahead.used_bytes, gate.leases) == (SIZE, 1)
    assert taken(ahead, 0) is None
    assert sorted(gate.reads) == [0, 1]


def test_what_is_used_stays_under_lease_while_it_is_read(make: Callable[..., Prefetcher]) -> None:
    gate = Gate()
    ahead = make(gate)
    ahead.prefetch(WANTED[:1]).wait(60.0)
    held = ahead.take(WANTED[0].name)
    assert (ahead.used_bytes, gate.leases) == (0, 1)
    held.release()
    assert gate.leases == 0


def test_it_is_loaded_by_priority_and_then_by_arrival(make: Callable[..., Prefetcher]) -> None:
    gate = Gate(is_open=False)
    ahead = make(gate, budget=9, threads=1)
    handles = [ahead.prefetch(WANTED[:1])]
    assert gate.begun.wait(60.0)
    handles += [ahead.prefetch([WANTED[at]], priority=priority) for at, priority in ((1, 0), (2, 5), (3, 0), (4, 5))]
    gate.opened.set()
    assert all(handle.wait(60.0) for handle in handles)
    assert gate.reads == [0, 2, 4, 1, 3]


def test_a_load_waits_for_what_is_being_read_instead_of_reading_twice(make: Callable[..., Prefetcher]) -> None:
    gate = Gate(is_open=False)
    ahead = make(gate)
    ahead.prefetch(WANTED[:1])
    assert gate.begun.wait(60.0)
    found: list[float | None] = []
    loads = [threading.Thread(target=lambda: found.append(taken(ahead, 0))) for _ in range(1)]
    for load in loads:
        load.start()
    gate.opened.set()
    for load in loads:
        load.join(60)
    assert (found, gate.reads, ahead.used_bytes, gate.leases) == ([10.0], [0], 0, 0)


def test_what_only_waits_in_the_queue_is_left_to_the_load(make: Callable[..., Prefetcher]) -> None:
    gate = Gate(is_open=False)
    ahead = make(gate, threads=1)
    ahead.prefetch(WANTED[:1])
    assert gate.begun.wait(60.0)
    handle = ahead.prefetch(WANTED[1:2])
    assert taken(ahead, 1) is None
    assert handle.done
    gate.opened.set()


def test_two_that_want_the_same_have_it_read_once_and_use_it_twice(make: Callable[..., Prefetcher]) -> None:
    gate = Gate()
    ahead = make(gate)
    handles = [ahead.prefetch(WANTED[:1]) for _ in range(2)]
    assert all(handle.wait(60.0) for handle in handles)
    assert ahead.used_bytes == SIZE
    assert [taken(ahead, 0) for _ in range(3)] == [10, 10, None]
    assert (gate.reads, ahead.used_bytes, gate.leases) == ([0], 0, 0)


def test_the_budget_is_never_exceeded_and_use_makes_room(make: Callable[..., Prefetcher]) -> None:
    gate = Gate()
    ahead = make(gate, budget=2, threads=1)
    handles = [ahead.prefetch([wanted]) for wanted in WANTED[:4]]
    for number, handle in enumerate(handles):
        assert handle.wait(60.0)
        assert 0 < ahead.used_bytes <= 2 * SIZE
        assert gate.leases <= 2
        assert taken(ahead, number) == 10 + number
    assert (gate.reads, ahead.used_bytes) == ([0, 1, 2, 3], 0)


def test_what_is_larger_than_the_budget_is_not_loaded(make: Callable[..., Prefetcher]) -> None:
    gate = Gate()
    ahead = make(gate, budget=0)
    assert ahead.prefetch(WANTED[:2]).wait(60.0)
    assert (gate.reads, ahead.used_bytes) == ([], 0)


def test_an_object_that_is_larger_than_was_thought_is_not_held_over_the_budget(make: Callable[..., Prefetcher]) -> None:
    gate = Gate()
    ahead = make(gate, budget_bytes=SIZE - 1)
    small = Wanted(WANTED[0].name, SIZE // 2, WANTED[0].entry_bytes)
    assert ahead.prefetch([small]).wait(60.0)
    assert (gate.reads, ahead.used_bytes, gate.leases, taken(ahead, 0)) == ([0], 0, 0, None)


def test_decoded_copies_count(make: Callable[..., Prefetcher]) -> None:
    gate = Gate()
    entry = CacheEntry(torch.ones(2, 2, 4, 3), torch.ones(2, 2, 4, 3), (10, 11, 12, 13))
    gate.store.delete(WANTED[0].name)
    gate.store.put(WANTED[0].name, "half", packed := encode(entry, IDENTITY, codec="half"))
    ahead = make(gate, accept=("raw", "half"))
    ahead.prefetch(WANTED[:1]).wait(60.0)
    assert ahead.used_bytes == packed.nbytes + entry.num_bytes


def test_what_is_less_urgent_is_replaced(make: Callable[..., Prefetcher]) -> None:
    gate = Gate()
    ahead = make(gate, budget=2)
    ahead.prefetch(WANTED[:2]).wait(60.0)
    assert ahead.prefetch(WANTED[2:3], priority=1).wait(60.0)
    assert (ahead.used_bytes, gate.leases) == (2 * SIZE, 2)
    assert [taken(ahead, number) for number in range(3)] == [10, None, 12]


def test_what_nobody_came_for_is_replaced(make: Callable[..., Prefetcher]) -> None:
    gate, now = Gate(), [0.0]
    ahead = make(gate, budget=1, monotonic=lambda: now[0])
    ahead.prefetch(WANTED[:1]).wait(60.0)
    later = ahead.prefetch(WANTED[1:2])
    assert later.wait(0.05) is False
    now[0] += STALE_S + 1
    assert ahead.prefetch(WANTED[1:2]).wait(60.0)
    assert [taken(ahead, number) for number in (0, 1)] == [None, 11]


@pytest.mark.parametrize("when", ["queued", "being read", "held", "waiting for room"])
def test_after_a_cancel_nothing_is_left(make: Callable[..., Prefetcher], when: str) -> None:
    gate = Gate(is_open=when in ("held", "waiting for room"))
    ahead = make(gate, budget=1 if when == "waiting for room" else 9, threads=1)
    first = ahead.prefetch(WANTED[:1])
    if when in ("queued", "being read"):
        assert gate.begun.wait(60.0)
    else:
        assert first.wait(60.0)
    handle = first if when in ("being read", "held") else ahead.prefetch(WANTED[1:4])
    handle.cancel()
    handle.cancel()
    first.cancel()
    assert (handle.done, first.done) == (True, True)
    gate.opened.set()
    ahead.close()
    assert (ahead.used_bytes, gate.leases, ahead._flights) == (0, 0, {})
    assert set(gate.reads) == {0}


def test_one_cancels_and_the_other_still_gets_it(make: Callable[..., Prefetcher]) -> None:
    gate = Gate()
    ahead = make(gate)
    one, other = ahead.prefetch(WANTED[:1]), ahead.prefetch(WANTED[:1])
    assert other.wait(60.0)
    one.cancel()
    assert taken(ahead, 0) == 10


def test_a_store_that_cannot_be_read_ends_the_prefetch_and_nothing_else(make: Callable[..., Prefetcher]) -> None:
    gate = Gate()

    def refuse(*_: object) -> None:
        raise StoreUnusable("gone")

    gate.store.get = refuse  # type: ignore[method-assign, assignment]
    ahead = make(gate)
    assert ahead.prefetch(WANTED[:2]).wait(60.0)
    assert (taken(ahead, 0), ahead.used_bytes) == (None, 0)


# --- through an engine ----------------------------------------------------------------------------------------------


def test_a_request_uses_what_the_engine_loaded_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlink.engine.prefetch.QUICK_S", 0.0)
    engine = engine_of(store=tmp_path)
    engine.encode(TEXTS)
    before = engine.generate(TEXTS, QUESTION, max_new_tokens=4)
    handle = engine.prefetch(TEXTS, QUESTION)
    assert handle.wait(60.0)
    assert engine.loader.ahead.used_bytes > 0
    get, engine.store.get = engine.store.get, None
    after = engine.generate(TEXTS, QUESTION, max_new_tokens=4)
    engine.store.get = get
    assert after.ids == before.ids
    assert {row.source for row in after.usage.documents} == {"disk"}
    assert engine.loader.ahead.used_bytes == 0
    engine.close()


@pytest.mark.parametrize("tiered", [False, True])
def test_what_is_small_and_in_memory_is_left_there(tiered: bool) -> None:
    store = MemoryStore(budget_bytes=1 << 24)
    engine = engine_of(store=TieredStore(store) if tiered else store)
    engine.encode(TEXTS)
    assert engine.prefetch(TEXTS).done
    assert engine.loader.ahead._flights == {}
    assert engine.prefetch(TEXTS[:1]).done


def test_what_is_absent_is_left_to_the_request(tmp_path: Path) -> None:
    with engine_of(store=tmp_path) as engine:
        assert engine.prefetch([*TEXTS, " "]).wait(60.0)
        answer = engine.generate(TEXTS, QUESTION, max_new_tokens=1)
    assert {row.source for row in answer.usage.documents} == {"encoded"}


@pytest.mark.parametrize(("seconds", "ahead"), [(0.001, False), (0.007, True), (1.0, True)])
def test_what_loads_in_no_time_is_left_to_the_request(tmp_path: Path, seconds: float, ahead: bool) -> None:
    """Its three documents together are looked at, as the slowest tier gives them."""
    with engine_of(store=tmp_path) as engine:
        engine.encode(TEXTS)
        bytes_each = engine.runner.geometry.bytes_per_token(engine.runner.dtype) * max(map(len, TEXTS))
        for _ in range(3):
            engine.loader.rates.loaded("host", bytes_each, 1e-6)
            engine.loader.rates.loaded("disk", bytes_each, seconds)
        handle = engine.prefetch(TEXTS)
        assert handle.wait(60.0)
        assert (engine.loader.ahead.used_bytes > 0) is ahead


def test_a_request_that_does_not_fit_is_refused_before_anything_is_loaded() -> None:
    engine: Engine = loaded(context=200)
    with pytest.raises(InputError):
        engine.prefetch([*TEXTS] * 9, QUESTION)
    assert engine.loader.ahead._flights == {}


def test_an_engine_that_closes_lets_go_of_everything(tmp_path: Path, others: set[threading.Thread]) -> None:
    engine = engine_of(store=tmp_path)
    list(engine.loader.encode([some_ids(9)]))
    engine.loader.prefetch([some_ids(9)]).wait(60.0)
    assert engine.loader.ahead.used_bytes > 0
    engine.close()
    assert engine.loader.ahead.used_bytes == 0
    assert_no_threads(others)
