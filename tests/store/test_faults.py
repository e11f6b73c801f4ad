"""What disks, clocks and people do to objects: nothing false is served, and what was deleted is nowhere."""

import json
import pickle
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from specimens import IDENTITY, STORE_KEY, Clock, Specimen, entry, put, specimen

from kvlink.core.errors import DamagedObject, StoreFull, StoreUnusable
from kvlink.core.fingerprint import fingerprint
from kvlink.store import CODECS, DiskStore, MemoryStore, TieredStore, encode, open_object
from kvlink.store.redis import RedisStore

FIRST, SECOND = specimen(), specimen(1)
SIZE = FIRST.data.nbytes
MADE = entry(90210777, tokens=60)
NAME = fingerprint(IDENTITY, MADE.token_ids)
OBJECTS = {codec: encode(MADE, IDENTITY, codec=codec) for codec in CODECS}
TELLING = b"90210800"
"""One of the ids, as every header spells it."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def regions(data: bytes) -> dict[str, int]:
    """Where the length, the header, its ids, its digest and each tensor lie: the middle of each."""
    start = 8 + int.from_bytes(data[:8], "little")
    frame = json.loads(data[8:start])
    places = {"length": 1, "header": 20, "ids": data.index(TELLING) + 7, "digest": data.index(b"digest") + 30}
    for name, tensor in frame.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            places[name] = start + (begin + end) // 2
    return places | {"last": len(data) - 1}


REGIONS = [(codec, region) for codec, data in OBJECTS.items() for region in regions(bytes(data))]


@pytest.mark.parametrize(("codec", "region"), REGIONS, ids=lambda part: part)
def test_a_flipped_bit_in_any_region_is_quarantined_and_never_served(root: Path, codec: str, region: str) -> None:
    store = DiskStore(root)
    store.put(NAME, codec, bytearray(OBJECTS[codec]))
    path = store._path(NAME, codec)
    data = bytearray(path.read_bytes())
    data[regions(bytes(data))[region]] ^= 4
    path.write_bytes(data)
    assert [verdict.error is None for verdict in store.verify()] == [False]
    assert store.get(NAME, list(CODECS)) is None
    assert store.get(NAME, [codec]) is None
    assert [file.name for file in (root / "quarantine").iterdir()] == [path.name]
    assert (store.stats().quarantined, store.stats().hits) == (1, 0)


@pytest.mark.parametrize("region", ["magic", "length", "name", "nonce", "first", "middle", "tag"])
def test_a_flipped_bit_in_any_region_of_a_sealed_file_is_quarantined_and_never_served(root: Path, region: str) -> None:
    store = DiskStore(root, store_key=STORE_KEY)
    store.put(NAME, "raw", bytearray(OBJECTS["raw"]))
    path = store._path(NAME, "raw")
    data = bytearray(path.read_bytes())
    start = 10 + int.from_bytes(data[8:10], "little")
    places = {"magic": 0, "length": 8, "name": data.index(NAME.encode()), "nonce": data.index(b"nonce") + 10}
    data[(places | {"first": start, "middle": len(data) // 2, "tag": len(data) - 1})[region]] ^= 1
    path.write_bytes(data)
    assert store.get(NAME, ["raw"]) is None
    assert (store.stats().quarantined, store.stats().hits, store.names()) == (1, 0, set())


@pytest.mark.parametrize("sealed", [False, True], ids=["clear", "sealed"])
def test_a_file_under_the_name_of_another_codec_is_quarantined(root: Path, sealed: bool) -> None:
    store = DiskStore(root, store_key=STORE_KEY if sealed else None)
    for codec in CODECS:
        store.put(NAME, codec, bytearray(OBJECTS[codec]))
    store._path(NAME, "int8").replace(store._path(NAME, "int4"))
    store._path(NAME, "half").write_bytes(store._path(NAME, "raw").read_bytes())
    assert store.get(NAME, ["int8", "int4", "half"]) is None
    assert store.stats().quarantined == 2
    assert store.get(NAME, ["raw"]) is not None


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("exploded"),)


@pytest.mark.parametrize("sealed", [False, True], ids=["clear", "sealed"])
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_is_quarantined_and_not_run(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int, sealed: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Bomb(), protocol))
    (tmp_path / "exploded").unlink()  # it does explode
    store = DiskStore(root, store_key=STORE_KEY if sealed else None)
    put(store, FIRST)
    for data in (pickle.dumps(Bomb(), protocol), pickle.dumps(Bomb(), protocol).ljust(SIZE, b".")):
        store._path(FIRST.name, "raw").parent.mkdir(parents=True, exist_ok=True)
        store._path(FIRST.name, "raw").write_bytes(data)
        assert store.get(FIRST.name, ["raw"]) is None
        with pytest.raises(DamagedObject):
            open_object(bytearray(data), name=FIRST.name, codec="raw")
    assert store.stats().quarantined == 2
    assert not (tmp_path / "exploded").exists()


def test_what_torch_saves_is_quarantined(root: Path) -> None:
    store = DiskStore(root)
    put(store, FIRST)
    torch.save({"keys": FIRST.entry.keys, "values": FIRST.entry.values}, store._path(FIRST.name, "raw"))
    assert store.get(FIRST.name, ["raw"]) is None
    assert store.stats().quarantined == 1


@pytest.mark.parametrize("found", [0, 2, -1])
def test_a_folder_of_an_older_or_a_newer_format_is_refused_and_left_as_it_is(root: Path, found: int) -> None:
    put(DiskStore(root), FIRST)
    (root / "settings.json").write_text(json.dumps({"format": found, "settings": {}}))
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(StoreUnusable, match=f"is of format {found}, and this version reads 1"):
        DiskStore(root)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_folders_that_are_links_lead_no_eviction_and_no_collection_outside(
    root: Path, tmp_path: Path, clock: Clock
) -> None:
    outside = tmp_path / "outside" / "cd"
    outside.mkdir(parents=True)
    (outside / "thesis.txt").write_text("mine")
    (outside / "empty").mkdir()
    store = DiskStore(root, budget_bytes=SIZE, clock=clock)
    for link in (root / "objects" / "ab", root / "quarantine" / "ab"):
        link.symlink_to(outside.parent)
    clock.now += 10_000
    put(store, FIRST)
    clock.now += 100
    put(store, SECOND)
    store.gc()
    assert store.names() == {SECOND.name}
    assert sorted(path.name for path in outside.iterdir()) == ["empty", "thesis.txt"]


@pytest.mark.parametrize("place", ["memory", "disk", "sealed disk"])
def test_eight_threads_on_a_store_ten_times_too_small_are_served_what_was_put(root: Path, place: str) -> None:
    objects = [specimen(seed, tokens=40) for seed in range(30)]
    budget = 3 * objects[0].data.nbytes + 2000
    store = {
        "memory": lambda: MemoryStore(budget_bytes=budget),
        "disk": lambda: DiskStore(root, budget_bytes=budget),
        "sealed disk": lambda: DiskStore(root, budget_bytes=budget, store_key=STORE_KEY),
    }[place]()
    start = threading.Barrier(8)

    def work(seed: int) -> tuple[int, int]:
        draw, hits, refused = random.Random(seed), 0, 0
        start.wait()
        for _ in range(60):
            one = draw.choice(objects)
            lease = store.get(one.name, ["raw"])
            if lease is None:
                try:
                    put(store, one)
                except StoreFull:  # all of it is being read
                    refused += 1
                continue
            with lease:
                assert lease.object.decode().equals(one.entry)
                assert store.stats().used_bytes <= budget
                hits += 1
        return hits, refused

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8)))
    stats = store.stats()
    assert stats.hits == sum(hits for hits, _ in found)
    assert stats.hits + stats.misses == 8 * 60
    assert stats.puts == stats.misses - sum(refused for _, refused in found)
    assert stats.evictions > 100
    assert stats.quarantined == 0
    assert stats.used_bytes == sum(s.num_bytes for name in store.names() for s in store.stat(name).values()) <= budget


def everywhere(root: Path, remote: RedisStore) -> bytes:
    """All bytes below a folder and in a server, names included."""
    found = [str(path).encode() + (path.read_bytes() if path.is_file() else b"") for path in root.rglob("*")]
    for key in remote._client.keys("*"):
        fields = remote._client.hgetall(key) if remote._client.type(key) == b"hash" else {}
        found += [key, *fields.keys(), *fields.values()]
    return b"\n".join(found)


def test_after_a_deletion_nothing_of_a_document_is_anywhere(root: Path, make_redis: Callable[..., RedisStore]) -> None:
    host, disk, remote = MemoryStore(budget_bytes=2**22), DiskStore(root), make_redis(part_bytes=2**20)
    store = TieredStore(host, disk, remote)
    whole = [Specimen(MADE, NAME, data, codec) for codec, data in OBJECTS.items()]
    put(store, *whole, FIRST)
    for codec in CODECS:
        store.get(NAME, [codec]).release()
    for codec in ("raw", "int8"):  # these are then in quarantine, and new ones in their place
        path = disk._path(NAME, codec)
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        host.delete(NAME, codec)
        store.get(NAME, [codec]).release()
    store.flush()
    payload = bytes(OBJECTS["raw"][-64:-32])
    before = everywhere(root, remote)
    assert before.count(TELLING) == 2 * len(CODECS) + 2
    assert payload in before
    assert host.names() == {NAME}

    store.delete(NAME)

    after = everywhere(root, remote)
    for trace in (TELLING, payload, NAME.encode()):
        assert trace not in after
    assert host.names() == set()
    assert host.stats().used_bytes == 0
    assert store.get(FIRST.name, ["raw"]) is not None
