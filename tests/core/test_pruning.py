"""Scores say what their papers say, and what is always kept is kept."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink.core.pruning import ALWAYS, FIRST, SCORES, expected_attention, kept_rows, keydiff, knorm

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
claim = settings(derandomize=True, deadline=None, max_examples=60)


def keys_of(seed: int = 0, *, tokens: int = 9, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 3, tokens, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_the_smallest_key_has_the_highest_norm_score() -> None:
    keys = torch.tensor([[3.0, 4.0], [0.0, 1.0], [-6.0, 8.0]]).view(1, 1, 3, 2)
    assert knorm(keys).flatten().tolist() == [-5, -1, -10]


def test_a_rotation_changes_no_norm_score() -> None:
    keys = keys_of(dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
    assert torch.allclose(knorm(keys @ turn), knorm(keys))


def test_the_key_that_points_elsewhere_has_the_highest_difference_whatever_its_length() -> None:
    keys = torch.tensor([[1.0, 0.0], [9.0, 1.0], [0.0, 0.1], [2.0, 0.1]]).view(1, 1, 4, 2)
    found = keydiff(keys).flatten()
    assert found.argmax() == 2
    assert torch.allclose(keydiff(keys * torch.tensor([1.0, 100.0, 0.01, 7.0]).view(1, 1, 4, 1)).flatten(), found)


def test_differences_are_cosines_to_the_mean_direction() -> None:
    keys = keys_of(dtype=torch.float64)
    for layer in range(2):
        for head in range(3):
            units = [key / key.norm() for key in keys[layer, head]]
            mean = sum(units) / len(units)
            wanted = torch.stack([-(unit @ mean) / mean.norm() for unit in units])
            assert torch.allclose(keydiff(keys)[layer, head], wanted)


@pytest.mark.parametrize("score", SCORES)
def test_each_layer_and_head_is_judged_by_its_own_keys(score: str) -> None:
    keys = keys_of()
    changed = keys.clone()
    changed[1, 2] = keys_of(5)[1, 2]
    before, after = (SCORES[score](these) for these in (keys, changed))
    same = (before == after).all(dim=-1)
    assert same.flatten().tolist() == [True] * 5 + [False]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_16_bits_are_judged_without_overflow(score: str, dtype: torch.dtype) -> None:
    found = SCORES[score](keys_of(dtype=dtype) * 5000)
    assert found.isfinite().all()
    assert found.shape == (2, 3, 9)


@claim
@given(st.integers(0, 1000), st.integers(1, 30), st.data())
def test_kept_tokens_are_the_first_the_last_and_the_best_of_the_others(
    seed: int, tokens: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(min(ALWAYS, tokens), tokens))
    scores = knorm(keys_of(seed, tokens=tokens))
    kept = kept_rows(scores, count)
    assert (kept.dtype, tuple(kept.shape)) == (torch.int32, (2, 3, count))
    for layer, heads in enumerate(kept.tolist()):
        for head, found in enumerate(heads):
            always = {*range(min(FIRST, tokens)), tokens - 1}
            others = sorted(set(range(tokens)) - always, key=lambda t: -scores[layer, head, t])
            assert found == sorted(always | set(others[: count - len(always)]))


def test_of_equal_scores_the_earlier_token_is_kept() -> None:
    assert kept_rows(torch.zeros(1, 1, 9), 7).flatten().tolist() == [0, 1, 2, 3, 4, 5, 8]


@pytest.mark.parametrize(("tokens", "count"), [(9, 4), (9, 10), (3, 2), (3, 4)])
def test_too_few_and_too_many_to_keep_are_refused(tokens: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"of {tokens} tokens .* can be kept, not {count}"):
        kept_rows(torch.zeros(1, 1, tokens), count)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e30])
def test_keys_that_cannot_be_judged_are_refused(score: str, number: float) -> None:
    keys = keys_of()
    keys[1, 1, 6] = number
    with pytest.raises(ValueError, match="cannot be judged"):
        SCORES[score](keys)


# --- expected attention ---------------------------------------------------------------------------------------------


def queries_of(heads: int, *, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and covariance of made-up queries, 2 layers of 4 numbers a head."""
    generator = torch.Generator().manual_seed(seed)
    mean, root = (torch.randn(2, heads, 4, *rest, generator=generator).double() for rest in ((), (4,)))
    return mean, root @ root.mT


def test_expected_attention_is_the_share_that_many_queries_give_times_the_values_norm() -> None:
    keys, values = keys_of(dtype=torch.float64) / 4, keys_of(9, dtype=torch.float64)
    mean, covariance = queries_of(6)
    found = expected_attention(keys, values, mean, covariance)
    generator = torch.Generator().manual_seed(4)
    for layer, head in ((0, 0), (1, 2)):
        shares = []
        for query_head in (2 * head, 2 * head + 1):
            root = torch.linalg.cholesky(covariance[layer, query_head])
            drawn = torch.randn(400_000, 4, generator=generator, dtype=torch.float64) @ root.T + mean[layer, query_head]
            exponentials = (drawn @ keys[layer, head].T / 2).exp().mean(dim=0)  # the expectation that the method solves
            shares.append(exponentials / exponentials.sum())
        wanted = sum(shares) / 2 * values[layer, head].norm(dim=-1)
        assert torch.allclose(found[layer, head], wanted, rtol=0.05)


def test_with_a_large_epsilon_only_the_values_count() -> None:
    keys, values = keys_of(dtype=torch.float64), keys_of(9, dtype=torch.float64)
    found = expected_attention(keys, values, *queries_of(3), epsilon=1e6)
    assert found.argsort(dim=-1).equal(values.norm(dim=-1).argsort(dim=-1))


def test_expected_attention_refuses_keys_that_are_no_numbers() -> None:
    keys = keys_of()
    keys[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="no numbers"):
        expected_attention(keys, keys_of(9), *queries_of(3))
