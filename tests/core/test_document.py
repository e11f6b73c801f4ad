"""What of a text reaches the tokenizer, and how a document is spelled for the model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink.core.document import BOM, Document, clean

claim = settings(derandomize=True, deadline=None)
awkward = st.sampled_from(["\ud800", "\ud83d", "\udbff", "\udc00", "\ude00", "\udfff", BOM, "\0", "😀", "\ufffe", "a"])
texts = st.text(awkward | st.characters(exclude_categories=()), max_size=12)


def cleaned_by_hand(text: str) -> str:
    codes, result, at = [ord(character) for character in text], "", 0
    while at < len(codes):
        code = codes[at]
        if 0xD800 <= code < 0xDC00 and at + 1 < len(codes) and 0xDC00 <= codes[at + 1] < 0xE000:
            result += chr(0x10000 + (code - 0xD800) * 0x400 + codes[at + 1] - 0xDC00)
            at += 2
        else:
            result += "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)
            at += 1
    return result.removeprefix("\ufeff")


@claim
@given(texts)
def test_clean_is_the_rule_written_code_point_by_code_point(text):
    assert clean(text) == cleaned_by_hand(text)


@claim
@given(texts)
def test_what_clean_returns_can_always_be_encoded(text):
    assert clean(text).encode().decode() == clean(text)


@claim
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters=BOM)))
def test_a_text_without_surrogates_and_mark_stays_as_it_is(text):
    assert clean(text) == text
    assert clean(clean(text)) == clean(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("", ""),
        ("a\ud800", "a\ufffd"),
        ("\udc00a", "\ufffda"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ud83d\ude00", "\ufffd😀"),
        ("\ud83d\ude00", "😀"),
        ("😀 and 𝄞", "😀 and 𝄞"),
        ("\ufeffa\ufeffb", "a\ufeffb"),
        ("\ufeff\ufeffa", "\ufeffa"),
        ("a\0b", "a\0b"),
        ("\0ä", "\0ä"),
        ("\r\n\t ", "\r\n\t "),
    ],
    ids=ascii,
)
def test_clean_repairs_surrogates_and_drops_the_first_mark_only(text, expected):
    assert clean(text) == expected


@claim
@given(title=texts, text=texts)
def test_a_document_reads_title_line_text_and_an_empty_line(title, text):
    rendered = Document(text=text, title=title).render()
    head = f"{cleaned_by_hand(title)}\n" if cleaned_by_hand(title) else ""
    assert rendered == head + cleaned_by_hand(text) + "\n\n"


@pytest.mark.parametrize("title", ["", BOM], ids=["none", "mark"])
def test_a_document_without_title_is_its_text_and_an_empty_line(title):
    assert Document(text="The text.", title=title).render() == "The text.\n\n"


def test_the_name_of_a_document_never_reaches_the_model():
    assert Document(text="t", title="h", name="a/path").render() == Document(text="t", title="h").render() == "h\nt\n\n"


@pytest.mark.parametrize("text", ["", " ", "\n\t\r\n", BOM, f"{BOM} \n", "\u3000\xa0"], ids=ascii)
def test_a_text_without_anything_to_read_is_blank_even_under_a_title(text):
    assert Document(text=text, title="Title").is_blank


@pytest.mark.parametrize("text", ["a", " . ", "\ud800", "\0", f"{BOM}x"], ids=ascii)
def test_a_text_with_one_character_is_not_blank(text):
    assert not Document(text=text).is_blank
