"""What every store promises. Each test runs over all of them."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from specimens import IDENTITY, Clock, MakeStore, Specimen, lying_bytes, put, specimen

from kvlink.core.errors import DamagedObject, StoreFull
from kvlink.store import DiskStore, MemoryStore, Store, encode
from kvlink.store.objects import FsspecStore
from kvlink.store.recompressing import RecompressingStore
from kvlink.store.redis import RedisStore
from kvlink.store.tiered import TieredStore

FIRST, SECOND, THIRD = (specimen(seed) for seed in range(3))
SIZE = FIRST.data.nbytes


def damage(store: Store, one: Specimen) -> int:
    """Flip the last bit of every copy of an object where it lies, and return how many there were."""
    match store:
        case MemoryStore():
            store._slots[one.name, one.codec].data[-1] ^= 1
        case DiskStore():
            path = store._path(one.name, one.codec)
            path.write_bytes(flipped(path.read_bytes()))
        case RedisStore():
            key = store._key(one.name, one.codec)
            last = str(store._client.hlen(key) - 4)
            store._client.hset(key, last, flipped(store._client.hget(key, last)))
        case FsspecStore():
            path = store._path(one.name, one.codec)
            store._fs.pipe_file(path, flipped(store._fs.cat_file(path)))
        case RecompressingStore():
            return damage(store._store, one)
        case TieredStore():
            return sum(damage(tier.store, one) for tier in store._tiers if tier.store.stat(one.name))
    return 1


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def used_bytes(store: Store) -> int:
    """What all objects take; the store's own account, where it keeps one, must say the same."""
    counted = sum(stat.num_bytes for name in store.names() for stat in store.stat(name).values())
    if isinstance(store, MemoryStore | DiskStore):
        assert store.stats().used_bytes == counted
    return counted


def notes_uses(store: Store) -> bool:
    return not isinstance(store, FsspecStore)


def test_what_was_put_comes_back_bit_for_bit(store: Store) -> None:
    put(store, FIRST, SECOND)
    with store.get(SECOND.name, ["raw"]) as lease:
        assert lease.object.name == SECOND.name
        assert lease.object.codec == "raw"
        assert lease.object.num_bytes == SIZE
        assert lease.object.decode().equals(SECOND.entry)
        assert lease.source == ("disk" if isinstance(store, TieredStore) else store.source)


def test_what_is_absent_is_a_miss(store: Store) -> None:
    put(store, FIRST)
    assert store.get(SECOND.name, ["raw"]) is None
    assert store.get(FIRST.name, []) is None
    assert (store.stats().hits, store.stats().misses) == (0, 2)


def test_putting_twice_is_putting_once(store: Store) -> None:
    put(store, FIRST, FIRST)
    assert store.names() == {FIRST.name}
    assert used_bytes(store) == lying_bytes(store, FIRST)


def test_read_only_bytes_can_be_put(store: Store) -> None:
    store.put(FIRST.name, "raw", bytes(FIRST.data))
    with store.get(FIRST.name, ["raw"]) as lease:
        assert lease.object.decode().equals(FIRST.entry)


@pytest.mark.parametrize("name", ["", "ab", "../" + "a" * 61, "A" * 64, "a" * 63 + "/", "a" * 64 + "\n"])
def test_only_fingerprints_are_names(store: Store, name: str) -> None:
    for call in (
        lambda: store.get(name, ["raw"]),
        lambda: store.put(name, "raw", FIRST.data),
        lambda: store.delete(name),
        lambda: store.stat(name),
    ):
        with pytest.raises(ValueError, match="a name is a fingerprint"):
            call()


@pytest.mark.parametrize("codec", ["", "rAw", "../raw", "raw/..", "zip"])
def test_only_known_codecs_are_codecs(store: Store, codec: str) -> None:
    for call in (
        lambda: store.get(FIRST.name, ["raw", codec]),
        lambda: store.put(FIRST.name, codec, FIRST.data),
        lambda: store.delete(FIRST.name, codec),
    ):
        with pytest.raises(ValueError, match="there is no codec"):
            call()


def test_a_string_of_codecs_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="there is no codec 'r'"):
        store.get(FIRST.name, "raw")


@pytest.mark.parametrize(
    "data", [SECOND.data, bytes(FIRST.data[:-1]), bytes(FIRST.data) + b"\0", b"", b"1234567", bytes(64)]
)
def test_put_refuses_what_is_not_the_object_it_is_called(store: Store, data: bytes) -> None:
    with pytest.raises(DamagedObject, match=f"{FIRST.name}.raw"):
        store.put(FIRST.name, "raw", data)
    assert store.names() == set()
    assert store.stats().puts == 0


def test_a_damaged_object_is_quarantined_counted_and_a_miss(store: Store) -> None:
    put(store, FIRST, SECOND)
    copies = damage(store, FIRST)
    assert store.get(FIRST.name, ["raw"]) is None
    assert store.names() == {SECOND.name}
    stats = store.stats()
    assert (stats.quarantined, stats.misses, stats.hits) == (copies, 1, 0)
    assert store.get(FIRST.name, ["raw"]) is None
    assert store.stats().quarantined == copies


def test_a_damaged_object_is_healed_by_a_put(store: Store) -> None:
    put(store, FIRST)
    damage(store, FIRST)
    put(store, FIRST)
    with store.get(FIRST.name, ["raw"]) as lease:
        assert lease.object.decode().equals(FIRST.entry)


def test_a_reader_that_writes_into_its_views_harms_no_other_reader(store: Store) -> None:
    put(store, FIRST)
    with store.get(FIRST.name, ["raw"]) as lease:
        lease.object.decode().values[0, 0, 0, 0] += 1
    again = store.get(FIRST.name, ["raw"])
    assert again is None or again.object.decode().equals(FIRST.entry)


def test_objects_signed_with_another_secret_are_misses(make_store: MakeStore) -> None:
    ours = specimen(secret=b"ours")
    for signer, reader in ((b"ours", b"theirs"), (b"ours", None), (None, b"ours")):
        store = make_store(secret=reader)
        put(store, specimen(secret=signer))
        copies = len(store._keeping) if isinstance(store, TieredStore) else 1
        assert store.get(ours.name, ["raw"]) is None
        assert store.stats().quarantined == copies
    store = make_store(secret=b"ours")
    put(store, ours)
    assert store.get(ours.name, ["raw"]) is not None


def test_delete_removes_one_codec_or_all_and_forgives_absence(store: Store) -> None:
    put(store, FIRST, SECOND, THIRD)
    assert store.delete(FIRST.name) == 1
    assert store.delete(SECOND.name, "raw") == 1
    assert store.delete(SECOND.name, "raw") == 0
    assert store.delete(SECOND.name) == 0
    assert store.names() == {THIRD.name}
    assert store.get(FIRST.name, ["raw"]) is None
    assert used_bytes(store) == lying_bytes(store, THIRD)


def test_stat_tells_bytes_and_counts_as_no_use(store: Store) -> None:
    assert store.stat(FIRST.name) == {}
    put(store, FIRST)
    assert {codec: found.num_bytes for codec, found in store.stat(FIRST.name).items()} == {
        "raw": lying_bytes(store, FIRST)
    }
    assert (store.stats().hits, store.stats().misses) == (0, 0)


def test_stat_tells_the_last_use_and_is_none_itself(store: Store, clock: Clock) -> None:
    put(store, FIRST)
    if not notes_uses(store):
        assert 0 < store.stat(FIRST.name)["raw"].last_use <= time.time()
        return
    put_at = clock.now
    clock.now += 100
    assert store.stat(FIRST.name)["raw"].last_use == put_at
    store.get(FIRST.name, ["raw"]).release()
    assert store.stat(FIRST.name)["raw"].last_use == clock.now


def test_a_last_use_is_never_in_the_future(store: Store, clock: Clock) -> None:
    put(store, FIRST)
    if not notes_uses(store):
        clock.now = 0.0
        store._clock = clock
        assert store.stat(FIRST.name)["raw"].last_use == 0.0
        return
    clock.now -= 10_000
    assert store.stat(FIRST.name)["raw"].last_use == clock.now
    store.get(FIRST.name, ["raw"]).release()
    clock.now += 5
    assert store.stat(FIRST.name)["raw"].last_use == clock.now - 5


def test_the_least_recently_used_object_makes_room(make_bounded: MakeStore, clock: Clock) -> None:
    store = make_bounded(budget_bytes=2 * SIZE)
    for one in (FIRST, SECOND):
        put(store, one)
        clock.now += 100
    store.get(FIRST.name, ["raw"]).release()
    clock.now += 100
    put(store, THIRD)
    assert store.names() == {FIRST.name, THIRD.name}
    stats = store.stats()
    assert (stats.evictions, stats.used_bytes, stats.budget_bytes) == (1, 2 * SIZE, 2 * SIZE)


def test_an_object_that_replaces_itself_evicts_no_other(make_bounded: MakeStore, clock: Clock) -> None:
    store = make_bounded(budget_bytes=2 * SIZE)
    put(store, FIRST, SECOND)
    clock.now += 100
    put(store, SECOND)
    assert store.names() == {FIRST.name, SECOND.name}
    assert store.stats().evictions == 0


def test_an_object_that_grows_makes_room_at_the_cost_of_others(make_bounded: MakeStore, clock: Clock) -> None:
    store = make_bounded(budget_bytes=2 * SIZE)
    put(store, FIRST)
    clock.now += 100
    put(store, SECOND)
    grown = encode(FIRST.entry, IDENTITY, provenance={"tokenizer": "a long story"})
    store.put(FIRST.name, "raw", grown)
    assert store.names() == {FIRST.name}
    assert store.stats().used_bytes == grown.nbytes > SIZE
    with store.get(FIRST.name, ["raw"]) as lease:
        assert lease.object.provenance == {"tokenizer": "a long story"}


def test_an_object_above_the_whole_budget_is_refused_and_evicts_none(make_bounded: MakeStore) -> None:
    store = make_bounded(budget_bytes=SIZE)
    put(store, FIRST)
    large = specimen(9, tokens=50)
    with pytest.raises(StoreFull, match=rf"{large.data.nbytes} bytes.* {SIZE}"):
        put(store, large)
    assert store.names() == {FIRST.name}


def test_a_leased_object_is_neither_evicted_nor_changed_under_its_reader(make_bounded: MakeStore) -> None:
    store = make_bounded(budget_bytes=SIZE)
    put(store, FIRST)
    with store.get(FIRST.name, ["raw"]) as lease:
        entry = lease.object.decode()
        with suppress(StoreFull):  # where a lease holds room
            put(store, SECOND)
        put(store, FIRST)
        store.delete(FIRST.name)
        assert entry.equals(FIRST.entry)
    lease.release()
    put(store, SECOND)
    assert store.names() == {SECOND.name}
    assert store.stats().used_bytes == SIZE


def test_readers_under_pressure_of_writers_see_whole_objects_or_none(make_store: MakeStore) -> None:
    objects = [specimen(seed) for seed in range(6)]
    store = make_store(budget_bytes=4 * SIZE)
    start = threading.Barrier(4)

    def read(seed: int) -> int:
        start.wait()
        hits = 0
        for turn in range(60):
            one = objects[(seed + turn) % 6]
            lease = store.get(one.name, ["raw"])
            if lease is not None:
                with lease:
                    assert lease.object.decode().equals(one.entry)
                    hits += 1
        return hits

    def write(seed: int) -> int:
        start.wait()
        for turn in range(40):
            put(store, objects[(seed + 5 * turn) % 6])
            if turn % 7 == 0:
                store.delete(objects[turn % 6].name)
        return 0

    with ThreadPoolExecutor(4) as pool:
        hits = sum(pool.map(lambda work: work[0](work[1]), [(read, 0), (read, 3), (write, 0), (write, 2)]))
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.puts, stats.quarantined) == (hits, 120 - hits, 80, 0)
    assert used_bytes(store) == lying_bytes(store, *(one for one in objects if one.name in store.names()))
    if isinstance(store, MemoryStore | DiskStore):
        assert stats.used_bytes <= 4 * SIZE


@pytest.mark.parametrize("value", [[1, 2, 3], {"a": [None, True, 1.5]}, "text \ud800 é", 0, False, ""])
def test_the_first_value_of_a_setting_is_kept(store: Store, value: object) -> None:
    assert store.setting("sink") is None
    assert store.keep_setting("sink", value) == value
    assert store.keep_setting("sink", "another") == value
    assert store.setting("sink") == value
    assert store.setting("other") is None


def test_a_kept_setting_is_no_alias_of_what_was_given(store: Store) -> None:
    given = [1]
    store.keep_setting("sink", given).append(2)
    given.append(3)
    assert store.setting("sink") == [1]


@pytest.mark.parametrize("value", [None, float("nan"), b"bytes", {1, 2}])
def test_a_setting_is_a_json_value(store: Store, value: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        store.keep_setting("sink", value)
    assert store.setting("sink") is None


def test_one_of_many_writers_of_a_setting_wins_and_all_learn_which(store: Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        kept = set(pool.map(lambda number: store.keep_setting("sink", number), range(12)))
    assert kept == {store.setting("sink")}


def test_a_store_can_be_closed_twice(store: Store) -> None:
    put(store, FIRST)
    store.close()
    store.close()
