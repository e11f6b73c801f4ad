"""Losses are what the formulas say: zero where nothing is missing, never more than the whole divergence."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvlink.core import scores
from kvlink.training.losses import TopLogits, answer, distill


def drawn(seed: int, *shape: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def full_kl(teacher: Tensor, student: Tensor) -> Tensor:
    wanted, found = teacher.double().log_softmax(-1), student.double().log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum(-1)


# --- what is kept of the teacher ------------------------------------------------------------------------------------


def test_the_most_likely_ids_are_kept_with_their_probabilities_under_all() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1], [0.1, 0.2, 0.3, 0.4]]).log() + 7
    found = TopLogits.of(logits, top=2)
    assert found.ids.tolist() == [[0, 1], [3, 2]]
    assert torch.allclose(found.logprobs.exp(), torch.tensor([[0.5, 0.25], [0.4, 0.3]]))


def test_of_a_smaller_vocabulary_all_is_kept() -> None:
    assert TopLogits.of(drawn(0, 5, 9), top=64).ids.shape == (5, 9)
    assert TopLogits.of(drawn(0, 5, 99)).ids.shape == (5, 64)


# --- distance to the teacher ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", [1, 8, 40, 64])
def test_equal_logits_are_no_distance_apart(top: int) -> None:
    logits = drawn(1, 30, 40)
    assert torch.equal(distill(logits, TopLogits.of(logits, top=top)), torch.zeros(30))
    assert distill(logits + 5, TopLogits.of(logits, top=top)).abs().max() < 1e-5  # a constant changes nothing


def test_by_hand() -> None:
    """Teacher 1/2, 1/4 and, together, 1/4; student 1/4, 1/4 and 1/2."""
    teacher = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    student = torch.tensor([[0.25, 0.25, 0.2, 0.3]]).log()
    wanted = 0.5 * math.log(2) + 0.25 * math.log(1) + 0.25 * math.log(0.5)
    assert distill(student, TopLogits.of(teacher, top=2)).item() == pytest.approx(wanted, abs=1e-6)


def test_with_all_ids_it_is_the_whole_divergence() -> None:
    teacher, student = drawn(2, 50, 30), drawn(3, 50, 30)
    found = distill(student, TopLogits.of(teacher, top=30))
    assert torch.allclose(found.double(), full_kl(teacher, student), atol=1e-5)
    assert found.mean().item() == pytest.approx(scores.kl(teacher, student), abs=1e-5)


@given(st.integers(0, 10**6), st.integers(1, 40), st.floats(0.1, 12))
def test_with_fewer_ids_it_is_never_more(seed: int, top: int, scale: float) -> None:
    teacher, student = drawn(seed, 8, 40, scale=scale), drawn(seed + 1, 8, 40, scale=scale)
    found = distill(student, TopLogits.of(teacher, top=top)).double()
    whole = full_kl(teacher, student)
    assert (found <= whole + 1e-4 * (1 + whole)).all()
    assert (found >= -1e-4).all()


def test_more_ids_tell_more() -> None:
    teacher, student = drawn(4, 100, 40), drawn(5, 100, 40)
    found = [distill(student, TopLogits.of(teacher, top=top)).mean().item() for top in (1, 4, 16, 40)]
    assert found == sorted(found)
    assert found[0] < 0.9 * found[-1]


def test_mass_that_the_student_puts_elsewhere_is_in_the_rest() -> None:
    """Two students that agree on the kept ids are the same distance away, wherever the rest lies."""
    teacher = TopLogits.of(torch.tensor([[0.6, 0.3, 0.05, 0.05]]).log(), top=2)
    one, other = (torch.tensor([[0.4, 0.2, *rest]]).log() for rest in ((0.3, 0.1), (0.001, 0.399)))
    assert distill(one, teacher).item() == pytest.approx(distill(other, teacher).item(), abs=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 300.0, 1e4])
@pytest.mark.parametrize("top", [1, 16, 40])
def test_gradients_are_finite_however_sure_both_are(scale: float, top: int) -> None:
    logits = drawn(6, 20, 40, scale=scale).requires_grad_()
    found = distill(logits, TopLogits.of(drawn(7, 20, 40, scale=scale), top=top))
    found.sum().backward()
    assert found.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_the_gradient_is_the_difference_of_the_distributions() -> None:
    teacher, student = drawn(8, 6, 20, scale=1.0), drawn(9, 6, 20, scale=1.0).requires_grad_()
    distill(student, TopLogits.of(teacher, top=20)).sum().backward()
    assert student.grad is not None
    assert torch.allclose(student.grad, student.detach().softmax(-1) - teacher.softmax(-1), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_logits_of_any_dtype_are_compared_in_float32(dtype: torch.dtype) -> None:
    student = drawn(10, 4, 20).to(dtype)
    found = distill(student, TopLogits.of(drawn(11, 4, 20)))
    assert found.dtype == torch.float32
    assert torch.equal(found, distill(student.float(), TopLogits.of(drawn(11, 4, 20))))


# --- distance to the right id ---------------------------------------------------------------------------------------


def test_the_answer_costs_what_its_ids_are_unlikely() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]).log()
    found = answer(logits, torch.tensor([1, 2]))
    assert found.tolist() == pytest.approx([-math.log(0.25), -math.log(0.8)])
    assert found.mean().item() == pytest.approx(scores.nll(logits, torch.tensor([1, 2])))
