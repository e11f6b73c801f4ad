"""Scores are what hand-worked examples and their sources' definitions say; intervals are what a closed form says."""

import math
import tracemalloc
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvlink.core import scores
from kvlink.core.scores import (
    RESAMPLES,
    agreement,
    exact_match,
    f1,
    kl,
    nll,
    normalise,
    paired_interval,
    substring,
)


def logits(*rows: Sequence[float]) -> Tensor:
    """Return logits whose softmax is these probabilities; each row is moved by a constant, which changes nothing."""
    return torch.tensor(rows, dtype=torch.float64).log() + torch.arange(1.0, len(rows) + 1)[:, None]


# --- distances ------------------------------------------------------------------------------------------------------


def test_nll_is_the_mean_of_minus_the_logarithms_of_what_the_ids_were_given() -> None:
    given_ = logits((0.5, 0.25, 0.25), (0.1, 0.8, 0.1))
    assert nll(given_, torch.tensor([0, 1])) == pytest.approx((math.log(2) - math.log(0.8)) / 2)


def test_nll_of_an_even_distribution_is_the_logarithm_of_the_vocabulary() -> None:
    assert nll(torch.zeros(3, 259), torch.tensor([0, 7, 258])) == pytest.approx(math.log(259))


def test_kl_is_the_sum_of_p_times_log_p_over_q() -> None:
    found = kl(logits((0.5, 0.5)), logits((0.25, 0.75)))
    assert found == pytest.approx(0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75))


def test_kl_is_taken_from_the_reference_to_the_method() -> None:
    found = kl(logits((0.25, 0.75)), logits((0.5, 0.5)))
    assert found == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))


def test_kl_is_a_mean_over_tokens() -> None:
    found = kl(logits((0.5, 0.5), (0.9, 0.1)), logits((0.25, 0.75), (0.9, 0.1)))
    assert found == pytest.approx(0.25 * math.log(4 / 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_kl_of_a_distribution_to_itself_is_zero(dtype: torch.dtype) -> None:
    one = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert kl(one, one.clone()) == 0


@given(st.integers(0, 10_000), st.sampled_from([1e-9, 1e-7, 1e-5, 1.0]))
def test_kl_is_never_negative(seed: int, distance: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(2, 50, generator=generator, dtype=torch.float64) * 5
    assert kl(one, one + distance * torch.randn(2, 50, generator=generator)) >= 0


def test_an_id_that_both_rule_out_adds_nothing_to_kl() -> None:
    found = kl(logits((0.5, 0.5, 0.0)), logits((0.25, 0.75, 0.0)))
    assert found == pytest.approx(0.5 * math.log(4 / 3))


def test_a_method_that_rules_out_what_the_reference_believes_is_infinitely_far() -> None:
    assert kl(logits((0.5, 0.5)), logits((1.0, 0.0))) == math.inf


def test_logits_that_are_not_numbers_are_not_taken_for_equal_ones() -> None:
    assert math.isnan(kl(logits((0.5, 0.5)), torch.full((1, 2), math.nan)))


def test_agreement_is_the_share_of_tokens_with_the_same_most_likely_id() -> None:
    reference = logits((0.6, 0.4), (0.6, 0.4), (0.1, 0.9), (0.2, 0.8))
    assert agreement(reference, logits((0.9, 0.1), (0.4, 0.6), (0.4, 0.6), (0.1, 0.9))) == 0.75


@pytest.mark.parametrize("score", [kl, agreement])
def test_distances_do_not_depend_on_a_constant_that_is_added_to_logits(score: Callable[..., float]) -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(4, 20, generator=generator, dtype=torch.float64) for _ in range(2))
    assert score(one + 3, other - 5) == pytest.approx(score(one, other))


# --- texts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("The Cat", "cat"),
        ("  two \n  words\t", "two words"),
        ("An apple, a pear & the plum!", "apple pear plum"),
        ("U.S.", "us"),
        ("twenty-one", "twentyone"),
        ("theory of another analogy", "theory of another analogy"),  # articles are whole words
        ("the-end", "theend"),  # punctuation goes first: what it held together is one word
        ("A", ""),
        ("?!", ""),
        ("ÄRGER", "ärger"),
        ("“quoted”", "“quoted”"),  # SQuAD knows ASCII punctuation alone
        ("", ""),
    ],
    ids=ascii,
)
def test_a_text_is_normalised_as_squad_does_it(text: str, wanted: str) -> None:
    assert normalise(text) == wanted


@pytest.mark.parametrize(
    ("found", "answer", "em", "f1_"),
    [
        ("The cat sat.", "cat sat", 1, 1),
        ("PARIS", "paris", 1, 1),
        ("the cat sat", "a cat sat down", 0, 0.8),  # 2 of 2 words right, 2 of 3 found
        ("x x y", "x x z", 0, 2 / 3),  # a word counts as often as both have it
        ("x x x", "x z", 0, 0.4),
        ("sat cat", "cat sat", 0, 1),  # order does not count for F1
        ("dog", "cat", 0, 0),
        ("in Paris, France", "Paris", 0, 0.5),
        ("", "", 1, 1),
        ("the", "!", 1, 1),  # both are empty once they are normalised
        ("", "cat", 0, 0),
        ("cat", "the", 0, 0),
    ],
    ids=ascii,
)
def test_exact_match_and_f1_are_those_of_squad(found: str, answer: str, em: float, f1_: float) -> None:
    assert (exact_match(found, [answer]), f1(found, [answer])) == (em, pytest.approx(f1_))


@pytest.mark.parametrize(
    ("found", "answer", "wanted"),
    [
        ("It was the Eiffel Tower, I think.", "Eiffel tower", 1),
        ("The Eiffel-Tower", "Eiffel Tower", 0),
        ("1987", "87", 1),  # the paper's metric looks for characters, not for words
        ("tower", "Eiffel tower", 0),
        ("", "cat", 0),
        ("the United States of America", "United States of the America", 1),
    ],
    ids=ascii,
)
def test_substring_looks_for_the_normalised_answer_in_the_normalised_text(
    found: str, answer: str, wanted: float
) -> None:
    assert substring(found, [answer]) == wanted


@pytest.mark.parametrize("score", [exact_match, f1, substring])
def test_the_best_alias_counts(score: Callable[..., float]) -> None:
    assert score("New York City", ["Boston", "NYC", "new york city", ""]) == 1


def test_f1_is_the_best_of_all_aliases_and_no_mean() -> None:
    assert f1("the cat sat", ["dog", "cat sat down", "cat"]) == pytest.approx(0.8)


@pytest.mark.parametrize("score", [exact_match, f1, substring])
def test_without_answers_a_text_scores_nothing(score: Callable[..., float]) -> None:
    assert score("", []) == 0


# --- intervals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 30])
def test_a_difference_that_is_the_same_in_all_rows_has_an_interval_without_width(n: int) -> None:
    baseline = [float(row) for row in range(n)]
    found = paired_interval([value + 0.25 for value in baseline], baseline)
    assert (found.difference, found.low, found.high) == (0.25, 0.25, 0.25)


def binomial_quantile(n: int, p: float, share: float) -> int:
    """Return the smallest count whose cumulative probability reaches `share`, computed exactly."""
    below = 0.0
    for count in range(n + 1):
        below += math.comb(n, count) * p**count * (1 - p) ** (n - count)
        if below >= share:
            return count
    return n


@pytest.mark.parametrize(("n", "ones"), [(8, 4), (15, 12), (20, 10), (40, 10), (100, 52), (200, 100)])
def test_the_interval_of_data_of_two_values_ends_at_the_quantiles_of_the_binomial(n: int, ones: int) -> None:
    found = paired_interval([1.0] * ones + [0.0] * (n - ones), [0.0] * n)
    ends = [binomial_quantile(n, ones / n, share) / n for share in (0.025, 0.975)]
    assert [found.low, found.high] == pytest.approx(ends)


def test_the_difference_is_that_of_the_means() -> None:
    assert paired_interval([1.0, 4.0, 4.0], [0.0, 1.0, 2.0]).difference == pytest.approx(2.0)


def test_rows_are_resampled_in_pairs() -> None:
    values, baseline = [0.0, 100.0, 1000.0], [1.0, 101.0, 1001.0]
    found = paired_interval(values, baseline)
    assert (found.low, found.high) == (-1, -1)


def noise(seed: int) -> list[float]:
    return torch.randn(25, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()


def test_an_interval_is_the_same_each_time() -> None:
    assert paired_interval(noise(1), noise(2)) == paired_interval(noise(1), noise(2))


def test_the_seed_is_zero_and_ten_thousand_resamples_are_drawn_unless_others_are_asked_for() -> None:
    assert paired_interval(noise(1), noise(2)) == paired_interval(noise(1), noise(2), seed=0, resamples=10_000)
    assert RESAMPLES == 10_000


def test_another_seed_draws_other_resamples() -> None:
    assert paired_interval(noise(1), noise(2)).low != paired_interval(noise(1), noise(2), seed=1).low


@pytest.mark.parametrize(("values", "baseline"), [(1, 3), (3, 1), (2, 3), (0, 1), (1, 0)])
def test_rows_that_are_no_pairs_raise(values: int, baseline: int) -> None:
    with pytest.raises(ValueError, match=f"{values} rows cannot be paired with {baseline}"):
        paired_interval([1.0] * values, [0.0] * baseline)


def test_no_rows_have_no_interval() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        paired_interval([], [])


@pytest.mark.parametrize("picks", [1, 7, 25, 26, 40, 333])
def test_how_many_picks_are_held_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch, picks: int) -> None:
    wanted = paired_interval(noise(1), noise(2), resamples=101)
    monkeypatch.setattr(scores, "_PICKS", picks)
    assert paired_interval(noise(1), noise(2), resamples=101) == wanted


def test_the_resamples_are_those_of_one_draw() -> None:
    differences = np.subtract(noise(1), noise(2))
    picks = np.random.default_rng(0).integers(0, 25, (RESAMPLES, 25))
    low, high = np.percentile(differences[picks].mean(axis=1), [2.5, 97.5])
    found = paired_interval(noise(1), noise(2))
    assert (found.low, found.high) == (low, high)


def test_many_rows_and_resamples_take_little_memory() -> None:
    values, baseline = np.random.default_rng(1).normal(size=(2, 10_000)).tolist()
    tracemalloc.start()
    paired_interval(values, baseline, resamples=1_000)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 64 * 2**20  # all picks and differences at a time would be 160 MB
