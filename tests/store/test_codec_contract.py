"""What every store promises where a name has objects in several codecs."""

import pytest
from specimens import IDENTITY, Clock, MakeStore, Specimen, lying_bytes, put, specimen
from test_codec import with_number
from test_store_contract import damage, used_bytes

from kvlink.core.errors import DamagedObject
from kvlink.store import CODECS, Store, encode, open_object
from kvlink.store.tiered import TieredStore

FIRST, SECOND = specimen(0, tokens=40), specimen(1, tokens=40)


def in_codec(one: Specimen, codec: str) -> Specimen:
    return Specimen(one.entry, one.name, encode(one.entry, IDENTITY, codec=codec), codec)


ALL = {codec: in_codec(FIRST, codec) for codec in CODECS}


def test_an_object_in_each_codec_comes_back_as_it_was_put(store: Store) -> None:
    put(store, *ALL.values())
    assert store.names() == {FIRST.name}
    for codec, one in ALL.items():
        with store.get(FIRST.name, [codec]) as lease:
            assert lease.object.codec == codec
            assert lease.object.decode().equals(open_object(one.data, name=one.name, codec=codec).decode())


@pytest.mark.parametrize(
    ("accept", "taken"),
    [
        (["raw", "int8", "int4"], "int8"),
        (["int4", "int8"], "int4"),
        (["raw", "half", "int4"], "int4"),
        (["pruned50", "int8"], "pruned50"),
        (["pruned75", "pruned25", "int8"], "int8"),
    ],
    ids=str,
)
def test_the_first_accepted_codec_that_is_there_is_taken(store: Store, accept: list[str], taken: str) -> None:
    put(store, ALL["int8"], ALL["int4"], ALL["pruned50"])
    with store.get(FIRST.name, accept) as lease:
        assert lease.object.codec == taken


def test_a_codec_that_is_not_accepted_is_a_miss(store: Store) -> None:
    put(store, ALL["int4"])
    assert store.get(FIRST.name, ["raw", "half", "int8"]) is None
    assert (store.stats().hits, store.stats().misses) == (0, 1)


def test_stat_tells_the_bytes_of_each_codec(store: Store) -> None:
    put(store, *ALL.values())
    found = store.stat(FIRST.name)
    assert {codec: stat.num_bytes for codec, stat in found.items()} == {
        codec: lying_bytes(store, one) for codec, one in ALL.items()
    }
    assert used_bytes(store) == lying_bytes(store, *ALL.values())


def test_one_codec_is_deleted_and_the_others_stay(store: Store) -> None:
    put(store, *ALL.values())
    assert store.delete(FIRST.name, "raw") == 1
    assert set(store.stat(FIRST.name)) == set(CODECS) - {"raw"}
    assert store.delete(FIRST.name) == len(CODECS) - 1
    assert (store.names(), used_bytes(store)) == (set(), 0)


def test_a_damaged_object_falls_back_to_the_next_codec(store: Store) -> None:
    put(store, ALL["raw"], ALL["int8"], ALL["int4"])
    damage(store, ALL["raw"])
    damage(store, ALL["int8"])
    with store.get(FIRST.name, ["raw", "int8", "int4"]) as lease:
        assert lease.object.codec == "int4"
    assert (store.stats().quarantined, store.stats().hits, store.stats().misses) == (2, 1, 0)
    assert store.get(FIRST.name, ["raw", "int8"]) is None


@pytest.mark.parametrize("codec", CODECS)
def test_an_object_is_put_under_its_own_codec_only(store: Store, codec: str) -> None:
    for other in set(CODECS) - {codec}:
        with pytest.raises(DamagedObject, match=f"{FIRST.name}.{other}"):
            store.put(FIRST.name, other, ALL[codec].data)
    assert store.names() == set()


def test_a_well_signed_object_without_numbers_is_quarantined(store: Store) -> None:
    small = specimen()
    put(store, Specimen(small.entry, small.name, with_number("int8", "key_scales", float("nan"), 0), "int8"))
    assert store.get(small.name, ["int8"]) is None
    assert (store.stats().quarantined, store.names()) == (2 if isinstance(store, TieredStore) else 1, set())


def test_the_least_used_codec_of_a_name_is_evicted_for_another(make_bounded: MakeStore, clock: Clock) -> None:
    worse = in_codec(FIRST, "int4")
    store = make_bounded(budget_bytes=FIRST.data.nbytes + worse.data.nbytes)
    for one in (worse, FIRST):
        put(store, one)
        clock.now += 100
    put(store, in_codec(SECOND, "int4"))
    assert set(store.stat(FIRST.name)) == {"raw"}
    assert set(store.stat(SECOND.name)) == {"int4"}
