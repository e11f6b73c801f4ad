"""Long documents as segments: what stands in each, and that nothing changes where they are not cut."""

import random
from statistics import median

import pytest

import tiny
from kvlink.core.document import Document
from kvlink.core.errors import InputError
from kvlink.core.segments import LARGEST, SMALLEST
from kvlink.models.prompt import LONGEST_TITLE, Prompter

PROMPTERS = {
    name: Prompter(tokenizer=tokenizer)
    for name, tokenizer in {
        "bytes": tiny.byte_tokenizer(),
        "bytes, no template": tiny.byte_tokenizer(None),
        "bpe, metaspace": tiny.metaspace_tokenizer("bpe"),
        "bpe, normalizer": tiny.metaspace_tokenizer("bpe", prefix="normalizer"),
        "unigram": tiny.metaspace_tokenizer("unigram"),
    }.items()
}
every_tokenizer = pytest.mark.parametrize("name", PROMPTERS)
TITLE = "the hut"
WORDS = ("the", "hen", "sits", "on", "an", "egg", "of", "stone", "and", "waits", "for", "rain")


def paragraphs(count, *, seed=0):
    """Return paragraphs of about 90 characters, in three sentences."""
    chance = random.Random(seed)
    sentence = lambda: f"{' '.join(chance.choices(WORDS, k=7))}."  # noqa: E731
    return [" ".join(sentence() for _ in range(3)) for _ in range(count)]


def long_document(count=50, *, seed=0, title=TITLE):
    return Document("\n\n".join(paragraphs(count, seed=seed)), title=title)


def bodies(prompter, segments, title):
    """Return what stands behind the title in each segment."""
    line = prompter.plain_ids(f"{title}\n") if title else ()
    assert all(segment[: len(line)] == line for segment in segments)
    return [segment[len(line) :] for segment in segments]


# --- not cut ---------------------------------------------------------------------------------------------------------


@every_tokenizer
@pytest.mark.parametrize("title", ["", TITLE])
def test_without_cutting_a_document_of_any_length_is_one_segment_of_its_own_ids(name, title):
    prompter = PROMPTERS[name]
    for document in (long_document(1, title=title), long_document(title=title)):
        assert prompter.segments(document, cut=False) == (prompter.document_ids(document),)


@pytest.mark.parametrize("over", [0, 1])
def test_only_more_than_the_largest_segment_is_cut(over):
    prompter = PROMPTERS["bytes"]
    document = Document("x" * (LARGEST - 2 + over))  # two for the empty line behind it
    segments = prompter.segments(document, cut=True)
    assert len(segments) == 1 + over
    assert over or segments == (prompter.document_ids(document),)


@pytest.mark.parametrize("cut", [False, True])
def test_a_document_of_which_the_tokenizer_makes_nothing_is_an_error_cut_or_not(cut):
    with pytest.raises(InputError, match="'report' gives no token ids"):
        Prompter(tokenizer=tiny.byte_tokenizer()).segments(_Nothing("", name="report"), cut=cut)


class _Nothing(Document):
    def render(self):
        return ""


# --- cut -------------------------------------------------------------------------------------------------------------


@every_tokenizer
@pytest.mark.parametrize("title", ["", TITLE])
def test_each_segment_keeps_to_the_bounds_its_title_counted(name, title):
    segments = PROMPTERS[name].segments(long_document(title=title), cut=True)
    assert len(segments) > 3
    assert all(SMALLEST <= len(segment) <= LARGEST for segment in segments)


@every_tokenizer
@pytest.mark.parametrize("title", ["", TITLE])
def test_each_segment_begins_with_the_title_and_the_rests_joined_are_the_text(name, title):
    prompter, document = PROMPTERS[name], long_document(title=title)
    rests = bodies(prompter, prompter.segments(document, cut=True), title)
    assert tuple(i for rest in rests for i in rest) == prompter.plain_ids(f"{document.text}\n\n")


@every_tokenizer
def test_segments_end_with_paragraphs(name):
    prompter = PROMPTERS[name]
    assert all(prompter.decode(ids).endswith(".\n\n") for ids in prompter.segments(long_document(), cut=True))


@every_tokenizer
def test_without_paragraphs_segments_end_with_sentences(name):
    prompter = PROMPTERS[name]
    document = Document(" ".join(paragraphs(50)), title=TITLE)
    assert all(prompter.decode(ids).strip().endswith(".") for ids in prompter.segments(document, cut=True))


@every_tokenizer
def test_without_any_end_a_text_is_cut_all_the_same(name):
    prompter = PROMPTERS[name]
    segments = prompter.segments(Document("x" * 5_000), cut=True)
    assert "".join(prompter.decode(segment) for segment in segments) == "x" * 5_000 + "\n\n"
    assert all(SMALLEST <= len(segment) <= LARGEST for segment in segments)


@every_tokenizer
def test_no_character_is_cut_in_two(name):
    prompter = PROMPTERS[name]
    segments = prompter.segments(Document("☃" * 2_000), cut=True)
    assert "".join(prompter.decode(segment) for segment in segments) == "☃" * 2_000 + "\n\n"


@pytest.mark.parametrize("over", [0, 1])
def test_a_title_that_is_too_long_to_repeat_stands_once(over):
    prompter = PROMPTERS["bytes"]
    title = "t" * (LONGEST_TITLE - 1 + over)  # one for the end of its line
    document = long_document(title=title)
    first, *others = prompter.segments(document, cut=True)
    assert prompter.decode(first).startswith(title)
    assert {prompter.decode(segment).startswith(title) for segment in others} == {not over}
    assert all(SMALLEST <= len(segment) <= LARGEST for segment in (first, *others))
    if over:
        assert tuple(i for segment in (first, *others) for i in segment) == prompter.document_ids(document)


@every_tokenizer
@pytest.mark.parametrize("control", ["<|im_start|>", "<|im_end|>", "</s>", "<unk>"])
def test_no_segment_holds_control_ids(name, control):
    prompter = PROMPTERS[name]
    document = Document(f"{control} the hen.\n\n" * 300, title=control)
    segments = prompter.segments(document, cut=True)
    assert len(segments) > 3
    assert all(prompter.control_ids.isdisjoint(segment) for segment in segments)


# --- edits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bytes", "unigram"])
def test_an_edit_of_one_paragraph_leaves_all_but_two_segments_in_the_median(name):
    prompter, changed = PROMPTERS[name], []
    texts, news = paragraphs(60), paragraphs(20, seed=1)
    before = set(prompter.segments(Document("\n\n".join(texts), title=TITLE), cut=True))
    for at, new in enumerate(news):
        edited = [*texts[: 3 * at], new, *texts[3 * at + 1 :]]
        changed.append(len(set(prompter.segments(Document("\n\n".join(edited), title=TITLE), cut=True)) - before))
    assert min(changed) >= 1
    assert median(changed) <= 2


def test_another_title_changes_every_segment():
    one, other = (set(PROMPTERS["bytes"].segments(long_document(title=t), cut=True)) for t in ("the hut", "the hat"))
    assert one.isdisjoint(other)
