"""Penalties, filters and the draw, held to plain loops over a row."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlink.core import sampling

# eighths, so that ties are frequent and sums of a few are exact
LOGITS = st.lists(st.integers(-24, 24).map(lambda n: n / 8), min_size=1, max_size=9)
ROWS = st.integers(1, 9).flatmap(
    lambda vocab: st.lists(
        st.lists(st.integers(-24, 24).map(lambda n: n / 8), min_size=vocab, max_size=vocab), min_size=1
    )
)


def kept(logits: Tensor) -> list[set[int]]:
    return [{i for i, logit in enumerate(row) if logit > -math.inf} for row in logits.tolist()]


def probabilities(row: Sequence[float]) -> list[float]:
    weights = [math.exp(logit) for logit in row]
    return [weight / math.fsum(weights) for weight in weights]


def plain_top_k(row: Sequence[float], k: int) -> set[int]:
    return {i for i, logit in enumerate(row) if sum(other > logit for other in row) < k}


def plain_min_p(row: Sequence[float], min_p: float) -> set[int]:
    return {i for i, logit in enumerate(row) if math.exp(logit - max(row)) >= min_p}


def plain_top_p(row: Sequence[float], top_p: float) -> set[int]:
    shares = probabilities(row)
    found: set[int] = set()
    for level in sorted(set(row), reverse=True):
        for i in (i for i, logit in enumerate(row) if logit == level):
            # one by one: the set is full as soon as it has enough, but an equal token is never left out
            found.add(i)
        if math.fsum(shares[i] for i in found) >= top_p:
            break
    return found


# --- filters --------------------------------------------------------------------------------------------------------


@given(rows=ROWS, data=st.data())
@settings(max_examples=200)
def test_top_k_keeps_what_fewer_than_k_tokens_beat(rows: list[list[float]], data: st.DataObject) -> None:
    ks = data.draw(st.lists(st.integers(1, 12), min_size=len(rows), max_size=len(rows)))
    found = kept(sampling.keep_top_k(torch.tensor(rows), ks))
    assert found == [plain_top_k(row, k) for row, k in zip(rows, ks, strict=True)]


@given(rows=ROWS, data=st.data())
@settings(max_examples=200)
def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(rows: list[list[float]], data: st.DataObject) -> None:
    shares = st.sampled_from([0.0, 1e-9, 0.0123, 0.1, 0.5, 0.9, 1.0])
    ps = data.draw(st.lists(shares, min_size=len(rows), max_size=len(rows)))
    found = kept(sampling.keep_min_p(torch.tensor(rows), ps))
    assert found == [plain_min_p(row, p) for row, p in zip(rows, ps, strict=True)]


@pytest.mark.parametrize("few", [1, 2, 1024])
@given(rows=ROWS, data=st.data())
@settings(max_examples=200)
def test_top_p_keeps_the_fewest_likeliest_tokens_that_have_enough(
    few: int, rows: list[list[float]], data: st.DataObject
) -> None:
    shares = st.sampled_from([1e-9, 0.0123, 0.101, 0.5003, 0.9007, 0.999])
    ps = data.draw(st.lists(shares, min_size=len(rows), max_size=len(rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_FEW", few)
        found = kept(sampling.keep_top_p(torch.tensor(rows), ps))
    assert found == [plain_top_p(row, p) for row, p in zip(rows, ps, strict=True)]


def test_top_p_looks_at_the_whole_vocabulary_where_a_few_do_not_have_enough() -> None:
    flat, peaked = torch.zeros(4000), torch.zeros(4000)
    flat[:2000] = 1e-3  # no ties between the halves
    peaked[7] = 20.0
    found = kept(sampling.keep_top_p(torch.stack([flat, peaked]), [0.9, 0.9]))
    assert [len(row) for row in found] == [4000, 1]
    assert kept(sampling.keep_top_p(flat[None], [0.5])) == [{*range(2000)}]


@pytest.mark.parametrize(
    ("keep", "value", "wanted"),
    [
        (sampling.keep_top_k, 1, {1, 2}),
        (sampling.keep_top_k, 2, {1, 2}),
        (sampling.keep_top_k, 3, {0, 1, 2}),
        (sampling.keep_top_k, 99, {0, 1, 2, 3}),
        (sampling.keep_top_p, 1e-12, {1, 2}),
        (sampling.keep_top_p, 0.9, {0, 1, 2}),
        (sampling.keep_top_p, 0.9999999999, {0, 1, 2, 3}),
        (sampling.keep_min_p, 1.0, {1, 2}),
        (sampling.keep_min_p, 0.2, {0, 1, 2}),
        (sampling.keep_min_p, 0.0, {0, 1, 2, 3}),
    ],
)
def test_ties_stay_together_at_every_border(
    keep: Callable[[Tensor, list[float]], Tensor], value: float, wanted: set[int]
) -> None:
    assert kept(keep(torch.tensor([[1.0, 2.0, 2.0, -1.0]]), [value])) == [wanted]


@pytest.mark.parametrize(
    ("keep", "value"), [(sampling.keep_top_k, 2), (sampling.keep_top_p, 0.97), (sampling.keep_min_p, 0.04)]
)
def test_a_filter_changes_no_logit_that_it_keeps(keep: Callable[[Tensor, list[float]], Tensor], value: float) -> None:
    logits = torch.tensor([[1.0, 5.0, -math.inf, 2.0]])
    before = logits.clone()
    assert keep(logits, [value]).tolist() == [[-math.inf, 5.0, -math.inf, 2.0]]
    assert torch.equal(logits, before)


# --- temperature and penalties --------------------------------------------------------------------------------------


@given(row=LOGITS, temperature=st.floats(0.05, 5))
def test_temperature_divides_differences(row: list[float], temperature: float) -> None:
    found = sampling.scale(torch.tensor([row]), [temperature])[0].tolist()
    assert found == pytest.approx([(logit - max(row)) / temperature for logit in row], rel=1e-5)


@pytest.mark.parametrize("temperature", [1e-320, 1e-38, 1e-6])
def test_a_tiny_temperature_leaves_the_likeliest_alone(temperature: float) -> None:
    scaled = sampling.scale(torch.tensor([[80.0, 79.9, -80.0, -math.inf]]), [temperature])
    assert scaled.exp().tolist() == [[1.0, 0.0, 0.0, 0.0]]


@given(row=LOGITS, data=st.data())
def test_each_token_gets_its_own_penalties(row: list[float], data: st.DataObject) -> None:
    def drawn(*values: float) -> list[float]:
        return data.draw(st.lists(st.sampled_from(values), min_size=len(row), max_size=len(row)))

    counts, repetition = drawn(1.0, 2.0, 3.0), drawn(0.5, 1.0, 1.25, 2.0)
    presence, frequency = drawn(-2.0, 0.0, 1.5), drawn(-2.0, 0.0, 0.25)
    wanted = [
        (logit / factor if logit > 0 else logit * factor) - once - each * count
        for logit, count, factor, once, each in zip(row, counts, repetition, presence, frequency, strict=True)
    ]
    found = sampling.penalise(
        torch.tensor(row),
        torch.tensor(counts),
        repetition=torch.tensor(repetition),
        presence=torch.tensor(presence),
        frequency=torch.tensor(frequency),
    )
    assert found.tolist() == pytest.approx(wanted, abs=1e-5)


# --- the draw -------------------------------------------------------------------------------------------------------


def test_draws_have_the_distribution_of_the_logits() -> None:
    row, draws = [0.0, 1.0, -math.inf, 2.5, -1.0], 40_000
    numbers = random.Random(5)
    ids = sampling.draw(torch.tensor([row]).expand(draws, -1), [numbers.random() for _ in range(draws)])
    counts = Counter(ids.tolist())
    assert set(counts) == {0, 1, 3, 4}
    shares = probabilities(row)
    square = sum((counts[i] - draws * shares[i]) ** 2 / (draws * shares[i]) for i in counts)
    assert square < 16.3  # the 99.9th percentile of three degrees of freedom
    wrong = probabilities([0.0, 1.05, -math.inf, 2.5, -1.0])  # the test sees a logit that is off by a twentieth
    assert sum((counts[i] - draws * wrong[i]) ** 2 / (draws * wrong[i]) for i in counts) > 16.3


@pytest.mark.parametrize("uniform", [0.0, math.nextafter(1.0, 0.0)])
@given(row=LOGITS, first=st.integers(0, 3), last=st.integers(0, 3))
def test_an_excluded_token_is_never_drawn(uniform: float, row: list[float], first: int, last: int) -> None:
    logits = torch.tensor([[*[-math.inf] * first, *row, *[-math.inf] * last]])
    wanted = first if uniform == 0 else first + len(row) - 1
    assert sampling.draw(logits, [uniform]).tolist() == [wanted]


@given(rows=ROWS, data=st.data())
def test_a_row_is_drawn_alone_as_among_others(rows: list[list[float]], data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=len(rows), max_size=len(rows)))
    together = sampling.draw(torch.tensor(rows), numbers).tolist()
    assert together == [sampling.draw(torch.tensor([row]), [u]).item() for row, u in zip(rows, numbers, strict=True)]
