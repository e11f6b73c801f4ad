"""What an engine answers: what the base model would, and the same from whatever order, place or repetition."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    NEW,
    QUESTION,
    TEXTS,
    TOKENIZER,
    VOCAB,
    engine_of,
    full_logits,
    loaded,
    logits_by_reuse,
    objects_of,
    prompt_of,
    read,
    with_links,
)

from kvlink import Document, Engine
from kvlink.models.reference import reference_logits
from tiny_models import DoublePrecision, largest, tiny_model

families = pytest.mark.parametrize(
    "family", ["llama", "llama-yarn", "mistral", "qwen3", "gemma3", "phi", "gpt_neox", "glm", "smollm3"]
)
EXACT = 1e-10
"""Relative to logits of size one, in float64."""


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of()


def stock_ids(engine: Engine, **inputs: Any) -> list[int]:
    """Return the ids that stock `generate` appends, greedily."""
    start = inputs["input_ids"].shape[1]
    found = engine.runner.model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    return found[0, start:].tolist()


# --- no documents: the base model -----------------------------------------------------------------------------------


@families
def test_without_documents_an_answer_is_the_base_models(family: str) -> None:
    engine = engine_of(family)
    turns = [{"role": "user", "content": QUESTION}]
    inputs = TOKENIZER.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert engine.generate([], QUESTION, max_new_tokens=NEW).ids == tuple(stock_ids(engine, **inputs))


def test_without_documents_the_mode_is_exact_and_everything_is_computed(engine: Engine) -> None:
    usage = engine.generate([], QUESTION, max_new_tokens=NEW).usage
    assert (usage.mode, usage.cached_tokens, usage.computed_tokens) == ("exact", 0, usage.prompt_tokens)


# --- one document: full prefill -------------------------------------------------------------------------------------


@families
def test_one_document_gives_the_logits_of_full_prefill(family: str) -> None:
    engine = engine_of(family)
    wanted = full_logits(engine, prompt_of(engine, TEXTS[:1]))
    assert largest(logits_by_reuse(engine, TEXTS[:1]) - wanted) < EXACT * largest(wanted)


@families
def test_one_document_gives_the_answer_of_full_prefill(family: str) -> None:
    engine = engine_of(family)
    full = engine.stream(TEXTS[:1], QUESTION, max_new_tokens=NEW, reuse=False)
    read(full)
    assert engine.generate(TEXTS[:1], QUESTION, max_new_tokens=NEW).ids == full.answer.ids


def test_a_stream_without_reuse_computes_the_base_models_answer_to_the_same_ids(engine: Engine) -> None:
    stream = engine.stream(TEXTS, QUESTION, labels=True, max_new_tokens=NEW, reuse=False)
    read(stream)
    prompt = prompt_of(engine, TEXTS, labels=True)
    ids = prompt.ids(prompt.layout())[None]
    assert stream.answer.ids == tuple(stock_ids(engine, input_ids=ids, attention_mask=torch.ones_like(ids)))


def test_a_document_of_another_sink_prefix_is_not_the_one_of_full_prefill() -> None:
    engine = engine_of(sink="none")
    wanted = full_logits(engine, prompt_of(engine, TEXTS[:1]))
    assert largest(logits_by_reuse(engine, TEXTS[:1]) - wanted) > 1e-3 * largest(wanted)


# --- several documents: the reference forward -----------------------------------------------------------------------


def precise_engine(num_links: int, **options: Any) -> Engine:
    """Load an engine inside `DoublePrecision`, around a model that nobody else uses."""
    model = tiny_model("llama", dtype=torch.float64, vocab_size=VOCAB)
    return with_links(Engine.from_pretrained(model, tokenizer=TOKENIZER, **options), num_links)


@pytest.mark.parametrize(
    ("num_links", "labels", "system"),
    [(0, False, None), (5, True, "Be brief.")],
    ids=["plain", "links, labels, system"],
)
@pytest.mark.parametrize("sink", ["header", "bos", "none"])
def test_several_documents_give_the_logits_of_the_reference_forward(
    sink: str, num_links: int, labels: bool, system: str | None
) -> None:
    with DoublePrecision():
        engine = precise_engine(num_links, sink=sink)
        prompt = prompt_of(engine, TEXTS, labels=labels, system=system)
        wanted = reference_logits(engine.assembler, prompt, sink_ids=engine.loader.identity.sink_ids)[-1]
        found = logits_by_reuse(engine, TEXTS, labels=labels, system=system)
    assert largest(found - wanted) < EXACT * largest(wanted)


@families
def test_an_answer_begins_as_the_reference_forward_says(family: str) -> None:
    engine = engine_of(family, num_links=3)
    prompt = prompt_of(engine, TEXTS)
    wanted = reference_logits(engine.assembler, prompt, sink_ids=engine.loader.identity.sink_ids)[-1]
    assert engine.generate(TEXTS, QUESTION, max_new_tokens=1).ids == (int(wanted.argmax()),)


# --- order, place and repetition ------------------------------------------------------------------------------------


def test_two_documents_swapped_answer_as_if_encoded_for_that_order(engine: Engine) -> None:
    engine.generate(TEXTS[:2], QUESTION, max_new_tokens=NEW)
    swapped = engine.generate(TEXTS[1::-1], QUESTION, max_new_tokens=NEW)
    assert all(row.codec for row in swapped.usage.documents)
    assert swapped.ids == engine_of().generate(TEXTS[1::-1], QUESTION, max_new_tokens=NEW).ids


def test_the_order_of_documents_matters_to_the_model(engine: Engine) -> None:
    one, other = logits_by_reuse(engine, TEXTS[:2]), logits_by_reuse(engine, TEXTS[1::-1])
    assert largest(one - other) > 1e-3 * largest(one)


def test_the_order_of_encoding_does_not_matter() -> None:
    forwards, backwards = engine_of(), engine_of()
    forwards.encode(TEXTS)
    for text in reversed(TEXTS):
        backwards.encode([text])
    one, other = logits_by_reuse(forwards, TEXTS), logits_by_reuse(backwards, TEXTS)
    assert largest(one - other) < EXACT * largest(one)


def test_encoded_before_or_while_asking_gives_the_same_answer(tmp_path: Path) -> None:
    before, while_asking = engine_of(store=tmp_path / "before"), engine_of(store=tmp_path / "while")
    before.encode(TEXTS)
    answers = [engine.generate(TEXTS, QUESTION, max_new_tokens=NEW) for engine in (before, while_asking)]
    assert [row.source for answer in answers for row in answer.usage.documents] == ["disk"] * 3 + ["encoded"] * 3
    assert answers[0].ids == answers[1].ids


def test_a_document_that_comes_twice_is_read_at_both_places() -> None:
    with DoublePrecision():
        engine = precise_engine(0)
        prompt = prompt_of(engine, [TEXTS[0], TEXTS[1], TEXTS[0]])
        wanted = reference_logits(engine.assembler, prompt, sink_ids=engine.loader.identity.sink_ids)[-1]
        found = logits_by_reuse(engine, [TEXTS[0], TEXTS[1], TEXTS[0]])
    assert largest(found - wanted) < EXACT * largest(wanted)


def test_a_document_that_comes_twice_is_loaded_once() -> None:
    engine = engine_of()
    engine.encode(TEXTS)
    answer = engine.generate([TEXTS[0], TEXTS[0]], QUESTION, max_new_tokens=1)
    assert engine.store.stats().hits == 1
    assert [row.source for row in answer.usage.documents] == ["host", "host"]


def test_a_document_that_comes_twice_is_encoded_once() -> None:
    engine = engine_of()
    answer = engine.generate([TEXTS[0], TEXTS[0]], QUESTION, max_new_tokens=1)
    assert engine.store.stats().puts == 1
    assert [row.source for row in answer.usage.documents] == ["encoded", "encoded"]


def test_questions_leave_the_bytes_in_the_store_as_they_are(tmp_path: Path) -> None:
    engine = engine_of(store=tmp_path)
    engine.encode(TEXTS[:1])
    before = objects_of(engine)
    for question in ("When?", "Where is it, and why?", QUESTION):
        engine.generate(TEXTS[:1], question, max_new_tokens=NEW)
    assert objects_of(engine) == before
    assert len(before) == 1


def test_the_same_question_gets_the_same_answer_whatever_was_asked_between(engine: Engine) -> None:
    questions = ("When?", "Where is it, and why?", QUESTION)
    first = [engine.generate(TEXTS[:1], question, max_new_tokens=NEW).ids for question in questions]
    again = [engine.generate(TEXTS[:1], question, max_new_tokens=NEW).ids for question in reversed(questions)]
    assert first == again[::-1]
    assert len(set(first)) == 3


@pytest.mark.parametrize("form", [Document(TEXTS[0]), {"text": TEXTS[0]}, {"text": TEXTS[0], "title": None}], ids=repr)
def test_a_text_is_the_same_document_in_every_form(engine: Engine, form: Any) -> None:
    assert prompt_of(engine, [form]) == prompt_of(engine, [TEXTS[0]])


def test_a_title_stands_above_its_text(engine: Engine) -> None:
    ids = prompt_of(engine, [{"text": "It opens.", "title": "Office"}]).segments[0]
    assert engine.prompter.decode(ids) == "Office\nIt opens.\n\n"


def test_a_shorter_prompt_behind_a_longer_one_reads_nothing_of_it(engine: Engine) -> None:
    engine.generate([" ".join(TEXTS * 5)], QUESTION, max_new_tokens=NEW)
    wanted = full_logits(engine, prompt_of(engine, TEXTS[:1]))
    assert largest(logits_by_reuse(engine, TEXTS[:1]) - wanted) < EXACT * largest(wanted)


# --- handing over to stock generate ---------------------------------------------------------------------------------


@pytest.mark.parametrize("docs", [(), TEXTS[:1], TEXTS], ids=["none", "one", "three"])
@pytest.mark.parametrize("labels", [False, True], ids=["plain", "labels"])
@pytest.mark.parametrize("num_links", [0, 4], ids=["K0", "K4"])
def test_stock_generate_continues_an_assembled_prompt_as_the_engine_does(
    engine: Engine, docs: tuple[str, ...], labels: bool, num_links: int
) -> None:
    linked = with_links(engine, num_links)
    inputs = linked.assemble(docs, QUESTION, labels=labels).inputs
    answer = linked.generate(docs, QUESTION, labels=labels, max_new_tokens=NEW)
    assert answer.ids == tuple(stock_ids(linked, **inputs))


@families
def test_stock_generate_continues_on_every_family(family: str) -> None:
    engine = engine_of(family, num_links=2)
    inputs = engine.assemble(TEXTS, QUESTION, labels=True).inputs
    assert engine.generate(TEXTS, QUESTION, labels=True, max_new_tokens=NEW).ids == tuple(stock_ids(engine, **inputs))


def test_an_assembled_prompt_stays_as_it_is_when_the_engine_goes_on(engine: Engine) -> None:
    assembled = engine.assemble(TEXTS, QUESTION)
    wanted = engine.generate(TEXTS, QUESTION, max_new_tokens=NEW).ids
    engine.generate(TEXTS[1:], "Why is there bread?", max_new_tokens=NEW)
    assert tuple(stock_ids(engine, **assembled.inputs)) == wanted


def test_an_engine_that_was_used_in_inference_mode_can_be_used_outside_of_it() -> None:
    engine = engine_of()
    with torch.inference_mode():
        inside = engine.generate(TEXTS, QUESTION, max_new_tokens=NEW).ids
    assert engine.generate(TEXTS[::-1], QUESTION, max_new_tokens=NEW).ids != inside
    assert engine.generate(TEXTS, QUESTION, max_new_tokens=NEW).ids == inside


def test_an_assembled_prompt_tells_its_usage(engine: Engine) -> None:
    engine.encode(TEXTS)
    usage = engine.assemble(TEXTS, QUESTION, labels=True).usage
    assert (usage.completion_tokens, usage.labels, usage.mode) == (0, True, "documents")
    assert usage.prompt_tokens == prompt_of(engine, TEXTS, labels=True).num_tokens


def test_links_change_the_answer(engine: Engine) -> None:
    one, other = (logits_by_reuse(with_links(engine, count), TEXTS) for count in (0, 4))
    assert largest(one - other) > 1e-3 * largest(one)


def test_links_change_no_entry(tmp_path: Path) -> None:
    engine = engine_of(store=tmp_path)
    engine.encode(TEXTS)
    answer = with_links(engine, 4).generate(TEXTS, QUESTION, max_new_tokens=1)
    assert {row.source for row in answer.usage.documents} == {"disk"}


def test_a_loaded_engine_has_no_links() -> None:
    assert loaded().num_links == 0
