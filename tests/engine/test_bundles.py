"""An engine serves a bundle that was made for its model, behind the bundle's sink prefix, and is else what it was.

Without documents no bit depends on a bundle, and entries are the same bytes with any of them.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    NEW,
    QUESTION,
    TEXTS,
    TOKENIZER,
    last_logits,
    loaded,
    logits_by_reuse,
    objects_of,
    prompt_of,
    shared_model,
)
from torch import Tensor

from kvlink import DiskStore, Engine, InputError
from kvlink.core.errors import BundleRefused, KVLinkWarning
from kvlink.core.layout import Prompt
from kvlink.models import bundle as bundles
from kvlink.models.bundle import Bundle
from kvlink.models.reference import reference_logits
from tiny_bundles import tiny_bundle
from tiny_models import DoublePrecision, largest, tiny_model

KINDS = ("links", "links+lora")
kinds = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def plain() -> Engine:
    """An engine without a bundle."""
    return loaded(links=None)


def bundle_of(kind: str = "links", *, sink: str = "header", engine: Engine | None = None, **options: Any) -> Bundle:
    """Return a bundle for an engine's model."""
    engine = engine or plain()
    given = {
        "digest": engine.model_info["digest"],
        "sink_ids": engine.prompter.sink_ids(sink),  # type: ignore[arg-type]
        "template": engine.prompter.template_version,
        "adapter": kind == "links+lora",
    }
    return tiny_bundle(engine.runner, **{**given, **options})


@functools.cache
def served(kind: str) -> Engine:
    """An engine with a bundle of two levels."""
    return loaded(links=bundle_of(kind))


def next_logits(engine: Engine, docs: Sequence[str], **options: Any) -> Tensor:
    """Return the logits from which the first token of an answer is taken."""
    return last_logits(engine, docs, QUESTION, **options)


# --- what it computes -----------------------------------------------------------------------------------------------


@kinds
def test_logits_are_the_reference_forward_with_the_bundle(kind: str) -> None:
    with DoublePrecision():
        engine = loaded(links=bundle_of(kind))
        sink_ids = engine.loader.identity.sink_ids
        found = next_logits(engine, TEXTS)
        wanted = reference_logits(engine.assembler, prompt_of(engine, TEXTS), sink_ids=sink_ids)[-1]
    assert largest(found - wanted) <= 1e-9
    assert largest(found - next_logits(plain(), TEXTS)) > 0.01


@kinds
def test_an_answer_is_the_greedy_one_of_the_reference_forward(kind: str) -> None:
    engine = served(kind)
    prompt, ids = prompt_of(engine, TEXTS), list[int]()
    stream = engine.stream(TEXTS, QUESTION, max_new_tokens=NEW)
    for _ in range(NEW):
        whole = Prompt(prompt.system, prompt.documents, (*prompt.tail, *ids))
        logits = reference_logits(engine.assembler, whole, sink_ids=engine.loader.identity.sink_ids)
        ids.append(int(logits[-1].argmax()))
        if ids[-1] in engine._end_ids:
            break
    assert "".join(stream) == engine.prompter.decode(ids)


@kinds
def test_links_are_counted_in_usage(kind: str) -> None:
    usage = served(kind).generate(TEXTS, QUESTION, max_new_tokens=1).usage
    assert usage.link_tokens == 3 * len(TEXTS)
    assert usage.prompt_tokens == plain().generate(TEXTS, QUESTION, max_new_tokens=1).usage.prompt_tokens


LONG = " ".join(f"Paragraph {number} says that hut {number} is full." for number in range(40))
"""More than 1,024 tokens."""


@pytest.mark.parametrize(("levels", "segments"), [(1, 1), (2, 2)])
def test_documents_are_cut_where_the_links_know_segments(levels: int, segments: int) -> None:
    engine = loaded(links=bundle_of(levels=levels))
    assert engine.cuts_documents is (levels == 2)
    assert engine.generate([LONG], QUESTION, max_new_tokens=1).usage.link_tokens == 3 * segments


# --- what no bundle changes -----------------------------------------------------------------------------------------


@kinds
def test_without_documents_every_bit_is_that_of_no_bundle(kind: str) -> None:
    engine = served(kind)
    engine.generate(TEXTS, QUESTION, max_new_tokens=2)  # so that a buffer with an adapter is at hand
    bare = plain()
    for compute in (next_logits, logits_by_reuse):
        for one in (engine, bare):
            one.forget_beginnings()
        assert torch.equal(compute(engine, []), compute(bare, []))
    found, wanted = (one.generate([], QUESTION, max_new_tokens=NEW) for one in (engine, bare))
    assert found.text == wanted.text
    assert found.usage.link_tokens == 0


@kinds
def test_computed_in_full_every_bit_is_that_of_no_bundle(kind: str) -> None:
    assert torch.equal(next_logits(served(kind), TEXTS, reuse=False), next_logits(plain(), TEXTS, reuse=False))


@kinds
def test_entries_are_the_same_bytes_with_any_bundle(kind: str, tmp_path: Path) -> None:
    found = []
    for name, links in (("without", None), ("with", bundle_of(kind))):
        with loaded(store=DiskStore(tmp_path / name), links=links) as engine:
            engine.generate(TEXTS[:1], QUESTION, max_new_tokens=2)  # one while answering, the others for later
            engine.encode(TEXTS)
            found.append(objects_of(engine))
    assert len(found[0]) == len(TEXTS)
    assert found[0] == found[1]


def test_an_engine_with_a_bundle_answers_from_entries_that_were_made_without(tmp_path: Path) -> None:
    with loaded(store=DiskStore(tmp_path), links=None) as engine:
        engine.encode(TEXTS)
    with loaded(store=DiskStore(tmp_path), links=bundle_of("links+lora")) as engine:
        usage = engine.generate(TEXTS, QUESTION, max_new_tokens=1).usage
    assert [document.source for document in usage.documents] == ["disk"] * len(TEXTS)


# --- stock generate -------------------------------------------------------------------------------------------------


def test_with_links_alone_stock_generate_goes_on() -> None:
    engine = served("links")
    # one path turns queries, the other rotates keys: float32 tables round the two in other places
    assert largest(logits_by_reuse(engine, TEXTS) - next_logits(engine, TEXTS)) < 2e-5


def test_under_an_adapter_the_model_alone_is_not_told_to_go_on() -> None:
    assembled = served("links+lora").assemble(TEXTS, QUESTION)
    with pytest.raises(InputError, match=r"holds an adapter .*call assembled\.generate\(\.\.\.\)"):
        assert assembled.inputs
    assert set(served("links+lora").assemble([], QUESTION).inputs) == set(plain().assemble([], QUESTION).inputs)


@kinds
def test_stock_generate_goes_on_as_the_engine_would(kind: str) -> None:
    engine = served(kind)
    options = {"max_new_tokens": NEW, "do_sample": False}
    found = engine.assemble(TEXTS, QUESTION).generate(**options)[0, 1:].tolist()
    assert engine.prompter.decode(found) == engine.generate(TEXTS, QUESTION, max_new_tokens=NEW).text
    if kind == "links+lora":
        assembled = engine.assemble(TEXTS, QUESTION)
        assert engine.runner.model.generate(**assembled._inputs, **options)[0, 1:].tolist() != found


# --- which bundle ---------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package that ships bundles."""
    monkeypatch.setattr(bundles, "files", lambda name: tmp_path / "package")
    return tmp_path / "package" / "bundles"


def embeddings(engine: Engine) -> Tensor | None:
    links = engine.assembler.links
    return None if links is None else links.embeddings


def test_a_bundle_is_a_file_or_at_hand(tmp_path: Path) -> None:
    bundle = bundle_of("links+lora")
    bundle.save(tmp_path / "a.safetensors")
    for links in (tmp_path / "a.safetensors", str(tmp_path / "a.safetensors"), bundle):
        engine = loaded(links=links)
        assert engine.num_links == 3
        assert torch.equal(engine.assembler.links.embeddings, bundle.links.embeddings)  # type: ignore[union-attr]
        assert engine.assembler.adapter is not None
        assert all(up.dtype == torch.float64 for up in engine.assembler.adapter.up.values())


def test_without_a_bundle_there_are_no_links(package: Path) -> None:
    bundle_of().save(package / "a.safetensors")
    assert (loaded(links=None).num_links, loaded(links=None).cuts_documents) == (0, False)


def test_the_bundle_that_ships_for_exactly_this_model_is_taken_by_default(package: Path) -> None:
    assert loaded().num_links == 0
    bundle_of(digest="cd" * 32, seed=1).save(package / "a.safetensors")
    assert loaded().num_links == 0
    bundle = bundle_of(seed=2)
    bundle.save(package / "b.safetensors")
    assert torch.equal(embeddings(loaded()), bundle.links.embeddings)  # type: ignore[arg-type]
    assert torch.equal(embeddings(loaded(links="auto")), bundle.links.embeddings)  # type: ignore[arg-type]


def test_what_ships_for_this_model_in_another_dtype_is_told_and_left_alone(package: Path) -> None:
    bundle = bundle_of(digest="cd" * 32)
    Bundle(bundle.links, bundles.Card("model", "cd" * 32, (), "")).save(package / "a.safetensors")
    with pytest.warns(
        KVLinkWarning, match=r"ship for model were trained for other weights.*\(float64\).*foreign_links"
    ):
        engine = loaded()
    assert engine.num_links == 0


def test_a_bundle_of_other_weights_is_refused(tmp_path: Path) -> None:
    bundle_of(digest="cd" * 32).save(tmp_path / "a.safetensors")
    with pytest.raises(BundleRefused, match=r"digest cdcdcdcdcdcd.*foreign_links=True \(--foreign-links\)"):
        loaded(links=tmp_path / "a.safetensors")


def test_a_bundle_of_other_weights_serves_with_a_warning_where_that_is_asked_for() -> None:
    with pytest.warns(KVLinkWarning, match="used as asked, so check its scores"):
        engine = loaded(links=bundle_of("links+lora", digest="cd" * 32), foreign_links=True)
    assert torch.equal(next_logits(engine, TEXTS), next_logits(served("links+lora"), TEXTS))


def test_the_same_model_with_other_weights_refuses_it() -> None:
    other = shared_model(seed=1)
    with pytest.raises(BundleRefused, match="other weights, another dtype or quantisation"):
        Engine.from_pretrained(other, tokenizer=TOKENIZER, links=bundle_of())


@pytest.mark.parametrize("foreign", [False, True])
def test_a_bundle_of_another_width_is_refused_in_any_case(foreign: bool) -> None:
    narrow = tiny_model("llama", hidden_size=32, head_dim=16, vocab_size=len(TOKENIZER))
    with pytest.raises(BundleRefused, match="64 wide, the model's embeddings 32: train its own"):
        Engine.from_pretrained(narrow, tokenizer=TOKENIZER, links=bundle_of(), foreign_links=foreign)


@pytest.mark.parametrize("content", [b"", b"garbage" * 99], ids=["empty", "garbage"])
def test_a_file_that_is_no_bundle_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(BundleRefused, match=r"a\.safetensors is no bundle of link tokens"):
        loaded(links=tmp_path / "a.safetensors")


def test_another_chat_template_is_told() -> None:
    with pytest.warns(KVLinkWarning, match="trained with another chat template"):
        assert loaded(links=bundle_of(template="ab" * 32)).num_links == 3


# --- its sink prefix ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", ["bos", "none"])
def test_the_sink_prefix_that_a_bundle_was_trained_behind_binds(sink: str) -> None:
    engine = loaded(links=bundle_of(sink=sink))
    assert engine.loader.identity.sink_ids == engine.prompter.sink_ids(sink)  # type: ignore[arg-type]
    assert (engine.loader.sink is None) is (sink == "none")
    found = next_logits(engine, TEXTS)
    wanted = next_logits(loaded(links=bundle_of(sink=sink), sink=sink), TEXTS)
    assert torch.equal(found, wanted)
    assert largest(found - next_logits(served("links"), TEXTS)) > 0.01


@pytest.mark.parametrize(("asked", "trained"), [("none", "header"), ("bos", "header"), ("none", "bos")])
def test_another_sink_prefix_that_is_asked_for_is_refused(asked: str, trained: str) -> None:
    count = len(plain().prompter.sink_ids(trained))  # type: ignore[arg-type]
    with pytest.raises(BundleRefused, match=rf"sink={asked} was asked for, .* a sink prefix of {count} other ids"):
        loaded(links=bundle_of(sink=trained), sink=asked)


def test_what_ships_does_not_get_in_the_way_of_another_sink_prefix(package: Path) -> None:
    bundle_of().save(package / "a.safetensors")
    with pytest.warns(KVLinkWarning, match="shipped link tokens were trained behind another sink prefix than none"):
        engine = loaded(sink="none")
    assert (engine.num_links, engine.loader.identity.sink_ids) == (0, ())


def test_a_model_without_a_tokenizer_takes_the_bundles_sink_prefix() -> None:
    bundle = bundle_of()
    engine = Engine.from_pretrained(shared_model(), links=bundle)
    assert engine.loader.identity.sink_ids == bundle.card.sink_ids
    assert engine.num_links == 3
