"""Links that are trained here, within seconds, win back what a lookup over several documents loses without them."""

import pytest
from lessons import loading

from kvlink.models.assembler import Assembler
from kvlink.training.initialise import initial_links
from kvlink.training.lesson import lessons_of
from kvlink.training.student import RequestSide
from kvlink.training.teacher import Teacher
from kvlink.training.trainer import Recipe, Trainer
from lookup import Outcome, examples, lookup_model, outcome

NUM_LINKS = 4


def trained() -> Assembler:
    """Train on 256 examples of seed 0; seed 1 is for measuring."""
    runner, prompter = lookup_model()
    found = lessons_of(
        examples(264, seed=0),
        prompter=prompter,
        segments=lambda document: prompter.segments(document, cut=False),
        num_links=NUM_LINKS,
        context=1024,
    )
    assert not found.refused
    links = initial_links(
        "random", runner=runner, prompter=prompter, documents=[], num_links=NUM_LINKS, levels=1, seed=0
    )
    student = RequestSide(runner, loading(runner, prompter.sink_ids("header")), links=links)
    trainer = Trainer(
        student,
        Teacher(runner, model="lookup"),
        lessons=found.kept[:256],
        held_out=found.kept[256:],
        recipe=Recipe(epochs=8, batch=8, lr=0.1, every=64, patience=None),
    )
    trainer.teacher.learn(found.kept)
    trainer.run()
    return Assembler(runner, links=student.links())


@pytest.fixture(scope="module")
def found() -> tuple[Outcome, Outcome]:
    """Without links, and with trained ones, on examples that were not learned from."""
    held_out = examples(60, seed=1)
    return outcome(Assembler(lookup_model()[0]), held_out), outcome(trained(), held_out)


def test_trained_links_win_back_more_than_half_of_the_answers_that_reuse_loses(found: tuple[Outcome, Outcome]):
    without, linked = found
    lost = without.full - without.accuracy
    assert lost >= 0.2
    assert linked.accuracy >= without.accuracy + lost / 2


def test_trained_links_take_more_than_half_of_the_divergence_from_full_attention(found: tuple[Outcome, Outcome]):
    without, linked = found
    assert without.kl >= 0.3
    assert linked.kl <= without.kl / 2


def test_what_one_document_answers_is_answered_as_before(found: tuple[Outcome, Outcome]):
    without, linked = found
    assert linked.alone >= without.alone - 0.05
