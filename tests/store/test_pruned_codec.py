"""A pruned object is as large as its name says, and what it keeps it keeps bit for bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specimens import IDENTITY, entry

from kvlink.core.entry import CacheEntry, same_bits
from kvlink.core.fingerprint import fingerprint
from kvlink.core.pruning import ALWAYS, FIRST, SCORES, kept_rows
from kvlink.store import CODECS, encode, open_object
from kvlink.store.codecs.base import geometry_of
from kvlink.store.codecs.pruned import Pruned
from kvlink.store.header import Geometry

PRUNED = {"pruned75": 75, "pruned50": 50, "pruned25": 25}
DTYPES = ("bfloat16", "float16", "float32", "float64")
codecs = pytest.mark.parametrize("codec", PRUNED)


def through(codec: str, made: CacheEntry) -> CacheEntry:
    packed = CODECS[codec].pack(made)
    CODECS[codec].check(packed, geometry_of(made))
    return CODECS[codec].unpack(packed, geometry=geometry_of(made), dtype=made.keys.dtype, token_ids=made.token_ids)


@codecs
@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 1000), st.integers(1, 70))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_kept_rows_are_those_of_the_entry_bit_for_bit(codec: str, dtype: str, seed: int, tokens: int) -> None:
    made = entry(seed, tokens=tokens, dtype=getattr(torch, dtype))
    read = through(codec, made)
    assert read.kept is not None
    assert read.token_ids == made.token_ids
    for layer in range(2):
        for head in range(2):
            rows = read.kept[layer, head].tolist()
            assert rows == sorted(set(rows))
            assert {*range(min(FIRST, tokens)), tokens - 1} <= set(rows) <= set(range(tokens))
            assert same_bits(read.keys[layer, head], made.keys[layer, head, rows])
            assert same_bits(read.values[layer, head], made.values[layer, head, rows])


@codecs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [40, 100, 1000])
def test_packed_bytes_are_the_promised_share_of_raw_ones(codec: str, dtype: torch.dtype, tokens: int) -> None:
    geometry = Geometry(layers=30, kv_heads=3, tokens=tokens, head_dim=64, value_dim=64)
    row = 30 * 3 * (128 * dtype.itemsize + 4)
    raw, found = (
        sum(plan.num_bytes for plan in CODECS[name].plan(geometry, dtype).values()) for name in ("raw", codec)
    )
    assert PRUNED[codec] / 100 * raw - row < found <= PRUNED[codec] / 100 * raw


@codecs
@pytest.mark.parametrize("tokens", range(1, 8))
def test_short_documents_keep_what_is_always_kept_though_it_is_more(codec: str, tokens: int) -> None:
    read = through(codec, entry(tokens=tokens))
    assert read.keys.shape[2] >= min(ALWAYS, tokens)
    assert read.is_pruned == (read.keys.shape[2] < tokens)
    assert read.is_pruned == (tokens > ALWAYS)


def test_the_name_of_a_size_is_its_size() -> None:
    assert {name: codec.percent for name, codec in CODECS.items() if isinstance(codec, Pruned)} == PRUNED
    assert {name for name, codec in CODECS.items() if codec.prunes} == set(PRUNED)


@pytest.mark.parametrize("score", SCORES)
def test_the_score_decides_which_tokens_stay(score: str) -> None:
    made = entry(tokens=30)
    kept = Pruned(50, score=score).pack(made)["positions"]
    assert torch.equal(kept, kept_rows(SCORES[score](made.keys), kept.shape[2]))


@codecs
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tensor_of_a_file_is_aligned_for_its_dtype(codec: str, dtype: str) -> None:
    geometry = Geometry(layers=1, kv_heads=1, tokens=9, head_dim=3, value_dim=5)
    start = 0
    for plan in CODECS[codec].plan(geometry, getattr(torch, dtype)).values():
        assert start % plan.dtype.itemsize == 0
        start += plan.num_bytes


@codecs
@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e30])
def test_keys_that_cannot_be_judged_have_no_place_and_values_may_be_anything(codec: str, number: float) -> None:
    made = entry(tokens=9)
    made.values[0, 0, 0, 0] = number
    encode(made, IDENTITY, codec=codec)
    made.keys[1, 1, 5, 0] = number
    with pytest.raises(ValueError, match="cannot be judged; take raw, which holds any"):
        encode(made, IDENTITY, codec=codec)


@codecs
def test_a_pruned_entry_that_was_read_is_marked_and_copies_nothing(codec: str) -> None:
    made = entry(tokens=30)
    data = encode(made, IDENTITY, codec=codec)
    found = open_object(data, name=fingerprint(IDENTITY, made.token_ids), codec=codec)
    read = found.decode()
    assert read.is_pruned
    assert read.keys.data_ptr() == found.tensors["keys"].data_ptr()
    assert read.num_bytes == sum(tensor.nbytes for tensor in found.tensors.values())
    assert read.equals(through(codec, made))
    assert not read.equals(replace(read, kept=read.kept.flip(0)))
