"""`bench train-step` compares equal work: both arms come to the same gradients, and what is known is not computed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvlink import Engine
from kvlink.cli import app
from kvlink.evaluation.bench import train_step
from kvlink.evaluation.bench.train_step import ARMS, Arm, Memory, Step, Work, bench_train_step, memory_of, runs_of
from kvlink.models.prompt import Prompter
from kvlink.store import MemoryStore
from kvlink.training.trainer import Recipe, Trainer
from tiny import byte_tokenizer
from tiny_models import largest, tiny_model

torch.set_num_threads(1)

WORK = Work(documents=3, tokens=40, question=20, answer=7, links=2)
MADE_UP = {"links": Memory(300, 10), "packed": Memory(300, 40)}
Make = Callable[[Engine, Arm], Step]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, tokenizer = tmp_path_factory.mktemp("model"), byte_tokenizer()
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def base(model: str) -> Engine:
    return Engine.from_pretrained(model, links=None)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    store = MemoryStore(budget_bytes=1 << 30)
    return lambda engine, arm: Step(engine, arm, WORK, store=store, folder=tmp_path)


@pytest.fixture
def made_up_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step, "memory_of", lambda _, arm, *__, **___: MADE_UP[arm])


@pytest.fixture
def unknown_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step, "memory_of", lambda *_, **__: None)


# --- the work -------------------------------------------------------------------------------------------------------


def test_the_lesson_has_the_lengths_that_were_asked_for(base: Engine) -> None:
    lesson = WORK.lesson(base.prompter)
    assert [len(ids) for ids in lesson.prompt.segments] == [40, 40, 40]
    assert len(set(lesson.prompt.segments)) == 3
    (branch,) = lesson.branches
    assert len(branch.answer) == lesson.num_scored == 7
    assert 15 <= len(branch.tail) - len(base.prompter.tail_ids("x")) + 1 <= 20


def test_both_arms_come_to_the_same_loss_and_the_same_gradients(make: Make) -> None:
    tokenizer = byte_tokenizer()
    tiny = tiny_model("llama", dtype=torch.float64, vocab_size=len(tokenizer))
    engine = Engine.from_pretrained(tiny, tokenizer=tokenizer, links=None)
    found = [(step.backward(), step.student.trained["links"].grad) for step in (make(engine, arm) for arm in ARMS)]
    (loss, gradient), (packed_loss, packed_gradient) = found
    assert gradient is not None
    assert packed_gradient is not None
    assert abs(loss - packed_loss).item() <= 1e-6  # the model's own rotary tables are float32
    assert largest(gradient[0]) > 1e-4
    assert largest(gradient - packed_gradient) <= 1e-5 * largest(gradient)


@pytest.mark.parametrize("arm", ARMS)
def test_the_loss_is_the_trainers(base: Engine, make: Make, arm: Arm) -> None:
    step = make(base, arm)
    trainer = Trainer(step.student, step._teacher, lessons=[step.lesson], held_out=[step.lesson], recipe=Recipe())
    assert step.backward().item() == pytest.approx(trainer.look().kl, rel=1e-5)


@pytest.mark.parametrize("arm", ARMS)
def test_a_step_changes_links_and_nothing_else(base: Engine, make: Make, arm: Arm) -> None:
    before = [parameter.clone() for parameter in base.runner.model.parameters()]
    step = make(base, arm)
    links = step.student.trained["links"].detach().clone()
    step()
    assert list(step.student.trained) == ["links"]
    assert not torch.equal(step.student.trained["links"][0], links[0])
    assert all(map(torch.equal, base.runner.model.parameters(), before))
    assert all(parameter.grad is None for parameter in base.runner.model.parameters())


def test_what_is_known_is_not_computed_again(base: Engine, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {arm: make(base, arm) for arm in ARMS}
    for step in steps.values():
        step()

    def encode(*_: Any, **__: Any) -> None:
        raise AssertionError("a stored document was encoded")

    monkeypatch.setattr(base.runner, "encode", encode)
    for step in steps.values():
        step()
    assert [step._teacher.computed for step in steps.values()] == [1, 0]


def test_arms_compute_links_and_tail_or_everything(base: Engine, make: Make) -> None:
    tail, sink = len(WORK.lesson(base.prompter).rows().ids), len(base.loader.identity.sink_ids)
    packed = len(base.prompter.system_ids()) + 3 * (sink + 40 + 2) + tail
    assert make(base, "links").rows == 3 * 2 + tail
    assert make(base, "packed").rows == -(-packed // 8) * 8  # padded


# --- memory ---------------------------------------------------------------------------------------------------------


def test_memory_of_a_step_is_told_apart_from_the_models(base: Engine, model: str, tmp_path: Path) -> None:
    found = memory_of(base, "packed", WORK, model=model, folder=tmp_path)
    if found is None:
        pytest.skip("this system does not tell a process its peak of memory")
    assert found.loaded_bytes > 50 << 20  # torch alone
    assert 0 < found.step_bytes < found.loaded_bytes


def test_a_peak_that_was_forgotten_does_not_count() -> None:
    block = torch.ones(96 << 18)  # 96 MiB
    del block
    if not train_step._forget_peak():
        pytest.skip("this system does not tell a process its peak of memory")
    before = train_step._peak_bytes()
    block = torch.ones(32 << 18)
    del block
    assert 31 << 20 <= train_step._peak_bytes() - before <= 64 << 20


def test_a_system_that_does_not_forget_peaks_gives_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("clear_refs")

    monkeypatch.setattr(Path, "write_text", refuse)
    assert not train_step._forget_peak()


# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("made_up_memory")
def test_rows_have_the_agreed_fields_and_say_what_was_gained(base: Engine, model: str) -> None:
    runs: list[None] = []
    rows = bench_train_step(base, model=model, work=WORK, repeats=3, progress=lambda: runs.append(None))
    work = {"documents": 3, "tokens": 40, "question": 20, "answer": 7, "links": 2, "seed": 0}
    assert [(row["arm"], {name: row[name] for name in work}) for row in rows] == [("links", work), ("packed", work)]
    assert all(len(row["samples_s"]) == 3 and row["q1_s"] <= row["median_s"] <= row["q3_s"] for row in rows)
    links, packed = rows
    assert links["times_faster"] == packed["median_s"] / links["median_s"]
    assert (packed["times_faster"], packed["memory_share"]) == (1, 1)
    assert (links["loaded_bytes"], links["step_bytes"], links["memory_share"]) == (300, 10, 0.25)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert len(runs) == runs_of(3)


@pytest.mark.usefixtures("unknown_memory")
def test_memory_that_nobody_knows_is_none(base: Engine, model: str) -> None:
    for row in bench_train_step(base, model=model, work=WORK, repeats=1):
        assert (row["loaded_bytes"], row["step_bytes"], row["memory_share"]) == (None, None, None)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


VERB = ("bench", "train-step", "--documents", 2, "--tokens", 40, "--links", 2, "--repeats", 1)


@pytest.mark.usefixtures("made_up_memory")
def test_the_verb_writes_its_rows_with_model_and_seed(model: str) -> None:
    found = json.loads(run(*VERB, "-m", model, "--json", "-").stdout)
    assert (found["schema"], found["command"], found["seed"]) == (1, "bench train-step", 0)
    assert (found["model"]["name"], [row["arm"] for row in found["results"]]) == (model, ["links", "packed"])


@pytest.mark.parametrize(("fixture", "shown"), [("made_up_memory", "25%"), ("unknown_memory", "unknown")])
def test_the_verb_shows_a_table(model: str, request: pytest.FixtureRequest, fixture: str, shown: str) -> None:
    request.getfixturevalue(fixture)
    result = run(*VERB, "-m", model)
    assert (result.exit_code, "one training step" in result.stdout, shown in result.stdout) == (0, True, True)


def test_another_seed_is_another_lesson() -> None:
    prompter = Prompter(tokenizer=byte_tokenizer())
    assert Work(seed=0).lesson(prompter).digest() != Work(seed=100).lesson(prompter).digest()
