"""Long documents: several segments where links of two levels are in use, one of any length where they are not."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from engines import NEW, QUESTION, TEXTS, TOKENIZER, VOCAB, engine_of, logits_by_reuse, prompt_of

from kvlink import ContextOverflow, Document, Engine, MemoryStore
from kvlink.core.layout import Kind, Prompt
from kvlink.core.segments import LARGEST, SMALLEST
from kvlink.engine.loader import Loader
from kvlink.engine.plan import make_plan
from kvlink.engine.rates import Rates
from kvlink.engine.usage import DocumentUsage
from kvlink.models.links import LinkTokens
from kvlink.models.reference import reference_logits
from tiny_models import DoublePrecision, largest, tiny_model

K = 3
EXACT = 1e-10
"""Relative to logits of size one, in float64."""
PARAGRAPHS = tuple(
    f"Day {day}: the hut at {day * 37 % 101} m stays open. Bread comes on day {day}." for day in range(50)
)


def long(paragraphs: Sequence[str] = PARAGRAPHS, *, title: str = "Log", name: str = "") -> Document:
    return Document("\n\n".join(paragraphs), title=title, name=name)


def edited(at: int) -> Document:
    return long((*PARAGRAPHS[:at], "The hut is shut.", *PARAGRAPHS[at + 1 :]))


def engine_with(levels: int, *, context: int = 8192) -> Engine:
    """Return an engine with random links of this many levels; none for 0."""
    return with_levels(engine_of(), levels, context=context)


def with_levels(base: Engine, levels: int, *, context: int = 8192) -> Engine:
    links = LinkTokens.random(base.runner.embedding, num_links=K, levels=levels) if levels else None
    return Engine(
        runner=base.runner,
        prompter=base.prompter,
        loader=base.loader,
        report=replace(base.report, context=context),
        end_ids=base.prompter.end_ids,
        links=links,
    )


def segments_of(engine: Engine, document: Document) -> tuple[tuple[int, ...], ...]:
    return engine.prompter.segments(document, cut=True)


def tokens_of(segments: Sequence[Sequence[int]]) -> int:
    return sum(map(len, segments))


def cut_prompt(engine: Engine, docs: Sequence[str | Document]) -> Prompt:
    documents = [doc if isinstance(doc, Document) else Document(doc) for doc in docs]
    return replace(prompt_of(engine, docs), documents=tuple(segments_of(engine, document) for document in documents))


@pytest.fixture
def engine() -> Engine:
    return engine_with(2)


# --- the reference --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "sink"), [("llama", "header"), ("gemma3", "none")])
def test_a_cut_document_between_short_ones_equals_the_reference(family: str, sink: str) -> None:
    docs = [TEXTS[0], long(), TEXTS[1]]
    with DoublePrecision():
        model = tiny_model(family, dtype=torch.float64, vocab_size=VOCAB)
        engine = with_levels(Engine.from_pretrained(model, tokenizer=TOKENIZER, sink=sink), 2)
        prompt = cut_prompt(engine, docs)
        wanted = reference_logits(engine.assembler, prompt, sink_ids=engine.loader.identity.sink_ids)[-1]
        found = logits_by_reuse(engine, docs)
    assert [len(segments) > 2 for segments in prompt.documents] == [False, True, False]
    assert largest(found - wanted) < EXACT * largest(wanted)


def test_segment_links_and_document_links_are_told_apart(engine: Engine) -> None:
    """The control of the test above: the same prompt whose inner links are those of documents is another one."""
    docs = [TEXTS[0], long(), TEXTS[1]]
    answers = []
    assert engine.assembler.links is not None
    first = engine.assembler.links.embeddings[:1]
    for embeddings in (engine.assembler.links.embeddings, torch.cat((first, first))):
        engine.assembler.links = LinkTokens(embeddings)
        answers.append(logits_by_reuse(engine, docs))
    assert largest(answers[0] - answers[1]) > 1e-3


def test_the_same_segments_from_a_store_give_the_very_same_answer(engine: Engine) -> None:
    engine.loader.rates = Rates(least=1 << 62)  # a slow load does not have the next document encoded
    docs = [long(), TEXTS[0]]
    first, second = (engine.generate(docs, QUESTION, max_new_tokens=NEW) for _ in range(2))
    assert first.ids == second.ids
    assert [row.source for row in second.usage.documents] == ["host", "host"]


# --- when documents are cut -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("levels", "cut"), [(0, False), (1, False), (2, True), (3, True)])
def test_only_links_of_two_levels_cut(levels: int, cut: bool) -> None:
    engine = engine_with(levels)
    assert engine.cuts_documents is cut
    whole = engine.prompter.document_ids(long())
    engine.encode([long()])
    wanted = segments_of(engine, long()) if cut else (whole,)
    assert len(whole) > LARGEST
    assert engine.store.names() == {engine.loader.name(ids) for ids in wanted}


@pytest.mark.parametrize("levels", [0, 1])
def test_without_cutting_all_figures_are_those_of_one_segment(levels: int) -> None:
    engine = engine_with(levels)
    whole = len(engine.prompter.document_ids(long(name="log")))
    assert engine.encode([long(name="log")]) == [DocumentUsage("log", whole, "encoded", None, "not in the store")]
    assert engine.encode([long(name="log")]) == [DocumentUsage("log", whole, "host", "raw", "already in the store")]
    usage = engine.generate([long(name="log")], QUESTION, max_new_tokens=1).usage
    assert usage.documents == (DocumentUsage("log", whole, "host", "raw", ""),)
    assert (usage.cached_tokens, usage.link_tokens) == (whole, K * levels)


def test_a_document_that_is_not_long_keeps_its_entry_with_links_of_two_levels(engine: Engine) -> None:
    engine_without = Engine(runner=engine.runner, prompter=engine.prompter, loader=engine.loader, report=engine.report)
    engine_without.encode(TEXTS)
    assert {row.source for row in engine.encode(TEXTS)} == {"host"}


def test_every_segment_keeps_to_the_bounds_and_bears_the_title(engine: Engine) -> None:
    engine.encode([long()])
    for ids in segments_of(engine, long()):
        assert SMALLEST <= len(ids) <= LARGEST
        assert engine.prompter.decode(ids).startswith("Log\n")


# --- edits ----------------------------------------------------------------------------------------------------------


def test_an_edited_document_encodes_only_what_changed(engine: Engine) -> None:
    engine.encode([long()])
    kept = engine.store.names()
    before, after = segments_of(engine, long()), segments_of(engine, edited(20))
    new = set(after) - set(before)
    (row,) = engine.encode([edited(20)])
    assert 1 <= len(new) <= 2 < len(before)
    assert engine.store.names() - kept == {engine.loader.name(ids) for ids in new}
    reason = f"{len(new)} of {len(after)} segments: not in the store"
    assert row == DocumentUsage("document 1", tokens_of(after), "encoded", None, reason)


def test_an_answer_from_an_edited_document_encodes_only_what_changed(engine: Engine) -> None:
    engine.encode([TEXTS[0], long()])
    usage = engine.generate([TEXTS[0], edited(20), TEXTS[1]], QUESTION, max_new_tokens=1).usage
    before, after = segments_of(engine, long()), segments_of(engine, edited(20))
    new = set(after) - set(before)
    first, second, third = usage.documents
    assert (first.source, third.source) == ("host", "encoded")
    assert third.reason == "not in the store"
    reason = f"{len(new)} of {len(after)} segments: not in the store"
    assert second == DocumentUsage("document 2", tokens_of(after), "encoded", None, reason)
    assert usage.cached_tokens == first.tokens + tokens_of(after) - tokens_of([*new])
    assert usage.link_tokens == K * (2 + len(after))


def test_two_documents_that_share_segments_encode_them_once(engine: Engine) -> None:
    calls: list[str] = []
    put = engine.store.put

    def counted(name: str, codec: str, data: bytes) -> object:
        calls.append(name)
        return put(name, codec, data)

    engine.store.put = counted  # type: ignore[method-assign, assignment]
    rows = engine.encode([long(), edited(20), long()])
    wanted = {engine.loader.name(ids) for doc in (long(), edited(20)) for ids in segments_of(engine, doc)}
    assert sorted(calls) == sorted(wanted)
    count, other = len(segments_of(engine, long())), len(segments_of(engine, edited(20)))
    assert [row.reason for row in rows] == [f"{n} of {n} segments: not in the store" for n in (count, other, count)]


def test_a_text_that_repeats_itself_is_encoded_once_and_laid_out_each_time(engine: Engine) -> None:
    document = Document("x" * 6_000)
    segments = segments_of(engine, document)
    assert len(set(segments)) < len(segments)
    (row,) = engine.encode([document])
    assert (row.tokens, len(engine.store.names())) == (6_002, len(set(segments)))
    usage = engine.generate([document], QUESTION, max_new_tokens=1).usage
    assert (usage.documents[0].tokens, usage.documents[0].source) == (6_002, "host")
    assert usage.cached_tokens == 6_002


def test_progress_comes_once_for_each_document_when_its_last_segment_is_done(engine: Engine) -> None:
    engine.encode([TEXTS[0]])
    told: list[DocumentUsage] = []
    rows = engine.encode([long(name="log"), TEXTS[0], edited(20), " "], progress=told.append)
    assert sorted(told, key=lambda row: row.name) == sorted(rows, key=lambda row: row.name)
    assert [row.source for row in told[:2]] == ["host", "skipped"]


# --- what does not fit, and what cannot be kept ---------------------------------------------------------------------


def test_segment_links_count_into_the_context() -> None:
    engine = engine_with(2, context=4096)
    segments = segments_of(engine, long())
    system, tail = engine.prompter.system_ids(), engine.prompter.tail_ids(QUESTION)
    room = 4096 - len(system) - len(tail) - tokens_of(segments) - K * len(segments)
    assert engine.assemble([long()], QUESTION, max_new_tokens=room).usage.link_tokens == K * len(segments)
    told = f"{tokens_of(segments)} tokens, {K * len(segments)} link tokens"
    with pytest.raises(ContextOverflow, match=told) as error:
        engine.assemble([long()], QUESTION, max_new_tokens=room + 1)
    assert error.value.over == 1


def test_a_dropped_document_frees_all_its_segments() -> None:
    engine = engine_with(2, context=2048)
    answer = engine.generate([TEXTS[0], long()], QUESTION, max_new_tokens=1, on_overflow="drop_last")
    kept, dropped = answer.usage.documents
    assert (kept.source, dropped.source) == ("encoded", "dropped")
    assert dropped.tokens == tokens_of(segments_of(engine, long()))
    assert answer.usage.link_tokens == K


def test_a_document_longer_than_the_context_is_not_encoded() -> None:
    engine = engine_with(2, context=2048)
    (row,) = engine.encode([long()])
    assert (row.source, engine.store.names()) == ("skipped", set())
    assert row.reason == f"{row.tokens - 2048} tokens longer than the context"


def test_segments_that_cannot_be_kept_are_told_with_their_number(engine: Engine) -> None:
    with MemoryStore(budget_bytes=1000) as small:
        loader = Loader(runner=engine.runner, store=small, identity=engine.loader.identity, sink=engine.loader.sink)
        links = engine.assembler.links
        full = Engine(runner=engine.runner, prompter=engine.prompter, loader=loader, report=engine.report, links=links)
        (row,) = full.generate([long()], QUESTION, max_new_tokens=1).usage.documents
    count = len(segments_of(engine, long()))
    assert row.reason.startswith(f"{count} of {count} segments: not kept: ")


def test_without_reuse_the_very_same_ids_are_computed(engine: Engine) -> None:
    docs = [TEXTS[0], long()]
    stream = engine.stream(docs, QUESTION, max_new_tokens=1, reuse=False)
    list(stream)
    usage = stream.answer.usage
    assert usage.prompt_tokens == cut_prompt(engine, docs).num_tokens
    assert (usage.mode, usage.link_tokens) == ("exact", 0)


# --- plan -----------------------------------------------------------------------------------------------------------


def test_a_plan_counts_documents_and_charges_segments(engine: Engine) -> None:
    documents = [Document(TEXTS[0]), long(), edited(20)]
    parts = [engine.prompter.segments(document, cut=True) for document in documents]
    plan = make_plan(engine, documents)
    assert (plan.documents, plan.tokens) == (3, sum(map(tokens_of, parts)))
    assert (plan.longest_tokens, plan.stored) == (max(map(tokens_of, parts)), 0)
    engine.encode([long()])
    missing = {ids for segments in parts for ids in segments} - set(parts[1])
    again = make_plan(engine, documents)
    assert again.stored == 1
    assert again.encode_s == pytest.approx(tokens_of([*missing]) / again.tokens_per_s)
    assert again.num_bytes == plan.num_bytes
    engine.encode(documents)
    assert make_plan(engine, documents).stored == 3


def test_links_of_each_level_stand_where_the_layout_says(engine: Engine) -> None:
    prompt = cut_prompt(engine, [TEXTS[0], long()])
    levels = [span.level for span in prompt.layout(num_links=K).of(Kind.LINK)]
    assert levels == [0, *[1] * (len(prompt.documents[1]) - 1), 0]
