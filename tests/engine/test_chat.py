"""Conversations: each answer is what a fresh computation of the same ids gives; the tree only saves time."""

from collections.abc import Iterator

import pytest
import torch
from engines import TEXTS, loaded
from test_bundles import bundle_of

from kvlink.core.document import Document
from kvlink.core.errors import InputError
from kvlink.engine.chat import Chat
from kvlink.engine.engine import Engine
from kvlink.models.reference import reference_logits

NEW = 8
OFFICE, PASS, BREAD = (Document(text, name=name) for text, name in zip(TEXTS, ("office", "pass", "bread"), strict=True))


@pytest.fixture(params=["no links", "links", "links+lora"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    links = None if request.param == "no links" else bundle_of(request.param)
    with loaded(links=links) as made:
        yield made


def continued(engine: Engine, chat: Chat, question: str, docs: list[Document], labels: bool = False) -> list[int]:
    """Answer greedily by reference forwards of the whole conversation, none of which reuses anything."""
    request = engine.job(docs, question, labels=labels, max_new_tokens=NEW, history=chat._history()).request
    prompt, ids = request.prompt, list[int]()
    for _ in range(NEW):
        whole = type(prompt)(prompt.system, prompt.documents, (*prompt.tail, *ids), prompt.labels, prompt.history)
        logits = reference_logits(engine.assembler, whole, sink_ids=engine.loader.identity.sink_ids)
        ids.append(int(logits[-1].argmax()))
        if ids[-1] in engine._end_ids:
            break
    return ids


@pytest.mark.parametrize("labels", [False, True])
def test_each_turn_equals_a_fresh_computation_of_the_conversation(engine: Engine, labels: bool) -> None:
    chat = engine.chat("one", labels=labels)
    for question, docs in [("When?", [OFFICE, PASS]), ("Why?", []), ("What of bread?", [BREAD]), ("Sure?", [])]:
        wanted = continued(engine, chat, question, docs, labels)
        answer = chat.ask(question, docs, max_new_tokens=NEW)
        assert list(answer.ids) == wanted
    assert chat.documents == (OFFICE, PASS, BREAD)


def test_a_turn_computes_only_what_is_new(engine: Engine) -> None:
    chat = engine.chat("one")
    first = chat.ask("When?", [OFFICE, PASS], max_new_tokens=NEW)
    second = chat.ask("Why?", [BREAD], max_new_tokens=NEW)
    added = second.usage.prompt_tokens - first.usage.prompt_tokens - len(first.ids)
    # the last token of the first answer was never computed; what stands behind it, and the new links, is new
    assert second.usage.computed_tokens == added + 1 + engine.num_links
    again = engine.chat("one").ask("Why?", max_new_tokens=1)
    assert again.usage.computed_tokens < second.usage.computed_tokens


def test_losing_what_was_computed_costs_time_and_no_meaning(engine: Engine) -> None:
    chats = [engine.chat("kept"), engine.chat("lost")]
    for question, docs in [("When?", [OFFICE]), ("Why?", [BREAD]), ("Sure?", [])]:
        engine.forget_beginnings()
        wanted = chats[1].ask(question, docs, max_new_tokens=NEW)
        assert chats[0].ask(question, docs, max_new_tokens=NEW).ids == wanted.ids


def test_a_document_leaves_and_another_conversation_that_never_had_it_answers_alike(engine: Engine) -> None:
    chat = engine.chat("with")
    chat.ask("When?", [OFFICE, PASS], max_new_tokens=NEW)
    chat.remove("office")
    assert chat.documents == (PASS,)
    wanted = continued(engine, chat, "Why?", [])
    assert list(chat.ask("Why?", max_new_tokens=NEW).ids) == wanted


def test_a_document_moves_to_a_later_turn(engine: Engine) -> None:
    chat = engine.chat("one")
    chat.ask("When?", [OFFICE, PASS], max_new_tokens=NEW)
    chat.remove("office")
    chat.ask("Why?", [OFFICE], max_new_tokens=NEW)
    assert [turn.documents for turn in chat.turns] == [(PASS,), (OFFICE,)]


def test_a_document_that_is_there_is_not_read_twice(engine: Engine) -> None:
    chat = engine.chat("one")
    chat.ask("When?", [OFFICE], max_new_tokens=NEW)
    answer = chat.ask("Why?", [OFFICE, BREAD], max_new_tokens=NEW)
    assert chat.documents == (OFFICE, BREAD)
    assert [row.name for row in answer.usage.documents] == ["bread"]


def test_an_answer_that_is_not_read_to_its_end_is_no_turn(engine: Engine) -> None:
    chat = engine.chat("one")
    chat.ask("When?", [OFFICE], max_new_tokens=NEW)
    wanted = continued(engine, chat, "Why?", [BREAD])
    stream = chat.stream("Why?", [BREAD], max_new_tokens=NEW)
    next(stream)
    stream.close()
    assert len(chat.turns) == 1
    assert list(chat.ask("Why?", [BREAD], max_new_tokens=NEW).ids) == wanted


def test_a_stateless_client_hits_by_itself(engine: Engine) -> None:
    """It sends its whole history; ids decide."""
    chat = engine.chat("one")
    chat.ask("When?", [OFFICE], max_new_tokens=NEW)
    history = chat._history()
    answers = [engine.stream([], "Why?", history=history, max_new_tokens=NEW) for _ in range(2)]
    for answer in answers:
        list(answer)
    assert answers[0].answer.ids == answers[1].answer.ids
    assert answers[1].answer.usage.computed_tokens == 1


def test_conversations_have_names_and_end(engine: Engine) -> None:
    engine.chat("one").ask("When?", max_new_tokens=1)
    assert len(engine.chat("one").turns) == 1
    assert engine.chat("two").turns == ()
    engine.end_chat("one")
    assert engine.chat("one").turns == ()


def test_what_is_not_there_cannot_leave(engine: Engine) -> None:
    chat = engine.chat("one")
    chat.ask("When?", [OFFICE], max_new_tokens=1)
    with pytest.raises(InputError, match=r"bread: not in this conversation, whose documents are office"):
        chat.remove("bread")
    assert chat.documents == (OFFICE,)


def test_without_documents_a_conversation_is_the_base_models(engine: Engine) -> None:
    chat = engine.chat("plain")
    for question in ("When?", "Why?"):
        request = engine.job([], question, max_new_tokens=1, history=chat._history()).request
        ids = request.prompt.ids(request.prompt.layout())[None]
        with torch.inference_mode():
            wanted = int(engine.runner.model(input_ids=ids).logits[0, -1].argmax())
        answer = chat.ask(question, max_new_tokens=1)
        assert answer.ids == (wanted,)
        assert answer.usage.mode == "exact"
