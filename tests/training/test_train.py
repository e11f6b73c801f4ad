"""One run from examples to a bundle: nothing that is held out is learned from, and the card says how it went."""

import functools
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lessons import PROMPTER, base_of, example_of, loading, shared_runner

from kvlink import Document
from kvlink.core.errors import BundleRefused, InputError
from kvlink.core.layout import Prompt
from kvlink.models.bundle import Bundle, read_bundle
from kvlink.models.runner import Runner
from kvlink.training.example import Question
from kvlink.training.lesson import Branch, Ids, Lesson
from kvlink.training.student import RequestSide
from kvlink.training.teacher import Teacher
from kvlink.training.train import Base, Plan, Trained, lessons_for, num_rows, prepare, split, train
from kvlink.training.trainer import Recipe, held_out
from kvlink.training.whole import LINKS, WholePrompt
from tiny import byte_tokenizer
from tiny_bundles import tiny_bundle
from tiny_models import tiny_model

PLAN = Plan(num_links=2, held_out=2)
RECIPE = Recipe(epochs=2, batch=2, lr=0.02, lr_adapter=3e-3, every=2, patience=None)


@functools.cache
def runner() -> Runner:
    return shared_runner("llama", torch.float32, 0.1)


@functools.cache
def lessons() -> list[Lesson]:
    """Six lessons of two sources."""
    examples = [example_of(number, source="huts" if number < 4 else "hand book") for number in range(6)]
    return list(lessons_for(base_of(runner()), examples, PLAN, context=4096).kept)


def teacher_of(base: Base) -> Teacher:
    return Teacher(base.runner, model=base.digest)


def trained(plan: Plan = PLAN, *, recipe: Recipe = RECIPE, base: Base | None = None, **options: Any) -> Trained:
    base = base or base_of(runner())
    return train(base, teacher_of(base), lessons(), plan=plan, recipe=recipe, **options)


@functools.cache
def once(mode: str) -> Trained:
    """A run that several tests look at."""
    return trained(replace(PLAN, mode=mode))


# --- what is held out -----------------------------------------------------------------------------------------------


def named(number: int, questions: tuple[int, ...]) -> Lesson:
    branches = tuple(Branch((100 + question,), (7,)) for question in questions)
    return Lesson(f"l{number}", "s", Prompt((1,), (((2,),),), branches[0].tail), branches)


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=3), min_size=4, max_size=30),
    st.integers(1, 5),
)
def test_no_question_is_both_learned_from_and_held_out(questions: list[list[int]], count: int) -> None:
    given_lessons = [named(number, tuple(asked)) for number, asked in enumerate(questions)]
    if len(given_lessons) < 2 * count:
        with pytest.raises(InputError, match="at least twice as many are needed"):
            split(given_lessons, count)
        return
    learned, looked = split(given_lessons, count)
    assert len(looked) == count
    held = {branch.tail for lesson in looked for branch in lesson.branches}
    assert not any(branch.tail in held for lesson in learned for branch in lesson.branches)
    rest = [lesson for lesson in given_lessons if lesson not in looked]
    assert learned == [lesson for lesson in rest if not any(branch.tail in held for branch in lesson.branches)]


def test_what_is_held_out_follows_from_ids_alone() -> None:
    some = [named(number, (number,)) for number in range(20)]
    _, looked = split(some, 5)
    _, turned = split(some[::-1], 5)
    assert sorted(lesson.id for lesson in turned) == sorted(lesson.id for lesson in looked)
    assert [lesson.id for lesson in looked] != [f"l{number}" for number in range(5)]


def test_a_set_of_which_one_question_is_held_out_is_not_learned_from_at_all() -> None:
    some = [named(number, (number,)) for number in range(10)]
    _, looked = split(some, 2)
    asked = looked[0].branches[0].tail[0] - 100
    learned, _ = split([*some, named(77, (50, asked, 51))], 2)
    assert "l77" not in [lesson.id for lesson in learned]
    assert len(learned) == 8


def test_the_same_words_with_another_answer_are_another_question() -> None:
    """As in "What are the documents about?", or a self-study would hold out most of what it asks by rule."""
    some = [named(number, (0,)) for number in range(10)]
    answered = [replace(one, branches=(Branch((100,), (number,)),)) for number, one in enumerate(some)]
    assert len(split(answered, 2)[0]) == 8
    assert split(some, 2)[0] == []


@pytest.mark.parametrize(("count", "out"), [(0, 1), (3, 2), (79, 40), (10, 0)])
def test_too_few_lessons_are_an_error_with_both_numbers(count: int, out: int) -> None:
    with pytest.raises(InputError, match=f"{count} lessons, {out} of them held out"):
        split([named(number, (number,)) for number in range(count)], out)


@given(st.lists(st.integers(1, 4), min_size=6, max_size=20), st.integers(0, 60))
def test_fewer_rows_are_the_beginning_of_more_and_leave_the_held_out_ones(asked: list[int], rows: int) -> None:
    some = [named(number, tuple(range(10 * number, 10 * number + count))) for number, count in enumerate(asked)]
    every, looked = split(some, 2)
    if not 1 <= rows <= num_rows(every):
        with pytest.raises(InputError, match=f"{rows} rows to learn from: there are 1 to {num_rows(every)} beside"):
            split(some, 2, rows=rows)
        return
    learned, same = split(some, 2, rows=rows)
    assert same == looked
    assert learned == every[: len(learned)]
    assert num_rows(learned[:-1]) < rows <= num_rows(learned)


# --- before training ------------------------------------------------------------------------------------------------

LONG = Document("\n\n".join(f"Paragraph {number} says that hut {number} is full." for number in range(40)), "Huts")
"""More than 1,024 tokens."""


@pytest.mark.parametrize(("levels", "cut"), [(1, False), (2, True)])
def test_long_documents_are_cut_where_there_are_links_for_it(levels: int, cut: bool) -> None:
    example = replace(example_of(1), documents=(LONG, Document("Short.")))
    plan = Plan(num_links=2, levels=levels)
    (lesson,) = lessons_for(base_of(runner()), [example], plan, context=4096).kept
    assert lesson.prompt.documents == tuple(PROMPTER.segments(one, cut=cut) for one in example.documents)
    assert (len(lesson.prompt.documents[0]) > 1) is cut


def test_what_does_not_fit_with_its_links_is_left_out() -> None:
    example = example_of(1)
    (lesson,) = lessons_for(base_of(runner()), [example], PLAN, context=4096).kept
    found = lessons_for(base_of(runner()), [example], PLAN, context=lesson.span(2) - 1)
    assert (found.kept, list(found.refused.values())) == ((), [1])


def test_entries_and_predictions_are_at_hand_before_the_first_step(tmp_path: Path) -> None:
    seen: list[Ids] = []
    base, done = base_of(runner(), seen=seen), list[None]()
    teacher = Teacher(base.runner, model=base.digest, folder=tmp_path)
    prepare(base, teacher, lessons(), done=lambda: done.append(None))
    assert seen == [ids for lesson in lessons() for ids in lesson.prompt.segments]
    assert (len(done), teacher.computed, teacher.known) == (6, 6, 0)
    train(base, teacher, lessons(), plan=PLAN, recipe=RECIPE)
    assert teacher.computed == 6


# --- the outcome ----------------------------------------------------------------------------------------------------


def test_the_card_says_what_it_is_and_how_it_went() -> None:
    made = once("links")
    card, curve = made.card, dict(made.outcome.curve)
    base = base_of(runner())
    assert (card.model, card.digest, card.sink_ids) == (base.name, base.digest, base.sink_ids)
    assert (card.template, card.mode, card.steps) == (PROMPTER.template_version, "links", made.outcome.best)
    learned, looked = split(lessons(), 2)
    assert sum(card.data.values()) == len(learned)
    assert card.data == {source: [one.source for one in learned].count(source) for source in card.data}
    assert card.loss == "KL to full attention"
    assert card.scores["kl"] == curve[made.outcome.best].kl
    assert card.scores["agreement"] == curve[made.outcome.best].agreement
    assert card.scores["held_out"] == len(looked) == 2
    assert card.recipe == asdict(RECIPE) | asdict(PLAN)


def test_of_fewer_rows_only_those_are_learned_from() -> None:
    found = trained(replace(PLAN, rows=2), recipe=replace(RECIPE, epochs=1))
    assert (sum(found.card.data.values()), found.rows) == (len(split(lessons(), 2, rows=2)[0]), found.rows)
    assert 2 <= found.rows < once("links").rows


def test_the_figure_without_links_is_that_of_no_links_at_all() -> None:
    base = base_of(runner())
    _, looked = split(lessons(), 2)
    bare = RequestSide(base.runner, base.load, links=torch.zeros(2, 0, 64))
    found = held_out(bare, teacher_of(base), looked)
    scores = once("links").card.scores
    assert (scores["kl_without"], scores["agreement_without"]) == (found.kl, found.agreement)
    assert scores["kl_without"] != once("links").outcome.curve[0][1].kl


@pytest.mark.parametrize("mode", ["links", "links+lora"])
def test_the_bundle_scores_what_its_card_says(mode: str, tmp_path: Path) -> None:
    made = once(mode)
    made.save(tmp_path / "a.safetensors")
    found = read_bundle(tmp_path / "a.safetensors")
    assert (found.card, found.digest) == (made.card, made.bundle().digest)
    base = base_of(runner())
    student = RequestSide(base.runner, base.load, links=found.links.embeddings, adapter=found.adapter)
    _, looked = split(lessons(), 2)
    assert held_out(student, teacher_of(base), looked).kl == pytest.approx(found.card.scores["kl"], rel=1e-5)
    assert (found.adapter is not None) is (mode == "links+lora")


def test_an_adapter_has_the_rank_of_the_plan() -> None:
    adapter = trained(replace(PLAN, mode="links+lora", rank=3), recipe=replace(RECIPE, epochs=1)).bundle().adapter
    assert adapter is not None
    assert adapter.rank == 3
    assert any(up.abs().max() > 0 for up in adapter.up.values())


def test_a_mix_of_losses_stands_on_the_card() -> None:
    made = trained(recipe=replace(RECIPE, epochs=1, answer=0.25))
    assert made.card.loss == "KL to full attention, 0.25 of it answers"


def test_the_same_seed_gives_the_same_bundle() -> None:
    assert trained().bundle().digest == once("links").bundle().digest
    assert trained(recipe=replace(RECIPE, seed=1)).bundle().digest != once("links").bundle().digest


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_the_other_modes_leave_a_model_with_links_of_its_own(mode: str, tmp_path: Path) -> None:
    own = Runner(tiny_model("llama", vocab_size=len(byte_tokenizer()), initializer_range=0.1))
    base = replace(base_of(own), load=loading(own))
    teacher = teacher_of(base)
    before = teacher(lessons()[0]).logprobs
    made = train(base, teacher, lessons(), plan=replace(PLAN, mode=mode), recipe=replace(RECIPE, lr_adapter=1e-3))
    assert isinstance(made.student, WholePrompt)
    assert made.card.mode == mode
    assert math.isfinite(made.card.scores["kl"])
    made.save(tmp_path, tokenizer=byte_tokenizer())
    assert read_bundle(tmp_path / LINKS).card.digest != base.digest
    if mode == "full":  # the model has changed, and what it said before has not
        assert torch.equal(teacher(lessons()[0]).logprobs, before)


# --- what it begins with --------------------------------------------------------------------------------------------


def test_training_goes_on_from_a_bundle() -> None:
    first = once("links+lora")
    again = trained(replace(PLAN, mode="links+lora"), start=first.bundle())
    assert again.outcome.curve[0][1].kl == pytest.approx(first.card.scores["kl"], rel=1e-5)


def start_of(**changed: Any) -> Bundle:
    return tiny_bundle(runner(), **{"num_links": 2, **changed})


def test_links_may_begin_with_those_of_other_weights() -> None:
    made = trained(start=start_of(digest="other"), recipe=replace(RECIPE, epochs=1))
    assert made.card.digest == base_of(runner()).digest


@pytest.mark.parametrize(
    ("start", "plan", "told"),
    [
        ({"num_links": 3}, {}, "has 3 links in 2 levels, asked for are 2 in 2"),
        ({"levels": 1}, {}, "has 2 links in 1 levels, asked for are 2 in 2"),
        ({"adapter": True}, {}, "holds an adapter, which links would lose: train links.lora"),
        ({"adapter": True}, {"mode": "full"}, "holds an adapter, which full would lose"),
    ],
)
def test_a_bundle_of_another_shape_is_no_beginning(start: dict[str, Any], plan: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        trained(replace(PLAN, **plan), start=start_of(**start))


def test_a_bundle_of_another_width_is_no_beginning() -> None:
    other = Runner(tiny_model("llama", hidden_size=32, head_dim=16))
    with pytest.raises(BundleRefused, match="32 wide, the model's embeddings 64"):
        trained(start=tiny_bundle(other, num_links=2))


def test_an_initialisation_that_is_not_there_is_an_error() -> None:
    with pytest.raises(InputError, match="there is no initialisation 'zeros'"):
        trained(replace(PLAN, init="zeros"))


# --- resumed --------------------------------------------------------------------------------------------------------


class Killed(Exception):
    """A run was stopped from outside."""


def killing(step: int, *_: Any) -> None:
    if step == 3:
        raise Killed


@pytest.mark.parametrize("mode", ["links", "links+lora"])
def test_a_killed_run_comes_to_the_same_bundle(mode: str, tmp_path: Path) -> None:
    plan = replace(PLAN, mode=mode)
    with pytest.raises(Killed):
        trained(plan, folder=tmp_path, progress=killing)
    found = trained(plan, folder=tmp_path, resume=True)
    assert found.bundle().digest == once(mode).bundle().digest
    assert found.card == once(mode).card
    assert found.outcome.curve == once(mode).outcome.curve


@pytest.mark.parametrize(
    ("plan", "options", "told"),
    [
        ({"init": "random"}, [], "plan"),
        ({"mode": "lora"}, [], "plan"),
        ({}, ["start"], "start"),
        ({}, ["base"], "model"),
    ],
    ids=["init", "mode", "start", "model"],
)
def test_a_state_of_another_plan_is_refused(
    plan: dict[str, Any], options: list[str], told: str, tmp_path: Path
) -> None:
    """All of them have parameters of the same names and shapes."""
    begun = replace(PLAN, mode="links+lora", rank=4)
    with pytest.raises(Killed):
        trained(begun, folder=tmp_path, progress=killing)
    given = {"start": start_of(adapter=True), "base": replace(base_of(runner()), digest="cd" * 32)}
    changed = {name: given[name] for name in options}
    with pytest.raises(InputError, match=rf"other settings \({told}\)"):
        trained(replace(begun, **plan), folder=tmp_path, resume=True, **changed)


def test_a_question_without_an_answer_teaches_nothing() -> None:
    example = replace(example_of(1), questions=(Question("Why?", " "),))
    found = lessons_for(base_of(runner()), [example], PLAN, context=4096)
    assert (found.kept, list(found.refused.values())) == ((), [1])
