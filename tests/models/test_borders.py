"""Where paragraphs and sentences end, as the ids of any tokenizer tell it."""

import pytest
from tokenizers import pre_tokenizers

import tiny
from kvlink.core.document import Document
from kvlink.models.borders import Borders, Rank
from kvlink.models.prompt import Prompter

MERGES = [(".", "Ċ"), (".Ċ", "Ċ"), ("Ċ", "Ċ"), ("Ġ", "Ġ"), ("Ġ", "T"), ("h", "e"), ("ĠT", "he")]
TOKENIZERS = {
    "bytes": tiny.byte_tokenizer(),
    "bytes, marks and lines in one id": tiny.byte_tokenizer(merges=MERGES),
    "bpe, metaspace": tiny.metaspace_tokenizer("bpe"),
    "unigram": tiny.metaspace_tokenizer("unigram"),
}
TOKENIZERS["bytes, marks and lines in one id"].backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
)
PARAGRAPH, SENTENCE = "¶", "§"
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def borders_of(name):
    prompter = Prompter(tokenizer=TOKENIZERS[name])
    return prompter, Borders(prompter.decode, anchor=prompter.plain_ids("."))


def marked(name, text):
    """Return the text with a mark at each end that was found."""
    prompter, borders = borders_of(name)
    ids = prompter.plain_ids(text)
    marks = {Rank.PARAGRAPH: PARAGRAPH, Rank.SENTENCE: SENTENCE}
    shown, at = "", 0
    for place, rank in enumerate(borders.ranks(ids)):
        if rank in marks:
            shown += prompter.decode(prompter.plain_ids(".") + ids[at:place])[1:] + marks[rank]
            at = place
    return shown + prompter.decode(prompter.plain_ids(".") + ids[at:])[1:]


@every_tokenizer
@pytest.mark.parametrize(
    "text",
    [
        "One.§ Two!§ The third?§ Four",
        'He says "no."§ She says (yes!)§ They stay',
        "3.14 and a.b and .5 and - no end",
        "The hen.\n¶The cat.\n\n¶The dog",
        "# Title\n\n¶Text\n§next line",
        "- one\n§- two\n§- three",
        "if x:\n§    pass.\n\n¶    return",
        "a\n \n\n¶b\r\n\r\n¶c",
        "a\n\n\n\n¶b",
        "The end.\n\n",
        "many    spaces and\ttabs end nothing",
    ],
)
def test_ends_are_found_whatever_ids_a_text_has(name, text):
    plain = text.replace(PARAGRAPH, "").replace(SENTENCE, "")
    assert marked(name, plain) == text


@every_tokenizer
def test_full_stops_of_other_scripts_need_no_space_behind_them(name):
    text = "東京。§大阪！』§京都。\n¶奈良"  # noqa: RUF001 (their own marks)
    assert marked(name, text.replace(PARAGRAPH, "").replace(SENTENCE, "")) == text


@every_tokenizer
def test_the_inside_of_a_character_is_the_last_place_to_cut_at(name):
    prompter, borders = borders_of(name)
    text = "a☃é😀b☃☃"
    ids = prompter.plain_ids(text)
    ranks = borders.ranks(ids)
    whole = [place for place, rank in enumerate(ranks) if rank is not Rank.CHARACTER]
    assert [prompter.decode(ids[a:b]) for a, b in zip(whole, [*whole[1:], len(ids)], strict=True)] == list(text)


def test_a_mark_and_the_lines_behind_it_may_be_one_id():
    prompter, _ = borders_of("bytes, marks and lines in one id")
    assert len(prompter.plain_ids(".\n\n")) == 1


@every_tokenizer
def test_nothing_has_no_ends(name):
    assert borders_of(name)[1].ranks([]) == []


def test_bytes_that_never_become_a_character_end_somewhere():
    prompter, borders = borders_of("bytes")
    broken = prompter.plain_ids("é")[:1] * 9
    ranks = borders.ranks([*broken, *prompter.plain_ids("x. y")])
    assert ranks[3:6] == [Rank.CHARACTER, Rank.TOKEN, Rank.CHARACTER]  # no character takes more than four bytes
    assert ranks[-2:] == [Rank.SENTENCE, Rank.TOKEN]


def test_how_an_id_reads_is_asked_once():
    prompter, asked = Prompter(tokenizer=TOKENIZERS["bytes"]), []
    borders = Borders(lambda ids: asked.append(tuple(ids)) or prompter.decode(ids), anchor=())
    ids = prompter.document_ids(Document("abc. " * 100))
    first = borders.ranks(ids)
    asked.clear()
    assert borders.ranks(ids) == first
    assert asked == []
