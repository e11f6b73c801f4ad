"""Documents as elements in what a user wrote: read where that is switched on, escaped, never nested."""

from collections.abc import Iterator
from typing import Any

import pytest
from live import MODEL, Live, live, tiny_engine

from kvlink.engine.library import Library
from kvlink.server.elements import split_elements
from kvlink.server.protocol import InlineDocument, LibraryDocument
from kvlink.server.refusals import Refused
from kvlink.server.served import Served

QUESTION = "When does the office open?"
TEXT = "The office <b>opens</b> at 7 & closes at 5."
ESCAPED = TEXT.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
ELEMENT = f'<document id="hours" title="Hours &amp; more">\n{ESCAPED}\n</document>'


@pytest.fixture(scope="module")
def elements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("library")
    with tiny_engine(folder / "entries") as engine, Library(folder, engine) as library:
        library.put("office", TEXT, "Hours & more")
        with live(Served(engine=engine, library=library, model=MODEL, elements=True)) as one:
            yield one


def ask(server: Live, *texts: str, documents: Any = (), **options: Any) -> Any:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    options = {"temperature": 0, "max_tokens": 6, **options}
    return server.openai.chat.completions.create(
        model=MODEL, messages=messages, extra_body={"documents": list(documents)}, **options
    )


def first_logprob(server: Live, *texts: str, **options: Any) -> float:
    return ask(server, *texts, logprobs=True, **options).choices[0].logprobs.content[0].logprob


def test_elements_are_documents_and_the_rest_is_the_question() -> None:
    question, found = split_elements(f"{ELEMENT}\n{QUESTION} <document id='x'/>".replace("'", '"'))
    assert question == QUESTION
    assert found == [InlineDocument(text=TEXT, title="Hours & more", id="hours"), LibraryDocument(id="x")]
    for plain in ("no element", "a <documents> tag & more", "documents < 5"):
        assert split_elements(plain) == (plain, [])


@pytest.mark.parametrize(
    "text",
    [
        "<document>open for ever",
        "</document>",
        "<document>a <document>nested</document></document>",
        "<document>a <b>tag</b></document>",
        "<document>R & D</document>",
        "<document>&nbsp;</document>",
        "<document/>",
        "<document> </document>",
        '<document title="x"></document>',
        '<document id="a" id="b">x</document>',
        '<document onload="x">x</document>',
        "<document id=x>x</document>",
        '<document id="a<b">x</document>',
        "<document " + " " * 100_000,
    ],
)
def test_what_is_no_whole_element_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="a <document> element"):
        split_elements(text)


@pytest.mark.enable_socket
def test_an_element_is_the_same_as_the_field(elements: Live) -> None:
    wanted = first_logprob(elements, QUESTION, documents=[{"title": "Hours & more", "text": TEXT}])
    found = ask(elements, f"{ELEMENT}\n\n{QUESTION}", logprobs=True)
    assert found.choices[0].logprobs.content[0].logprob == pytest.approx(wanted, abs=1e-5)
    assert found.usage.kvlink["documents"][0]["id"] == "hours"
    named = first_logprob(elements, f'{QUESTION}<document id="office"/>')
    assert named == pytest.approx(wanted, abs=1e-5)
    assert abs(first_logprob(elements, QUESTION) - wanted) > 1e-4


@pytest.mark.enable_socket
def test_elements_of_earlier_turns_stay_where_they_were(elements: Live) -> None:
    """A client that sends its whole history again has the documents of all turns reused."""
    first = ask(elements, f"{ELEMENT}{QUESTION}", max_tokens=4)
    talk = (f"{ELEMENT}{QUESTION}", first.choices[0].message.content, "And on Sundays?")
    again = ask(elements, *talk, max_tokens=4)
    assert again.usage.kvlink["mode"] == "documents"
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1
    moved = first_logprob(elements, QUESTION, talk[1], f"{ELEMENT}{talk[2]}")
    assert abs(first_logprob(elements, *talk) - moved) > 1e-4


@pytest.mark.enable_socket
def test_only_a_user_brings_elements_and_only_where_they_are_switched_on(elements: Live, server: Live) -> None:
    assert ask(server, f"{ELEMENT}{QUESTION}").usage.kvlink == {
        "mode": "exact",
        "links": 0,
        "labels": False,
        "documents": [],
    }
    assert ask(elements, QUESTION, ELEMENT, QUESTION).usage.kvlink["mode"] == "exact"
    status, body, _ = elements.send(
        "POST",
        "/v1/chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": "<document>x"}]},
    )
    assert (status, body["error"]["code"]) == (400, "invalid_document_element")
