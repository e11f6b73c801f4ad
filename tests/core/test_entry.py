"""An entry fits together or is not made, and two entries are equal only bit by bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink.core.entry import CacheEntry

claim = settings(derandomize=True, deadline=None)


def entry(*, tokens: int = 3, value_dim: int = 4, dtype: torch.dtype = torch.float32) -> CacheEntry:
    keys = torch.arange(2 * 1 * tokens * 4).reshape(2, 1, tokens, 4).to(dtype)
    values = torch.ones(2, 1, tokens, value_dim, dtype=dtype)
    return CacheEntry(keys, values, tuple(range(tokens)))


@claim
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5)),
    st.tuples(st.integers(1, 8), st.integers(1, 8)),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
)
def test_tokens_and_bytes_are_those_of_keys_and_values_together(shape, dims, dtype):
    layers, heads, tokens = shape
    keys, values = (torch.zeros(*shape, dim, dtype=dtype) for dim in dims)
    made = CacheEntry(keys, values, tuple(range(tokens)))
    assert made.num_tokens == tokens
    assert made.num_bytes == layers * heads * tokens * sum(dims) * dtype.itemsize
    assert made.equals(CacheEntry(keys.clone(), values.clone(), made.token_ids))


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ((2, 1, 4, 4), (2, 1, 4, 4)),
        ((2, 1, 2, 4), (2, 1, 3, 4)),
        ((2, 1, 3, 4), (2, 1, 2, 4)),
        ((1, 1, 3, 4), (2, 1, 3, 4)),
        ((2, 1, 3, 4), (2, 2, 3, 4)),
    ],
)
def test_shapes_that_do_not_fit_together_are_refused_with_all_of_them(keys, values):
    made = entry()
    for name, value in (("keys", torch.zeros(keys)), ("values", torch.zeros(values)), ("token_ids", (7, 8, 9))):
        object.__setattr__(made, name, value)
    with pytest.raises(ValueError, match="an entry of 3 tokens") as caught:
        made.__post_init__()  # the check itself: the run-time checker of the suite would be there first
    assert str(keys) in str(caught.value)
    assert str(values) in str(caught.value)


def test_entries_of_other_ids_keys_values_or_shapes_are_not_equal():
    made = entry()
    assert made.equals(entry())
    assert not made.equals(CacheEntry(made.keys, made.values, (0, 1, 5)))
    assert not made.equals(CacheEntry(made.keys + 1, made.values, made.token_ids))
    assert not made.equals(CacheEntry(made.keys, made.values + 1, made.token_ids))
    assert not made.equals(entry(value_dim=8))
    assert not made.equals(entry(tokens=2))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float16), (torch.float16, torch.bfloat16)], ids=str)
def test_equal_numbers_in_another_dtype_are_not_equal(dtypes):
    zeros = [torch.zeros(2, 1, 3, 4, dtype=dtype) for dtype in dtypes]
    assert torch.equal(*zeros)
    one, other = (CacheEntry(tensor, tensor, (1, 2, 3)) for tensor in zeros)
    assert not one.equals(other)


def test_zero_and_minus_zero_are_not_equal_but_a_nan_equals_itself():
    made = entry()
    zeros = torch.zeros_like(made.values)
    assert not CacheEntry(made.keys, zeros, made.token_ids).equals(CacheEntry(made.keys, -zeros, made.token_ids))
    unset = CacheEntry(made.keys, torch.full_like(made.values, torch.nan), made.token_ids)
    assert unset.equals(CacheEntry(made.keys, unset.values.clone(), made.token_ids))


def test_views_that_are_not_contiguous_are_compared_by_what_they_hold():
    made = entry()
    strided = made.keys.transpose(0, 2).contiguous().transpose(0, 2)
    assert not strided.is_contiguous()
    assert made.equals(CacheEntry(strided, made.values, made.token_ids))


def test_an_entry_has_no_equality_operator_that_could_compare_tensors():
    made = entry()
    assert made == made  # noqa: PLR0124
    assert made != entry()


def pruned(*, tokens: int = 6, rows: int = 3) -> CacheEntry:
    kept = torch.tensor([0, 2, 5][:rows], dtype=torch.int32).expand(2, 1, -1)
    return CacheEntry(torch.ones(2, 1, rows, 4), torch.ones(2, 1, rows, 4), tuple(range(tokens)), kept)


def test_a_pruned_entry_has_the_length_of_its_document_and_the_bytes_of_its_rows():
    made = pruned()
    assert (made.num_tokens, made.is_pruned) == (6, True)
    assert made.num_bytes == 2 * 3 * (4 + 4) * 4 + 2 * 3 * 4
    assert not entry().is_pruned
    assert not pruned(tokens=3).is_pruned


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kept", torch.zeros(2, 1, 2, dtype=torch.int32)),
        ("kept", torch.zeros(1, 1, 3, dtype=torch.int32)),
        ("kept", torch.zeros(2, 2, 3, dtype=torch.int32)),
        ("values", torch.ones(2, 1, 2, 4)),
        ("token_ids", (7, 8)),
    ],
)
def test_rows_and_tokens_that_do_not_fit_together_are_refused(name, value):
    made = pruned()
    object.__setattr__(made, name, value)
    with pytest.raises(ValueError, match=f"a pruned entry of {made.num_tokens} tokens needs keys, values and kept"):
        made.__post_init__()


def test_pruned_entries_of_other_tokens_are_not_equal():
    made = pruned()
    assert made.equals(pruned())
    assert not made.equals(CacheEntry(made.keys, made.values, made.token_ids, made.kept + 1))
    whole = pruned(tokens=3)
    assert not whole.equals(CacheEntry(whole.keys, whole.values, whole.token_ids))
    assert not CacheEntry(whole.keys, whole.values, whole.token_ids).equals(whole)
