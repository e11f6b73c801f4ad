"""Pieces of a text are short enough and together are the text; what is no dialogue has no turns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlink import Document
from kvlink.training.pieces import approximate_tokens, chunked, joined, turns

PARAGRAPHS = "One is here. Two is there.\n\nThree comes next, and it is a little longer.\n\nFour."


def texts(text: str, max_tokens: int) -> list[str]:
    return [chunk.text for chunk in chunked(Document(text), max_tokens)]


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), ("é" * 8, 2)])
def test_four_characters_are_about_a_token(text: str, tokens: int) -> None:
    assert approximate_tokens(text) == tokens


def test_a_short_document_is_its_own_only_chunk() -> None:
    document = Document(PARAGRAPHS, "T", "n")
    assert chunked(document, 1000) == (document,)


def test_a_text_is_cut_between_paragraphs_first() -> None:
    assert texts(PARAGRAPHS, 11) == PARAGRAPHS.split("\n\n")


def test_short_paragraphs_share_a_chunk_with_the_blank_line_between_them() -> None:
    assert texts("A b.\n\nC d.\n\n" + "word " * 20, 20)[0] == "A b.\n\nC d."


def test_a_long_paragraph_is_cut_between_sentences_and_a_long_sentence_between_words() -> None:
    assert texts("One is here. Two is there.", 4) == ["One is here.", "Two is there."]
    assert texts("alpha beta gamma delta", 3) == ["alpha beta", "gamma delta"]


def test_a_text_without_any_border_is_cut_all_the_same() -> None:
    assert max(map(len, texts("x" * 100, 5))) <= 20
    assert "".join(texts("x" * 100, 5)) == "x" * 100


def test_chunks_keep_the_title_and_are_named_after_their_document() -> None:
    chunks = chunked(Document(PARAGRAPHS, "T", "file.md"), 11)
    assert [(chunk.title, chunk.name) for chunk in chunks] == [("T", f"file.md#{n}") for n in (1, 2, 3)]
    assert {chunk.name for chunk in chunked(Document(PARAGRAPHS), 11)} == {""}


@given(st.text(st.sampled_from("ab.? \n"), max_size=300), st.integers(1, 30))
def test_any_chunks_are_short_enough_and_nothing_but_white_space_is_lost(text: str, max_tokens: int) -> None:
    chunks = texts(text, max_tokens)
    assert "".join("".join(chunks).split()) == "".join(text.split())
    assert len(chunks) == 1 or all(approximate_tokens(chunk) <= max_tokens and chunk.strip() for chunk in chunks)


def test_a_huge_document_is_cut_in_time() -> None:
    chunks = texts(("word " * 11 + "end. ") * 20_000, 1000)
    assert 290 <= len(chunks) <= 310


def test_passages_are_joined_by_blank_lines() -> None:
    assert joined(["a", "b", "c"], "T") == Document("a\n\nb\n\nc", "T")


# --- turns ----------------------------------------------------------------------------------------------------------


def spoken(text: str, most: int = 20) -> list[str]:
    return [turn.text for turn in turns(Document(text, "Talk"), most=most)]


def test_each_turn_is_a_document_with_the_dialogues_title() -> None:
    assert spoken("Ann: Hi!\r\nBen: Hello.") == ["Ann: Hi!", "Ben: Hello."]
    assert {turn.title for turn in turns(Document("A: b\nC: d", "Talk"), most=20)} == {"Talk"}


def test_lines_without_a_name_belong_to_the_turn_before() -> None:
    assert spoken("Ann: Hi!\nHow are you?\n\nBen: Well.") == ["Ann: Hi!\nHow are you?", "Ben: Well."]


@pytest.mark.parametrize("text", ["", "A plain text.", "Ann: alone", "Once upon a time\nAnn: Hi!\nBen: Hello."])
def test_what_is_no_dialogue_has_no_turns(text: str) -> None:
    assert spoken(text) == []


@pytest.mark.parametrize("most", [1, 2, 7, 20])
def test_neighbours_share_a_document_where_turns_are_too_many(most: int) -> None:
    lines = [f"P{number % 2}: turn {number}" for number in range(45)]
    found = spoken("\n".join(lines), most)
    assert len(found) == most
    assert "\n".join(found).splitlines() == lines
    sizes = [len(one.splitlines()) for one in found]
    assert max(sizes) - min(sizes) <= 1
