"""From a folder or a ready model to an engine: with or without text, proven exact or refused; and a sink that stays."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import NEW, QUESTION, TEXTS, TOKENIZER, VOCAB, loaded, shared_model

from kvlink import DiskStore, Engine, InputError, MemoryStore, ModelError, ModelRefused, StoreUnusable, TextUnavailable
from kvlink.core.errors import KVLinkWarning
from kvlink.engine.build import open_store
from kvlink.models.prompt import Prompter
from tiny import DATED, byte_tokenizer
from tiny_models import tiny_model


def save(folder: Path, tokenizer: Any = None, *, family: str = "llama") -> Path:
    """Save a tiny model as a folder, with its tokenizer if there is one."""
    tiny_model(family, vocab_size=VOCAB).save_pretrained(folder)
    if tokenizer:
        tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), TOKENIZER)


@pytest.fixture(scope="module")
def bare_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("bare"))


# --- folders --------------------------------------------------------------------------------------------------------


def test_a_folder_and_the_model_in_it_give_the_same_engine(folder: Path) -> None:
    by_folder = Engine.from_pretrained(folder, device="cpu")
    by_model = Engine.from_pretrained(tiny_model("llama", vocab_size=VOCAB), tokenizer=TOKENIZER)
    assert by_folder.loader.identity == by_model.loader.identity
    answers = [engine.generate(TEXTS, QUESTION, max_new_tokens=NEW).ids for engine in (by_folder, by_model)]
    assert answers[0] == answers[1]


def test_an_engine_says_which_model_it_runs(folder: Path) -> None:
    engine = Engine.from_pretrained(str(folder), device="cpu")
    assert engine.model_info == {"name": str(folder), "digest": engine.loader.identity.model}


def test_a_dtype_may_be_chosen(folder: Path) -> None:
    engine = Engine.from_pretrained(folder, dtype=torch.float64, device="cpu")
    assert engine.runner.dtype == torch.float64
    assert engine.loader.identity.dtype == "float64"


@pytest.mark.parametrize("wish", [{"dtype": torch.float32}, {"device": "cpu"}], ids=["dtype", "device"])
def test_a_ready_model_is_neither_cast_nor_moved(wish: Any) -> None:
    with pytest.raises(InputError, match="ready model keeps its dtype and device"):
        loaded(**wish)


def test_a_context_that_had_to_be_capped_is_told_in_a_warning() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("llama", vocab_size=VOCAB, rope_parameters=rope, max_position_embeddings=1024)
    with pytest.warns(KVLinkWarning, match="the context is capped"):
        engine = Engine.from_pretrained(model, tokenizer=TOKENIZER, context=2048)
    assert engine.report.context == 1024


def test_a_model_without_a_chat_template_answers_questions(tmp_path: Path) -> None:
    engine = Engine.from_pretrained(save(tmp_path, byte_tokenizer(None)), device="cpu")
    answer = engine.generate(TEXTS, QUESTION, max_new_tokens=NEW)
    assert engine.prompter.decode(engine.prompter.tail_ids("Why?")) == "\nQuestion: Why?\nAnswer:"
    assert answer.usage.mode == "documents"


def test_a_model_without_a_tokenizer_reads_no_text(bare_folder: Path) -> None:
    engine = Engine.from_pretrained(bare_folder, device="cpu")
    for ask in (lambda: engine.generate(TEXTS, QUESTION), lambda: engine.encode(TEXTS)):
        with pytest.raises(TextUnavailable, match="no tokenizer"):
            ask()


def test_a_model_without_a_tokenizer_has_a_context_and_encodes_ids(bare_folder: Path) -> None:
    engine = Engine.from_pretrained(bare_folder, device="cpu")
    assert engine.report.context == 8192
    (kept,) = engine.loader.encode([(5, 6, 7)])
    assert engine.loader.has(kept.entry.token_ids)


def test_a_tokenizer_may_be_given_for_a_folder_that_has_none(bare_folder: Path) -> None:
    engine = Engine.from_pretrained(bare_folder, tokenizer=TOKENIZER, device="cpu")
    assert engine.generate(TEXTS, QUESTION, max_new_tokens=1).usage.mode == "documents"


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_a_model_on_which_reuse_is_not_exact_is_refused_with_the_reason(tmp_path: Path, family: str) -> None:
    with pytest.raises(ModelRefused, match=r"position|not in the keys"):
        Engine.from_pretrained(save(tmp_path, TOKENIZER, family=family), device="cpu")


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        Engine.from_pretrained(tmp_path / "nowhere")


# --- stores ---------------------------------------------------------------------------------------------------------


def test_without_a_store_entries_are_kept_in_a_tenth_of_the_memory() -> None:
    store = open_store(None)
    assert isinstance(store, MemoryStore)
    assert 0 < store.stats().budget_bytes < 1 << 48


def test_a_path_becomes_a_store_on_disk(tmp_path: Path) -> None:
    engine = loaded(store=str(tmp_path / "new" / "store"))
    assert isinstance(engine.store, DiskStore)
    assert (tmp_path / "new" / "store").is_dir()


def test_a_ready_store_is_used_as_it_is() -> None:
    store = MemoryStore(budget_bytes=1 << 24)
    assert loaded(store=store).store is store


def test_a_folder_of_somebody_else_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(StoreUnusable, match=r"thesis\.txt"):
        loaded(store=tmp_path)


def test_each_object_says_which_model_and_template_made_it(folder: Path) -> None:
    engine = Engine.from_pretrained(folder, device="cpu")
    engine.encode(TEXTS[:1])
    (name,) = engine.store.names()
    lease = engine.store.get(name, ("raw",))
    assert lease is not None
    with lease:
        assert lease.object.provenance == {"model": str(folder), "template": engine.prompter.template_version}


# --- sinks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", ["header", "bos", "none"])
def test_documents_are_encoded_behind_the_sink_that_was_chosen(sink: Any) -> None:
    engine = loaded(sink=sink)
    assert engine.loader.identity.sink_ids == engine.prompter.sink_ids(sink)
    assert len(engine.loader.sink or ()) == len(engine.loader.identity.sink_ids)


def test_the_default_sink_is_the_s_of_a_request_without_a_system_prompt() -> None:
    engine = loaded()
    assert engine.loader.identity.sink_ids == engine.prompter.system_ids()


@pytest.mark.usefixtures("as_shipped")
def test_an_unknown_sink_is_an_error() -> None:
    with pytest.raises(InputError, match="choose header, bos or none"):
        loaded(sink="headers")


def test_a_store_keeps_the_sink_that_it_was_begun_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(store=tmp_path).encode(TEXTS)
    with monkeypatch.context() as patch:
        patch.setattr(Prompter, "sink_ids", lambda *_: (7, 7))  # a later version renders it otherwise
        again = loaded(store=tmp_path)
    assert {row.source for row in again.encode(TEXTS)} == {"disk"}


def test_a_template_with_todays_date_keeps_its_entries_over_night(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at(day: str) -> tuple[Engine, tuple[int, ...]]:
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", FrozenClock(day))
        engine = Engine.from_pretrained(shared_model(), tokenizer=byte_tokenizer(DATED), store=tmp_path)
        return engine, engine.prompter.system_ids()

    monday, on_monday = at("01 Jan 2035")
    monday.encode(TEXTS)
    tuesday, on_tuesday = at("02 Jan 2035")
    assert on_monday != on_tuesday
    assert {row.source for row in tuesday.encode(TEXTS)} == {"disk"}


class FrozenClock:
    """Stands for the class `datetime`: it is always the same day."""

    def __init__(self, day: str) -> None:
        self.day = day

    def now(self, *_: Any) -> "FrozenClock":
        return self

    def strftime(self, _: str) -> str:
        return self.day


def test_the_sink_stands_in_the_stores_settings(tmp_path: Path) -> None:
    engine = loaded(store=tmp_path)
    kept = json.loads((tmp_path / "settings.json").read_text())["settings"]
    assert list(kept.values()) == [list(engine.loader.identity.sink_ids)]
