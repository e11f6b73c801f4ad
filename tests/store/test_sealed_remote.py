"""Sealed objects in a remote: whoever comes with another key, or without one, is refused and does no harm."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from specimens import STORE_KEY, Specimen, put, specimen

from kvlink.core.errors import StoreUnusable
from kvlink.store import DiskStore, RemoteStore, Seal
from kvlink.store.objects import FsspecStore
from kvlink.store.redis import RedisStore

FIRST, SECOND = specimen(), specimen(1)
OTHER_KEY = bytes(32)
OUR_ID, OTHER_ID = Seal(STORE_KEY).key_id, Seal(OTHER_KEY).key_id

Open = Callable[..., RemoteStore]


@pytest.fixture(params=["redis", "files"])
def open_place(request: pytest.FixtureRequest, tmp_path: Path, fresh: Callable[[], str]) -> Open:
    """Opens one place again and again."""
    if request.param == "redis":
        return partial(request.getfixturevalue("make_redis"), prefix=fresh())
    return partial(FsspecStore, f"file://{tmp_path}/kv")


def lying(store: RemoteStore) -> list[bytes]:
    """Everything that lies in a place, names included."""
    if isinstance(store, RedisStore):
        keys = store._client.keys(f"{store._begin}*")
        values = [store._client.hgetall(key) for key in keys]
        return [*keys, *(part for fields in values for item in fields.items() for part in item)]
    paths = [path for path in Path(store._top).rglob("*") if path.is_file()]
    return [*(str(path).encode() for path in paths), *(path.read_bytes() for path in paths)]


def forget_settings(store: RemoteStore) -> None:
    """What a server does that evicts any name."""
    if isinstance(store, RedisStore):
        assert store._client.delete(f"{store._begin}settings") == 1
    else:
        Path(store._setting_path("seal")).unlink()


def refused(store: RemoteStore, one: Specimen = SECOND) -> str:
    """Return why a store refuses; nothing is changed by its trying."""
    before = sorted(lying(store))
    assert store.get(FIRST.name, ["raw"]) is None
    assert store.get(FIRST.name, ["raw", "int8"]) is None
    for call in (
        lambda: put(store, one),
        lambda: store.delete(FIRST.name),
        store.names,
        lambda: store.stat(FIRST.name),
    ):
        with pytest.raises(StoreUnusable) as error:
            call()
    assert sorted(lying(store)) == before
    stats = store.stats()
    assert (stats.misses, stats.not_kept, stats.is_open, stats.quarantined) == (2, 1, False, 0)
    assert stats.errors >= 2
    assert stats.reason == str(error.value)
    return stats.reason


def test_no_header_and_no_tensor_can_be_read_in_a_place(open_place: Open) -> None:
    store = open_place(store_key=STORE_KEY)
    put(store, FIRST)
    found = b"\n".join(lying(store))
    assert OUR_ID.encode() in found
    assert b"token_ids" not in found
    payload = 8 + int.from_bytes(FIRST.data[:8], "little")
    for at in range(payload, FIRST.data.nbytes - 16, 16):
        assert bytes(FIRST.data[at : at + 16]) not in found


def test_machines_with_the_same_key_share_a_place(open_place: Open) -> None:
    put(open_place(store_key=STORE_KEY), FIRST)
    other = open_place(store_key=STORE_KEY)
    assert other.get(FIRST.name, ["raw"]).object.data == FIRST.data
    put(other, SECOND)
    assert other.names() == {FIRST.name, SECOND.name}


def test_another_key_is_refused_and_does_no_harm(open_place: Open) -> None:
    owner = open_place(store_key=STORE_KEY)
    put(owner, FIRST)
    assert f"sealed with the key {OUR_ID}, and it was opened with the key {OTHER_ID}" in refused(
        open_place(store_key=OTHER_KEY)
    )
    assert owner.get(FIRST.name, ["raw"]) is not None


def test_a_missing_key_is_refused_and_does_no_harm(open_place: Open) -> None:
    owner = open_place(store_key=STORE_KEY)
    put(owner, FIRST)
    assert f"sealed with the key {OUR_ID}, and it was opened without a key" in refused(open_place())
    assert owner.get(FIRST.name, ["raw"]) is not None


def test_a_key_for_a_place_of_clear_objects_is_refused(open_place: Open) -> None:
    put(open_place(), FIRST)
    assert f"not sealed, and it was opened with the key {OUR_ID}" in refused(open_place(store_key=STORE_KEY))


def test_of_two_keys_for_an_empty_place_the_first_to_write_decides(open_place: Open) -> None:
    ours, others = open_place(store_key=STORE_KEY), open_place(store_key=OTHER_KEY)
    assert ours.names() == others.names() == set()
    put(ours, FIRST)
    with pytest.raises(StoreUnusable, match=f"sealed with the key {OUR_ID}"):
        put(others, SECOND)
    assert ours.names() == {FIRST.name}


def test_a_place_that_forgot_its_settings_is_known_by_its_objects(open_place: Open) -> None:
    put(open_place(store_key=STORE_KEY), FIRST)
    forget_settings(open_place())
    refused(open_place(store_key=OTHER_KEY))
    owner = open_place(store_key=STORE_KEY)
    assert owner.get(FIRST.name, ["raw"]) is not None
    put(owner, SECOND)
    assert f"sealed with the key {OUR_ID}" in refused(open_place())


def test_without_settings_and_without_a_key_a_sealed_object_is_a_miss_and_stays(open_place: Open) -> None:
    put(open_place(store_key=STORE_KEY), FIRST)
    forget_settings(open_place())
    store = open_place()
    assert store.get(FIRST.name, ["raw"]) is None
    assert (store.stats().quarantined, store.stats().errors) == (0, 1)
    assert f"is sealed with the key {OUR_ID}, and the store was opened without one" in store.stats().reason
    assert open_place(store_key=STORE_KEY).get(FIRST.name, ["raw"]) is not None


def test_a_clear_object_among_sealed_ones_is_removed(open_place: Open) -> None:
    store = open_place(store_key=STORE_KEY)
    put(store, FIRST)
    store._write(FIRST.name, "raw", memoryview(FIRST.data))
    assert store.get(FIRST.name, ["raw"]) is None
    assert (store.stats().quarantined, store.names()) == (1, set())


def test_a_place_is_asked_once_how_it_is_sealed(open_place: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    put(open_place(store_key=STORE_KEY), FIRST)
    store = open_place(store_key=STORE_KEY)
    load = store._load_setting
    monkeypatch.setattr(store, "_load_setting", lambda key: asked.append(key) or load(key))
    for _ in range(3):
        assert store.get(FIRST.name, ["raw"])
    assert asked == ["seal"]


def test_a_sealed_folder_of_a_disk_store_is_a_store_elsewhere(tmp_path: Path) -> None:
    with DiskStore(tmp_path, store_key=STORE_KEY) as disk:
        put(disk, FIRST)
        disk.keep_setting("sink", [1, 2])
    url = f"file://{tmp_path}"
    remote = FsspecStore(url, store_key=STORE_KEY)
    assert remote.get(FIRST.name, ["raw"]).object.data == FIRST.data
    assert remote.keep_setting("sink", [3]) == remote.setting("sink") == [1, 2]
    put(remote, SECOND)
    assert DiskStore(tmp_path, store_key=STORE_KEY).get(SECOND.name, ["raw"]) is not None
    refused(FsspecStore(url))
    refused(FsspecStore(url, store_key=OTHER_KEY))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"settings": 1}', '{"format": 1}'])
def test_what_is_no_settings_of_a_folder_tells_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "settings.json").write_text(text)
    store = FsspecStore(f"file://{tmp_path}")
    assert store.setting("sink") is None
    assert store.keep_setting("sink", [1]) == [1]


def test_settings_are_not_sealed(open_place: Open) -> None:
    store = open_place(store_key=STORE_KEY)
    put(store, FIRST)
    store.keep_setting("sink", [123456789])
    assert json.dumps([123456789]).encode() in lying(store)
