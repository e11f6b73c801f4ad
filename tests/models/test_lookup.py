"""The tiny trained model: full attention solves its lookup, documents that are encoded alone do not."""

from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from kvlink import Engine
from kvlink.core.entry import CacheEntry
from kvlink.core.layout import Kind, Layout
from kvlink.models.assembler import Assembler
from kvlink.models.cache import SlotCache
from kvlink.models.links import LinkTokens
from kvlink.models.probe import probe
from lookup import FOLDER, Outcome, examples, lookup_model, outcome, rows

SEED = 1
"""Of examples that no training here may draw."""


@cache
def measured(*, num_links: int = 0, rotated: bool = True) -> Outcome:
    runner, _ = lookup_model()

    def unrotate(cache: SlotCache, layout: Layout, entries: list[CacheEntry]) -> None:
        for span, entry in zip(layout.of(Kind.SEGMENT), entries, strict=True):
            cache.keys[:, :, span.start : span.stop] = entry.keys

    links = LinkTokens.random(runner.embedding, num_links=num_links) if num_links else None
    return outcome(Assembler(runner, links=links), examples(40, seed=SEED), spoil=None if rotated else unrotate)


def test_full_attention_solves_it():
    assert measured().full >= 0.95


def test_documents_encoded_alone_fall_short_where_the_answer_takes_two_of_them():
    found = measured()
    assert found.joint <= 0.5
    assert found.full - found.accuracy >= 0.2
    assert found.kl >= 0.3


def test_documents_encoded_alone_suffice_where_one_of_them_answers():
    assert measured().alone >= 0.95


def test_without_rotation_it_falls_further():
    assert measured(rotated=False).kl >= measured().kl + 0.1


@pytest.mark.parametrize("num_links", [2, 6])
def test_untrained_random_links_win_nothing_back(num_links: int):
    assert measured(num_links=num_links).kl >= measured().kl - 0.05


def test_the_probe_accepts_the_model():
    report = probe(lookup_model()[0])
    assert report.supported, report.reason
    assert report.context == 1024


def test_an_engine_answers_from_the_folder():
    engine = Engine.from_pretrained(FOLDER, store=None)
    example = examples(1, seed=SEED)[0]
    question = example.questions[0]
    answer = engine.generate(example.documents, question.text, system=example.system, max_new_tokens=4)
    assert answer.text == question.answer


def test_the_vocabulary_holds_every_word_of_the_task():
    _, prompter = lookup_model()
    unknown = prompter.plain_ids("Zoe")
    texts = [text for row in rows(40, seed=0) for text in (row.text, row.system, *row.answers)]
    texts += [document.render() for example in examples(40, seed=0) for document in example.documents]
    assert len(unknown) == 1
    assert not set(unknown) & set(chain.from_iterable(map(prompter.plain_ids, texts)))


def test_examples_follow_from_the_seed_alone():
    assert examples(5, seed=3) == examples(5, seed=3)
    assert examples(5, seed=3) != examples(5, seed=4)


def test_gold_documents_of_a_row_hold_its_answer():
    for row in rows(20, seed=SEED):
        assert row.gold is not None
        assert row.answers[0] in row.documents[row.gold[-1]].text


def test_the_weights_are_small():
    assert sum(file.stat().st_size for file in Path(FOLDER).iterdir()) < 1_000_000
