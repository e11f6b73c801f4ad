"""A student that reuses entries computes what serving computes, and its gradients are those of what it computes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from lessons import SINK, lesson_of, links_of, loading, shared_runner
from torch import Tensor

from kvlink.core.layout import Kind
from kvlink.models.assembler import Assembler
from kvlink.models.links import LinkTokens
from kvlink.models.runner import Runner
from kvlink.training.lesson import Branch, Ids, Lesson
from kvlink.training.student import RequestSide
from tiny_bundles import tiny_adapter
from tiny_models import DoublePrecision, largest, random_ids, reuse_logits

FAMILIES = ("llama", "mistral", "gemma2", "gemma3", "phi", "smollm3")
families = pytest.mark.parametrize("family", FAMILIES)
modes = pytest.mark.parametrize("adapter", [False, True], ids=["links", "links+lora"])


def student_of(
    runner: Runner, *, adapter: bool = False, num_links: int = 3, seen: list[Ids] | None = None
) -> RequestSide:
    return RequestSide(
        runner,
        loading(runner, SINK, seen),
        links=links_of(runner, num_links),
        adapter=tiny_adapter(runner) if adapter else None,
    )


def served(runner: Runner, lesson: Lesson, number: int, *, adapter: bool) -> Tensor:
    """Return what the engine's own path computes for one question and its answer."""
    branch = lesson.branches[number]
    prompt = replace(lesson.prompt, tail=branch.ids)
    assembler = Assembler(runner, links=LinkTokens(links_of(runner)), adapter=tiny_adapter(runner) if adapter else None)
    return reuse_logits(assembler, prompt, sink_ids=SINK)[-len(branch.ids) :]


# --- what it computes -----------------------------------------------------------------------------------------------


@families
@modes
def test_logits_are_those_that_serving_computes_for_each_question(family: str, adapter: bool) -> None:
    runner, lesson = shared_runner(family), lesson_of()
    with DoublePrecision(), torch.no_grad():
        found = student_of(runner, adapter=adapter).logits(lesson)
        wanted = torch.cat([served(runner, lesson, number, adapter=adapter) for number in range(3)])
    assert found.shape == (len(lesson.rows().ids), 320)
    assert largest(found - wanted) <= 1e-9


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi"])
@modes
def test_another_question_changes_nothing_in_the_first(family: str, adapter: bool) -> None:
    runner, lesson = shared_runner(family), lesson_of()
    first, _, third = lesson.branches
    other = replace(lesson, branches=(first, Branch(random_ids(5, seed=901), random_ids(1, seed=902)), third))
    rows = lesson.rows().branches
    with torch.no_grad():
        student = student_of(runner, adapter=adapter)
        before, after = student.logits(lesson), student.logits(other)
    assert torch.equal(after[rows == 1], before[rows == 1])
    assert torch.equal(after[rows == 3], before[rows == 3])
    assert largest(after[rows == 2] - before[rows == 2]) > 0.1


def test_without_links_the_documents_alone_are_behind_the_question() -> None:
    runner, lesson = shared_runner(), lesson_of(branches=[(8, 1)])
    with torch.no_grad():
        found = RequestSide(runner, loading(runner, SINK), links=links_of(runner)[:, :0]).logits(lesson)
    assert largest(found - reuse_logits(Assembler(runner), lesson.prompt, sink_ids=SINK)[-8:]) < 1e-9


def test_segments_are_asked_for_in_the_prompts_order() -> None:
    seen: list[Ids] = []
    lesson = lesson_of()
    with torch.no_grad():
        student_of(shared_runner(), seen=seen).logits(lesson)
    assert seen == list(lesson.prompt.segments)


def test_s_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = shared_runner()
    student, asked = student_of(runner), list[Ids]()
    compute = runner.prefix
    monkeypatch.setattr(runner, "prefix", lambda ids: asked.append(tuple(ids)) or compute(ids))
    lesson = lesson_of()
    with torch.no_grad():
        student.logits(lesson)
        student.logits(lesson)
    assert asked.count(lesson.prompt.system) == 1


# --- what is trained ------------------------------------------------------------------------------------------------


def test_links_and_factors_are_trained_and_the_model_is_not() -> None:
    runner = shared_runner()
    student = student_of(runner, adapter=True)
    adapter = tiny_adapter(runner)
    names = [f"{part}.{name}" for name in adapter.down for part in ("down", "up")]
    assert list(student.trained) == ["links", *names]
    assert all(tensor.is_leaf and tensor.requires_grad for tensor in student.trained.values())
    assert not any(parameter.requires_grad for parameter in runner.model.parameters())
    assert list(student_of(runner).trained) == ["links"]


def test_what_training_begins_with_is_not_changed_by_it() -> None:
    runner = shared_runner()
    links, adapter = links_of(runner), tiny_adapter(runner)
    student = RequestSide(runner, loading(runner, SINK), links=links, adapter=adapter)
    before = {name: tensor.clone() for name, tensor in adapter.up.items()}
    with torch.no_grad():
        for tensor in student.trained.values():
            tensor.add_(1)
    assert torch.equal(links, links_of(runner))
    assert all(torch.equal(adapter.up[name], tensor) for name, tensor in before.items())


def test_what_is_handed_out_is_a_copy_without_gradients() -> None:
    student = student_of(shared_runner(), adapter=True)
    links, adapter = student.links(), student.adapter()
    assert adapter is not None
    assert adapter.scale == 2.0
    with torch.no_grad():
        for tensor in student.trained.values():
            tensor.zero_()
    assert links.embeddings.abs().max() > 0
    assert all(up.abs().max() > 0 and not up.requires_grad for up in adapter.up.values())
    assert not links.embeddings.requires_grad
    assert student_of(shared_runner()).adapter() is None


def test_links_are_used_level_by_level() -> None:
    """Level 1 stands behind the one segment that is not a document's last: without such a segment it is idle."""
    runner = shared_runner()
    student, uncut = student_of(runner), lesson_of(documents=((20,), (11,)))
    assert [span.level for span in lesson_of().prompt.layout(num_links=3).of(Kind.LINK)] == [1, 0, 0, 0, 0]
    for lesson, used in ((lesson_of(), [True, True]), (uncut, [True, False])):
        (gradient,) = torch.autograd.grad(student.logits(lesson).log_softmax(-1)[:, 3].sum(), student.trained["links"])
        assert [bool(level.abs().max() > 0) for level in gradient] == used


# --- gradients ------------------------------------------------------------------------------------------------------


def slope_and_gradient(student: RequestSide, lesson: Lesson, name: str, *, step: float = 1e-6) -> tuple[float, float]:
    """Return the slope of a loss along a random direction, by differences and by the gradient."""
    generator = torch.Generator().manual_seed(4)
    tensor = student.trained[name]
    direction = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    weights: Any = None

    def loss() -> Tensor:
        nonlocal weights
        logits = student.logits(lesson)
        if weights is None:
            weights = torch.randn(logits.shape, generator=generator, dtype=logits.dtype)
        return (logits.log_softmax(-1) * weights).mean()

    (gradient,) = torch.autograd.grad(loss(), tensor)
    ends = []
    with torch.no_grad():
        for side in (1, -2):
            tensor.add_(side * step * direction)
            ends.append(loss().item())
        tensor.add_(step * direction)
    return (ends[0] - ends[1]) / (2 * step), (gradient * direction).sum().item()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3", "phi"])
def test_the_gradient_of_the_links_is_finite_differences(family: str) -> None:
    with DoublePrecision():
        slope, gradient = slope_and_gradient(student_of(shared_runner(family)), lesson_of(), "links")
    assert gradient == pytest.approx(slope, rel=1e-6)
    assert abs(slope) > 1e-4


@pytest.mark.parametrize("part", ["down", "up"])
def test_the_gradient_of_an_adapter_is_finite_differences(part: str) -> None:
    student = student_of(shared_runner(), adapter=True)
    for name in [name for name in student.trained if name.startswith(f"{part}.")][::3]:
        with DoublePrecision():
            slope, gradient = slope_and_gradient(student, lesson_of(), name)
        assert gradient == pytest.approx(slope, rel=1e-5, abs=1e-10)
