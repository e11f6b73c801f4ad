"""The teacher predicts what the frozen model's own full attention does, once, and keeps it within its budget."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lessons import lesson_of, shared_runner, short_lesson
from torch import Tensor

from kvlink.models.runner import Runner
from kvlink.training.lesson import Lesson
from kvlink.training.losses import TopLogits
from kvlink.training.teacher import Teacher
from tiny_models import DoublePrecision, largest

FAMILIES = ("llama", "mistral", "qwen2", "gemma2", "gemma3", "phi", "smollm3")
"""Windows of 16 in all or some layers, eager attention, scaled embeddings, partial rotary, a NoPE layer, and none."""

MODEL = "ab" * 32


def own_logits(runner: Runner, lesson: Lesson, number: int) -> Tensor:
    """Return what the model itself says of S, documents, and one question with its answer, in one causal forward."""
    branch = lesson.branches[number]
    ids = [*lesson.prompt.system, *(token for ids in lesson.prompt.segments for token in ids), *branch.ids]
    with torch.inference_mode():
        return runner.model(input_ids=torch.tensor([ids])).logits[0, -len(branch.ids) :]


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


# --- what it predicts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_predictions_are_the_models_own_for_each_question_alone(family: str) -> None:
    runner, lesson = shared_runner(family), lesson_of()
    with DoublePrecision():
        found = Teacher(runner, model=MODEL, top=320)(lesson)
        logits = torch.cat([own_logits(runner, lesson, number) for number in range(3)])
        wanted = logits.log_softmax(-1)
    assert largest(found.logprobs - wanted.gather(-1, found.ids)) <= 1e-9
    assert torch.equal(found.ids[:, 0], wanted.argmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_several_questions_at_once_are_each_as_alone(family: str) -> None:
    runner, lesson = shared_runner(family), lesson_of()
    with DoublePrecision():
        together = Teacher(runner, model=MODEL)(lesson)
        alone = [Teacher(runner, model=MODEL)(replace(lesson, branches=(branch,))) for branch in lesson.branches]
    assert torch.equal(together.ids, torch.cat([one.ids for one in alone]))
    assert largest(together.logprobs - torch.cat([one.logprobs for one in alone])) <= 1e-9


def test_where_a_document_is_cut_is_all_the_same_to_it() -> None:
    runner, lesson = shared_runner(), lesson_of()
    whole = tuple((tuple(token for ids in document for token in ids),) for document in lesson.prompt.documents)
    joined = replace(lesson, prompt=replace(lesson.prompt, documents=whole))
    cut, found = Teacher(runner, model=MODEL)(lesson), Teacher(runner, model=MODEL)(joined)
    assert largest(found.logprobs - cut.logprobs) < 1e-12


def test_predictions_can_stand_in_a_graph_of_gradients() -> None:
    found = Teacher(shared_runner(), model=MODEL)(short_lesson(1))
    weight = torch.ones(1, requires_grad=True)
    (weight * found.logprobs).sum().backward()
    assert weight.grad is not None


def test_as_many_ids_are_kept_as_are_asked_for() -> None:
    lesson = short_lesson(1)
    assert Teacher(shared_runner(), model=MODEL)(lesson).ids.shape == (len(lesson.rows().ids), 64)
    assert Teacher(shared_runner(), model=MODEL, top=5)(lesson).ids.shape == (len(lesson.rows().ids), 5)


# --- what it keeps --------------------------------------------------------------------------------------------------


def never(lesson: Lesson) -> TopLogits:
    raise AssertionError("it was computed once more")


def test_without_a_folder_every_question_is_computed_again() -> None:
    teacher, lesson = Teacher(shared_runner(), model=MODEL), short_lesson(1)
    one, other = teacher(lesson), teacher(lesson)
    assert torch.equal(one.logprobs, other.logprobs)
    assert (teacher.computed, teacher.known) == (2, 0)


def test_a_kept_file_is_read_instead_of_computing_in_this_process_and_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lesson, first = short_lesson(1), Teacher(shared_runner(), model=MODEL, folder=tmp_path / "new")
    computed = first(lesson)
    again = Teacher(shared_runner(), model=MODEL, folder=tmp_path / "new")
    for teacher in (first, again):
        monkeypatch.setattr(teacher, "compute", never)
        found = teacher(lesson)
        assert torch.equal(found.ids, computed.ids)
        assert torch.equal(found.logprobs, computed.logprobs)
        assert found.ids.dtype == torch.int64
    assert (first.computed, first.known, again.computed, again.known) == (1, 1, 0, 1)


@pytest.mark.parametrize(
    "other",
    [
        lambda folder: (Teacher(shared_runner(), model="cd" * 32, folder=folder), short_lesson(1)),
        lambda folder: (Teacher(shared_runner(), model=MODEL, folder=folder, top=8), short_lesson(1)),
        lambda folder: (Teacher(shared_runner(), model=MODEL, folder=folder), short_lesson(2)),
    ],
    ids=["model", "top", "lesson"],
)
def test_of_another_model_number_of_ids_or_lesson_nothing_is_known(
    tmp_path: Path, other: Callable[[Path], tuple[Teacher, Lesson]]
) -> None:
    Teacher(shared_runner(), model=MODEL, folder=tmp_path)(short_lesson(1))
    teacher, lesson = other(tmp_path)
    teacher(lesson)
    assert (teacher.computed, teacher.known) == (1, 0)
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["empty", "cut", "garbage", "another lesson's"])
def test_a_damaged_file_is_computed_again_and_replaced(tmp_path: Path, damage: str) -> None:
    lesson, longer = short_lesson(1), short_lesson(2, answer=9)
    teacher = Teacher(shared_runner(), model=MODEL, folder=tmp_path / "a")
    wanted = teacher(lesson)
    (file,) = files(tmp_path / "a")
    whole = file.read_bytes()
    Teacher(shared_runner(), model=MODEL, folder=tmp_path / "b")(longer)
    other = files(tmp_path / "b")[0].read_bytes()
    file.write_bytes({"empty": b"", "cut": whole[:-7], "garbage": b"\xff" * 999, "another lesson's": other}[damage])
    again = Teacher(shared_runner(), model=MODEL, folder=tmp_path / "a")
    found = again(lesson)
    assert torch.equal(found.logprobs, wanted.logprobs)
    assert (again.computed, again.known) == (1, 0)
    assert file.read_bytes() == whole
    assert files(tmp_path / "a") == [file]


# --- its budget -----------------------------------------------------------------------------------------------------


def size_of_one(folder: Path) -> int:
    Teacher(shared_runner(), model=MODEL, folder=folder)(short_lesson(1))
    return files(folder)[0].stat().st_size


def test_what_the_budget_has_no_room_for_is_not_kept(tmp_path: Path) -> None:
    size = size_of_one(tmp_path / "one")
    teacher = Teacher(shared_runner(), model=MODEL, folder=tmp_path / "two", budget_bytes=2 * size)
    for seed in (1, 2, 3, 3):
        teacher(short_lesson(seed))
    assert len(files(tmp_path / "two")) == 2
    assert (teacher.computed, teacher.known) == (4, 0)


def test_the_budget_counts_what_was_there_before(tmp_path: Path) -> None:
    size = size_of_one(tmp_path)
    teacher = Teacher(shared_runner(), model=MODEL, folder=tmp_path, budget_bytes=2 * size)
    teacher(short_lesson(2))
    teacher(short_lesson(3))
    assert sum(file.stat().st_size for file in files(tmp_path)) == 2 * size
    teacher(short_lesson(1))
    assert (teacher.computed, teacher.known) == (2, 1)


def test_a_damaged_file_makes_room_for_the_one_that_replaces_it(tmp_path: Path) -> None:
    size = size_of_one(tmp_path)
    (file,) = files(tmp_path)
    file.write_bytes(b"\x00" * size)
    teacher = Teacher(shared_runner(), model=MODEL, folder=tmp_path, budget_bytes=size)
    teacher(short_lesson(1))
    teacher(short_lesson(1))
    assert (teacher.computed, teacher.known) == (1, 1)


def test_a_full_disk_costs_time_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lesson = short_lesson(1)
    wanted = Teacher(shared_runner(), model=MODEL)(lesson)
    teacher = Teacher(shared_runner(), model=MODEL, folder=tmp_path)

    def full(file: Path, data: bytes) -> int:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert torch.equal(teacher(lesson).logprobs, wanted.logprobs)
    assert files(tmp_path) == []
