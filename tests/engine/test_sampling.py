"""What requests ask for meets their logits: alone or in any batch the same, and one that fails fails alone."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlink import InputError
from kvlink.core.errors import KVLinkError, ModelError
from kvlink.engine.sampling import Sampled, Sampler, SamplingParams, sample

VOCAB = 40
END = 2


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sampler(**asked: Any) -> Sampler:
    return Sampler(SamplingParams(**asked), end_ids=[END])


def ids_of(found: Sequence[Sampled | KVLinkError]) -> list[int]:
    assert all(isinstance(one, Sampled) for one in found)
    return [one.id for one in found if isinstance(one, Sampled)]


def answer(one: Sampler, steps: int = 12, seed: int = 0) -> list[int]:
    """Generate from logits that depend on the step and the token before."""
    ids = [0]
    for step in range(steps):
        ids += ids_of(sample(logits_of(1000 * step + ids[-1] + seed), [one]))
    return ids[1:]


# --- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_by_default_the_first_of_the_likeliest_tokens_is_taken(dtype: torch.dtype) -> None:
    logits = logits_of(0, rows=5).to(dtype)
    logits[0] = 1.0
    assert ids_of(sample(logits, [sampler() for _ in range(5)])) == logits.argmax(-1).tolist()
    assert sample(logits[:1], [sampler()]) == [Sampled(0)]


def test_a_greedy_request_ignores_filters_and_seeds_but_not_penalties() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.9]])
    one = sampler(top_p=0.1, min_p=1.0, top_k=1, seed=3, presence_penalty=0.2)
    assert [ids_of(sample(logits, [one]))[0] for _ in range(3)] == [1, 2, 1]


def test_nobody_is_given_no_token() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []


# --- seeds and batches ----------------------------------------------------------------------------------------------

ASKED = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 4.0]),
        "top_p": st.sampled_from([0.2, 0.9, 1.0]),
        "top_k": st.sampled_from([None, 1, 5, 99]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, -0.5]),
        "seed": st.integers(0, 2**64 - 1),
        "logprobs": st.sampled_from([None, 0, 3]),
        "min_new_tokens": st.sampled_from([0, 3]),
    }
)


@given(asked=st.lists(ASKED, min_size=1, max_size=6), order=st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_a_request_gets_the_same_tokens_alone_and_in_any_batch(asked: list[dict[str, Any]], order: Any) -> None:
    steps = [logits_of(step, rows=len(asked)) for step in range(5)]
    alone = [[sample(logits[row : row + 1], [one])[0] for logits in steps] for row, one in enumerate(map(of, asked))]
    together: list[list[Sampled | KVLinkError]] = [[] for _ in asked]
    samplers = [*map(of, asked)]
    for logits in steps:
        rows = [*range(len(asked))]
        order.shuffle(rows)
        for row, found in zip(rows, sample(logits[rows], [samplers[row] for row in rows]), strict=True):
            together[row].append(found)
    for one, other in zip(alone, together, strict=True):
        assert ids_of(one) == ids_of(other)
        for left, right in zip(one, other, strict=True):
            assert isinstance(left, Sampled)
            assert isinstance(right, Sampled)
            assert left.logprob == pytest.approx(right.logprob, abs=1e-5)
            assert [i for i, _ in left.top] == [i for i, _ in right.top]


def of(asked: dict[str, Any]) -> Sampler:
    return sampler(**asked)


def test_the_same_seed_gives_the_same_answer_and_another_another() -> None:
    answers = [answer(sampler(temperature=1.0, seed=seed)) for seed in (7, 7, 8, 7 + 2**32)]
    assert answers[0] == answers[1]
    assert answers[0] not in answers[2:]


def test_without_a_seed_answers_differ() -> None:
    assert len({tuple(answer(sampler(temperature=2.0))) for _ in range(4)}) == 4


def test_seeds_in_a_row_draw_as_if_unrelated() -> None:
    logits = torch.zeros(1, 10)
    counts = Counter(ids_of(sample(logits, [sampler(temperature=1.0, seed=seed)]))[0] for seed in range(5000))
    assert sum((counts[i] - 500) ** 2 / 500 for i in range(10)) < 27.9  # the 99.9th percentile


def test_logits_are_left_as_they_were() -> None:
    logits = logits_of(0, rows=3)
    before = logits.clone()
    asked = sampler(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1, presence_penalty=1.0, min_new_tokens=5)
    for _ in range(3):
        sample(logits, [asked, sampler(min_new_tokens=1), sampler(temperature=1.0, top_p=0.5)])
    assert torch.equal(logits, before)


# --- filters in their order -----------------------------------------------------------------------------------------


def reached(logits: Sequence[float], **asked: Any) -> set[int]:
    row = torch.tensor([logits])
    found = sample(row.expand(400, -1), [sampler(**asked, seed=seed) for seed in range(400)])
    return set(ids_of(found))


def test_filters_see_what_temperature_and_the_filters_before_them_left() -> None:
    logits = [math.log(share) for share in (0.4, 0.3, 0.2, 0.1)]
    assert reached(logits, temperature=1.0) == {0, 1, 2, 3}
    assert reached(logits, temperature=1.0, top_p=0.55) == {0, 1}
    assert reached(logits, temperature=1.0, top_p=0.55, top_k=2) == {0}  # 0.4 of 0.7
    assert reached(logits, temperature=1.0, top_p=0.55, min_p=0.7) == {0}
    assert reached(logits, temperature=1.0, top_k=3, min_p=0.3) == {0, 1, 2}
    assert reached(logits, temperature=9.0, top_p=0.55) == {0, 1, 2}  # nearly even: three have it
    assert reached(logits, temperature=0.01) == {0}


@pytest.mark.parametrize("seed", range(3))
def test_shares_of_tokens_are_those_of_a_plain_softmax(seed: int) -> None:
    logits = logits_of(seed, vocab=6)
    scaled = [logit / 1.7 for logit in logits[0].tolist()]
    best = sorted(range(6), key=lambda i: -scaled[i])[:3]
    weights = {i: math.exp(scaled[i]) for i in best}
    draws = 3000
    one = [sampler(temperature=1.7, top_k=3, seed=n) for n in range(draws)]
    counts = Counter(ids_of(sample(logits.expand(draws, -1), one)))
    assert set(counts) <= set(best)
    wanted = {i: draws * weight / math.fsum(weights.values()) for i, weight in weights.items()}
    assert sum((counts[i] - wanted[i]) ** 2 / wanted[i] for i in best) < 13.8  # the 99.9th percentile


# --- what is remembered ---------------------------------------------------------------------------------------------


def test_a_frequency_penalty_grows_with_each_use_and_a_presence_penalty_does_not() -> None:
    logits = torch.tensor([[3.0, 2.25, 0.0]])
    one = sampler(frequency_penalty=0.5)
    assert [ids_of(sample(logits, [one]))[0] for _ in range(4)] == [0, 0, 1, 0]
    one = sampler(presence_penalty=0.5)
    assert [ids_of(sample(logits, [one]))[0] for _ in range(4)] == [0, 0, 0, 0]


def test_a_repetition_penalty_divides_what_is_above_zero_and_multiplies_what_is_below() -> None:
    one = sampler(repetition_penalty=2.0)
    assert [ids_of(sample(torch.tensor([[3.0, 2.0, 1.4]]), [one]))[0] for _ in range(3)] == [0, 1, 0]
    one = sampler(repetition_penalty=2.0)
    assert [ids_of(sample(torch.tensor([[-1.0, -1.5, -2.5]]), [one]))[0] for _ in range(3)] == [0, 1, 0]


def test_a_penalty_of_one_request_is_none_of_another() -> None:
    logits = torch.tensor([[3.0, 2.9]]).expand(2, -1)
    samplers = [sampler(presence_penalty=1.0), sampler()]
    assert [ids_of(sample(logits, samplers)) for _ in range(2)] == [[0, 0], [1, 0]]


def test_no_id_ends_an_answer_before_its_least_length() -> None:
    logits = torch.zeros(1, 4)
    logits[0, END] = 9.0
    one = sampler(min_new_tokens=2)
    assert [ids_of(sample(logits, [one]))[0] for _ in range(3)] == [0, 0, END]


# --- logprobs -------------------------------------------------------------------------------------------------------


def test_logprobs_are_the_models_own_whatever_is_asked_beside_them() -> None:
    logits = logits_of(4)
    wanted = logits[0].log_softmax(-1)
    one = sampler(logprobs=5, temperature=3.0, top_k=30, presence_penalty=2.0, seed=1, min_new_tokens=9)
    for _ in range(6):
        (found,) = sample(logits, [one])
        assert isinstance(found, Sampled)
        assert found.logprob == pytest.approx(wanted[found.id].item(), abs=1e-5)
        assert [i for i, _ in found.top] == wanted.topk(5).indices.tolist()
        assert [logprob for _, logprob in found.top] == pytest.approx(wanted.topk(5).values.tolist(), abs=1e-5)


def test_each_request_is_told_as_much_as_it_asked_for() -> None:
    found = sample(logits_of(0, rows=4), [sampler(logprobs=n) for n in (None, 0, 1, 20)])
    assert [(one.logprob is None, len(one.top)) for one in found if isinstance(one, Sampled)] == [
        (True, 0),
        (False, 0),
        (False, 1),
        (False, 20),
    ]


def test_more_alternatives_than_tokens_are_all_of_them() -> None:
    (found,) = sample(logits_of(0, vocab=3), [sampler(logprobs=20)])
    assert isinstance(found, Sampled)
    assert sorted(i for i, _ in found.top) == [0, 1, 2]
    assert math.fsum(math.exp(logprob) for _, logprob in found.top) == pytest.approx(1)


# --- one fails ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "asked",
    [{}, {"temperature": 1.0, "top_p": 0.9}, {"min_new_tokens": 4}, {"presence_penalty": 1.0}, {"logprobs": 2}],
    ids=str,
)
def test_logits_that_are_no_numbers_fail_their_request_alone(bad: float, asked: dict[str, Any]) -> None:
    logits = logits_of(0, rows=3)
    whole = sample(logits, [sampler(**asked, seed=seed) for seed in range(3)])
    logits[1, END] = bad
    samplers = [sampler(**asked, seed=seed) for seed in range(3)]
    found = sample(logits, samplers)
    assert [found[0], found[2]] == [whole[0], whole[2]]
    assert isinstance(found[1], ModelError)
    assert "check the weights" in str(found[1])
    assert [one.num_generated for one in samplers] == [1, 0, 1]


def test_a_request_to_which_nothing_is_allowed_fails_alone() -> None:
    logits = torch.full((2, 3), -math.inf)
    logits[:, END] = 1.0
    first, second = sample(logits, [sampler(min_new_tokens=1), sampler()])
    assert isinstance(first, ModelError)
    assert second == Sampled(END)


# --- what may be asked ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"top_k": 0},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"presence_penalty": 2.1},
        {"frequency_penalty": math.nan},
        {"logprobs": -1},
        {"logprobs": 21},
        {"max_new_tokens": 0},
        {"min_new_tokens": -1},
        {"min_new_tokens": 129},
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused_with_what_to_pass(asked: dict[str, Any]) -> None:
    ((name, value),) = asked.items()
    with pytest.raises(InputError, match=f"{name} is {value!r}; pass "):
        SamplingParams(**asked)


@pytest.mark.usefixtures("as_shipped")
def test_one_string_that_ends_an_answer_is_refused_where_several_are_expected() -> None:
    with pytest.raises(InputError, match="stop is '###'; pass a tuple"):
        SamplingParams(stop=cast("Any", "###"))


def test_a_schema_and_a_least_length_exclude_each_other() -> None:
    with pytest.raises(InputError, match="pass one of them"):
        SamplingParams(json_schema={}, min_new_tokens=1)


def test_a_schema_needs_its_matcher() -> None:
    with pytest.raises(InputError, match="go together"):
        sampler(json_schema={})
