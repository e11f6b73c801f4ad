"""Tiers: what is found below moves up, what fails is passed over, what is deleted stays deleted."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from servers import RedisServer
from specimens import IDENTITY, Clock, Specimen, put, specimen

from kvlink.core.errors import DamagedObject, StoreError, StoreFull, StoreUnusable
from kvlink.store import DiskStore, Lease, MemoryStore, Store
from kvlink.store.codec import BytesLike, encode
from kvlink.store.redis import RedisStore
from kvlink.store.tiered import TieredStore

FIRST, SECOND = specimen(), specimen(1)
SIZE = FIRST.data.nbytes
MakeRedis = Callable[..., RedisStore]


@pytest.fixture
def host(clock: Clock) -> MemoryStore:
    return MemoryStore(budget_bytes=10 * SIZE, clock=clock)


@pytest.fixture
def disk(tmp_path: Path, clock: Clock) -> DiskStore:
    return DiskStore(tmp_path / "disk", budget_bytes=10 * SIZE, clock=clock)


@pytest.fixture
def remote(make_redis: MakeRedis) -> RedisStore:
    return make_redis()


@pytest.fixture
def tiers(host: MemoryStore, disk: DiskStore, remote: RedisStore) -> TieredStore:
    return TieredStore(host, disk, remote)


def fail(store: Store, *methods: str, error: Exception | None = None) -> None:
    """Let these methods raise."""

    def raising(*_: object, **__: object) -> None:
        raise error or StoreUnusable("it is broken")

    for method in methods:
        setattr(store, method, raising)


def flush(store: Store) -> None:
    if isinstance(store, TieredStore):
        store.flush()


def got(store: Store, one: Specimen) -> str | None:
    """Where an object came from, once it is promoted."""
    lease = store.get(one.name, ["raw"])
    flush(store)
    if lease is None:
        return None
    with lease:
        assert lease.object.data == one.data
        return lease.source


def holders(one: Specimen, *stores: Store) -> list[str]:
    return [store.source for store in stores if store.stat(one.name)]


def test_a_put_goes_to_the_disk_and_the_remote_but_not_to_the_host(
    tiers: TieredStore, host: MemoryStore, disk: DiskStore, remote: RedisStore
) -> None:
    put(tiers, FIRST)
    assert holders(FIRST, host, disk, remote) == ["disk", "remote"]


def test_where_there_are_only_hosts_a_put_goes_to_them(host: MemoryStore) -> None:
    tiers = TieredStore(host)
    put(tiers, FIRST)
    assert (got(tiers, FIRST), tiers.source) == ("host", "host")


def test_what_a_slow_tier_has_moves_into_all_above(
    tiers: TieredStore, host: MemoryStore, disk: DiskStore, remote: RedisStore
) -> None:
    put(remote, FIRST)
    put(disk, SECOND)
    assert [got(tiers, FIRST), got(tiers, FIRST)] == ["remote", "host"]
    assert holders(FIRST, host, disk, remote) == ["host", "disk", "remote"]
    assert [got(tiers, SECOND), got(tiers, SECOND)] == ["disk", "host"]
    assert holders(SECOND, host, disk, remote) == ["host", "disk"]
    assert [tier.promotions for tier in tiers.stats().tiers] == [2, 1, 0]


def test_what_is_promoted_takes_no_second_memory(tiers: TieredStore, host: MemoryStore) -> None:
    put(tiers, FIRST)
    with tiers.get(FIRST.name, ["raw"]) as lease:
        (slot,) = host._slots.values()
        assert slot.data.obj is lease.object.data.obj


def test_a_put_forgets_what_the_host_had(tiers: TieredStore, host: MemoryStore) -> None:
    put(tiers, FIRST)
    assert [got(tiers, FIRST), got(tiers, FIRST)] == ["disk", "host"]
    put(tiers, FIRST)
    assert host.names() == set()


def test_a_damaged_copy_is_replaced_from_below(tiers: TieredStore, host: MemoryStore) -> None:
    put(tiers, FIRST)
    got(tiers, FIRST)
    next(iter(host._slots.values())).data[-1] ^= 1
    assert [got(tiers, FIRST), got(tiers, FIRST)] == ["disk", "host"]
    assert tiers.stats().quarantined == 1


def test_an_empty_stack_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        TieredStore()


@pytest.mark.parametrize("error", [StoreUnusable("gone"), OSError(5, "gone")])
def test_a_tier_that_fails_is_passed_over_and_counted(
    tiers: TieredStore, host: MemoryStore, disk: DiskStore, error: Exception
) -> None:
    put(tiers, FIRST)
    fail(host, "get", "put", "delete", "names", "stat", error=error)
    fail(disk, "get", "put", "names", "stat", error=error)
    assert [got(tiers, FIRST), got(tiers, FIRST), got(tiers, SECOND)] == ["remote", "remote", None]
    assert tiers.names() == {FIRST.name}
    assert set(tiers.stat(FIRST.name)) == {"raw"}
    put(tiers, SECOND)
    assert got(tiers, SECOND) == "remote"
    stats = tiers.stats()
    assert all(tier.failures > 0 and "gone" in tier.reason for tier in stats.tiers[:2])
    assert (stats.tiers[2].failures, stats.tiers[2].reason) == (0, "")
    assert (stats.hits, stats.misses, stats.puts) == (3, 1, 2)


def test_a_host_without_room_costs_no_request(disk: DiskStore) -> None:
    host = MemoryStore(budget_bytes=SIZE - 1)
    tiers = TieredStore(host, disk)
    put(tiers, FIRST)
    assert [got(tiers, FIRST), got(tiers, FIRST)] == ["disk", "disk"]
    assert tiers.stats().tiers[0].promotions == 0


def test_one_tier_that_keeps_it_is_enough_and_none_is_an_error(
    tiers: TieredStore, disk: DiskStore, remote: RedisStore
) -> None:
    fail(disk, "put", error=StoreFull("the disk is full"))
    put(tiers, FIRST)
    assert got(tiers, FIRST) == "remote"
    fail(remote, "put")
    with pytest.raises(StoreFull, match="the disk is full"):
        put(tiers, SECOND)
    assert tiers.stats().puts == 1


def test_what_is_no_object_reaches_no_tier(tiers: TieredStore, disk: DiskStore) -> None:
    fail(disk, "put", error=AssertionError("it was put"))
    with pytest.raises(DamagedObject):
        tiers.put(FIRST.name, "raw", SECOND.data)


def test_delete_removes_everywhere(tiers: TieredStore, host: MemoryStore, disk: DiskStore, remote: RedisStore) -> None:
    put(tiers, FIRST)
    got(tiers, FIRST)
    assert holders(FIRST, host, disk, remote) == ["host", "disk", "remote"]
    assert tiers.delete(FIRST.name) == 1
    assert holders(FIRST, host, disk, remote) == []


@pytest.mark.parametrize("codec", [None, "raw"])
def test_delete_says_which_tier_could_not_and_removes_from_the_others(
    tiers: TieredStore, host: MemoryStore, disk: DiskStore, remote: RedisStore, codec: str | None
) -> None:
    put(tiers, FIRST)
    got(tiers, FIRST)
    fail(remote, "delete")
    with pytest.raises(StoreUnusable, match=rf"{FIRST.name} may still be in remote \(it is broken\)"):
        tiers.delete(FIRST.name, codec)
    assert holders(FIRST, host, disk, remote) == ["remote"]
    del remote.delete
    assert tiers.delete(FIRST.name, codec) == 1
    assert got(tiers, FIRST) is None


@pytest.mark.parametrize("when", ["while it searches", "while it promotes"])
def test_what_is_deleted_meanwhile_is_not_promoted(
    tiers: TieredStore, host: MemoryStore, disk: DiskStore, remote: RedisStore, when: str
) -> None:
    put(tiers, FIRST)
    get, keep = disk.get, host.put

    def get_then_delete(name: str, accept: Sequence[str]) -> Lease | None:
        lease = get(name, accept)
        tiers.delete(name)
        return lease

    def delete_then_keep(name: str, codec: str, data: BytesLike) -> None:
        tiers.delete(name)
        keep(name, codec, data)

    if when == "while it searches":
        disk.get = get_then_delete
    else:
        host.put = delete_then_keep
    assert got(tiers, FIRST) == "disk"
    assert holders(FIRST, host, disk, remote) == []


def test_a_search_that_begins_while_the_name_is_deleted_promotes_nothing(
    tiers: TieredStore, host: MemoryStore, disk: DiskStore, remote: RedisStore
) -> None:
    put(tiers, FIRST)
    delete = disk.delete

    def search_then_delete(name: str, codec: str | None = None) -> int:
        got(tiers, FIRST)
        return delete(name, codec)

    disk.delete = search_then_delete
    assert tiers.delete(FIRST.name) == 1
    assert holders(FIRST, host, disk, remote) == []
    assert not tiers._flights._deleting
    put(tiers, FIRST)
    assert [got(tiers, FIRST), got(tiers, FIRST)] == ["disk", "host"]


class Gate:
    """Counts the reads of a store, and holds them until it is opened."""

    def __init__(self, store: Store) -> None:
        self.reads = 0
        self.opened = threading.Event()
        get = store.get

        def wait_then_get(name: str, accept: Sequence[str]) -> Lease | None:
            self.reads += 1
            assert self.opened.wait(60)
            return get(name, accept)

        store.get = wait_then_get


def await_searchers(tiers: TieredStore, number: int) -> None:
    """Return once so many wait for what one search finds."""
    tick = threading.Event()
    for _ in range(6000):
        with tiers._flights._lock:
            if sum(flight.passengers for flight in tiers._flights._flights.values()) == number:
                return
        tick.wait(0.01)
    raise AssertionError(f"{number} never waited at once")


@pytest.mark.parametrize("with_host", [True, False])
def test_of_many_that_ask_at_once_one_reads(host: MemoryStore, disk: DiskStore, with_host: bool) -> None:
    tiers = TieredStore(host, disk) if with_host else TieredStore(disk)
    put(tiers, FIRST)
    gate = Gate(disk)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(tiers.get, FIRST.name, ["raw"]) for _ in range(8)]
        await_searchers(tiers, 8)
        gate.opened.set()
        leases = [one.result() for one in asked]
    assert gate.reads == 1
    assert {lease.source for lease in leases} == {"disk"}
    assert all(lease.object.data == FIRST.data for lease in leases)
    assert (tiers.stats().hits, tiers._flights._flights) == (8, {})


def test_a_shared_lease_ends_with_the_last_reader(host: MemoryStore) -> None:
    tiers = TieredStore(host)
    put(tiers, FIRST)
    gate = Gate(host)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(tiers.get, FIRST.name, ["raw"]) for _ in range(2)]
        await_searchers(tiers, 2)
        gate.opened.set()
        one, other = (each.result() for each in asked)
    (slot,) = host._slots.values()
    one.release()
    one.release()
    assert slot.leases == 1
    other.release()
    assert slot.leases == 0


def test_an_error_reaches_all_who_wait_and_the_next_search_is_a_new_one(disk: DiskStore) -> None:
    tiers = TieredStore(disk)
    put(tiers, FIRST)
    get = disk.get
    fail(disk, "get", error=ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        tiers.get(FIRST.name, ["raw"])
    disk.get = get
    assert got(tiers, FIRST) == "disk"


def test_the_remote_decides_what_machines_share(tmp_path: Path, make_redis: MakeRedis) -> None:
    machines = [TieredStore(DiskStore(tmp_path / name), make_redis(prefix="settings")) for name in "ab"]
    assert machines[0].keep_setting("sink", [1]) == [1]
    assert machines[1].keep_setting("sink", [2]) == [1]
    assert machines[1].setting("sink") == [1]
    machines[1]._tiers[1].store._client.flushdb()
    assert machines[1].setting("sink") == [1]
    assert machines[1].keep_setting("sink", [3]) == [1]
    assert machines[1]._tiers[1].store.setting("sink") == [1]


def test_settings_need_one_tier(disk: DiskStore, remote: RedisStore) -> None:
    tiers = TieredStore(disk, remote)
    fail(remote, "setting", "keep_setting")
    assert tiers.keep_setting("sink", 1) == tiers.setting("sink") == 1
    fail(disk, "setting", "keep_setting")
    for call in (lambda: tiers.setting("sink"), lambda: tiers.keep_setting("sink", 1)):
        with pytest.raises(StoreUnusable):
            call()


def test_every_tier_is_closed_even_if_one_cannot_be(disk: DiskStore, remote: RedisStore, host: MemoryStore) -> None:
    closed = []
    host.close = lambda: closed.append("host")
    remote.close = lambda: closed.append("remote")
    fail(disk, "close", error=OSError("gone"))
    with pytest.raises(OSError, match="gone"), TieredStore(host, disk, remote):
        pass
    assert sorted(closed) == ["host", "remote"]


def test_claims_are_those_of_the_remote(tiers: TieredStore, host: MemoryStore, remote: RedisStore) -> None:
    with tiers.claim(FIRST.name, ttl_s=60.0):
        assert remote.claim(FIRST.name, ttl_s=60.0) is None
    put(remote, FIRST)
    assert tiers.wait(FIRST.name, ["raw"], at_most_s=60.0) is True
    alone = TieredStore(host)
    assert alone.claim(FIRST.name, ttl_s=60.0) is not None
    assert alone.wait(FIRST.name, ["raw"], at_most_s=60.0) is False


def test_a_remote_that_dies_changes_no_answer(host: MemoryStore, disk: DiskStore, make_redis: MakeRedis) -> None:
    with RedisServer() as server:
        tiers = TieredStore(host, disk, make_redis(url=server.url))
        put(tiers, FIRST)
        server.stop()
        assert [got(tiers, FIRST), got(tiers, SECOND)] == ["disk", None]
        put(tiers, SECOND)
        assert [got(tiers, SECOND), got(tiers, SECOND)] == ["disk", "host"]
        with pytest.raises(StoreError, match="may still be in remote"):
            tiers.delete(FIRST.name)
        assert holders(FIRST, host, disk) == []
        stats = tiers.stats().tiers[2]
        assert (stats.source, stats.stats.is_open, stats.stats.errors) == ("remote", True, 1)


# --- what is written in the background ------------------------------------------------------------------------------


class Slow:
    """Holds the writes of a store until it is opened, and counts them."""

    def __init__(self, store: Store) -> None:
        self.writes: list[str] = []
        self.begun, self.opened = threading.Event(), threading.Event()
        keep = store.put

        def wait_then_keep(name: str, codec: str, data: BytesLike) -> None:
            self.writes.append(name)
            self.begun.set()
            assert self.opened.wait(60)
            keep(name, codec, data)

        store.put = wait_then_keep


def put_at_once(store: Store, one: Specimen) -> None:
    store.put(one.name, one.codec, bytearray(one.data))


def test_a_put_does_not_wait_for_the_slower_tier(tiers: TieredStore, disk: DiskStore, remote: RedisStore) -> None:
    slow = Slow(remote)
    put_at_once(tiers, FIRST)
    assert slow.begun.wait(60)
    assert holders(FIRST, disk, remote) == ["disk"]
    slow.opened.set()
    tiers.flush()
    assert holders(FIRST, disk, remote) == ["disk", "remote"]


def test_a_get_does_not_wait_for_the_disk_to_be_written(
    tiers: TieredStore, host: MemoryStore, disk: DiskStore, remote: RedisStore
) -> None:
    put(remote, FIRST)
    slow = Slow(disk)
    assert tiers.get(FIRST.name, ["raw"]).source == "remote"
    assert tiers.get(FIRST.name, ["raw"]).source == "host"
    assert holders(FIRST, host, disk) == ["host"]
    slow.opened.set()
    tiers.flush()
    assert holders(FIRST, host, disk) == ["host", "disk"]


def test_what_waits_already_is_not_queued_twice(tiers: TieredStore, remote: RedisStore) -> None:
    slow = Slow(remote)
    put_at_once(tiers, FIRST)
    assert slow.begun.wait(60)
    for _ in range(3):
        put_at_once(tiers, SECOND)
    slow.opened.set()
    tiers.flush()
    assert slow.writes == [FIRST.name, SECOND.name]
    assert tiers._writer.num_bytes == 0


def test_a_deletion_voids_what_waits_and_waits_for_what_is_being_written(
    tiers: TieredStore, disk: DiskStore, remote: RedisStore
) -> None:
    slow = Slow(remote)
    put_at_once(tiers, FIRST)
    assert slow.begun.wait(60)
    put_at_once(tiers, SECOND)
    with ThreadPoolExecutor(1) as pool:
        assert tiers.delete(SECOND.name) == 1
        deleting = pool.submit(tiers.delete, FIRST.name)
        assert not deleting.done()
        slow.opened.set()
        assert deleting.result(60) == 1
    tiers.flush()
    assert slow.writes == [FIRST.name]
    assert holders(FIRST, disk, remote) == holders(SECOND, disk, remote) == []


def test_what_finds_no_room_to_wait_is_left_out_and_counted(
    host: MemoryStore, disk: DiskStore, remote: RedisStore
) -> None:
    tiers = TieredStore(host, disk, remote, waiting_bytes=SIZE)
    slow = Slow(remote)
    put_at_once(tiers, FIRST)
    assert slow.begun.wait(60)
    put_at_once(tiers, SECOND)
    slow.opened.set()
    tiers.flush()
    assert holders(SECOND, disk, remote) == ["disk"]
    stats = tiers.stats().tiers[2]
    assert (stats.failures, "wait to be written" in stats.reason) == (1, True)


@pytest.mark.parametrize("error", [StoreFull("no room"), AttributeError("its socket is gone")])
def test_a_write_that_fails_in_the_background_is_counted_and_the_next_is_made(
    tiers: TieredStore, remote: RedisStore, error: Exception
) -> None:
    fail(remote, "put", error=error)
    put_at_once(tiers, FIRST)
    tiers.flush()
    stats = tiers.stats().tiers[2]
    assert (stats.failures, str(error) in stats.reason) == (1, True)
    del remote.put
    put(tiers, SECOND)
    assert holders(SECOND, remote) == ["remote"]


def test_closing_writes_what_waits_and_leaves_no_thread(
    tiers: TieredStore, disk: DiskStore, make_redis: MakeRedis
) -> None:
    remote = make_redis(prefix="closing")
    with TieredStore(disk, make_redis(prefix="closing")) as both:
        for one in (FIRST, SECOND):
            put_at_once(both, one)
    assert remote.names() == {FIRST.name, SECOND.name}
    for thread in threading.enumerate():
        if thread.name == "kvlink-writer":
            thread.join(60)  # it may be about to end
            assert not thread.is_alive()


def test_where_the_disk_fails_the_remote_has_it_before_put_returns(
    tiers: TieredStore, disk: DiskStore, remote: RedisStore
) -> None:
    fail(disk, "put")
    put_at_once(tiers, FIRST)
    assert holders(FIRST, remote) == ["remote"]


def test_a_claim_lasts_until_the_remote_has_the_object(tiers: TieredStore, remote: RedisStore) -> None:
    slow = Slow(remote)
    with tiers.claim(FIRST.name, ttl_s=60.0):
        put_at_once(tiers, FIRST)
        assert slow.begun.wait(60)
    assert remote.claim(FIRST.name, ttl_s=60.0) is None
    slow.opened.set()
    tiers.flush()
    assert remote.claim(FIRST.name, ttl_s=60.0) is not None


def test_memory_lets_go_of_what_a_slower_tier_has_and_of_nothing_else(
    tiers: TieredStore, host: MemoryStore, disk: DiskStore, remote: RedisStore
) -> None:
    for one in (FIRST, SECOND):
        put(host, one)
    assert tiers.free_host(FIRST.name) == tiers.free_host(SECOND.name) == 0
    put(disk, FIRST)
    put(remote, SECOND)
    fail(disk, "stat")
    assert tiers.free_host(FIRST.name) == 0  # it cannot be asked
    assert tiers.free_host(SECOND.name) == 1
    del disk.stat
    assert tiers.free_host(FIRST.name) == 1
    assert host.names() == set()
    assert holders(FIRST, disk, remote) == ["disk"]
    assert got(tiers, FIRST) == "disk"
    assert TieredStore(host).free_host(FIRST.name) == 0
    assert holders(FIRST, host) == ["host"]


def test_memory_keeps_an_object_that_a_slower_tier_has_in_another_codec_alone(
    tiers: TieredStore, host: MemoryStore, disk: DiskStore
) -> None:
    put(host, FIRST)
    disk.put(FIRST.name, "int8", encode(FIRST.entry, IDENTITY, codec="int8"))
    assert tiers.free_host(FIRST.name) == 0


def test_an_object_is_located_in_the_fastest_tier_that_has_it(tiers: TieredStore, remote: RedisStore) -> None:
    put(remote, FIRST)
    assert tiers.locate(FIRST.name, ["half", "raw"]) == ("remote", "raw", SIZE)
    got(tiers, FIRST)
    assert tiers.locate(FIRST.name, ["raw"]) == ("host", "raw", SIZE)
    assert tiers.locate(SECOND.name, ["raw"]) is None


def test_what_is_promoted_by_hand_goes_only_to_faster_tiers(
    tiers: TieredStore, host: MemoryStore, disk: DiskStore, remote: RedisStore
) -> None:
    tiers.promote(FIRST.name, "raw", bytearray(FIRST.data), above="remote")
    tiers.flush()
    assert holders(FIRST, host, disk, remote) == ["host", "disk"]
