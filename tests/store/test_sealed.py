"""Encryption at rest: nothing readable lies on the disk, and a store with another key is refused with the reason."""

import base64
import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from specimens import IDENTITY, Clock, Specimen, entry, put, specimen

from kvlink.core.errors import DamagedObject, StoreFull, StoreUnusable
from kvlink.core.fingerprint import fingerprint
from kvlink.store import CODECS, DiskStore, MemoryStore, Seal, TieredStore, encode, open_store, store_key
from kvlink.store import sealed as module

FIRST, SECOND = specimen(), specimen(1)
SIZE = FIRST.data.nbytes
OURS, THEIRS = bytes(range(32)), bytes(range(1, 33))
THEIR_ID = Seal(THEIRS).key_id
RAW = {"name": FIRST.name, "codec": "raw"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path, clock: Clock) -> DiskStore:
    return DiskStore(root, store_key=OURS, clock=clock)


def wrapped(one: Specimen = FIRST, key: bytes = OURS) -> bytearray:
    return bytearray(Seal(key).wrap(one.data, name=one.name, codec=one.codec))


def opened(data: bytes | bytearray, key: bytes = OURS, **which: str) -> memoryview:
    return Seal(key).unwrap(memoryview(bytearray(data)), **(RAW | which))


def envelope_of(data: bytes | bytearray) -> tuple[dict, int]:
    """What stands in clear before the object, and where the sealed bytes begin."""
    start = 10 + int.from_bytes(data[8:10], "little")
    return json.loads(bytes(data[10:start])), start


def with_envelope(data: bytes | bytearray, text: bytes) -> bytes:
    return data[:8] + len(text).to_bytes(2, "little") + text + data[envelope_of(data)[1] :]


def spelled(fields: object) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def file_of(root: Path, one: Specimen) -> Path:
    return root / "objects" / one.name[:2] / one.name[2:4] / f"{one.name}.{one.codec}.safetensors"


def test_what_was_sealed_is_opened_bit_for_bit() -> None:
    assert opened(wrapped()) == FIRST.data


def test_a_sealed_object_says_what_it_is_and_takes_few_bytes_more() -> None:
    data = wrapped()
    fields, start = envelope_of(data)
    nonce = fields.pop("nonce")
    assert fields == {"cipher": "AES-256-GCM", "format": 1, "key": Seal(OURS).key_id} | RAW
    assert len(bytes.fromhex(nonce)) == 12
    assert data[:8] == b"KVSEALED"
    assert len(data) == start + SIZE + 16 < SIZE + 300


def test_a_sealed_object_can_be_opened_by_the_book() -> None:
    """With nothing but what the page on the format says."""
    data = bytes(wrapped())
    fields, start = envelope_of(data)
    derived = blake3(OURS + f"{FIRST.name}.raw".encode(), derive_key_context="kvlink 2025-11-30 key of a sealed object")
    clear = AESGCM(derived.digest()).decrypt(bytes.fromhex(fields["nonce"]), data[start:], data[:start])
    assert clear == FIRST.data
    key_id = blake3(OURS, derive_key_context="kvlink 2025-11-30 id of a store's key").hexdigest()[:16]
    assert fields["key"] == key_id


def test_the_same_object_is_never_sealed_alike() -> None:
    assert len({bytes(wrapped()[-16:]) for _ in range(20)}) == 20


@pytest.mark.parametrize("key", [b"", b"short", bytes(31), bytes(33)])
def test_a_key_has_32_bytes(key: bytes) -> None:
    with pytest.raises(ValueError, match=f"a store's key has 32 bytes, not {len(key)}"):
        Seal(key)


def test_every_flipped_bit_is_found() -> None:
    good = wrapped()
    for place in range(len(good)):
        data = bytearray(good)
        data[place] ^= 1 << place % 8
        with pytest.raises(DamagedObject, match=FIRST.name):
            opened(data)


def test_every_truncation_is_found() -> None:
    good = wrapped()
    for length in range(len(good)):
        with pytest.raises(DamagedObject, match=FIRST.name):
            opened(good[:length])


@pytest.mark.parametrize("which", [{"name": SECOND.name}, {"codec": "int8"}], ids=["name", "codec"])
def test_an_object_opens_under_its_own_name_and_codec_only(which: dict[str, str]) -> None:
    with pytest.raises(DamagedObject, match="envelope is that of another object"):
        opened(wrapped(), **which)


@pytest.mark.parametrize("which", [{"name": SECOND.name}, {"codec": "int8"}], ids=["name", "codec"])
def test_an_envelope_cannot_be_written_anew_for_another_object(which: dict[str, str]) -> None:
    data = wrapped()
    moved = with_envelope(data, spelled(envelope_of(data)[0] | which))
    with pytest.raises(DamagedObject, match="what is sealed has changed"):
        opened(moved, **which)


def test_the_envelope_is_sealed_even_where_it_decides_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    data = wrapped()
    monkeypatch.setattr(module, "_FIELDS", {"cipher": "AES-256-GCM", "format": 1, "note": "x"})
    with pytest.raises(DamagedObject, match="what is sealed has changed"):
        opened(with_envelope(data, spelled(envelope_of(data)[0] | {"note": "x"})))


HOSTILE_ENVELOPES: dict[str, Callable[[dict], object]] = {
    "no nonce": lambda fields: {key: value for key, value in fields.items() if key != "nonce"},
    "an empty nonce": lambda fields: fields | {"nonce": ""},
    "a long nonce": lambda fields: fields | {"nonce": "00" * 64},
    "a nonce of numbers": lambda fields: fields | {"nonce": 5},
    "a nonce in capitals": lambda fields: fields | {"nonce": fields["nonce"].upper() + "AA"},
    "another format": lambda fields: fields | {"format": 2},
    "another cipher": lambda fields: fields | {"cipher": "none"},
    "more than there should be": lambda fields: fields | {"more": 1},
    "a list": lambda fields: [fields],
    "nothing": lambda fields: {},
}


@pytest.mark.parametrize("change", HOSTILE_ENVELOPES.values(), ids=HOSTILE_ENVELOPES)
def test_an_envelope_that_says_something_else_is_refused(change: Callable[[dict], object]) -> None:
    data = wrapped()
    with pytest.raises(DamagedObject, match=FIRST.name):
        opened(with_envelope(data, spelled(change(envelope_of(data)[0]))))


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 60_000, b'{"key":' + b"9" * 5000 + b"}"], ids=len)
def test_an_envelope_that_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(DamagedObject, match=FIRST.name):
        opened(with_envelope(wrapped(), text))


@pytest.mark.parametrize("codec", CODECS)
def test_no_id_no_number_and_no_header_can_be_read_in_any_file(root: Path, store: DiskStore, codec: str) -> None:
    made = entry(90210777, tokens=40)
    clear = encode(made, IDENTITY, codec=codec, provenance={"model": "a telling name"})
    store.put(fingerprint(IDENTITY, made.token_ids), codec, clear)
    payload = 8 + int.from_bytes(clear[:8], "little")
    telling = [b"a telling name", b"token_ids", b"90210777", b"geometry", b"__metadata__", IDENTITY.model.encode()]
    telling += [struct.pack(f"<{width}", 90210777) for width in ("i", "q")]
    telling += [bytes(clear[at : at + 16]) for at in range(payload, clear.nbytes - 16, 16)]
    lying = [path.read_bytes() for path in root.rglob("*") if path.is_file()]
    assert any(len(data) > clear.nbytes for data in lying)
    assert [piece for piece in telling for data in lying if piece in data] == []


def test_sealed_bytes_count_in_the_budget(root: Path, clock: Clock) -> None:
    lying = len(wrapped())
    store = DiskStore(root, store_key=OURS, budget_bytes=2 * lying - 1, clock=clock)
    put(store, FIRST)
    clock.now += 100
    put(store, SECOND)
    assert store.names() == {SECOND.name}
    assert store.stats().used_bytes == file_of(root, SECOND).stat().st_size == lying
    with pytest.raises(StoreFull, match=f"needs {lying} bytes"):
        put(DiskStore(root, store_key=OURS, budget_bytes=SIZE, clock=clock), FIRST)


def test_objects_and_the_key_survive_a_restart(store: DiskStore, root: Path) -> None:
    put(store, FIRST)
    again = DiskStore(root, store_key=OURS)
    assert again.get(FIRST.name, ["raw"]).object.decode().equals(FIRST.entry)
    assert [verdict.error for verdict in again.verify()] == [None]


def test_a_sealed_folder_can_be_moved(store: DiskStore, root: Path) -> None:
    put(store, FIRST)
    moved = root.rename(root.with_name("elsewhere"))
    assert DiskStore(moved, store_key=OURS).get(FIRST.name, ["raw"]) is not None


@pytest.mark.parametrize(
    ("begun", "given", "message"),
    [
        (OURS, THEIRS, f"sealed with the key {Seal(OURS).key_id}, and it was opened with the key {THEIR_ID}"),
        (OURS, None, f"sealed with the key {Seal(OURS).key_id}, and it was opened without a key"),
        (None, OURS, f"not sealed, and it was opened with the key {Seal(OURS).key_id}"),
    ],
    ids=["another", "missing", "needless"],
)
def test_a_folder_belongs_to_the_key_it_was_begun_with(
    root: Path, begun: bytes | None, given: bytes | None, message: str
) -> None:
    put(DiskStore(root, store_key=begun), FIRST)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(StoreUnusable, match=f"{root} are {message}; pass what the store was begun with"):
        DiskStore(root, store_key=given)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_no_message_and_no_file_holds_the_key(store: DiskStore, root: Path) -> None:
    put(store, FIRST)
    with pytest.raises(StoreUnusable) as refused:
        DiskStore(root, store_key=THEIRS)
    lying = b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())
    for key in (OURS, THEIRS):
        assert key.hex() not in str(refused.value)
        assert key not in lying
        assert key.hex().encode() not in lying


@pytest.mark.parametrize("planted", [bytes(FIRST.data), bytes(wrapped(key=THEIRS))], ids=["clear", "another key's"])
def test_a_foreign_object_in_a_sealed_folder_is_quarantined(store: DiskStore, root: Path, planted: bytes) -> None:
    put(store, FIRST)
    file_of(root, FIRST).write_bytes(planted)
    assert "not sealed" in next(store.verify()).error or THEIR_ID in next(store.verify()).error
    assert store.get(FIRST.name, ["raw"]) is None
    assert (store.stats().quarantined, store.names()) == (1, set())


def test_a_sealed_object_in_a_clear_folder_is_refused_with_the_reason_and_stays(root: Path) -> None:
    store = DiskStore(root)
    put(store, FIRST)
    file_of(root, FIRST).write_bytes(wrapped())
    with pytest.raises(StoreUnusable, match=rf"{FIRST.name}.raw is sealed with the key {Seal(OURS).key_id}.*without"):
        store.get(FIRST.name, ["raw"])
    assert "KVLINK_STORE_KEY" in next(store.verify()).error
    assert store.names() == {FIRST.name}


def test_a_host_above_a_sealed_disk_holds_clear_objects(store: DiskStore) -> None:
    host = MemoryStore(budget_bytes=2**20)
    tiers = TieredStore(host, store)
    put(tiers, FIRST)
    assert tiers.get(FIRST.name, ["raw"]).source == "disk"
    assert host.get(FIRST.name, ["raw"]).object.data == FIRST.data


def test_a_sealed_store_signs_as_well(root: Path) -> None:
    signed = specimen(secret=b"ours")
    store = DiskStore(root, secret=b"ours", store_key=OURS)
    put(store, signed)
    assert store.get(signed.name, ["raw"]) is not None
    put(store, FIRST)
    assert store.get(FIRST.name, ["raw"]) is None


def test_a_copy_under_another_key_is_a_store_of_that_key(store: DiskStore, tmp_path: Path) -> None:
    put(store, FIRST, SECOND)
    with DiskStore(tmp_path / "new", store_key=THEIRS) as target:
        for name in store.names():
            for codec in store.stat(name):
                with store.get(name, [codec]) as lease:
                    target.put(name, codec, lease.object.data)
        assert target.names() == {FIRST.name, SECOND.name}
        assert all(verdict.error is None for verdict in target.verify())


def test_whatever_names_a_store_it_is_opened_with_the_key(tmp_path: Path) -> None:
    for named in (
        tmp_path / "a",
        str(tmp_path / "b"),
        f"file://{tmp_path}/c",
        [tmp_path / "d", f"file://{tmp_path}/e"],
    ):
        with open_store(named, store_key=OURS) as store:
            put(store, FIRST)
    lying = [path.read_bytes() for path in tmp_path.rglob("*.safetensors")]
    assert [data[:8] for data in lying] == [b"KVSEALED"] * 5


def test_a_missing_package_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(StoreUnusable, match=r"pip install 'kvlink\[encryption\]'"):
        DiskStore(root, store_key=OURS)
    assert not root.exists()


def test_an_object_longer_than_the_cipher_takes_is_refused(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGEST_BYTES", SIZE - 1)
    with pytest.raises(StoreUnusable, match=f"has {SIZE} bytes, and at most {SIZE - 1} can be sealed"):
        put(store, FIRST)


@pytest.mark.parametrize("spell", [bytes.hex, base64.b64encode, base64.urlsafe_b64encode])
@pytest.mark.parametrize("key", [OURS, b"\xff" * 32])
def test_a_key_is_read_from_the_environment_in_hex_or_base64(key: bytes, spell: Callable[[bytes], str | bytes]) -> None:
    spelling = spell(key)
    text = spelling if isinstance(spelling, str) else spelling.decode()
    for given in (text, f" {text}\n"):
        assert store_key({"KVLINK_STORE_KEY": given}) == key


def test_without_a_variable_there_is_no_key() -> None:
    assert store_key({}) is None


@pytest.mark.parametrize("text", ["", " ", "secret", OURS.hex()[:-2], OURS.hex() + "00", "é" * 64, "=" * 44])
def test_what_is_no_key_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(StoreUnusable, match=r"KVLINK_STORE_KEY is no key: it has .*openssl rand -hex 32") as refused:
        store_key({"KVLINK_STORE_KEY": text})
    assert not text.strip() or text not in str(refused.value)


def test_two_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match="are both set"):
        store_key({"KVLINK_STORE_KEY": OURS.hex(), "KVLINK_STORE_KEY_FILE": str(tmp_path / "key")})


def test_a_key_is_read_from_a_file_of_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(OURS.hex() + "\n")
    file.chmod(0o400)
    assert store_key({"KVLINK_STORE_KEY_FILE": str(file)}) == OURS


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_can_get_at_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    file.write_text(OURS.hex())
    file.chmod(mode)
    with pytest.raises(StoreUnusable, match=f"{file} .*has mode {mode:04o}.*chmod 600"):
        store_key({"KVLINK_STORE_KEY_FILE": str(file)})


def test_a_file_that_is_not_there_or_holds_no_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(StoreUnusable, match=f"cannot read {file} .*No such file"):
        store_key({"KVLINK_STORE_KEY_FILE": str(file)})
    file.write_bytes(b"\xff" * 32)
    file.chmod(0o600)
    with pytest.raises(StoreUnusable, match=f"the content of {file} .*is no key"):
        store_key({"KVLINK_STORE_KEY_FILE": str(file)})
    with pytest.raises(StoreUnusable, match="cannot read"):
        store_key({"KVLINK_STORE_KEY_FILE": str(tmp_path)})


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "KVLINK_STORE_KEY", OURS.hex())
    assert store_key() == OURS
