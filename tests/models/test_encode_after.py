"""A segment whose beginning is kept is the segment encoded anew: the rest is computed as if the whole had been."""

import pytest
import torch

from kvlink.core.entry import CacheEntry, same_bits
from kvlink.models.cache import EncodeCache
from kvlink.models.runner import Runner
from tiny_models import FAMILIES, DoublePrecision, largest, random_ids, tiny_runner

HEADER = random_ids(4, seed=77)
OLD = random_ids(60, seed=5)
KEPT = 41
NEW = (*OLD[:KEPT], *random_ids(27, seed=6))
"""Longer than the sliding windows of 16, in what is kept and in what is computed."""

families = pytest.mark.parametrize("family", FAMILIES)
sinks = pytest.mark.parametrize("sink_ids", [(), HEADER], ids=["none", "header"])


def beginning(entry: CacheEntry, count: int, ids: tuple[int, ...] | None = None) -> CacheEntry:
    """Return an entry of the first rows of another, under ids of one's choice."""
    return CacheEntry(entry.keys[:, :, :count], entry.values[:, :, :count], (ids or entry.token_ids)[:count])


def difference(one: CacheEntry, other: CacheEntry) -> float:
    """Return the largest difference of keys and of values, relative to the largest of them."""
    assert one.token_ids == other.token_ids
    return max(
        largest(one.keys - other.keys) / largest(other.keys), largest(one.values - other.values) / largest(other.values)
    )


def rebuilt(runner: Runner, sink_ids: tuple[int, ...], *, kept: int = KEPT) -> tuple[CacheEntry, CacheEntry]:
    """Return the new segment after what is kept of the old one, and encoded anew."""
    prefix = runner.prefix(sink_ids)
    old = runner.encode([OLD], prefix=prefix)[0]
    found = runner.encode_after(beginning(old, kept, NEW), NEW, prefix=prefix)
    return found, runner.encode([NEW], prefix=prefix)[0]


@families
@sinks
def test_in_float64_it_is_the_fresh_entry(family: str, sink_ids: tuple[int, ...]) -> None:
    with DoublePrecision():
        assert difference(*rebuilt(tiny_runner(family), sink_ids)) <= 1e-12


@families
@sinks
def test_in_float32_it_differs_by_rounding(family: str, sink_ids: tuple[int, ...]) -> None:
    assert difference(*rebuilt(tiny_runner(family, torch.float32), sink_ids)) <= 1e-5


@families
def test_a_beginning_one_token_too_long_is_seen(family: str) -> None:
    assert OLD[KEPT] != NEW[KEPT]
    with DoublePrecision():
        assert difference(*rebuilt(tiny_runner(family), HEADER, kept=KEPT + 1)) > 1e-3


@families
@pytest.mark.parametrize("rest", [1, 2])
def test_one_token_or_two_may_be_left(family: str, rest: int) -> None:
    runner = tiny_runner(family)
    with DoublePrecision():
        prefix = runner.prefix(HEADER)
        whole = runner.encode([NEW], prefix=prefix)[0]
        found = runner.encode_after(beginning(whole, len(NEW) - rest), NEW, prefix=prefix)
        assert difference(found, whole) <= 1e-12


@families
def test_what_was_kept_twice_is_still_exact(family: str) -> None:
    runner, third = tiny_runner(family), (*NEW[:-9], *random_ids(12, seed=8))
    with DoublePrecision():
        prefix = runner.prefix(HEADER)
        second, _ = rebuilt(runner, HEADER)
        found = runner.encode_after(beginning(second, len(NEW) - 9), third, prefix=prefix)
        assert difference(found, runner.encode([third], prefix=prefix)[0]) <= 1e-12


def test_kept_rows_are_copied_bit_for_bit_and_the_old_entry_stays() -> None:
    runner = tiny_runner("llama", torch.float32)
    prefix = runner.prefix(HEADER)
    old = runner.encode([OLD], prefix=prefix)[0]
    before = CacheEntry(old.keys.clone(), old.values.clone(), OLD)
    found = runner.encode_after(beginning(old, KEPT), NEW, prefix=prefix)
    assert same_bits(found.keys[:, :, :KEPT], old.keys[:, :, :KEPT])
    assert same_bits(found.values[:, :, :KEPT], old.values[:, :, :KEPT])
    assert old.equals(before)


def test_only_the_rest_goes_through_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, rows = tiny_runner("qwen3"), list[int]()
    update = EncodeCache.update

    def counted(self: EncodeCache, keys: torch.Tensor, values: torch.Tensor, layer: int, **rest: object) -> object:
        if layer == 0:
            rows.append(keys.shape[2])
        return update(self, keys, values, layer, **rest)

    old = runner.encode([OLD])[0]
    monkeypatch.setattr(EncodeCache, "update", counted)
    runner.encode_after(beginning(old, KEPT), NEW)
    assert rows == [len(NEW) - KEPT]


def test_a_segment_that_was_cut_off_is_not_computed_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tiny_runner("llama")
    old, short = runner.encode([OLD])[0], runner.encode([OLD[:KEPT]])[0]
    monkeypatch.setattr(Runner, "forward", None)
    found = runner.encode_after(beginning(old, KEPT), OLD[:KEPT])
    assert difference(found, short) <= 1e-5
    assert found.keys.untyped_storage().nbytes() == found.keys.nbytes


@pytest.mark.parametrize("count", [0, KEPT + 1])
def test_what_is_no_beginning_is_refused(count: int) -> None:
    runner = tiny_runner("llama")
    old = runner.encode([OLD])[0]
    with pytest.raises(ValueError, match="does not begin with"):
        runner.encode_after(beginning(old, count), NEW)
