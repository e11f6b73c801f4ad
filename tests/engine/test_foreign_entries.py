"""What another model, sink, dtype or tenant made is a miss: never a wrong hit, and never in anybody's way."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from engines import NEW, QUESTION, TEXTS, TOKENIZER, VOCAB, loaded, objects_of

from kvlink import Answer, Engine, StoreUnusable
from kvlink.engine.loader import Loader
from kvlink.store import Store
from tiny import NO_SYSTEM, byte_tokenizer
from tiny_models import tiny_model

Make = Callable[[Path | Store | None], Engine]


def own(store: Path | Store | None) -> Engine:
    return loaded(store=store)


def another_model(store: Path | Store | None) -> Engine:
    model = tiny_model("llama", dtype=torch.float64, seed=1, vocab_size=VOCAB)
    return Engine.from_pretrained(model, tokenizer=TOKENIZER, store=store)


def another_parameter(store: Path | Store | None) -> Engine:
    """What an adapter that is merged into the weights comes to, down to a single number."""
    model = tiny_model("llama", dtype=torch.float64, vocab_size=VOCAB)
    model.model.layers[0].self_attn.v_proj.weight.data[0, 0] += 0.5
    return Engine.from_pretrained(model, tokenizer=TOKENIZER, store=store)


def another_config(store: Path | Store | None) -> Engine:
    model = tiny_model("llama", dtype=torch.float64, vocab_size=VOCAB, rms_norm_eps=1e-2)
    return Engine.from_pretrained(model, tokenizer=TOKENIZER, store=store)


def another_rope(store: Path | Store | None) -> Engine:
    rope = {"rope_type": "default", "rope_theta": 500.0}
    model = tiny_model("llama", dtype=torch.float64, vocab_size=VOCAB, rope_parameters=rope)
    return Engine.from_pretrained(model, tokenizer=TOKENIZER, store=store)


def another_dtype(store: Path | Store | None) -> Engine:
    return Engine.from_pretrained(tiny_model("llama", vocab_size=VOCAB), tokenizer=TOKENIZER, store=store)


def another_sink(store: Path | Store | None) -> Engine:
    return loaded(store=store, sink="bos")


def no_sink(store: Path | Store | None) -> Engine:
    return loaded(store=store, sink="none")


def another_template(store: Path | Store | None) -> Engine:
    model = tiny_model("llama", dtype=torch.float64, vocab_size=VOCAB)
    return Engine.from_pretrained(model, tokenizer=byte_tokenizer(NO_SYSTEM), store=store)


def another_scope(store: Path | Store | None) -> Engine:
    base = loaded(store=store)
    identity = replace(base.loader.identity, scope=b"tenant of a test")
    loader = Loader(runner=base.runner, store=base.store, identity=identity, sink=base.loader.sink)
    return Engine(runner=base.runner, prompter=base.prompter, loader=loader, report=base.report)


FOREIGNERS = [
    another_model,
    another_parameter,
    another_config,
    another_rope,
    another_dtype,
    another_sink,
    no_sink,
    another_template,
    another_scope,
]


@dataclass(frozen=True, slots=True)
class Meeting:
    """What happened when we used a folder in which somebody else had encoded the same texts."""

    answer: Answer
    before: dict[str, bytes]
    after: dict[str, bytes]


@functools.cache
def meeting(foreign: Make) -> Meeting:
    with TemporaryDirectory() as folder:
        theirs = foreign(Path(folder))
        theirs.encode(TEXTS)
        before = objects_of(theirs)
        answer = own(Path(folder)).generate(TEXTS, QUESTION, max_new_tokens=NEW)
        return Meeting(answer, before, objects_of(theirs))


@functools.cache
def right_answer() -> tuple[int, ...]:
    return own(None).generate(TEXTS, QUESTION, max_new_tokens=NEW).ids


foreigners = pytest.mark.parametrize("foreign", FOREIGNERS)


@foreigners
def test_entries_of_somebody_else_are_a_miss(foreign: Make) -> None:
    assert [row.source for row in meeting(foreign).answer.usage.documents] == ["encoded"] * 3


@foreigners
def test_an_answer_beside_entries_of_somebody_else_is_ones_own(foreign: Make) -> None:
    assert meeting(foreign).answer.ids == right_answer()


@foreigners
def test_entries_of_somebody_else_stay_where_they_are(foreign: Make) -> None:
    found = meeting(foreign)
    assert len(found.after) == 2 * len(found.before) == 6
    assert found.before.items() <= found.after.items()


def test_the_same_model_built_again_finds_its_entries(tmp_path: Path) -> None:
    loaded(store=tmp_path).encode(TEXTS)
    model = tiny_model("llama", dtype=torch.float64, vocab_size=VOCAB)
    again = Engine.from_pretrained(model, tokenizer=byte_tokenizer(), store=tmp_path)
    answer = again.generate(TEXTS, QUESTION, max_new_tokens=NEW)
    assert [row.source for row in answer.usage.documents] == ["disk"] * 3


def test_a_name_of_the_model_or_a_context_makes_no_other_entries(tmp_path: Path) -> None:
    loaded(store=tmp_path).encode(TEXTS)
    answer = loaded(store=tmp_path, context=1000).generate(TEXTS, QUESTION, max_new_tokens=1)
    assert {row.source for row in answer.usage.documents} == {"disk"}


@pytest.mark.parametrize("secret", [b"mine", None])
def test_entries_signed_by_somebody_elses_secret_cannot_be_opened(tmp_path: Path, secret: bytes | None) -> None:
    loaded(store=tmp_path, secret=b"theirs").encode(TEXTS)
    with pytest.raises(StoreUnusable, match="signed with a secret"):
        loaded(store=tmp_path, secret=secret)


def test_entries_signed_by_ones_own_secret_are_taken(tmp_path: Path) -> None:
    loaded(store=tmp_path, secret=b"mine").encode(TEXTS)
    answer = loaded(store=tmp_path, secret=b"mine").generate(TEXTS, QUESTION, max_new_tokens=1)
    assert {row.source for row in answer.usage.documents} == {"disk"}


def test_a_document_is_the_same_under_any_name_and_in_any_place(tmp_path: Path) -> None:
    engine = loaded(store=tmp_path)
    engine.encode([{"text": TEXTS[0], "name": "a.md"}])
    rows = engine.generate([TEXTS[1], {"text": TEXTS[0], "name": "b.md"}], QUESTION, max_new_tokens=1).usage.documents
    assert (rows[1].name, rows[1].source) == ("b.md", "disk")
