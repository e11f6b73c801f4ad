"""Under pressure objects become smaller before any goes, and whatever is cut off leaves whole ones."""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
from specimens import IDENTITY, STORE_KEY, Clock, MakeStore, Specimen, put, specimen

from kvlink.core.entry import CacheEntry
from kvlink.core.errors import StoreFull, StoreUnusable
from kvlink.core.fingerprint import fingerprint
from kvlink.store import CODECS, BoundedStore, DiskStore, MemoryStore, Store, disk, encode, folder, open_object
from kvlink.store.base import recoded
from kvlink.store.folder import Folder
from kvlink.store.objects import FsspecStore
from kvlink.store.recompress import check_ladder, recompress
from kvlink.store.recompressing import RecompressingStore, under_pressure
from kvlink.store.room import Room
from kvlink.store.tiered import TieredStore

LADDER = ("int8", "int4")
ANY = ("raw", *LADDER)


def wide(seed: int) -> Specimen:
    """Return an object that is mostly numbers, so that codecs count."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, 2, 40, 32, generator=generator) for _ in range(2))
    made = CacheEntry(keys, values, tuple(range(100 * seed, 100 * seed + 40)))
    return Specimen(made, fingerprint(IDENTITY, made.token_ids), encode(made, IDENTITY))


MANY = [wide(seed) for seed in range(24)]
FIRST, SECOND, THIRD = MANY[:3]
SIZE = max(one.data.nbytes for one in MANY)
PLENTY = 30 * SIZE

MARKS = {"high": 0.75, "low": 0.6}
"""One object is a sixth of the budget in these tests: there must be room for it above the high mark."""


def codecs(store: Store, *objects: Specimen) -> list[list[str]]:
    return [list(store.stat(one.name)) for one in objects]


def put_in_turn(store: Store, clock: Clock, *objects: Specimen) -> None:
    for one in objects:
        put(store, one)
        clock.now += 100
        if isinstance(store, RecompressingStore):
            store.settle()


def off(one: Specimen, store: Store, codec: str) -> float:
    """Return by how much what is stored is off, relative to the entry."""
    with store.get(one.name, [codec]) as lease:
        read = lease.object.decode()
    return float((read.values - one.entry.values).norm() / one.entry.values.norm())


def without_numbers() -> Specimen:
    """Return an object that no lossy codec takes."""
    found = specimen(77_000, tokens=200).entry
    found.keys[0, 0, 0, 0] = torch.nan
    return Specimen(found, fingerprint(IDENTITY, found.token_ids), encode(found, IDENTITY))


# --- what it brings -------------------------------------------------------------------------------------------------


def test_a_store_four_times_too_small_keeps_more_documents_than_without(make_bounded: MakeStore, clock: Clock) -> None:
    kept: list[int] = []
    for ladder in ((), ("int8",), LADDER):
        store = RecompressingStore(make_bounded(budget_bytes=6 * SIZE), ladder=ladder, **MARKS)
        put_in_turn(store, clock, *MANY)
        kept.append(len(store.names()))
        assert all(open_whole(store, one) for one in MANY if one.name in store.names())
    without, one_step, two_steps = kept
    assert (without, two_steps) == (6, len(MANY))
    assert 2 * without < one_step < two_steps


def open_whole(store: Store, one: Specimen) -> bool:
    lease = store.get(one.name, ANY)
    assert lease is not None
    with lease:
        return lease.object.decode().token_ids == one.entry.token_ids


def test_nothing_is_evicted_while_something_can_become_smaller(make_bounded: MakeStore, clock: Clock) -> None:
    store = RecompressingStore(make_bounded(budget_bytes=6 * SIZE), ladder=LADDER, **MARKS)
    put_in_turn(store, clock, *MANY)
    assert (len(store.names()), store.stats().evictions) == (len(MANY), 0)


def test_without_a_ladder_nothing_changes(make_bounded: MakeStore, clock: Clock) -> None:
    store = RecompressingStore(make_bounded(budget_bytes=3 * SIZE))
    put_in_turn(store, clock, *MANY[:5])
    assert codecs(store, *MANY[2:5]) == [["raw"]] * 3
    assert (store.stats().evictions, store.stats().recompression.written) == (2, {})


# --- in which order -------------------------------------------------------------------------------------------------


def test_the_least_used_comes_first(make_bounded: MakeStore, clock: Clock) -> None:
    store = make_bounded(budget_bytes=PLENTY)
    put_in_turn(store, clock, FIRST, SECOND, THIRD)
    store.get(FIRST.name, ["raw"]).release()
    done = recompress(store, LADDER, target_bytes=store.stats().used_bytes - 1)
    assert codecs(store, FIRST, SECOND, THIRD) == [["raw"], ["int8"], ["raw"]]
    assert dict(done.written) == {"int8": 1}
    recompress(store, LADDER, target_bytes=store.stats().used_bytes - 1)
    assert codecs(store, FIRST, SECOND, THIRD) == [["raw"], ["int8"], ["int8"]]


def test_everything_takes_the_first_step_before_anything_takes_the_second(
    make_bounded: MakeStore, clock: Clock
) -> None:
    store = make_bounded(budget_bytes=PLENTY)
    put_in_turn(store, clock, FIRST, SECOND)
    seen: list[list[list[str]]] = []
    recompress(store, LADDER, progress=lambda done, total: seen.append(codecs(store, FIRST, SECOND)))
    assert seen == [[["int8"], ["raw"]], [["int8"], ["int8"]], [["int4"], ["int8"]], [["int4"], ["int4"]]]


def test_recompression_is_no_use(make_bounded: MakeStore, clock: Clock) -> None:
    store = make_bounded(budget_bytes=PLENTY)
    put_in_turn(store, clock, FIRST, SECOND)
    before = store.stat(FIRST.name)["raw"].last_use, store.stats()
    clock.now += 1000
    recompress(store, LADDER)
    after = store.stat(FIRST.name)["int4"].last_use, store.stats()
    assert after[0] == before[0]
    assert (after[1].hits, after[1].misses, after[1].puts) == (before[1].hits, before[1].misses, before[1].puts)


def test_what_was_recompressed_keeps_its_turn_to_be_evicted(make_bounded: MakeStore, clock: Clock) -> None:
    small = [Specimen(one.entry, one.name, encode(one.entry, IDENTITY, codec="int8"), "int8") for one in MANY]
    store = make_bounded(budget_bytes=SIZE + 2 * max(one.data.nbytes for one in small))
    put_in_turn(store, clock, FIRST, small[1])
    assert store.recompress(FIRST.name, "raw", "int8")
    put_in_turn(store, clock, small[2], MANY[3])
    assert store.names() == {small[1].name, small[2].name, MANY[3].name}


def test_it_begins_above_the_high_mark_and_ends_at_the_low_one(make_bounded: MakeStore, clock: Clock) -> None:
    store = RecompressingStore(make_bounded(budget_bytes=10 * SIZE), ladder=LADDER, high=0.85, low=0.55)
    put_in_turn(store, clock, *MANY[:8])
    assert codecs(store, *MANY[:8]) == [["raw"]] * 8
    put_in_turn(store, clock, MANY[8])
    assert 5 * SIZE < store.stats().used_bytes <= 5.5 * SIZE
    assert codecs(store, MANY[0], MANY[8]) == [["int8"], ["raw"]]


def test_a_store_that_is_too_full_when_it_is_opened_is_worked_on_at_once(tmp_path: Path) -> None:
    with DiskStore(tmp_path, budget_bytes=PLENTY) as plain:
        put(plain, *MANY[:4])
    store = RecompressingStore(DiskStore(tmp_path, budget_bytes=4 * SIZE), ladder=LADDER)
    store.settle()
    assert ["int8"] in codecs(store, *MANY[:4])


# --- what is left alone ---------------------------------------------------------------------------------------------


def test_while_a_lease_holds_an_object_it_is_left_alone(make_bounded: MakeStore, clock: Clock) -> None:
    store = RecompressingStore(make_bounded(budget_bytes=4 * SIZE), ladder=("int8",), high=0.5, low=0.0)
    put(store, FIRST)
    clock.now += 100
    with store.get(FIRST.name, ["raw"]) as lease:
        put_in_turn(store, clock, SECOND, THIRD)
        assert codecs(store, FIRST, SECOND, THIRD) == [["raw"], ["int8"], ["int8"]]
        assert store.stats().recompression.left_alone > 0
        assert lease.object.decode().equals(FIRST.entry)
    put_in_turn(store, clock, *MANY[3:5])
    assert codecs(store, FIRST) == [["int8"]]


def test_a_store_in_memory_leaves_alone_what_is_read_from_it() -> None:
    store = MemoryStore(budget_bytes=PLENTY)
    put(store, FIRST)
    with store.get(FIRST.name, ["raw"]):
        assert not store.recompress(FIRST.name, "raw", "int8")
    assert store.recompress(FIRST.name, "raw", "int8")
    with store.get(FIRST.name, ["int8"]):
        assert not store.recompress(FIRST.name, "int8", "int4")
        put(store, FIRST)
        assert not store.recompress(FIRST.name, "raw", "int8")
    assert codecs(store, FIRST) == [["raw", "int8"]]


def test_what_a_codec_refuses_stays_as_it_is(make_bounded: MakeStore, clock: Clock) -> None:
    store, odd = make_bounded(budget_bytes=PLENTY), without_numbers()
    put_in_turn(store, clock, odd, FIRST)
    done = recompress(store, LADDER)
    assert codecs(store, odd, FIRST) == [["raw"], ["int4"]]
    assert (done.left_alone, done.failures) == (1, 0)
    with store.get(odd.name, ["raw"]) as lease:
        assert lease.object.decode().equals(odd.entry)


def test_where_one_codec_refuses_the_next_of_the_ladder_is_taken(make_bounded: MakeStore) -> None:
    store = make_bounded(budget_bytes=PLENTY)
    found = specimen(5, tokens=200).entry
    made = CacheEntry(found.keys.bfloat16(), found.values.bfloat16(), found.token_ids)
    identity = IDENTITY.__class__(model="a1" * 32, rope="b2" * 32, sink_ids=(1, 7), dtype="bfloat16")
    one = Specimen(made, fingerprint(identity, made.token_ids), encode(made, identity))
    put(store, one)
    assert dict(recompress(store, ("half", "int8")).written) == {"int8": 1}
    assert codecs(store, one) == [["int8"]]


def test_codecs_off_the_ladder_stay(make_bounded: MakeStore) -> None:
    store = make_bounded(budget_bytes=PLENTY)
    half = Specimen(FIRST.entry, FIRST.name, encode(FIRST.entry, IDENTITY, codec="half"), "half")
    put(store, half)
    assert dict(recompress(store, LADDER).written) == {}
    assert codecs(store, FIRST) == [["half"]]


def test_a_damaged_object_is_quarantined_and_makes_no_other(make_bounded: MakeStore) -> None:
    store = make_bounded(budget_bytes=PLENTY)
    put(store, FIRST)
    if isinstance(store, MemoryStore):
        store._slots[FIRST.name, "raw"].data[-1] ^= 1
    else:
        path = store._path(FIRST.name, "raw")
        path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    assert not store.recompress(FIRST.name, "raw", "int8")
    assert (store.names(), store.stats().quarantined) == (set(), 1)


def test_a_store_that_is_full_to_the_brim_can_shrink(make_bounded: MakeStore) -> None:
    store = make_bounded(budget_bytes=FIRST.data.nbytes)
    put(store, FIRST)
    assert store.recompress(FIRST.name, "raw", "int8")
    assert codecs(store, FIRST) == [["int8"]]
    assert store.stats().evictions == 0


def test_what_would_be_no_smaller_stays(make_bounded: MakeStore) -> None:
    store, tiny = make_bounded(budget_bytes=PLENTY), specimen(3, tokens=1)
    put(store, tiny)
    assert encode(tiny.entry, IDENTITY, codec="int4").nbytes >= tiny.data.nbytes
    assert not store.recompress(tiny.name, "raw", "int4")
    assert codecs(store, tiny) == [["raw"]]


@pytest.mark.parametrize("ladder", [("raw",), ("int8", "raw"), ("int8", "int8"), ("pruned50",), ("zip",)], ids=str)
def test_what_is_no_ladder_is_refused(ladder: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"ladder of recompression|no codec"):
        check_ladder(ladder)
    with pytest.raises(ValueError, match=r"ladder of recompression|no codec"):
        RecompressingStore(MemoryStore(budget_bytes=SIZE), ladder=ladder)


@pytest.mark.parametrize(("high", "low"), [(0.5, 0.6), (1.1, 0.5), (0.5, -0.1)])
def test_marks_are_shares_of_the_budget(high: float, low: float) -> None:
    with pytest.raises(ValueError, match="0 <= low <= high <= 1"):
        RecompressingStore(MemoryStore(budget_bytes=SIZE), high=high, low=low)


def test_a_step_that_leads_nowhere_or_leaves_tokens_out_is_refused(make_bounded: MakeStore) -> None:
    store = make_bounded(budget_bytes=PLENTY)
    put(store, FIRST)
    for into in ("raw", "pruned50"):
        with pytest.raises(ValueError, match="take another codec"):
            store.recompress(FIRST.name, "raw", into)
    assert codecs(store, FIRST) == [["raw"]]


# --- what is written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second", "factor"), [("int8", "int4", 1.05), ("half", "int8", 1.05)])
def test_a_step_from_a_step_loses_hardly_more_than_a_step_from_raw(
    make_bounded: MakeStore, first: str, second: str, factor: float
) -> None:
    store = make_bounded(budget_bytes=PLENTY)
    put(store, FIRST)
    assert store.recompress(FIRST.name, "raw", second)
    direct = off(FIRST, store, second)
    put(store, FIRST)
    assert store.recompress(FIRST.name, "raw", first)
    assert store.recompress(FIRST.name, first, second)
    assert codecs(store, FIRST) == [[second]]
    assert 0 < off(FIRST, store, second) < factor * direct


def test_a_new_object_has_the_facts_of_the_old_one_and_the_stores_signature(tmp_path: Path) -> None:
    data = encode(FIRST.entry, IDENTITY, provenance={"model": "m"}, secret=b"ours")
    for store in (
        MemoryStore(budget_bytes=PLENTY, secret=b"ours"),
        DiskStore(tmp_path / "signed", budget_bytes=PLENTY, secret=b"ours"),
        DiskStore(tmp_path / "sealed", budget_bytes=PLENTY, secret=b"ours", store_key=STORE_KEY),
    ):
        store.put(FIRST.name, "raw", bytearray(data))
        assert recompress(store, LADDER).written == {"int8": 1, "int4": 1}
        with store.get(FIRST.name, ["int4"]) as lease:
            assert lease.object.provenance == {"model": "m"}
            assert lease.object.identity == IDENTITY
            open_object(lease.object.data, name=FIRST.name, codec="int4", secret=b"ours")


def test_an_old_object_replaces_the_worse_one_beside_it(make_bounded: MakeStore, clock: Clock) -> None:
    store = make_bounded(budget_bytes=PLENTY)
    put_in_turn(store, clock, FIRST)
    store.recompress(FIRST.name, "raw", "int8")
    put_in_turn(store, clock, FIRST, SECOND)
    assert codecs(store, FIRST) == [["raw", "int8"]]
    used_at = store.stat(FIRST.name)["raw"].last_use
    assert store.recompress(FIRST.name, "raw", "int8")
    assert codecs(store, FIRST) == [["int8"]]
    assert store.stat(FIRST.name)["int8"].last_use == used_at
    assert store.stats().used_bytes == sum(stat.num_bytes for one in MANY[:2] for stat in store.stat(one.name).values())


# --- what is cut off ------------------------------------------------------------------------------------------------


class Cut(BaseException):
    """The process ends here."""


def cut_before(call: Callable[..., object], times: itertools.count, at: int) -> Callable[..., object]:
    def maybe(*arguments: object, **given: object) -> object:
        if next(times) == at:
            raise Cut
        return call(*arguments, **given)

    return maybe


@pytest.mark.parametrize("at", range(8))
def test_a_crash_at_any_step_on_a_disk_leaves_whole_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Steps: read, recode, publish, write, sync of the file, sync of its folder, drop, prune."""
    store = DiskStore(tmp_path, budget_bytes=PLENTY)
    put(store, FIRST)
    times = itertools.count()
    with monkeypatch.context() as patched:
        for owner, name in (
            (disk, "read_whole"),
            (disk, "recoded"),
            (Folder, "publish"),
            (folder, "write_whole"),
            (os, "fsync"),
            (Room, "remove"),
            (Folder, "prune"),
        ):
            patched.setattr(owner, name, cut_before(getattr(owner, name), times, at))
        with pytest.raises(Cut):
            store.recompress(FIRST.name, "raw", "int8")
    again = DiskStore(tmp_path, budget_bytes=PLENTY)
    assert FIRST.name in again.names()
    assert all(verdict.error is None for verdict in again.verify())
    assert open_whole(again, FIRST)
    again.gc()
    assert open_whole(again, FIRST)
    recompress(again, LADDER)
    assert codecs(again, FIRST) == [["int4"]]
    assert again.stats().used_bytes == again.stat(FIRST.name)["int4"].num_bytes


def test_between_writing_and_dropping_both_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path, budget_bytes=PLENTY)
    put(store, FIRST)
    monkeypatch.setattr(Room, "remove", cut_before(Room.remove, itertools.count(), 0))
    with pytest.raises(Cut):
        store.recompress(FIRST.name, "raw", "int8")
    again = DiskStore(tmp_path, budget_bytes=PLENTY)
    assert codecs(again, FIRST) == [["raw", "int8"]]
    assert off(FIRST, again, "raw") == 0 < off(FIRST, again, "int8") < 0.01


def test_a_name_deleted_by_another_process_meanwhile_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = (DiskStore(tmp_path, budget_bytes=PLENTY) for _ in range(2))
    put(store, FIRST)
    publish = Folder.publish

    def deleted_before(*arguments: object, **given: object) -> None:
        other.delete(FIRST.name)
        publish(*arguments, **given)

    monkeypatch.setattr(Folder, "publish", deleted_before)
    assert not store.recompress(FIRST.name, "raw", "int8")
    assert (store.names(), store.stats().used_bytes) == (set(), 0)


def test_of_two_processes_that_recompress_one_object_neither_loses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = (DiskStore(tmp_path, budget_bytes=PLENTY) for _ in range(2))
    put(store, FIRST)
    publish = Folder.publish
    with ThreadPoolExecutor(1) as pool:
        meanwhile: list[Future[bool]] = []

        def while_the_other_does(folder: Folder, *arguments: object, **given: object) -> None:
            if folder is store._folder:
                meanwhile.append(pool.submit(other.recompress, FIRST.name, "raw", "int8"))
                wait(meanwhile, timeout=0.5)
            publish(folder, *arguments, **given)

        monkeypatch.setattr(Folder, "publish", while_the_other_does)
        assert store.recompress(FIRST.name, "raw", "int8")
        assert not meanwhile[0].result()
    assert codecs(store, FIRST) == [["int8"]]


def test_a_deletion_takes_what_is_recompressed_under_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = (DiskStore(tmp_path, budget_bytes=PLENTY) for _ in range(2))
    put(store, FIRST)
    remove = Room.remove

    def recompressed_before(self: Room, path: Path) -> bool:
        if self is other._room and ".raw." in path.name:
            assert store.recompress(FIRST.name, "raw", "int8")
        return remove(self, path)

    monkeypatch.setattr(Room, "remove", recompressed_before)
    other.delete(FIRST.name)
    assert other.names() == set()


@pytest.mark.parametrize("meanwhile", ["delete", "use", "put"])
def test_what_happens_to_an_object_meanwhile_wins(
    make_bounded: MakeStore, clock: Clock, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    store = make_bounded(budget_bytes=PLENTY)
    put(store, FIRST)
    clock.now += 100

    def then(*arguments: object, **given: object) -> memoryview:
        if meanwhile == "delete":
            store.delete(FIRST.name)
        elif meanwhile == "put":
            put(store, FIRST)
        else:
            store.get(FIRST.name, ["raw"]).release()
        return recoded(*arguments, **given)

    for place in ("memory", "disk"):
        monkeypatch.setattr(f"kvlink.store.{place}.recoded", then)
    assert not store.recompress(FIRST.name, "raw", "int8")
    assert codecs(store, FIRST) == [[] if meanwhile == "delete" else ["raw"]]


def test_a_lease_that_is_taken_meanwhile_keeps_the_object(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """The clock stands still, so that only the lease tells."""
    store = MemoryStore(budget_bytes=PLENTY, clock=clock)
    put(store, FIRST)
    taken = []

    def then(*arguments: object, **given: object) -> memoryview:
        taken.append(store.get(FIRST.name, ["raw"]))
        return recoded(*arguments, **given)

    monkeypatch.setattr("kvlink.store.memory.recoded", then)
    assert not store.recompress(FIRST.name, "raw", "int8")
    assert codecs(store, FIRST) == [["raw"]]
    taken[0].release()


def test_of_two_objects_of_a_name_the_later_use_counts(make_bounded: MakeStore, clock: Clock) -> None:
    better = Specimen(FIRST.entry, FIRST.name, encode(FIRST.entry, IDENTITY, codec="int8"), "int8")
    store = make_bounded(budget_bytes=2 * SIZE + better.data.nbytes)
    put_in_turn(store, clock, FIRST, SECOND, better)
    assert store.recompress(FIRST.name, "raw", "int8")
    put_in_turn(store, clock, THIRD, MANY[3])
    assert store.names() == {FIRST.name, THIRD.name, MANY[3].name}


@pytest.mark.parametrize("error", [StoreFull("no room"), StoreUnusable("no disk")])
def test_what_cannot_be_written_is_counted_and_puts_go_on(
    make_bounded: MakeStore, clock: Clock, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> bool:
        raise error

    inner = make_bounded(budget_bytes=3 * SIZE)
    monkeypatch.setattr(type(inner), "recompress", fail)
    store = RecompressingStore(inner, ladder=LADDER)
    put_in_turn(store, clock, *MANY[:6])
    found = store.stats().recompression
    assert (found.reason, len(store.names()), found.written) == (str(error), 3, {})
    assert found.failures > 0


# --- many at a time -------------------------------------------------------------------------------------------------


def test_eight_threads_see_whole_objects_or_none(make_bounded: MakeStore) -> None:
    with RecompressingStore(make_bounded(budget_bytes=4 * SIZE), ladder=LADDER) as store:

        def work(seed: int) -> None:
            for turn in range(40):
                one = MANY[(seed * 5 + turn * (1 + seed % 3)) % len(MANY)]
                match (seed + turn) % 4:
                    case 0 | 1:
                        put(store, one)
                    case 2:
                        lease = store.get(one.name, ANY)
                        if lease is not None:
                            with lease:
                                read = lease.object.decode()
                                assert torch.allclose(read.values, one.entry.values, atol=0.5)
                    case _:
                        store.delete(one.name) if turn % 3 == 0 else store.stat(one.name)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        store.settle()
        stats = store.stats()
        assert (stats.quarantined, stats.recompression.failures) == (0, 0)
        assert stats.recompression.written
        counted = sum(stat.num_bytes for name in store.names() for stat in store.stat(name).values())
        assert stats.used_bytes == counted <= 4 * SIZE


def test_it_ends_with_the_store_and_takes_no_more_puts_for_work(make_bounded: MakeStore, clock: Clock) -> None:
    store = RecompressingStore(make_bounded(budget_bytes=3 * SIZE), ladder=LADDER)
    put(store, *MANY[:3])
    store.close()
    store.close()
    assert store._pass is None
    put(store, *MANY[3:6])


def test_a_host_and_a_disk_of_tiers_recompress_each_for_itself(tmp_path: Path, clock: Clock) -> None:
    below = RecompressingStore(DiskStore(tmp_path, budget_bytes=6 * SIZE, clock=clock), ladder=LADDER, **MARKS)
    with TieredStore(MemoryStore(budget_bytes=PLENTY, clock=clock), below) as store:
        for one in MANY[:12]:
            put_in_turn(store, clock, one)
            below.settle()
        found = [one for one in MANY[:12] if one.name in store.names()]
        assert len(found) == 12
        for one in found:
            store.get(one.name, ANY).release()
            assert set(store.stat(one.name)) <= set(ANY)


def test_every_codec_that_keeps_all_tokens_can_stand_on_a_ladder(make_bounded: MakeStore) -> None:
    ladder = tuple(codec for codec, made in CODECS.items() if codec != "raw" and not made.prunes)
    store: BoundedStore = make_bounded(budget_bytes=PLENTY)
    put(store, FIRST)
    assert dict(recompress(store, ladder).written) == dict.fromkeys(ladder, 1)


# --- whose objects --------------------------------------------------------------------------------------------------


def test_objects_of_another_model_are_read_once_and_left_alone(
    make_bounded: MakeStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_bounded(budget_bytes=6 * SIZE)
    put_in_turn(store, clock, *MANY[:6])
    tried: list[str] = []
    recompressing = type(store).recompress

    def counted(self: BoundedStore, name: str, codec: str, into: str, **options: object) -> bool:
        tried.append(name)
        return recompressing(self, name, codec, into, **options)

    monkeypatch.setattr(type(store), "recompress", counted)
    theirs = RecompressingStore(store, ladder=LADDER, model="c3" * 32)
    theirs.settle()
    put_in_turn(theirs, clock, MANY[6])
    assert sorted(tried) == sorted({one.name for one in MANY[:7]})
    assert (theirs.stats().recompression.written, theirs.stats().recompression.failures) == ({}, 0)
    ours = RecompressingStore(store, ladder=LADDER, model=IDENTITY.model)
    ours.settle()
    assert ours.stats().recompression.written


def test_what_is_not_wanted_stays_and_the_store_is_as_it_was(make_bounded: MakeStore) -> None:
    store = make_bounded(budget_bytes=PLENTY)
    put(store, FIRST)
    before = store.stats()
    assert not store.recompress(FIRST.name, "raw", "int8", wanted=lambda found: found.name != FIRST.name)
    assert (codecs(store, FIRST), store.stats()) == ([["raw"]], before)
    assert store.recompress(FIRST.name, "raw", "int8", wanted=lambda found: found.codec == "raw")


def test_a_store_of_which_nothing_can_become_smaller_is_not_looked_through_with_each_put(
    make_bounded: MakeStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RecompressingStore(make_bounded(budget_bytes=300 * SIZE), ladder=("int8",), high=0.0, low=0.0)
    looks = 0
    looking = type(store._store).names

    def counted(self: BoundedStore) -> set[str]:
        nonlocal looks
        looks += 1
        return looking(self)

    monkeypatch.setattr(type(store._store), "names", counted)
    put_in_turn(store, clock, *MANY[:9])
    assert looks == 3


# --- around stores that others made ---------------------------------------------------------------------------------


def test_only_stores_that_keep_a_budget_are_put_under_pressure(tmp_path: Path) -> None:
    remote = FsspecStore(f"file://{tmp_path}/remote")
    tiers = TieredStore(MemoryStore(budget_bytes=PLENTY), DiskStore(tmp_path / "disk"), remote)
    assert under_pressure(tiers, ladder=LADDER) is tiers
    host, disk, last = (tier.store for tier in tiers._tiers)
    assert [type(one) for one in (host, disk)] == [RecompressingStore] * 2
    assert last is remote
    assert under_pressure(remote, ladder=LADDER) is remote
    assert under_pressure(host, ladder=("half",)) is host
    tiers.close()
