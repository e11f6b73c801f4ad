"""Training learns, repeats itself, survives a kill, and passes over what is no number.

Most tests train a table instead of a model: one row of logits for all, so that every figure can be worked out.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lessons import SINK, lesson_of, links_of, loading, shared_runner, short_lesson
from torch import Tensor

from kvlink.core.errors import InputError, TrainingDiverged
from kvlink.models.adapter import Adapter
from kvlink.models.links import LinkTokens
from kvlink.training.lesson import Lesson
from kvlink.training.losses import TopLogits
from kvlink.training.student import RequestSide, Student
from kvlink.training.teacher import Teacher
from kvlink.training.trainer import MAX_BAD_STEPS, HeldOut, Outcome, Progress, Recipe, Trainer, held_out

VOCAB = 320


class Table(Student):
    """Predicts the same for every row; a second table counts as an adapter. `broken` spoils the logits of lessons."""

    def __init__(self, broken: dict[str, float] | None = None) -> None:
        self.trained = {"links": torch.zeros(VOCAB).requires_grad_(), "up.a": torch.zeros(VOCAB).requires_grad_()}
        self.broken = broken or {}
        self.seen: list[str] = []

    def logits(self, lesson: Lesson) -> Tensor:
        self.seen.append(lesson.id)
        row = self.trained["links"] + self.trained["up.a"] + self.broken.get(lesson.id, 0.0)
        return row.expand(len(lesson.rows().ids), VOCAB)

    def links(self) -> LinkTokens:
        raise NotImplementedError


class Drawn(Teacher):
    """Predicts what is drawn; held-out lessons may want only a share of it, or the opposite."""

    def __init__(self, *, share: float = 1.0) -> None:
        self.share = share

    def logits(self, lesson: Lesson) -> Tensor:
        base = 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
        own = torch.randn(len(lesson.rows().ids), VOCAB, generator=torch.Generator().manual_seed(len(lesson.id)))
        return (self.share if lesson.id.startswith("h") else 1.0) * base + own

    def __call__(self, lesson: Lesson) -> TopLogits:
        return TopLogits.of(self.logits(lesson), top=VOCAB)


LESSONS = [lesson_of(branches=[(4, 1 + seed)], documents=[(3,)], seed=seed, name=f"l{seed}") for seed in range(5)]
"""With 1 to 5 tokens of an answer."""

LOOKED = [lesson_of(branches=[(4, 2)], documents=[(3,)], seed=50 + seed, name=f"h{seed}") for seed in range(2)]


def recipe_of(**changed: Any) -> Recipe:
    return Recipe(**{"epochs": 3, "batch": 2, "lr": 0.05, "lr_adapter": 0.02, "every": 2, "patience": None, **changed})


def trainer_of(
    folder: Path | None = None,
    *,
    student: Student | None = None,
    teacher: Teacher | None = None,
    lessons: Sequence[Lesson] = LESSONS,
    looked: Sequence[Lesson] = LOOKED,
    settings: dict[str, Any] | None = None,
    **recipe: Any,
) -> Trainer:
    return Trainer(
        student or Table(),
        teacher or Drawn(),
        lessons=lessons,
        held_out=looked,
        recipe=recipe_of(**recipe),
        folder=folder,
        settings=settings,
    )


def parameters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.student.trained.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


class Killed(Exception):
    """A run was stopped from outside."""


def killing(at: int) -> Progress:
    def progress(step: int, *_: Any) -> None:
        if step == at:
            raise Killed

    return progress


def kl_rows(teacher: Tensor, student: Tensor) -> Tensor:
    wanted, found = teacher.log_softmax(-1), student.log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum(-1)


# --- one step -------------------------------------------------------------------------------------------------------


def test_the_loss_is_a_mean_over_tokens_and_not_over_lessons() -> None:
    trainer, batch = trainer_of(), [LESSONS[0], LESSONS[4]]
    rows = [kl_rows(Drawn().logits(one), torch.zeros(VOCAB))[one.rows().scored] for one in batch]
    assert [len(row) for row in rows] == [1, 5]
    loss, _, tokens = trainer._step(batch)
    assert loss == pytest.approx(torch.cat(rows).mean().item(), rel=1e-5)
    assert loss != pytest.approx(sum(row.mean().item() for row in rows) / 2, rel=1e-4)
    assert tokens == 6


def test_the_gradient_of_a_batch_is_that_of_all_its_tokens_at_once() -> None:
    trainer = trainer_of(clip=1e9)
    table = torch.zeros(VOCAB, requires_grad=True)
    rows = [kl_rows(Drawn().logits(one), table)[one.rows().scored] for one in LESSONS]
    (wanted,) = torch.autograd.grad(torch.cat(rows).mean(), table)
    _, norm, _ = trainer._step(LESSONS)
    for name in ("links", "up.a"):
        found = trainer.student.trained[name].grad
        assert found is not None
        assert torch.allclose(found, wanted, atol=1e-7)
    assert norm == pytest.approx(2**0.5 * wanted.norm().item(), rel=1e-5)


def test_a_real_student_gathers_the_gradients_of_a_batch_one_by_one() -> None:
    runner = shared_runner("llama", torch.float32)
    batch = [short_lesson(1), short_lesson(2, answer=6)]
    student = RequestSide(runner, loading(runner, SINK), links=links_of(runner), adapter=Adapter.fresh(runner.model))
    teacher = Teacher(runner, model="a")
    weights = torch.cat([lesson.rows().scored for lesson in batch])
    logits = torch.cat([student.logits(lesson) for lesson in batch])
    known = [teacher(lesson) for lesson in batch]
    ids, wanted = torch.cat([one.ids for one in known]), torch.cat([one.logprobs for one in known])
    kept = (wanted.exp() * (wanted - logits.log_softmax(-1).gather(-1, ids))).sum(-1)
    rest, left = 1 - wanted.exp().sum(-1), 1 - logits.softmax(-1).gather(-1, ids).sum(-1)
    whole = (kept + rest * (rest.log() - left.log()))[weights].mean()
    gradients = torch.autograd.grad(whole, list(student.trained.values()))
    trainer = Trainer(student, teacher, lessons=batch, held_out=batch, recipe=recipe_of(clip=1e9))
    loss, _, tokens = trainer._step(batch)
    assert loss == pytest.approx(whole.item(), rel=1e-4)
    assert tokens == 9
    for gradient, (name, tensor) in zip(gradients, student.trained.items(), strict=True):
        assert tensor.grad is not None, name
        assert (tensor.grad - gradient).norm() <= 1e-3 * gradient.norm()


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_right_ids_have_their_share_of_the_loss(share: float) -> None:
    lesson = LESSONS[3]
    rows = lesson.rows()
    distance = kl_rows(Drawn().logits(lesson), torch.zeros(VOCAB))[rows.scored].mean().item()
    found, _, _ = trainer_of(answer=share)._step([lesson])
    assert found == pytest.approx((1 - share) * distance + share * math.log(VOCAB), rel=1e-5)


def test_rows_of_the_question_weigh_what_they_are_told_to() -> None:
    lesson = LESSONS[1]
    rows = lesson.rows()
    per_row = kl_rows(Drawn().logits(lesson), torch.zeros(VOCAB))
    weights = torch.where(rows.scored, 1.0, 0.5)
    assert weights.tolist() == [0.5, 0.5, 0.5, 1.0, 1.0]
    found, _, _ = trainer_of(question=0.5)._step([lesson])
    assert found == pytest.approx(((per_row * weights).sum() / weights.sum()).item(), rel=1e-5)


def test_a_gradient_is_clipped_to_the_length_that_is_asked_for() -> None:
    trainer = trainer_of(clip=1e-3)
    _, norm, _ = trainer._step(LESSONS)
    assert norm > 0.01
    assert torch.cat([t.grad for t in trainer.student.trained.values() if t.grad is not None]).norm() == pytest.approx(
        1e-3, rel=1e-3
    )


def test_only_what_is_no_link_decays() -> None:
    trainer = trainer_of(weight_decay=0.1, lr=1.0, lr_adapter=1.0, warmup=0.0)
    rates = {group["params"][0] is trainer.student.trained["links"]: group for group in trainer._optimiser.param_groups}
    assert (rates[True]["weight_decay"], rates[False]["weight_decay"]) == (0.0, 0.1)


# --- a run ----------------------------------------------------------------------------------------------------------


def test_the_loss_falls() -> None:
    trainer = trainer_of(epochs=20, lr=0.2)
    outcome = trainer.run()
    curve = dict(outcome.curve)
    assert (outcome.reason, outcome.steps, outcome.bad_steps) == ("finished", 60, 0)
    assert curve[outcome.best].kl < 0.25 * curve[0].kl
    assert curve[outcome.best].kl == min(seen.kl for seen in curve.values())


@pytest.mark.parametrize("lora", [False, True], ids=["links", "links+lora"])
def test_trained_links_bring_a_model_nearer_to_its_own_full_attention(lora: bool) -> None:
    runner = shared_runner("llama", torch.float32, 0.1)
    lessons = [short_lesson(seed) for seed in range(2)]
    adapter = Adapter.fresh(runner.model) if lora else None
    student = RequestSide(runner, loading(runner, SINK), links=links_of(runner), adapter=adapter)
    recipe = Recipe(epochs=10, batch=2, lr=0.02, lr_adapter=3e-3, every=10, patience=None)
    outcome = Trainer(student, Teacher(runner, model="a"), lessons=lessons, held_out=lessons, recipe=recipe).run()
    kl = dict(outcome.curve)
    assert kl[outcome.best].kl < (0.6 if lora else 0.85) * kl[0].kl


def test_every_epoch_takes_every_lesson_once_in_an_order_of_its_own() -> None:
    student = Table()
    trainer_of(student=student, epochs=4, batch=2, every=99).run()
    learned = [name for name in student.seen if name.startswith("l")]
    epochs = [learned[start : start + 5] for start in range(0, 20, 5)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(lesson.id for lesson in LESSONS)] * 4
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_same_seed_gives_the_same_curve_and_another_seed_another() -> None:
    runs = [trainer_of(seed=seed) for seed in (1, 1, 2)]
    one, again, other = (run.run() for run in runs)
    assert one.curve == again.curve
    assert same(parameters(runs[0]), parameters(runs[1]))
    assert one.curve[0] == other.curve[0]
    assert one.curve != other.curve


def test_the_rate_rises_then_falls_to_nothing(tmp_path: Path) -> None:
    """18 steps, a sixth of which warm up."""
    trainer_of(tmp_path, lessons=LESSONS[:3], epochs=18, batch=3, warmup=1 / 6, lr=0.9).run()
    rates = [row["lr"] for row in metrics(tmp_path) if "loss" in row]
    assert rates[:3] == pytest.approx([0.3, 0.6, 0.9])
    assert rates[3:] == pytest.approx([0.45 * (1 + math.cos(math.pi * n / 15)) for n in range(15)])
    assert rates[-1] < 0.02


def test_progress_is_told_of_each_step() -> None:
    told: list[tuple[int, int, float, float]] = []
    outcome = trainer_of(epochs=1).run(progress=lambda *row: told.append(row))
    curve = dict(outcome.curve)
    assert [(step, steps) for step, steps, _, _ in told] == [(1, 3), (2, 3), (3, 3)]
    assert [seen for *_, seen in told] == [curve[0].kl, curve[2].kl, curve[3].kl]
    assert told[-1][2] == outcome.loss


def test_metrics_hold_the_settings_each_step_and_each_look(tmp_path: Path) -> None:
    outcome = trainer_of(tmp_path, epochs=1, settings={"plan": {"mode": "links"}}).run()
    first, *rows = metrics(tmp_path)
    assert set(first["settings"]) == {"recipe", "trained", "lessons", "plan"}
    assert [(row["step"], *sorted(row)[:1]) for row in rows] == [
        *((0, "agreement"), (1, "loss"), (2, "loss"), (2, "agreement"), (3, "loss"), (3, "agreement")),
    ]
    assert [row["kl"] for row in rows if "kl" in row] == [seen.kl for _, seen in outcome.curve]
    assert sum(row["tokens"] for row in rows if "loss" in row) == 1 + 2 + 3 + 4 + 5


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer_of().run()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written to .*file"):
        trainer_of(tmp_path / "file").run()


# --- the best, and when to stop -------------------------------------------------------------------------------------


def test_it_stops_where_held_out_lessons_gain_nothing_and_gives_back_the_best() -> None:
    trainer = trainer_of(teacher=Drawn(share=-1), epochs=50, patience=3)
    before = parameters(trainer)
    outcome = trainer.run()
    assert (outcome.reason, outcome.best, outcome.steps) == ("stopped early", 0, 6)
    assert [step for step, _ in outcome.curve] == [0, 2, 4, 6]
    assert same(parameters(trainer), before)


def test_without_patience_it_goes_on_to_the_end_and_gives_back_the_best() -> None:
    trainer = trainer_of(teacher=Drawn(share=-1))
    before = parameters(trainer)
    outcome = trainer.run()
    assert (outcome.reason, outcome.best, outcome.steps) == ("finished", 0, 9)
    assert same(parameters(trainer), before)


def test_the_student_holds_what_the_best_look_saw() -> None:
    trainer = trainer_of(teacher=Drawn(share=0.4), epochs=8, lr=0.3)  # learning goes past what they want
    outcome = trainer.run()
    assert trainer.look() == dict(outcome.curve)[outcome.best]
    assert 0 < outcome.best < outcome.steps


def test_the_distance_on_held_out_lessons_is_a_mean_over_the_tokens_of_answers() -> None:
    lessons = [LESSONS[0], LESSONS[4]]
    student, teacher = Table(), Drawn()
    with torch.no_grad():
        student.trained["links"].copy_(teacher.logits(LESSONS[4])[4])
    rows = torch.cat([teacher.logits(lesson)[lesson.rows().scored] for lesson in lessons])
    table = student.trained["links"].detach()
    found = held_out(student, teacher, lessons)
    assert found.kl == pytest.approx(kl_rows(rows, table).mean().item(), rel=1e-5)
    assert found.agreement == pytest.approx((rows.argmax(-1) == table.argmax()).double().mean().item())
    assert 0 < found.agreement < 1


# --- what is no number ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_steps_without_a_number_change_nothing_and_are_counted(bad: float, tmp_path: Path) -> None:
    student = Table(broken={"l1": bad})
    trainer = trainer_of(tmp_path, student=student, batch=1, epochs=2)
    outcome = trainer.run()
    assert outcome.bad_steps == 2
    assert outcome.reason == "finished"
    assert math.isfinite(outcome.loss)
    assert all(tensor.isfinite().all() for tensor in student.trained.values())
    assert [row["loss"] for row in metrics(tmp_path) if "loss" in row].count(None) == 2
    assert dict(outcome.curve)[outcome.best].kl < outcome.curve[0][1].kl


def test_a_step_without_a_number_keeps_every_bit() -> None:
    trainer = trainer_of(student=Table(broken={"l1": math.nan}), batch=1)
    trainer._step([LESSONS[0]])
    before, kept = parameters(trainer), json.dumps(trainer._optimiser.state_dict()["state"], default=Tensor.tolist)
    loss, _, _ = trainer._step([LESSONS[1]])
    assert math.isnan(loss)
    assert same(parameters(trainer), before)
    assert json.dumps(trainer._optimiser.state_dict()["state"], default=Tensor.tolist) == kept


def test_a_gradient_that_is_no_number_behind_a_loss_that_is_one_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of()
    before = parameters(trainer)
    trainer.student.trained["links"].register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(TrainingDiverged, match="gradient nan"):
        trainer.run()
    assert same(parameters(trainer), before)


def test_three_in_a_row_end_the_run_with_what_to_do() -> None:
    trainer = trainer_of(student=Table(broken={lesson.id: math.nan for lesson in LESSONS}), batch=1)
    told = r"no number in 3 steps in a row, the last one step 3 of 15 .*those of step 0\. Lower --lr \(0\.05\).* l\d"
    with pytest.raises(TrainingDiverged, match=told):
        trainer.run()


def test_as_many_that_are_not_in_a_row_do_not() -> None:
    student = Table(broken={"l1": math.nan})
    outcome = trainer_of(student=student, batch=1, epochs=6).run()
    assert outcome.bad_steps == 6 > MAX_BAD_STEPS
    assert outcome.bad_in_a_row <= 2


def test_a_held_out_distance_that_is_no_number_is_never_the_best() -> None:
    student = Table(broken={"h1": math.nan})
    trainer = trainer_of(student=student)
    looks = iter([math.nan, 3.0, math.nan, 2.0, math.nan, 4.0])
    trainer.look = lambda: HeldOut(next(looks), 0.5)  # type: ignore[method-assign]
    outcome = trainer.run()
    assert outcome.best == 6


# --- killed and resumed ---------------------------------------------------------------------------------------------


def resumed(make: Callable[[], Trainer], kill_at: Sequence[int]) -> tuple[Outcome, dict[str, Tensor]]:
    """Run and kill at each of these steps, then go on to the end; every time a new process would be at work."""
    for count, step in enumerate(kill_at):
        with pytest.raises(Killed):
            make().run(resume=count > 0, progress=killing(step))
    last = make()
    return last.run(resume=True), parameters(last)


def timeless(outcome: Outcome) -> Any:
    return (outcome.steps, outcome.reason, outcome.loss, outcome.best, outcome.bad_steps, outcome.curve)


@pytest.mark.parametrize("kill_at", [[1], [2], [5], [6], [8], [9], [3, 4, 7]], ids=str)
def test_a_resumed_run_comes_to_the_same_as_one_that_was_never_killed(tmp_path: Path, kill_at: list[int]) -> None:
    whole = trainer_of(tmp_path / "whole")
    outcome = whole.run()
    found, learned = resumed(lambda: trainer_of(tmp_path / "killed"), kill_at)
    assert timeless(found) == timeless(outcome)
    assert same(learned, parameters(whole))
    assert (tmp_path / "killed" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_so_does_one_with_a_real_student(tmp_path: Path) -> None:
    runner = shared_runner("llama", torch.float32)
    lessons, teacher = [short_lesson(seed) for seed in range(2)], Teacher(runner, model="a")
    looked = lessons[:1]

    def make(folder: str) -> Trainer:
        student = RequestSide(
            runner, loading(runner, SINK), links=links_of(runner), adapter=Adapter.fresh(runner.model)
        )
        recipe = recipe_of(batch=1, every=1, epochs=1)
        return Trainer(student, teacher, lessons=lessons, held_out=looked, recipe=recipe, folder=tmp_path / folder)

    whole = make("whole")
    outcome = whole.run()
    found, learned = resumed(lambda: make("killed"), [1])
    assert timeless(found) == timeless(outcome)
    assert same(learned, parameters(whole))
    assert (tmp_path / "killed" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("kill_at", [[5], [6]], ids=str)
def test_so_does_one_that_stops_early(tmp_path: Path, kill_at: list[int]) -> None:
    """Killed in the very step that would have been the last one, too."""

    def make(folder: str) -> Trainer:
        return trainer_of(tmp_path / folder, teacher=Drawn(share=-1), epochs=50, patience=3)

    whole = make("whole")
    outcome = whole.run()
    assert outcome.steps == 6
    found, learned = resumed(lambda: make("killed"), kill_at)
    assert timeless(found) == timeless(outcome)
    assert same(learned, parameters(whole))
    assert (tmp_path / "killed" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("patience", [None, 3])
def test_a_run_that_has_ended_ends_again_at_once(tmp_path: Path, patience: int | None) -> None:
    def make(student: Table) -> Trainer:
        return trainer_of(
            tmp_path, student=student, teacher=Drawn(share=1 if patience is None else -1), patience=patience
        )

    first = make(Table())
    outcome, before = first.run(), (tmp_path / "metrics.jsonl").read_bytes()
    student = Table()
    again = make(student)
    assert timeless(again.run(resume=True)) == timeless(outcome)
    assert student.seen == []
    assert same(parameters(again), parameters(first))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_steps_without_a_number_are_counted_across_a_kill(tmp_path: Path) -> None:
    broken = {lesson.id: math.nan for lesson in LESSONS}
    with pytest.raises(Killed):
        trainer_of(tmp_path, student=Table(broken), batch=1, every=2).run(progress=killing(2))
    with pytest.raises(TrainingDiverged, match="the last one step 3 of"):
        trainer_of(tmp_path, student=Table(broken), batch=1, every=2).run(resume=True)


def test_seconds_are_those_of_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("kvlink.training.trainer.time.perf_counter", lambda: float(next(clock)))
    with pytest.raises(Killed):
        trainer_of(tmp_path).run(progress=killing(4))
    kept = trainer_of(tmp_path).run(resume=True).seconds
    assert kept > trainer_of().run().seconds - 1
    assert kept >= 5


def test_where_there_is_no_state_resuming_begins(tmp_path: Path) -> None:
    outcome = trainer_of(tmp_path / "a").run(resume=True)
    assert timeless(outcome) == timeless(trainer_of().run())


def test_a_new_run_forgets_the_state_of_the_last_one(tmp_path: Path) -> None:
    """Or one that is killed early would go on where another one stopped."""
    trainer_of(tmp_path).run()
    with pytest.raises(Killed):
        trainer_of(tmp_path).run(progress=killing(1))
    student = Table()
    trainer_of(tmp_path, student=student).run(resume=True)
    assert len([name for name in student.seen if name.startswith("l")]) == 15
    assert [row["step"] for row in metrics(tmp_path) if "loss" in row] == list(range(1, 10))


@pytest.mark.parametrize("torn", ['{"step": 5, "lo', '{"step": 2, "loss": 1.0}'], ids=["half", "without its end"])
def test_a_line_of_metrics_that_a_kill_has_torn_is_cut_off(tmp_path: Path, torn: str) -> None:
    trainer_of(tmp_path / "whole").run()
    with pytest.raises(Killed):
        trainer_of(tmp_path / "killed").run(progress=killing(4))
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write(torn)
    trainer_of(tmp_path / "killed").run(resume=True)
    assert (tmp_path / "killed" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"lr": 0.06}, "recipe"),
        ({"seed": 1}, "recipe"),
        ({"lessons": LESSONS[:4]}, "lessons"),
        ({"lessons": LESSONS[::-1]}, "lessons"),
        ({"settings": {"plan": "lora"}}, "plan"),
        ({"settings": None}, "plan"),
    ],
    ids=["rate", "seed", "fewer", "order", "plan", "no plan"],
)
def test_a_state_of_another_run_is_refused_by_what_differs(tmp_path: Path, other: dict[str, Any], told: str) -> None:
    trainer_of(tmp_path, settings={"plan": "links"}).run()
    with pytest.raises(
        InputError, match=rf"other settings \({told}\); give the same ones, another folder, or no --res"
    ):
        trainer_of(tmp_path, **{"settings": {"plan": "links"}, **other}).run(resume=True)


# --- what is asked for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["lessons", "looked"])
def test_without_lessons_or_held_out_ones_there_is_nothing_to_train(missing: str) -> None:
    with pytest.raises(InputError, match="at least one of each is needed"):
        trainer_of(**{missing: []})


@pytest.mark.parametrize(
    "wrong", [{"epochs": 0}, {"batch": 0}, {"every": 0}, {"answer": 1.1}, {"answer": -0.1}, {"question": -1.0}], ids=str
)
def test_a_recipe_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(InputError, match=f"{name} {wrong[name]}"):
        Recipe(**wrong)
