"""A student that encodes documents afresh computes what serving computes, and leaves a model behind that serves.

Equality is shown in float64 all through (`DoublePrecision`), on weights wide enough for peaked attention.
"""

import functools
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlink import Engine, InputError
from kvlink.core.entry import CacheEntry
from kvlink.core.errors import BundleRefused
from kvlink.core.layout import Prompt
from kvlink.models.adapter import Adapter
from kvlink.models.assembler import Assembler
from kvlink.models.bundle import Card, read_bundle
from kvlink.models.links import LinkTokens
from kvlink.models.reference import reference_logits
from kvlink.models.runner import Runner
from kvlink.training.lesson import Branch, Ids, Lesson
from kvlink.training.student import Load, RequestSide, Student
from kvlink.training.teacher import Teacher
from kvlink.training.trainer import Recipe, Trainer
from kvlink.training.whole import LINKS, WholePrompt, WholeRows
from tiny import byte_tokenizer
from tiny_models import DoublePrecision, largest, random_ids, reuse_logits, tiny_model

torch.set_num_threads(1)

FAMILIES = ("llama", "mistral", "qwen2", "gemma2", "gemma3", "granite", "phi")
"""Full attention; windows of 16 in all layers, in some; eager attention; scaled embeddings; partial rotary."""

SINKS = {"none": (), "bos": (1,), "header": random_ids(4, seed=77), "longer-than-system": random_ids(9, seed=78)}
"""The prompts' S has 6 tokens."""

CARD = Card(model="tiny", digest="", sink_ids=(), template="", mode="lora")


@dataclass
class Held:
    entry: CacheEntry


@functools.cache
def shared_runner(family: str) -> Runner:
    return Runner(tiny_model(family, dtype=torch.float64).requires_grad_(False))


def own_runner(family: str = "llama", **options: Any) -> Runner:
    """A runner whose weights a test may change."""
    return Runner(tiny_model(family, **{"dtype": torch.float64, **options}))


def lesson_of(
    *,
    branches: Sequence[tuple[int, int]] = ((8, 3), (5, 1), (1, 6)),
    documents: Sequence[Sequence[int]] = ((20, 7), (11,), (1,), (17,)),
    seed: int = 0,
    vocab: int = 300,
) -> Lesson:
    """Random ids; by default a document of two segments, lengths beyond and below a window of 16, three questions."""
    seeds = iter(range(1000 * seed, 1000 * seed + 1000))

    def ids(count: int) -> Ids:
        return tuple(1 + token % (vocab - 1) for token in random_ids(count, seed=next(seeds)))

    asked = tuple(Branch(ids(tail), ids(answer)) for tail, answer in branches)
    cut = tuple(tuple(ids(length) for length in document) for document in documents)
    return Lesson(str(seed), "random", Prompt(ids(6), cut, asked[0].tail), asked)


def links_of(runner: Runner, num_links: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    drawn = torch.randn(2, num_links, runner.embedding.embedding_dim, generator=generator, dtype=runner.dtype)
    return drawn * runner.embedding.weight.detach().square().mean().sqrt()


def loading(runner: Runner, sink_ids: Ids) -> Load:
    @contextmanager
    def load(segments: Sequence[Ids]) -> Generator[list[Held]]:
        yield [Held(entry) for entry in runner.encode(segments, prefix=runner.prefix(sink_ids))]

    return load


def request_side(runner: Runner, sink_ids: Ids = (), **options: Any) -> RequestSide:
    return RequestSide(runner, loading(runner, sink_ids), links=links_of(runner), **options)


def change_of(runner: Runner, *, seed: int = 5) -> Adapter:
    """A low-rank change that is not zero."""
    fresh, generator = Adapter.fresh(runner.model, rank=4), torch.Generator().manual_seed(seed)
    return Adapter(fresh.down, {k: torch.randn(up.shape, generator=generator) * 0.1 for k, up in fresh.up.items()}, 2.0)


def gradients(student: Student, lesson: Lesson) -> dict[str, Tensor]:
    """Of a loss that weighs every logit otherwise."""
    logits = student.logits(lesson)
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    found = torch.autograd.grad((logits.log_softmax(-1) * weights).sum(), list(student.trained.values()))
    return dict(zip(student.trained, found, strict=True))


# --- what it computes -----------------------------------------------------------------------------------------------

everywhere = pytest.mark.parametrize(("family", "sink"), [(family, sink) for family in FAMILIES for sink in SINKS])


@everywhere
def test_logits_are_those_of_the_student_that_reuses_entries(family: str, sink: str) -> None:
    runner, lesson = shared_runner(family), lesson_of()
    with DoublePrecision(), torch.no_grad():
        found = WholePrompt(runner, links=links_of(runner), sink_ids=SINKS[sink]).logits(lesson)
        wanted = request_side(runner, SINKS[sink]).logits(lesson)
    assert found.shape == (len(lesson.rows().ids), runner.embedding.num_embeddings)
    assert largest(found - wanted) <= 1e-9


@everywhere
def test_gradients_of_the_links_are_those_of_the_student_that_reuses_entries(family: str, sink: str) -> None:
    runner, lesson = shared_runner(family), lesson_of()
    with DoublePrecision():
        found = gradients(WholePrompt(runner, links=links_of(runner), sink_ids=SINKS[sink]), lesson)["links"]
        wanted = gradients(request_side(runner, SINKS[sink]), lesson)["links"]
    assert (wanted.abs().amax(-1) > 1e-3).all() or family == "mistral"  # there a window hides the early ones from T
    assert largest(found - wanted) <= 1e-9 * largest(wanted)


@everywhere
def test_one_question_gives_the_reference_forward(family: str, sink: str) -> None:
    runner, lesson = shared_runner(family), lesson_of(branches=[(8, 1)])
    with DoublePrecision(), torch.no_grad():
        assembler = Assembler(runner, links=LinkTokens(links_of(runner)))
        wanted = reference_logits(assembler, lesson.prompt, sink_ids=SINKS[sink])[-8:]
        found = WholePrompt(runner, links=links_of(runner), sink_ids=SINKS[sink]).logits(lesson)
    assert largest(found - wanted) <= 1e-9


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_another_sink_prefix_gives_other_logits(family: str) -> None:
    runner, lesson = shared_runner(family), lesson_of()
    with torch.no_grad():
        found = WholePrompt(runner, links=links_of(runner), sink_ids=SINKS["header"]).logits(lesson)
        wanted = request_side(runner, SINKS["none"]).logits(lesson)
    assert largest(found - wanted) > 0.1


def test_without_links_logits_are_those_of_block_attention() -> None:
    runner, lesson = shared_runner("llama"), lesson_of(branches=[(8, 1)])
    with DoublePrecision(), torch.no_grad():
        wanted = reference_logits(Assembler(runner), lesson.prompt)[-8:]
        found = WholePrompt(runner, links=links_of(runner, 0)).logits(lesson)
    assert largest(found - wanted) <= 1e-9


# --- padding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiple", [1, 8, 64])
def test_rows_are_a_multiple_and_padding_is_in_no_group(multiple: int) -> None:
    rows = WholeRows.of(lesson_of(), num_links=3, sink_ids=(1,), multiple=multiple)
    used = len(WholeRows.of(lesson_of(), num_links=3, sink_ids=(1,), multiple=1))
    assert (len(rows) % multiple, len(rows) - used < multiple) == (0, True)
    mask = rows.mask()
    assert not mask[used:].any()
    assert not mask[:, used:].any()
    assert torch.equal(mask[:used, :used].diagonal(), torch.ones(used, dtype=torch.bool))


def padded(monkeypatch: pytest.MonkeyPatch, multiple: int) -> None:
    whole = functools.partial(WholeRows.of, multiple=multiple)
    monkeypatch.setattr("kvlink.training.whole.WholeRows.of", staticmethod(whole))


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_neither_logits_nor_gradients(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lesson, found = lesson_of(), []
    for multiple in (1, 64):
        padded(monkeypatch, multiple)
        student = WholePrompt(own_runner(family), links=links_of(shared_runner(family)), sink_ids=(1,), full=True)
        with DoublePrecision():
            found.append((student.logits(lesson).detach(), gradients(student, lesson)))
    (bare, wanted), (logits, given) = found
    assert largest(logits - bare) <= 1e-9
    assert all(largest(given[name] - wanted[name]) <= 1e-9 * max(1, largest(wanted[name])) for name in wanted)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_brings_no_nan_forward_or_backward(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    padded(monkeypatch, 64)
    runner, lesson = own_runner(family, dtype=dtype), lesson_of()
    student = WholePrompt(runner, links=links_of(runner).float(), adapter=change_of(runner))
    assert student.logits(lesson).isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(student, lesson).values())


def test_a_mask_of_infinity_would_bring_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    padded(monkeypatch, 64)
    runner = own_runner("gemma2")
    finite = runner.masks
    monkeypatch.setattr(runner, "masks", lambda seen: {k: m * float("inf") for k, m in finite(seen).items()})
    student = WholePrompt(runner, links=links_of(runner), adapter=change_of(runner))
    assert not all(gradient.isfinite().all() for gradient in gradients(student, lesson_of()).values())


# --- low-rank change on all rows ------------------------------------------------------------------------------------


def test_a_fresh_change_changes_nothing() -> None:
    runner, lesson = own_runner(), lesson_of()
    with torch.no_grad():
        bare = WholePrompt(runner, links=links_of(runner)).logits(lesson)
        fresh = WholePrompt(runner, links=links_of(runner), adapter=Adapter.fresh(runner.model)).logits(lesson)
    assert torch.equal(bare, fresh)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi", "gpt_neox"])
def test_a_change_on_all_rows_is_a_change_of_the_weights(family: str) -> None:
    runner, lesson = own_runner(family), lesson_of()
    student = WholePrompt(runner, links=links_of(runner), adapter=change_of(runner), sink_ids=(1,))
    merged = Runner(student.merged())
    with DoublePrecision(), torch.no_grad():
        bare = request_side(runner, (1,)).logits(lesson)
        found = student.logits(lesson)
        wanted = request_side(merged, (1,)).logits(lesson)
    assert largest(found - wanted) <= 1e-9
    assert largest(found - bare) > 0.1


def test_merging_leaves_the_model_as_it_was() -> None:
    runner, lesson = own_runner(), lesson_of()
    before = {name: tensor.clone() for name, tensor in runner.model.state_dict().items()}
    WholePrompt(runner, links=links_of(runner), adapter=change_of(runner)).merged()
    assert all(torch.equal(tensor, before[name]) for name, tensor in runner.model.state_dict().items())
    with torch.no_grad():
        assert WholePrompt(runner, links=links_of(runner)).logits(lesson).isfinite().all()


def test_a_low_rank_change_leaves_the_weights_without_gradients() -> None:
    runner = own_runner()
    adapter = change_of(runner)
    student = WholePrompt(runner, links=links_of(runner), adapter=adapter)
    names = [f"{part}.{name}" for name in adapter.down for part in ("down", "up")]
    assert sorted(student.trained) == sorted(["links", *names])
    assert not any(parameter.requires_grad for parameter in runner.model.parameters())
    assert student.adapter() is None  # what acts on documents is no part of a bundle


# --- all weights ----------------------------------------------------------------------------------------------------


def test_all_weights_are_trained_and_a_tied_embedding_stays_tied() -> None:
    runner = Runner(tiny_model("llama", tie_word_embeddings=True))
    student = WholePrompt(runner, links=links_of(runner), full=True)
    names = [name for name, _ in runner.model.named_parameters()]
    assert "lm_head.weight" not in names
    assert list(student.trained) == ["links", *(f"model.{name}" for name in names)]
    optimiser = torch.optim.AdamW(student.trained.values(), lr=0.01)
    before = {name: tensor.detach().clone() for name, tensor in student.trained.items()}
    student.logits(lesson_of()).log_softmax(-1)[:, 7].sum().backward()
    optimiser.step()
    assert all(not torch.equal(tensor, before[name]) for name, tensor in student.trained.items())
    assert student.merged() is runner.model
    assert runner.model.lm_head.weight is runner.model.get_input_embeddings().weight


def test_weights_of_16_bits_are_not_trained() -> None:
    runner = own_runner(dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"bfloat16.*--dtype float32"):
        WholePrompt(runner, links=links_of(runner), full=True)


def test_a_change_and_all_weights_together_are_refused() -> None:
    runner = own_runner()
    with pytest.raises(InputError, match="choose one"):
        WholePrompt(runner, links=links_of(runner), adapter=Adapter.fresh(runner.model), full=True)


# --- training -------------------------------------------------------------------------------------------------------

RECIPE = Recipe(epochs=12, batch=2, lr=0.02, lr_adapter=3e-3, every=12, patience=None)


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_training_brings_the_student_nearer_to_the_teacher(full: bool) -> None:
    runner = own_runner(dtype=torch.float32, initializer_range=0.1)
    lessons = [lesson_of(seed=seed) for seed in (1, 2)]
    teacher = Teacher(runner, model="0" * 64)
    teacher.learn(lessons)
    adapter = None if full else Adapter.fresh(runner.model)
    student = WholePrompt(runner, links=links_of(runner), sink_ids=(1,), adapter=adapter, full=full)
    outcome = Trainer(student, teacher, lessons=lessons, held_out=lessons, recipe=RECIPE).run()
    kl = dict(outcome.curve)
    assert kl[outcome.best].kl < 0.5 * kl[0].kl


# --- the teacher of a model that changes ----------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["memory", "folder", "full folder"])
def test_a_teacher_that_has_learned_does_not_follow_the_model(kept: str, tmp_path: Path) -> None:
    runner, lesson, calls = own_runner(), lesson_of(), list[None]()
    options: dict[str, Any] = {} if kept == "memory" else {"folder": tmp_path}
    teacher = Teacher(runner, model="0" * 64, budget_bytes=0 if kept == "full folder" else 1 << 30, **options)
    teacher.learn([lesson], done=lambda: calls.append(None))
    assert len(calls) == 1
    before = Teacher(runner, model="0" * 64)(lesson)
    with torch.no_grad():
        for parameter in runner.model.parameters():
            parameter.mul_(1.5)
    after, moved = teacher(lesson), Teacher(runner, model="1" * 64)(lesson)
    assert torch.equal(after.ids, before.ids)
    assert torch.equal(after.logprobs, before.logprobs)
    assert not torch.equal(moved.logprobs, before.logprobs)
    assert (teacher.computed, teacher.known) == (1, 1)


def test_a_teacher_that_has_learned_refuses_what_it_has_not_seen() -> None:
    teacher = Teacher(own_runner(), model="0" * 64)
    teacher.learn([lesson_of(seed=1)])
    with pytest.raises(InputError, match=r"lesson 2 .* let Teacher\.learn see all lessons"):
        teacher(lesson_of(seed=2))


def test_what_was_kept_and_is_gone_is_an_error_and_no_prediction_of_another_model(tmp_path: Path) -> None:
    teacher, lesson = Teacher(own_runner(), model="0" * 64, folder=tmp_path), lesson_of()
    teacher.learn([lesson])
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(InputError, match="leave its folder alone"):
        teacher(lesson)


# --- what is left behind --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_saved_model_serves_with_its_links_and_computes_what_the_student_did(
    full: bool, tied: bool, tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    runner = Runner(tiny_model("llama", vocab_size=len(tokenizer), tie_word_embeddings=tied))
    lesson = lesson_of(branches=[(8, 1)], documents=((20,), (11,)), vocab=len(tokenizer))
    adapter = None if full else change_of(runner)
    student = WholePrompt(runner, links=links_of(runner), sink_ids=(1,), adapter=adapter, full=full)
    with torch.no_grad():
        for name, tensor in student.trained.items():
            if name.startswith("model."):
                tensor.mul_(1.1)
        wanted = student.logits(lesson)
    card = Card("tiny", "", (1,), "", mode="full" if full else "lora")
    written = student.save(tmp_path / "out", tokenizer=tokenizer, card=card)
    engine = Engine.from_pretrained(tmp_path / "out", links=tmp_path / "out" / LINKS)
    assert engine.num_links == 3
    assert (written.card.digest, written.card.mode) == (engine.model_info["digest"], card.mode)
    assert read_bundle(tmp_path / "out" / LINKS).digest == written.digest
    assert engine.generate(["The office opens at seven."], "When?", max_new_tokens=4).usage.link_tokens == 3
    found = reuse_logits(engine.assembler, lesson.prompt, sink_ids=engine.loader.identity.sink_ids)[-8:]
    assert largest(found - wanted) <= 1e-4 * largest(wanted)


def test_the_base_model_refuses_the_links_of_a_changed_one(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    runner = Runner(tiny_model("llama", vocab_size=len(tokenizer)))
    WholePrompt(runner, links=links_of(runner), adapter=change_of(runner)).save(tmp_path, tokenizer=None, card=CARD)
    with pytest.raises(BundleRefused, match="other weights"):
        Engine.from_pretrained(runner.model, tokenizer=tokenizer, links=tmp_path / LINKS)


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    runner = own_runner()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written to .*file"):
        WholePrompt(runner, links=links_of(runner)).save(tmp_path / "file", tokenizer=None, card=CARD)


def test_saving_again_leaves_no_links_of_another_model_behind_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = own_runner(dtype=torch.float32)
    student = WholePrompt(runner, links=links_of(runner), full=True)
    student.save(tmp_path, tokenizer=None, card=CARD)

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(runner.model, "save_pretrained", full_disk)
    with pytest.raises(InputError, match="no space left"):
        student.save(tmp_path, tokenizer=None, card=CARD)
    assert not (tmp_path / LINKS).exists()
