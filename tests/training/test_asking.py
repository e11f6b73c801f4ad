"""What is asked about a document: excerpts with their headings, questions that mean something, rules for all else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlink import Document
from kvlink.training.asking import (
    ABOUT_ALL,
    EXCERPT_TOKENS,
    WRITE,
    Excerpt,
    clean_questions,
    excerpts,
    instructions,
    names,
    subject,
)
from kvlink.training.pieces import approximate_tokens

HANDBOOK = """# Handbook: Leave

The working week has 39 hours, and most people start between 07:00 and 09:00.

## Paid leave

Short.

Each employee gets 27 days of paid leave per year, says Maud Ellering in Brissel.

## Empty

## Illness
If you are ill, tell your team before 09:00, and Maud Ellering in the afternoon.
"""
FACTS = "Each employee gets 27 days of paid leave per year. The heater of the Graupel 8 has 35 watts."


# --- excerpts -------------------------------------------------------------------------------------------------------


def test_an_excerpt_is_a_paragraph_below_its_heading() -> None:
    assert [(excerpt.heading, excerpt.text.partition(" ")[0]) for excerpt in excerpts(Document(HANDBOOK))] == [
        ("Handbook: Leave", "The"),
        ("Paid leave", "Short.\nEach"),
        ("Illness", "If"),
    ]


def test_every_word_below_a_heading_is_in_some_excerpt() -> None:
    words = " ".join(excerpt.text for excerpt in excerpts(Document(HANDBOOK))).split()
    assert words == " ".join(line for line in HANDBOOK.splitlines() if not line.startswith("#")).split()


def test_a_long_paragraph_becomes_several_excerpts() -> None:
    found = excerpts(Document("This is one of many sentences. " * 100))
    assert len(found) == 4
    assert all(approximate_tokens(excerpt.text) <= EXCERPT_TOKENS for excerpt in found)


@pytest.mark.parametrize("text", ["one", "a: 1\nb: 2", '{"a": [1, 2]}', "# Heading alone\ntext", "日本語のテキスト。"])
def test_any_text_has_an_excerpt(text: str) -> None:
    assert excerpts(Document(text))


def test_an_excerpt_without_a_heading_stands_below_the_title() -> None:
    assert [excerpt.heading for excerpt in excerpts(Document("Some text.", "Leave"))] == ["Leave"]
    assert [excerpt.heading for excerpt in excerpts(Document("Some text."))] == [""]


@pytest.mark.parametrize(
    ("text", "heading", "topic"),
    [
        ("The heater of the gauge is warm. The heater has 35 watts.", "H", "the heater"),
        ("Please ask Maud Ellering in Brissel.", "H", "Maud Ellering"),
        ("nothing much here", "H", "H"),
    ],
)
def test_a_second_prompt_asks_about_what_the_excerpt_speaks_of(text: str, heading: str, topic: str) -> None:
    assert Excerpt(text, heading).prompts == (WRITE, f"Write three short questions about {topic}.")


def test_an_excerpt_that_speaks_of_nothing_has_one_prompt() -> None:
    assert Excerpt("nothing much here", "").prompts == (WRITE,)


def test_names_are_capital_letters_inside_a_sentence() -> None:
    assert names(HANDBOOK) == ["Maud Ellering", "Brissel"]
    assert names("Every day. Some days. The Graupel 8 and the Talus 3, not Graupel.") == [
        "Graupel 8",
        "Talus 3",
        "Graupel",
    ]


# --- questions that a model wrote -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("1. How many days of paid leave does an employee get?", "How many days of paid leave does an employee get?"),
        ("- what is the heater of the Graupel 8?", "What is the heater of the Graupel 8?"),
        ("Question 2: How many watts has the heater?", "How many watts has the heater?"),
        ('"How many watts has the heater?"', "How many watts has the heater?"),
        ("**How many watts   has the heater?**", "How many watts has the heater?"),
        ("How many watts has the heater? It has 35 watts.", "How many watts has the heater?"),
    ],
)
def test_a_question_is_kept_without_what_stands_around_it(written: str, kept: str) -> None:
    assert clean_questions(written, FACTS) == [kept]


@pytest.mark.parametrize(
    "written",
    [
        "",
        "What a wonderful story.",
        "1. How many paid leave days",
        "Paid leave days?",
        "What is the answer to this question?",
        "What is the purpose of the text?",
        "What is the document about?",
        "What is the answer to the question: how many days of paid leave?",
        "What is the name of the company that you work for?",
        "Who is the most important employee in the whole world today?",
        "What is the " + "heater of the employee and the " * 10 + "watts?",
    ],
)
def test_what_is_no_question_about_the_excerpt_is_left_out(written: str) -> None:
    assert clean_questions(written, FACTS) == []


def test_a_document_may_be_asked_for_where_the_rest_means_something() -> None:
    assert clean_questions("Which document gives the days of paid leave?", FACTS)
    assert clean_questions("Who answers questions about paid leave days?", f"{FACTS} He answers questions.")


def test_a_question_is_kept_once() -> None:
    written = "1. How many watts has the heater?\n2. how many watts has the heater?\n3. How many days of paid leave?"
    assert clean_questions(written, FACTS) == ["How many watts has the heater?", "How many days of paid leave?"]


def test_forms_of_a_word_are_one_word() -> None:
    assert clean_questions("Do employees get paid leaves?", FACTS)


@given(st.text(), st.text())
def test_whatever_is_written_questions_end_in_one_question_mark(written: str, about: str) -> None:
    for question in clean_questions(f"{written}\n1. {about}?", about):
        assert question.endswith("?")
        assert question.count("?") == 1
        assert "\n" not in question


# --- by rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "called"),
    [
        (Document(HANDBOOK), "Handbook: Leave"),
        (Document(HANDBOOK, "Leave"), "Leave"),
        (Document("\n\n# One #\ntext"), "One"),
        (Document("text\n# One"), ""),
        (Document(""), ""),
    ],
)
def test_a_document_is_called_by_its_title_else_by_its_heading(document: Document, called: str) -> None:
    assert subject(document) == called


def test_rules_ask_about_the_document_and_about_what_is_in_it() -> None:
    asked = instructions(Document(HANDBOOK))
    assert "What is “Handbook: Leave” about?" in asked
    assert "What does “Handbook: Leave” say about Paid leave?" in asked
    assert "What does “Handbook: Leave” say about Maud Ellering?" in asked
    assert "What does “Handbook: Leave” say about Handbook: Leave?" not in asked
    assert len(set(asked)) == len(asked)


def test_rules_ask_about_all_documents_where_one_has_no_name() -> None:
    assert instructions(Document("nothing much here")) == list(ABOUT_ALL)
    assert "What do the documents say about Brissel?" in instructions(Document("It lies in Brissel."))


@pytest.mark.parametrize("text", ["{subject}", "{0}", "{"])
def test_braces_in_a_document_are_text(text: str) -> None:
    assert f"What is “{text}” about?" in instructions(Document("x", text))
    assert Excerpt(f"Ask about {text}", text).prompts[-1].endswith(f" {text}.")
