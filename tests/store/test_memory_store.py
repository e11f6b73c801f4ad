"""What is particular to objects in memory: whose memory it is, and who keeps it from being dropped."""

import pytest
from specimens import Clock, put, specimen

from kvlink.core.errors import StoreFull
from kvlink.store import MemoryStore

FIRST, SECOND, THIRD = (specimen(seed) for seed in range(3))
SIZE = FIRST.data.nbytes


def test_memory_that_can_be_written_is_taken_over_and_other_is_copied() -> None:
    store = MemoryStore(budget_bytes=2 * SIZE)
    mine = bytearray(FIRST.data)
    store.put(FIRST.name, "raw", mine)
    store.put(SECOND.name, "raw", bytes(SECOND.data))
    mine[-4:] = bytes(4)
    assert store.get(FIRST.name, ["raw"]) is None
    assert store.get(SECOND.name, ["raw"]) is not None


def test_leased_objects_make_a_store_full_and_nothing_is_dropped_in_vain() -> None:
    store = MemoryStore(budget_bytes=2 * SIZE)
    put(store, FIRST, SECOND)
    with store.get(SECOND.name, ["raw"]):
        with pytest.raises(StoreFull, match=f"{SIZE} of {2 * SIZE} in memory are being read"):
            put(store, specimen(5, tokens=20))
        assert store.names() == {FIRST.name, SECOND.name}
        put(store, THIRD)
        assert store.names() == {SECOND.name, THIRD.name}


def test_an_object_deleted_under_its_readers_counts_until_the_last_of_them_is_done() -> None:
    store = MemoryStore(budget_bytes=SIZE)
    put(store, FIRST)
    readers = [store.get(FIRST.name, ["raw"]) for _ in range(2)]
    assert store.delete(FIRST.name) == 1
    assert store.get(FIRST.name, ["raw"]) is None
    for reader in readers:
        assert store.stats().used_bytes == SIZE
        with pytest.raises(StoreFull):
            put(store, SECOND)
        assert reader.object.decode().equals(FIRST.entry)
        reader.release()
        reader.release()
    assert store.stats().used_bytes == 0
    put(store, SECOND)


def test_an_object_damaged_under_its_readers_is_dropped_but_counted_until_they_are_done() -> None:
    store = MemoryStore(budget_bytes=2 * SIZE)
    put(store, FIRST)
    reader = store.get(FIRST.name, ["raw"])
    reader.object.decode().keys.zero_()
    assert store.get(FIRST.name, ["raw"]) is None
    put(store, FIRST)
    assert store.stats().used_bytes == 2 * SIZE
    reader.release()
    assert store.stats().used_bytes == SIZE
    assert store.get(FIRST.name, ["raw"]).object.decode().equals(FIRST.entry)


def test_damage_found_late_does_not_drop_what_came_in_between() -> None:
    store = MemoryStore(budget_bytes=2 * SIZE)
    put(store, FIRST)
    damaged = store._borrow((FIRST.name, "raw"))
    store.delete(FIRST.name)
    put(store, FIRST)
    store._quarantine((FIRST.name, "raw"), damaged)
    assert store.names() == {FIRST.name}
    assert store.stats().quarantined == 0


def test_a_leased_object_is_not_replaced() -> None:
    store = MemoryStore(budget_bytes=SIZE)
    put(store, FIRST)
    with store.get(FIRST.name, ["raw"]) as lease:
        put(store, FIRST)
        with store.get(FIRST.name, ["raw"]) as another:
            assert another.object.decode().keys.data_ptr() == lease.object.decode().keys.data_ptr()


def test_order_of_use_does_not_depend_on_the_clock() -> None:
    clock = Clock()
    store = MemoryStore(budget_bytes=2 * SIZE, clock=clock)
    put(store, FIRST)
    clock.now -= 10_000
    put(store, SECOND, THIRD)
    assert store.names() == {SECOND.name, THIRD.name}


def test_closing_gives_all_memory_back() -> None:
    store = MemoryStore(budget_bytes=SIZE)
    put(store, FIRST)
    store.close()
    assert store.stats().used_bytes == 0
