"""Two engines in one process: they share a folder, help each other, and do not disturb each other."""

import sys
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any

import pytest
import torch
from engines import NEW, QUESTION, TEXTS, TOKENIZER, VOCAB, engine_of, loaded, some_ids

from kvlink import Engine
from kvlink.core.layout import Prompt
from kvlink.models.rotary import ROTARY_FUNCTION
from tiny_models import largest, tiny_model


def engine_of_its_own(seed: int, store: Path | None = None) -> Engine:
    model = tiny_model("llama", dtype=torch.float64, seed=seed, vocab_size=VOCAB)
    return Engine.from_pretrained(model, tokenizer=TOKENIZER, store=store)


def test_what_one_engine_encoded_the_other_finds(tmp_path: Path) -> None:
    one, other = loaded(store=tmp_path), loaded(store=tmp_path)
    one.encode(TEXTS[:2])
    assert [row.source for row in other.encode(TEXTS)] == ["disk", "disk", "encoded"]
    assert [row.source for row in one.encode(TEXTS)] == ["disk"] * 3


def test_two_engines_on_one_folder_answer_alike(tmp_path: Path) -> None:
    one, other = loaded(store=tmp_path), loaded(store=tmp_path)
    answers = [engine.generate(TEXTS, QUESTION, max_new_tokens=NEW) for engine in (one, other, one)]
    assert len({answer.ids for answer in answers}) == 1
    assert [answer.usage.documents[0].source for answer in answers] == ["encoded", "disk", "device"]


def test_engines_on_two_models_share_a_folder_without_mixing(tmp_path: Path) -> None:
    wanted = [engine_of_its_own(seed).generate(TEXTS, QUESTION, max_new_tokens=NEW).ids for seed in (0, 1)]
    engines = [engine_of_its_own(seed, tmp_path) for seed in (0, 1)]
    for _ in range(2):
        assert [engine.generate(TEXTS, QUESTION, max_new_tokens=NEW).ids for engine in engines] == wanted


def test_one_engine_answers_many_threads_one_after_the_other() -> None:
    engine = engine_of()
    wanted = {q: engine.generate(TEXTS, q, max_new_tokens=NEW).ids for q in ("Why?", "When?", QUESTION)}
    found: dict[str, tuple[int, ...]] = {}

    def ask(question: str) -> None:
        found[question] = engine.generate(TEXTS, question, max_new_tokens=NEW).ids

    threads = [Thread(target=ask, args=(question,)) for question in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == wanted


@pytest.mark.parametrize("run", ["encode", "decode"])
def test_an_engine_that_runs_while_another_encodes_does_not_get_into_its_entries(
    monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    one, other = engine_of_its_own(0), engine_of_its_own(1)
    ids = some_ids(20)
    (wanted,) = one.runner.encode([ids], prefix=one.loader.sink)
    home = sys.modules[type(one.runner.model).__module__]
    rotate = getattr(home, ROTARY_FUNCTION)
    started: list[Thread] = []

    def run_the_other() -> None:
        if run == "encode":
            other.runner.encode([ids], prefix=other.loader.sink)
        else:
            other.assembler.prefill_plain(Prompt(ids, (), ids))

    def rotate_while_the_other_runs(*arguments: Any, **options: Any) -> Any:
        if current_thread() is main_thread():  # the other model's layers come here, too
            thread = Thread(target=run_the_other)
            thread.start()
            thread.join(0.2 if run == "encode" else None)  # to encode, it waits until this encoding has ended
            started.append(thread)
        return rotate(*arguments, **options)

    monkeypatch.setattr(home, ROTARY_FUNCTION, rotate_while_the_other_runs)
    (found,) = one.runner.encode([ids], prefix=one.loader.sink)
    for thread in started:
        thread.join()  # while this function is still in place: who watches puts back what was there
    assert len(started) == one.runner.geometry.layers
    assert largest(found.keys - wanted.keys) < 1e-10
