"""Pieces of a text are the text, are of bearable length, and stay where an edit is not."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlink.core.pieces import LARGEST, name_of_piece, split_text


def text_of(paragraphs: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefg", k=5)) for _ in range(80)]
    return "\n\n".join(" ".join(draw.choices(words, k=draw.randint(15, 60))) + "." for _ in range(paragraphs))


@given(st.text(alphabet="ab .\n。é\t", max_size=4000))
def test_joined_pieces_are_the_text(text: str) -> None:
    assert "".join(split_text(text)) == text


def test_a_short_text_is_one_piece_and_an_empty_one_none() -> None:
    assert split_text("One.\n\nTwo.") == ["One.\n\nTwo."]
    assert "".join(split_text("")) == ""


@pytest.mark.parametrize("seed", range(5))
def test_pieces_end_with_paragraphs_and_are_no_longer_than_allowed(seed: int) -> None:
    pieces = split_text(text_of(60, seed))
    assert len(pieces) > 5
    assert max(len(piece.split()) for piece in pieces) <= LARGEST
    assert sum(piece.endswith("\n\n") for piece in pieces[:-1]) >= 0.8 * len(pieces[:-1])


@pytest.mark.parametrize("text", ["x" * 30000, "这是一句话。" * 3000], ids=["one word", "no spaces"])
def test_texts_without_spaces_are_cut_too(text: str) -> None:
    assert len(split_text(text)) > 3


@pytest.mark.parametrize("seed", range(10))
def test_an_edit_changes_few_pieces(seed: int) -> None:
    text = text_of(80, seed)
    at = text.index(" ", len(text) * (seed + 1) // 12)
    before, after = set(split_text(text)), set(split_text(f"{text[:at]} inserted words here{text[at:]}"))
    assert 1 <= len(after - before) <= 3
    assert len(after & before) >= len(before) - 3


def test_a_piece_is_named_by_its_text() -> None:
    assert name_of_piece("a.md", "one") == name_of_piece("a.md", "one") != name_of_piece("a.md", "two")
    assert name_of_piece("a.md", "one").startswith("a.md#")
