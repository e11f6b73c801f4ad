"""What encoding a corpus would cost: counted exactly, measured on a sample, and nothing kept."""

import math

import pytest
from engines import NEW, QUESTION, TEXTS, engine_of, prompt_of

from kvlink import Document, Engine, InputError
from kvlink.engine.plan import SAMPLE, make_plan

DOCUMENTS = [Document("x" * length, name=str(length)) for length in (30, 300, 100, 1500, 10, 500, 70)]


@pytest.fixture
def engine() -> Engine:
    return engine_of()


def test_documents_and_tokens_are_counted_exactly(engine: Engine) -> None:
    plan = make_plan(engine, DOCUMENTS)
    lengths = [len(ids) for ids in prompt_of(engine, DOCUMENTS).segments]
    assert (plan.documents, plan.tokens, plan.longest_tokens) == (len(DOCUMENTS), sum(lengths), max(lengths))


def test_bytes_are_those_of_keys_and_values(engine: Engine) -> None:
    plan = make_plan(engine, DOCUMENTS)
    engine.encode(DOCUMENTS)
    headers = engine.store.stats().used_bytes - plan.num_bytes
    assert plan.num_bytes > 0
    assert 0 < headers < plan.num_bytes


def test_a_text_that_comes_twice_takes_room_once(engine: Engine) -> None:
    once, twice = make_plan(engine, DOCUMENTS[:1]), make_plan(engine, DOCUMENTS[:1] * 2)
    assert (once.num_bytes, twice.documents) == (twice.num_bytes, 2)


def test_what_the_store_holds_needs_no_encoding(engine: Engine) -> None:
    engine.encode(DOCUMENTS)
    plan = make_plan(engine, DOCUMENTS)
    assert (plan.stored, plan.encode_s) == (len(DOCUMENTS), 0)


def test_what_the_store_lacks_is_charged_by_its_tokens(engine: Engine) -> None:
    engine.encode(DOCUMENTS[:3])
    plan = make_plan(engine, DOCUMENTS)
    missing = sum(len(ids) for ids in prompt_of(engine, DOCUMENTS[3:]).segments)
    assert plan.stored == 3
    assert plan.encode_s == pytest.approx(missing / plan.tokens_per_s)


def test_planning_keeps_nothing(engine: Engine) -> None:
    make_plan(engine, DOCUMENTS)
    assert engine.store.names() == set()


def test_the_shortest_and_the_longest_are_in_the_sample(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    encode = engine.runner.encode

    def watched(batch: list[tuple[int, ...]], **options: object) -> object:
        measured.extend(len(ids) for ids in batch)
        return encode(batch, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.runner, "encode", watched)
    for documents in (DOCUMENTS, DOCUMENTS[:2], DOCUMENTS[:3], DOCUMENTS[:1]):
        measured.clear()
        make_plan(engine, documents)
        lengths = [len(ids) for ids in prompt_of(engine, documents).segments]
        assert {min(lengths), max(lengths)} <= set(measured[1:])
        assert len(measured[1:]) == min(SAMPLE, len(documents))


def test_blank_documents_and_those_beyond_the_context_are_left_out(engine: Engine) -> None:
    plan = make_plan(engine, [*DOCUMENTS, Document(" "), Document("x" * 9000)])
    assert (plan.documents, plan.longest_tokens) == (len(DOCUMENTS), 1502)


@pytest.mark.parametrize("documents", [[], [Document("")], [Document("x" * 9000)]], ids=["none", "blank", "too long"])
def test_a_corpus_in_which_nothing_fits_is_an_error(engine: Engine, documents: list[Document]) -> None:
    with pytest.raises(InputError, match="fits the context of 8192 tokens"):
        make_plan(engine, documents)


def test_it_pays_from_the_use_at_which_what_was_saved_exceeds_the_encoding(engine: Engine) -> None:
    plan = make_plan(engine, DOCUMENTS)
    if plan.load_s < plan.full_s:
        assert plan.break_even == math.ceil(plan.full_s / (plan.full_s - plan.load_s))
    else:
        assert plan.break_even is None


def test_times_and_speeds_are_positive(engine: Engine) -> None:
    plan = make_plan(engine, DOCUMENTS)
    assert min(plan.tokens_per_s, plan.encode_s, plan.full_s, plan.load_s) > 0


def test_an_engine_answers_as_before_behind_a_plan(engine: Engine) -> None:
    wanted = engine_of().generate(TEXTS, QUESTION, max_new_tokens=NEW).ids
    make_plan(engine, DOCUMENTS)
    assert engine.generate(TEXTS, QUESTION, max_new_tokens=NEW).ids == wanted
