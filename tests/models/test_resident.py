"""A resident's keys are what the model caches at local positions; a pruned one's, row by row and head by head."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvlink.core.entry import CacheEntry, same_bits
from kvlink.models.resident import Resident
from kvlink.models.runner import Runner
from kvlink.store.codecs import CODECS
from kvlink.store.codecs.base import geometry_of
from tiny_models import FAMILIES, random_ids, tiny_runner

IDS = random_ids(24, seed=1)
SINK = random_ids(5, seed=2)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
families = pytest.mark.parametrize("family", FAMILIES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def cached(runner: Runner, offset: int = 0) -> tuple[Tensor, Tensor]:
    """Return keys (rotated) and values that the model itself caches for IDS at an offset."""
    cache = runner._encode([IDS], prefix=None, offset=offset)
    return torch.stack(cache.cached_keys)[:, 0], torch.stack(cache.values)[:, 0]


def pruned(entry: CacheEntry, codec: str) -> CacheEntry:
    made, geometry = CODECS[codec], geometry_of(entry)
    return made.unpack(made.pack(entry), geometry=geometry, dtype=entry.keys.dtype, token_ids=entry.token_ids)


@families
@dtypes
def test_keys_and_values_are_the_very_bits_that_the_model_caches_from_position_0(
    family: str, dtype: torch.dtype
) -> None:
    runner = tiny_runner(family, dtype)
    entry, (keys, values) = runner.encode([IDS])[0], cached(runner)
    before = entry.keys.clone()
    resident = Resident.of(entry, runner)
    assert same_bits(resident.keys, keys)
    assert same_bits(resident.values, values)
    assert same_bits(entry.keys, before)
    assert all(tensor[layer].is_contiguous() for tensor in (resident.keys, resident.values) for layer in range(2))


@families
def test_unrotated_keys_and_keys_of_other_positions_are_not_those(family: str) -> None:
    runner = tiny_runner(family, torch.float32)
    entry = runner.encode([IDS])[0]
    resident = Resident.of(entry, runner)
    assert not torch.equal(resident.keys[0], entry.keys[0])
    assert not torch.equal(resident.keys[0], cached(runner, offset=1)[0][0])


@families
@dtypes
def test_behind_a_sink_prefix_positions_are_those_of_the_segment_alone(family: str, dtype: torch.dtype) -> None:
    runner = tiny_runner(family, dtype)
    resident = Resident.of(runner.encode([IDS], prefix=runner.prefix(SINK))[0], runner)
    assert same_bits(resident.keys[0], cached(runner)[0][0])  # layer 0 has not attended yet


@families
@pytest.mark.parametrize("codec", ["pruned75", "pruned25"])
def test_each_head_of_a_pruned_segment_holds_its_own_rows_at_their_own_positions(family: str, codec: str) -> None:
    runner = tiny_runner(family, torch.float32)
    entry = pruned(runner.encode([IDS])[0], codec)
    resident = Resident.of(entry, runner)
    assert entry.kept is not None
    assert resident.is_pruned
    assert resident.keys.shape == entry.keys.shape
    assert resident.num_tokens == len(IDS)
    assert same_bits(resident.values, entry.values)
    for layer, head in torch.cartesian_prod(*map(torch.arange, entry.keys.shape[:2])).tolist():
        alone = runner.rotary.rotate(entry.keys, entry.kept[layer, head])
        assert same_bits(resident.keys[layer, head], alone[layer, head])
        assert same_bits(resident.keys[layer, head], cached(runner)[0][layer, head, entry.kept[layer, head].long()])


@pytest.mark.parametrize("family", ["llama", "glm", "phi"])
def test_rows_of_a_pruned_segment_are_not_rotated_one_behind_the_other_nor_all_heads_alike(family: str) -> None:
    runner = tiny_runner(family, torch.float32)
    entry = pruned(runner.encode([IDS])[0], "pruned50")
    resident = Resident.of(entry, runner)
    assert entry.kept is not None
    assert not torch.equal(entry.kept[0, 0], entry.kept[0, 1])
    assert not torch.equal(resident.keys, runner.rotary.rotate(entry.keys, torch.arange(entry.keys.shape[2])))
    assert not torch.equal(resident.keys[0, 1], runner.rotary.rotate(entry.keys, entry.kept[0, 0])[0, 1])


def test_a_segment_of_which_everything_was_kept_is_a_whole_one() -> None:
    runner = tiny_runner("llama", torch.float32)
    entry = runner.encode([IDS])[0]
    kept = torch.arange(len(IDS), dtype=torch.int32).expand(*entry.keys.shape[:2], -1)
    resident = Resident.of(replace(entry, kept=kept), runner)
    assert not resident.is_pruned
    assert same_bits(resident.keys, Resident.of(entry, runner).keys)


def test_values_are_the_memory_of_the_entry_and_keys_are_not() -> None:
    runner = tiny_runner("llama", torch.float32)
    for entry in (runner.encode([IDS])[0], pruned(runner.encode([IDS])[0], "pruned50")):
        resident = Resident.of(entry, runner)
        assert resident.values.data_ptr() == entry.values.data_ptr()
        assert resident.keys.untyped_storage().data_ptr() != entry.keys.untyped_storage().data_ptr()
        assert resident.num_bytes == entry.keys.nbytes + entry.values.nbytes
        assert resident.token_ids == IDS
        copied = Resident.of(entry, runner, copy_values=True)
        assert copied.values.untyped_storage().data_ptr() != entry.values.untyped_storage().data_ptr()
        assert same_bits(copied.values, resident.values)


def test_what_lies_scattered_or_is_of_another_dtype_is_copied_into_one_piece() -> None:
    runner = tiny_runner("llama", torch.float32)
    entry = runner.encode([IDS])[0]
    keys, values = (
        tensor.transpose(1, 2).contiguous().transpose(1, 2).double() for tensor in (entry.keys, entry.values)
    )
    resident = Resident.of(CacheEntry(keys, values, IDS), runner)
    assert resident.keys.is_contiguous()
    assert resident.values.is_contiguous()
    assert same_bits(resident.keys, Resident.of(entry, runner).keys)
    assert same_bits(resident.values, entry.values)
