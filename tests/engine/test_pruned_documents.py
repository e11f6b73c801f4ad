"""Documents that a store holds pruned are answered from, streamed from, and never taken for whole ones."""

import pytest
import torch
from engines import NEW, QUESTION, TEXTS, engine_of, prompt_of, read, shared_model, some_ids, with_links

from kvlink import Engine
from kvlink.core.errors import InputError, ModelRefused
from kvlink.engine.loader import Loader
from kvlink.engine.rates import Rates
from kvlink.store import MemoryStore, Store
from tiny_models import largest, random_ids

PRUNED = ("pruned75", "pruned50", "pruned25")


@pytest.fixture
def store() -> Store:
    return MemoryStore(budget_bytes=1 << 30)


def pruning_engine(store: Store, *, name: str = "llama", **options: object) -> Engine:
    """Return an engine whose loader was told a codec."""
    base = engine_of(name)
    options.setdefault("rates", Rates(least=1 << 62))  # a slow load does not have the next document encoded
    loader = Loader(runner=base.runner, store=store, identity=base.loader.identity, sink=base.loader.sink, **options)
    return Engine(
        runner=base.runner,
        prompter=base.prompter,
        loader=loader,
        report=base.report,
        end_ids=base.prompter.end_ids,
    )


@pytest.mark.parametrize("codec", PRUNED)
def test_a_loader_writes_pruned_objects_and_reads_them_marked(store: Store, codec: str) -> None:
    loader = pruning_engine(store, codec=codec).loader
    segments = [some_ids(40), some_ids(33)]
    with loader.load(segments) as fresh:
        assert not any(one.entry.is_pruned for one in fresh)
    with loader.load(segments) as loaded:
        assert [(one.source, one.codec) for one in loaded] == [("host", codec)] * 2
        for before, after in zip(fresh, loaded, strict=True):
            assert after.entry.is_pruned
            assert after.entry.num_tokens == before.entry.num_tokens
            assert after.entry.num_bytes <= int(codec.removeprefix("pruned")) / 100 * before.entry.num_bytes


def test_whole_documents_are_preferred_and_pruned_ones_not_taken_unless_named(store: Store) -> None:
    ids = [some_ids(40)]
    list(pruning_engine(store, codec="pruned25").loader.encode(ids))
    assert not engine_of(store=store).loader.has(ids[0])
    list(pruning_engine(store, codec="pruned75").loader.encode(ids))
    loader = pruning_engine(store, codec="raw", accept=["raw", "pruned75", "pruned25"]).loader
    with loader.load(ids) as loaded:
        assert loaded[0].codec == "pruned75"
    list(engine_of(store=store).loader.encode(ids))
    with loader.load(ids) as loaded:
        assert (loaded[0].codec, loaded[0].entry.is_pruned) == ("raw", False)


@pytest.mark.parametrize("num_links", [0, 3])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen3"])
def test_an_answer_from_pruned_documents_is_that_of_their_entries_laid_out_by_hand(
    store: Store, name: str, num_links: int
) -> None:
    engine = with_links(pruning_engine(store, name=name, codec="pruned25"), num_links)
    engine.encode(TEXTS)
    answer = engine.generate(TEXTS, QUESTION, max_new_tokens=NEW)
    assert [row.codec for row in answer.usage.documents] == ["pruned25"] * len(TEXTS)
    prompt = prompt_of(engine, TEXTS)
    layout, runner, assembler = prompt.layout(num_links=num_links), engine.runner, engine.assembler
    prefix = runner.prefix(prompt.system)
    assert prefix is not None
    with engine.loader.load(prompt.segments) as loaded:
        entries = [one.entry for one in loaded]
        assert all(entry.is_pruned for entry in entries)
        cache = assembler.assemble(layout, prefix=prefix, entries=entries, room=NEW)
    logits, ids = assembler.prefill(cache, prompt, layout)[-1], []
    while len(ids) < len(answer.ids):
        ids.append(int(logits.argmax()))
        logits = runner.decode(cache, ids[-1])
    assert tuple(ids) == answer.ids
    whole = engine_of(name, num_links=num_links)
    assert whole.generate(TEXTS, QUESTION, max_new_tokens=NEW).ids != answer.ids


def test_the_masks_stay_while_an_answer_is_streamed(store: Store) -> None:
    """Without them, the rows that were pruned would be attended from the first decoded token on."""
    engine = pruning_engine(store, codec="pruned25")
    engine.encode(TEXTS)
    wanted = engine.generate(TEXTS, QUESTION, max_new_tokens=NEW)
    decode, logits = engine._assembling.decode, {True: [], False: []}

    def answer(*, masked: bool) -> tuple[int, ...]:
        def spoilt(cache: object, token: int) -> torch.Tensor:
            if not masked:
                cache.present = None
            logits[masked].append(decode(cache, token))
            return logits[masked][-1]

        engine._assembling.decode = spoilt
        stream = engine.stream(TEXTS, QUESTION, max_new_tokens=NEW)
        read(stream)
        return stream.answer.ids

    assert answer(masked=True) == wanted.ids
    answer(masked=False)
    assert largest(logits[True][0] - logits[False][0]) > 1e-4 * largest(logits[True][0])


def test_a_document_too_short_to_be_pruned_is_whole(store: Store) -> None:
    engine = pruning_engine(store, codec="pruned25")
    short = random_ids(5, seed=3)
    list(engine.loader.encode([short]))
    with engine.loader.load([short]) as loaded:
        assert (loaded[0].codec, loaded[0].entry.is_pruned) == ("pruned25", False)


def test_pruned_and_whole_answers_alternate_in_one_engine(store: Store) -> None:
    other, plain = ["Cheese is sold on Mondays."], engine_of(store=store)
    wanted = plain.generate(other, QUESTION, max_new_tokens=NEW).ids
    engine = pruning_engine(store, codec="pruned25")
    engine.encode(TEXTS)
    pruned = engine.generate(TEXTS, QUESTION, max_new_tokens=NEW).ids
    for _ in range(2):
        answer = engine.generate(other, QUESTION, max_new_tokens=NEW)
        assert ([row.codec for row in answer.usage.documents], answer.ids) == (["raw"], wanted)
        assert engine.generate(TEXTS, QUESTION, max_new_tokens=NEW).ids == pruned
        assert engine.generate(TEXTS, QUESTION, max_new_tokens=NEW, reuse=False).ids != pruned


def test_pruned_documents_are_not_handed_to_stock_generate_and_the_engine_goes_on(store: Store) -> None:
    engine = pruning_engine(store, codec="pruned50")
    engine.encode(TEXTS)
    with pytest.raises(InputError, match=r"read from a pruned object.*answer with engine.generate"):
        engine.assemble(TEXTS, QUESTION)
    assert engine.generate(TEXTS, QUESTION, max_new_tokens=2).ids
    assert engine.assemble(["Fresh bread is whole."], QUESTION).inputs


@pytest.mark.parametrize("options", [{"codec": "pruned50"}, {"accept": ["raw", "pruned25"]}], ids=str)
def test_a_loader_refuses_pruned_codecs_on_a_model_with_a_sliding_window(
    store: Store, options: dict[str, object]
) -> None:
    with pytest.raises(ModelRefused, match="through a sliding window of 16 positions"):
        pruning_engine(store, name="mistral", **options)
    pruning_engine(store, name="mistral", codec="int8")


def test_the_shared_model_attends_as_before() -> None:
    assert shared_model("llama").config._attn_implementation == "sdpa"
