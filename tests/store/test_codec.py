"""Bytes <-> entries: nothing is lost, and nothing false is let in."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, load_file
from specimens import IDENTITY, entry, specimen

from kvlink.core.entry import CacheEntry
from kvlink.core.errors import DamagedObject
from kvlink.core.fingerprint import FORMAT, fingerprint
from kvlink.store import CODECS, StoredObject, check_head, encode, open_object
from kvlink.store.header import MAX_HEADER_BYTES, canonical_json

DTYPES = {"bfloat16": torch.int16, "float16": torch.int16, "float32": torch.int32, "float64": torch.int64}
GOOD = specimen()
OBJECTS = {codec: encode(GOOD.entry, IDENTITY, codec=codec) for codec in CODECS}


def opened(data: bytes | memoryview, *, name: str = GOOD.name, secret: bytes | None = None) -> StoredObject:
    return open_object(bytearray(data), name=name, codec="raw", secret=secret)


def refused(data: bytes | memoryview, *, name: str = GOOD.name, secret: bytes | None = None) -> str:
    with pytest.raises(DamagedObject) as error:
        opened(data, name=name, secret=secret)
    return str(error.value)


def border(data: bytes | memoryview) -> int:
    """Where the payload begins."""
    return 8 + int.from_bytes(data[:8], "little")


@st.composite
def parts(draw: st.DrawFn) -> tuple[str, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Any bits of any dtype: NaNs with payloads, infinities, subnormals; at times strided."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    layers, heads, tokens, head_dim, value_dim = (draw(st.integers(1, 4)) for _ in range(5))
    bits = torch.iinfo(DTYPES[dtype])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def any_bits(width: int) -> torch.Tensor:
        shape = (layers, tokens, heads, width)
        tensor = torch.randint(bits.min, bits.max, shape, generator=generator, dtype=DTYPES[dtype])
        tensor.view(-1)[0] = bits.max - draw(st.integers(0, 3))  # a NaN
        return tensor.view(getattr(torch, dtype)).transpose(1, 2)

    ids = draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=tokens, max_size=tokens))
    return dtype, any_bits(head_dim), any_bits(value_dim), tuple(ids)


@given(
    parts(),
    st.dictionaries(st.text(), st.text(), max_size=3),
    st.none() | st.binary(min_size=1),
    st.binary(min_size=16, max_size=16),
)
@settings(max_examples=60, deadline=None)
def test_every_bit_survives(
    made: tuple[str, torch.Tensor, torch.Tensor, tuple[int, ...]],
    provenance: dict[str, str],
    secret: bytes | None,
    scope: bytes,
) -> None:
    dtype, *fields = made
    before = CacheEntry(*fields)
    identity = replace(IDENTITY, dtype=dtype, scope=scope)
    data = encode(before, identity, provenance=provenance, secret=secret)
    found = open_object(data, name=fingerprint(identity, before.token_ids), codec="raw", secret=secret)
    after = found.decode()
    for one, other in ((before.keys, after.keys), (before.values, after.values)):
        assert torch.equal(one.contiguous().view(DTYPES[dtype]), other.view(DTYPES[dtype]))
        assert other.data_ptr() % other.dtype.itemsize == 0
    assert after.token_ids == found.token_ids == before.token_ids
    assert found.identity == identity
    assert dict(found.provenance) == provenance
    assert found.num_bytes == data.nbytes


def test_opening_copies_no_payload() -> None:
    data = bytearray(GOOD.data)
    found = open_object(data, name=GOOD.name, codec="raw")
    data[-4:] = torch.tensor(42.0).numpy().tobytes()
    assert found.decode().values.flatten()[-1] == 42.0


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_stock_safetensors_reader_opens_the_file(dtype: str, tmp_path: Path) -> None:
    made = entry(dtype=getattr(torch, dtype))
    path = tmp_path / "object.safetensors"
    path.write_bytes(encode(made, replace(IDENTITY, dtype=dtype), provenance={"tokenizer": "é"}))
    tensors = load_file(path)
    assert CacheEntry(tensors["keys"], tensors["values"], made.token_ids).equals(made)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["kvlink"])
    assert header["format"] == FORMAT
    assert header["token_ids"] == list(made.token_ids)
    assert header["sink_ids"] == [1, 7]
    assert header["geometry"] == {"layers": 2, "kv_heads": 2, "tokens": 5, "head_dim": 3, "value_dim": 4}


def test_the_digest_is_blake3_of_the_header_without_it_and_the_payload() -> None:
    start = border(GOOD.data)
    header = json.loads(json.loads(bytes(GOOD.data[8:start]))["__metadata__"]["kvlink"])
    digest = header.pop("digest")
    assert digest == blake3(canonical_json(header).encode() + GOOD.data[start:]).hexdigest()
    assert start % 8 == 0


def test_large_objects_verify_with_many_threads() -> None:
    tokens = 12_000
    made = CacheEntry(torch.zeros(2, 2, tokens, 8), torch.ones(2, 2, tokens, 8), tuple(range(tokens)))
    data = encode(made, IDENTITY, secret=b"s")
    name = fingerprint(IDENTITY, made.token_ids)
    assert opened(data, name=name, secret=b"s").decode().equals(made)
    data[border(data) + 2**20] ^= 64
    assert "digest" in refused(data, name=name, secret=b"s")


def test_two_processes_give_the_same_name_and_the_same_bytes(tmp_path: Path) -> None:
    script = (
        "import sys; from specimens import specimen; from kvlink.store import DiskStore; one = specimen(3)\n"
        "DiskStore(sys.argv[1]).put(one.name, one.codec, one.data)"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / seed)],
            env=os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    assert [process.wait() for process in running] == [0, 0]
    files = [next((tmp_path / seed).glob("objects/*/*/*")) for seed in ("1", "2")]
    assert files[0].name == files[1].name == f"{specimen(3).name}.raw.safetensors"
    assert files[0].read_bytes() == files[1].read_bytes() == specimen(3).data


@pytest.mark.parametrize(
    ("made", "identity", "codec", "message"),
    [
        (entry(dtype=torch.float16), IDENTITY, "raw", "the identity says float32, but the entry holds torch.float16"),
        (CacheEntry(entry().keys, entry().values.double(), entry().token_ids), IDENTITY, "raw", "torch.float64"),
        (entry(dtype=torch.float8_e5m2), replace(IDENTITY, dtype="float8_e5m2"), "raw", "none of the dtypes bfloat16"),
        (entry(tokens=0), IDENTITY, "raw", "at least one element"),
        (entry(), IDENTITY, "zip", "no codec 'zip'"),
    ],
)
def test_what_cannot_be_encoded_is_refused(made: CacheEntry, identity: object, codec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode(made, identity, codec=codec)


def test_a_header_has_a_greatest_length() -> None:
    with pytest.raises(ValueError, match="split the document"):
        encode(entry(), IDENTITY, provenance={"note": "x" * MAX_HEADER_BYTES})


def test_read_only_memory_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="copy these bytes into a bytearray"):
        open_object(memoryview(bytes(GOOD.data)), name=GOOD.name, codec="raw")


@pytest.mark.parametrize("codec", CODECS)
def test_every_flipped_bit_of_the_head_is_found(codec: str) -> None:
    good = OBJECTS[codec]
    data = bytearray(good)
    for place in range(border(good)):
        data[place] ^= 1 << place % 8
        with pytest.raises(DamagedObject):
            open_object(data, name=GOOD.name, codec=codec)
        data[place] = good[place]
    assert open_object(data, name=GOOD.name, codec=codec)


@pytest.mark.parametrize("codec", CODECS)
@given(st.data(), st.integers(1, 255))
@settings(max_examples=100, deadline=None)
def test_every_changed_byte_of_the_payload_is_found(codec: str, where: st.DataObject, change: int) -> None:
    data = bytearray(OBJECTS[codec])
    data[where.draw(st.integers(border(data), len(data) - 1))] ^= change
    with pytest.raises(DamagedObject, match="digest"):
        open_object(data, name=GOOD.name, codec=codec)


START = border(GOOD.data)


def borders(data: bytes | memoryview) -> list[int]:
    """Where head, tensors and file begin and end, and the bytes around."""
    start = border(data)
    frame = json.loads(bytes(data[8:start]))
    stops = [start + tensor["data_offsets"][1] for name, tensor in frame.items() if name != "__metadata__"]
    return [0, 1, 7, 8, 9, *(at + off for at in (start, *stops) for off in (-1, 0, 1) if at + off < data.nbytes)]


@pytest.mark.parametrize(("codec", "length"), [(codec, at) for codec, data in OBJECTS.items() for at in borders(data)])
def test_truncation_is_found_at_every_border(codec: str, length: int) -> None:
    for call in (open_object, check_head):
        with pytest.raises(DamagedObject):
            call(bytearray(OBJECTS[codec][:length]), name=GOOD.name, codec=codec)


@pytest.mark.parametrize("codec", CODECS)
def test_an_object_under_another_codec_is_found(codec: str) -> None:
    for other in set(CODECS) - {codec}:
        with pytest.raises(DamagedObject, match=f"its header says format 1, {GOOD.name}.{codec} and not"):
            open_object(bytearray(OBJECTS[codec]), name=GOOD.name, codec=other)


def test_appended_bytes_are_found() -> None:
    assert "bytes where its header describes" in refused(bytes(GOOD.data) + b"\0")


def test_an_object_under_another_name_is_found() -> None:
    other = specimen(1)
    assert f"its header says format 1, {other.name}.raw" in refused(other.data)


def test_a_payload_under_another_head_is_found() -> None:
    other = specimen(1)
    assert "digest" in refused(bytes(GOOD.data[:START]) + bytes(other.data[border(other.data) :]))


def test_another_secret_is_found_and_the_message_does_not_help_to_forge() -> None:
    signed = specimen(secret=b"ours")
    assert opened(signed.data, secret=b"ours").decode().equals(signed.entry)
    header = json.loads(json.loads(bytes(signed.data[8 : border(signed.data)]))["__metadata__"]["kvlink"])
    for secret in (None, b"theirs", b""):
        refused(signed.data, secret=secret)
    forged = forge(lambda fields: fields.update(provenance={"a": "b"}), lambda outer: None, signed.data)
    assert header["digest"] not in refused(forged, secret=b"ours")
    assert specimen(secret=b"ours").data == signed.data


def forge(
    inside: Callable[[dict], object] = lambda fields: None,
    outside: Callable[[dict], object] = lambda outer: None,
    data: bytes | memoryview = GOOD.data,
) -> bytes:
    """Change the header, or what stands around it, and sign the result as anyone can who has no secret."""
    start = border(data)
    outer = json.loads(bytes(data[8:start]))
    fields = json.loads(outer["__metadata__"]["kvlink"])
    inside(fields)
    if isinstance(fields, dict):
        fields.pop("digest", None)
        fields["digest"] = blake3(canonical_json(fields).encode() + data[start:]).hexdigest()
    outer["__metadata__"]["kvlink"] = canonical_json(fields)
    outside(outer)
    return framed(canonical_json(outer).encode(), bytes(data[start:]))


def framed(text: bytes, payload: bytes) -> bytes:
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + payload


def test_the_forger_can_forge() -> None:
    """Otherwise the tests below would pass for the wrong reason."""
    assert forge() == GOOD.data
    assert opened(forge(lambda fields: fields.update(provenance={"a": "b"}))).provenance == {"a": "b"}


HOSTILE_FIELDS = {
    "another format": {"format": FORMAT + 1},
    "format as text": {"format": str(FORMAT)},
    "format as fraction": {"format": FORMAT + 0.5},
    "another name": {"fingerprint": "0" * 64},
    "another codec": {"codec": "zip"},
    "another model": {"model": "c3" * 32},
    "a surrogate": {"model": "\ud800"},
    "another scope": {"scope": "11" * 16},
    "a short scope": {"scope": "00"},
    "other ids": {"token_ids": [1, 2, 3, 4, 5]},
    "ids beyond 64 bits": {"token_ids": [2**70]},
    "ids as text": {"token_ids": "10001"},
    "ids as fractions": {"token_ids": [float(i) for i in GOOD.entry.token_ids]},
    "no ids": {"token_ids": None},
    "truth for one": {"sink_ids": [True, 7]},
    "a dtype of the same width": {"dtype": "int32"},
    "wide dtype": {"dtype": "float64"},
    "no geometry": {"geometry": []},
    "negative axes": {"geometry": {"layers": -2, "kv_heads": -2, "tokens": 5, "head_dim": 3, "value_dim": 4}},
    "axes of another shape": {"geometry": {"layers": 4, "kv_heads": 1, "tokens": 5, "head_dim": 3, "value_dim": 4}},
    "axes without end": {
        "geometry": dict.fromkeys(("layers", "kv_heads", "tokens", "head_dim", "value_dim"), 10**4000)
    },
    "a sixth axis": {"geometry": dict.fromkeys(("layers", "kv_heads", "tokens", "head_dim", "value_dim", "x"), 1)},
    "provenance of numbers": {"provenance": {"a": 1}},
    "provenance as list": {"provenance": ["a"]},
    "an extra field": {"extra": 1},
}


@pytest.mark.parametrize("fields", HOSTILE_FIELDS.values(), ids=HOSTILE_FIELDS)
def test_a_well_signed_header_that_says_something_else_is_refused(fields: dict[str, object]) -> None:
    refused(forge(lambda header: header.update(fields)))


@pytest.mark.parametrize("field", ["format", "fingerprint", "codec", "model", "scope", "geometry", "token_ids"])
def test_a_header_without_a_field_is_refused(field: str) -> None:
    assert f"KeyError: '{field}'" in refused(forge(lambda fields: fields.pop(field)))


def stretch(outer: dict, name: str, **changes: object) -> None:
    outer[name] = outer[name] | changes


HOSTILE_FRAMES: dict[str, Callable[[dict], object]] = {
    "a third tensor": lambda o: o.update(extra={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
    "a missing tensor": lambda o: o.pop("values"),
    "a renamed tensor": lambda o: o.update(queries=o.pop("values")),
    "overlapping offsets": lambda o: stretch(o, "values", data_offsets=[0, 320]),
    "swapped offsets": lambda o: o.update(keys=o["values"], values=o["keys"]),
    "a gap": lambda o: stretch(o, "keys", data_offsets=[8, 248]),
    "offsets beyond the end": lambda o: stretch(o, "values", data_offsets=[240, 2**62]),
    "negative offsets": lambda o: stretch(o, "keys", data_offsets=[-240, 0]),
    "another shape": lambda o: stretch(o, "keys", shape=[2, 2, 3, 5]),
    "another dtype": lambda o: stretch(o, "keys", dtype="I32"),
    "other metadata": lambda o: o["__metadata__"].update(more="x"),
    "no metadata": lambda o: o.pop("__metadata__"),
    "metadata of numbers": lambda o: o.update(__metadata__={"kvlink": 1}),
    "a header that is a list": lambda o: o["__metadata__"].update(kvlink="[]"),
    "a header that is not JSON": lambda o: o["__metadata__"].update(kvlink="{"),
    "a header without bottom": lambda o: o["__metadata__"].update(kvlink="[" * 100_000),
    "a number without end": lambda o: o["__metadata__"].update(kvlink='{"format":' + "9" * 5000 + "}"),
    "a digest that is no hex": lambda o: o["__metadata__"].update(
        kvlink=o["__metadata__"]["kvlink"].replace('"digest":"', '"digest":"é')
    ),
    "a digest in capitals": lambda o: o["__metadata__"].update(
        kvlink=o["__metadata__"]["kvlink"].replace(json.loads(o["__metadata__"]["kvlink"])["digest"], "A" * 64)
    ),
}


@pytest.mark.parametrize("change", HOSTILE_FRAMES.values(), ids=HOSTILE_FRAMES)
def test_a_frame_that_is_not_the_canonical_one_is_refused(change: Callable[[dict], object]) -> None:
    refused(forge(outside=change))


@pytest.mark.parametrize("codec", ["half", "int8", "int4", "pruned50"])
def test_a_well_signed_header_that_names_another_codec_does_not_fit_its_tensors(codec: str) -> None:
    forged = forge(lambda header: header.update(codec=codec))
    with pytest.raises(DamagedObject, match="not the canonical one"):
        open_object(bytearray(forged), name=GOOD.name, codec=codec)


@pytest.mark.parametrize("codec", ["half", "int8", "int4", "pruned50"])
def test_the_sizes_of_every_tensor_follow_from_the_header(codec: str) -> None:
    frame = json.loads(bytes(OBJECTS[codec][8 : border(OBJECTS[codec])]))
    for name, tensor in frame.items():
        if name != "__metadata__":
            turned = [*tensor["shape"][:2], *tensor["shape"][:1:-1]]
            forged = forge(outside=partial(stretch, name=name, shape=turned), data=OBJECTS[codec])
            if turned != tensor["shape"]:
                with pytest.raises(DamagedObject, match="not the canonical one"):
                    open_object(bytearray(forged), name=GOOD.name, codec=codec)


def test_a_half_object_of_an_entry_of_16_bits_is_refused() -> None:
    made, identity = entry(dtype=torch.float16), replace(IDENTITY, dtype="float16")
    data = forge(lambda header: header.update(codec="half"), data=encode(made, identity))
    with pytest.raises(DamagedObject, match="saves nothing"):
        open_object(bytearray(data), name=fingerprint(identity, made.token_ids), codec="half")


def with_number(codec: str, name: str, number: float, place: int) -> bytes:
    """Write a number into a group of an object and sign it as anyone can."""
    data = bytearray(OBJECTS[codec])
    start = border(data)
    begin, end = json.loads(bytes(data[8:start]))[name]["data_offsets"]
    numbers = torch.frombuffer(data, dtype=torch.bfloat16, offset=start + begin, count=(end - begin) // 2)
    numbers[place] = number
    return forge(data=data)


PRUNED = ("pruned75", "pruned50", "pruned25")
LONG = specimen(tokens=12)


def pruned_object(codec: str, change: Callable[[torch.Tensor], object] = lambda positions: None) -> bytes:
    """Write other positions into a pruned object of 12 tokens and sign it as anyone can."""
    data = bytearray(encode(LONG.entry, IDENTITY, codec=codec))
    start = border(data)
    plan = json.loads(bytes(data[8:start]))["positions"]
    (begin, end), shape = plan["data_offsets"], plan["shape"]
    positions = torch.frombuffer(data, dtype=torch.int32, offset=start + begin, count=(end - begin) // 4)
    change(positions.view(shape))
    return forge(data=data)


HOSTILE_POSITIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "one beyond the end": lambda p: p[1, 0, -1].fill_(12),
    "far beyond the end": lambda p: p[1, 0, -1].fill_(2**31 - 1),
    "below zero": lambda p: p[0, 1, 0].fill_(-1),
    "far below zero": lambda p: p[0, 1, 0].fill_(-(2**31)),
    "the same twice": lambda p: p[1, 1, -2].fill_(int(p[1, 1, -1])),
    "in another order": lambda p: p.copy_(p.flip(-1)),
    "two that changed places": lambda p: p[1, 1, 1:3].copy_(p[1, 1, 1:3].flip(0).clone()),
    "not the first": lambda p: p[0, 0, 0].fill_(1),
    "not the fourth": lambda p: p[1, 1, 3].fill_(4),
    "not the last": lambda p: p[0, 0, -1].fill_(10),
}


@pytest.mark.parametrize("change", HOSTILE_POSITIONS.values(), ids=HOSTILE_POSITIONS)
@pytest.mark.parametrize("codec", PRUNED)
def test_a_well_signed_object_whose_positions_are_none_is_refused(
    codec: str, change: Callable[[torch.Tensor], object]
) -> None:
    assert open_object(bytearray(pruned_object(codec)), name=LONG.name, codec=codec).decode().is_pruned
    with pytest.raises(DamagedObject, match="its positions are not ascending ones of 12 tokens"):
        open_object(bytearray(pruned_object(codec, change)), name=LONG.name, codec=codec)


@pytest.mark.parametrize("codec", PRUNED)
def test_every_flipped_bit_of_a_pruned_object_is_found(codec: str) -> None:
    good = encode(LONG.entry, IDENTITY, codec=codec)
    data = bytearray(good)
    for place in range(len(data)):
        data[place] ^= 1 << place % 8
        with pytest.raises(DamagedObject):
            open_object(data, name=LONG.name, codec=codec)
        data[place] = good[place]
    assert open_object(data, name=LONG.name, codec=codec)


@pytest.mark.parametrize("codec", PRUNED)
def test_a_pruned_object_keeps_the_ids_and_the_length_of_the_whole_document(codec: str) -> None:
    found = open_object(encode(LONG.entry, IDENTITY, codec=codec), name=LONG.name, codec=codec)
    assert (found.geometry.tokens, found.token_ids) == (12, LONG.entry.token_ids)
    assert found.decode().num_tokens == 12


@pytest.mark.parametrize("axis", ["layers", "kv_heads", "tokens", "head_dim", "value_dim"])
@pytest.mark.parametrize("size", [0, -1, 1, 13, 2**70])
def test_a_pruned_object_of_other_sizes_than_it_says_is_refused(axis: str, size: int) -> None:
    data = encode(LONG.entry, IDENTITY, codec="pruned50")
    forged = forge(lambda header: header["geometry"].update({axis: size}), data=data)
    with pytest.raises(DamagedObject):
        open_object(bytearray(forged), name=LONG.name, codec="pruned50")


@pytest.mark.parametrize("codec", [*CODECS])
def test_what_a_pruned_object_has_left_out_no_object_can_hold(codec: str) -> None:
    read = open_object(encode(LONG.entry, IDENTITY, codec="pruned50"), name=LONG.name, codec="pruned50").decode()
    with pytest.raises(ValueError, match=r"5 of 12 tokens.*is packed by no codec.*encode the document again"):
        encode(read, IDENTITY, codec=codec)


NUMBERS = [("int8", "key_scales"), ("int8", "value_scales"), ("int4", "key_scales"), ("int4", "value_lows")]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 3e38, -3e38])
@pytest.mark.parametrize(("codec", "name"), NUMBERS)
@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
def test_a_well_signed_object_whose_groups_have_no_numbers_is_refused(
    codec: str, name: str, number: float, place: int
) -> None:
    with pytest.raises(DamagedObject, match=f"its {name} hold numbers that no entry gives"):
        open_object(bytearray(with_number(codec, name, number, place)), name=GOOD.name, codec=codec)


@pytest.mark.parametrize("number", [0.0, -0.0, -1.0])
@pytest.mark.parametrize(("codec", "name"), NUMBERS)
def test_a_scale_is_positive_and_a_low_end_need_not_be(codec: str, name: str, number: float) -> None:
    data = bytearray(with_number(codec, name, number, 0))
    if name == "value_lows":
        assert open_object(data, name=GOOD.name, codec=codec)
        return
    with pytest.raises(DamagedObject, match=f"its {name} hold"):
        open_object(data, name=GOOD.name, codec=codec)


@pytest.mark.parametrize("number", [2.0**120, 2.0**-126, 1.0])
@pytest.mark.parametrize(("codec", "name"), NUMBERS)
def test_whatever_is_taken_decodes_to_numbers(codec: str, name: str, number: float) -> None:
    found = open_object(bytearray(with_number(codec, name, number, -1)), name=GOOD.name, codec=codec).decode()
    assert found.keys.isfinite().all()
    assert found.values.isfinite().all()


def test_a_frame_that_fits_its_header_but_not_its_ids_is_refused() -> None:
    axes = {"layers": 2, "kv_heads": 5, "tokens": 2, "head_dim": 3, "value_dim": 4}

    def reshape(outer: dict) -> None:
        stretch(outer, "keys", shape=[2, 5, 2, 3])
        stretch(outer, "values", shape=[2, 5, 2, 4])

    assert "not the canonical one" in refused(forge(lambda header: header.update(geometry=axes), reshape))


def test_a_header_beyond_the_bound_is_not_even_parsed() -> None:
    data = MAX_HEADER_BYTES.to_bytes(8, "little") + bytes(MAX_HEADER_BYTES)
    assert f"its header claims {MAX_HEADER_BYTES} of {len(data)} bytes" in refused(data)


TEXT = bytes(GOOD.data[8:START])
PAYLOAD = bytes(GOOD.data[START:])
HOSTILE_BYTES = {
    "a huge length": (2**63).to_bytes(8, "little") + TEXT + PAYLOAD,
    "no header": bytes(8),
    "an empty header": framed(b"{}", PAYLOAD),
    "a list": framed(b"[]", PAYLOAD),
    "duplicate keys": framed(TEXT.replace(b'{"__metadata__"', b'{"keys":{},"__metadata__"'), PAYLOAD),
    "duplicate fields": framed(TEXT.replace(b'{\\"codec\\"', b'{\\"codec\\":\\"raw\\",\\"codec\\"'), PAYLOAD),
    "other spaces": framed(TEXT.rstrip().replace(b'{"__metadata__":', b'{ "__metadata__":'), PAYLOAD),
    "another order": framed(canonical_json(dict(sorted(json.loads(TEXT).items()))).encode()[:-1] + b" }", PAYLOAD),
    "a longer padding": framed(TEXT + b" " * 8, PAYLOAD),
    "an escape": framed(TEXT.replace(b'"keys"', b'"\\u006beys"'), PAYLOAD),
    "a second encoding": framed(TEXT.decode().encode("utf-16"), PAYLOAD),
    "an infinite id": framed(TEXT.replace(b'\\"sink_ids\\":[1,7]', b'\\"sink_ids\\":[1e999]'), PAYLOAD),
    "not text": framed(b"\xff" * 16, PAYLOAD),
    "nesting without bottom": framed(b"[" * 100_000, PAYLOAD),
}


@pytest.mark.parametrize("data", HOSTILE_BYTES.values(), ids=HOSTILE_BYTES)
def test_hostile_bytes_are_refused_before_the_payload_is_read(data: bytes) -> None:
    with pytest.raises(DamagedObject, match=GOOD.name):
        check_head(data, name=GOOD.name, codec="raw")
    refused(data)


def test_a_stock_reader_accepts_what_only_the_frame_check_refuses() -> None:
    """The check is stricter than the format, and that is the point."""
    assert set(load(HOSTILE_BYTES["other spaces"])) == {"keys", "values"}
    refused(HOSTILE_BYTES["other spaces"])
