"""Long documents are cut where their ids say, within bounds, and an edit elsewhere moves no border."""

import random
from itertools import pairwise
from statistics import mean, median

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvlink.core.fingerprint import ids_bytes
from kvlink.core.segments import HASHED, LARGEST, SMALLEST, cut_ids

PARAGRAPH, SENTENCE, TOKEN = 0, 1, 2
EDITS = 200

sizes = st.integers(1, 6).flatmap(lambda smallest: st.tuples(st.just(smallest), st.integers(2 * smallest, 20)))
ranked = st.lists(st.tuples(st.integers(0, 3) | st.just(7), st.sampled_from([2, 2, 2, 1, 0])), max_size=150)


def lengths(segments):
    return [len(segment) for segment in segments]


def borders(segments):
    at = [0]
    for segment in segments:
        at.append(at[-1] + len(segment))
    return at


def by_hand(ids, ranks, smallest, largest):
    """The rule as one would say it: take place after place, and look at the piece around it."""

    def digest(place):
        return blake3(ids_bytes(ids[max(0, place - HASHED) : place])).digest(), place

    at = {0, len(ids)}
    for rank in range(8):
        for too_long_by_little in (range(largest + 1, largest + smallest // 4), ()):
            for place in sorted((p for p in range(1, len(ids)) if ranks[p] == rank), key=digest):
                start, stop = max(b for b in at if b <= place), min(b for b in at if b > place)
                parts = {place - start, stop - place}
                if stop - start > largest and min(parts) >= smallest and parts.isdisjoint(too_long_by_little):
                    at.add(place)
    return [tuple(ids[start:stop]) for start, stop in pairwise(sorted(at))]


# --- bounds ----------------------------------------------------------------------------------------------------------


@given(ranked, sizes)
def test_segments_joined_are_the_ids_and_each_keeps_to_the_bounds(places, sizes):
    (smallest, largest), ids, ranks = sizes, [i for i, _ in places], [rank for _, rank in places]
    segments = cut_ids(ids, ranks, smallest=smallest, largest=largest)
    assert [i for segment in segments for i in segment] == ids
    assert all(min(smallest, len(ids)) <= length <= largest for length in lengths(segments))


@given(ranked, sizes)
def test_places_are_taken_by_rank_and_hash_and_divide_what_is_too_long(places, sizes):
    ids, ranks = [i for i, _ in places], [rank for _, rank in places]
    assert cut_ids(ids, ranks, smallest=sizes[0], largest=sizes[1]) == (by_hand(ids, ranks, *sizes) if ids else [()])


@given(ranked, sizes)
def test_no_segment_ends_in_a_sentence_where_a_paragraph_ends_within_the_window(places, sizes):
    (smallest, largest), ranks = sizes, [rank for _, rank in places]
    segments = cut_ids([i for i, _ in places], ranks, smallest=smallest, largest=largest)
    at = borders(segments)
    for start, place, stop in zip(at, at[1:], at[2:], strict=False):
        assert all(ranks[place] <= ranks[other] for other in range(start + smallest, stop - smallest + 1))


@pytest.mark.parametrize("count", [0, 1, SMALLEST - 1, LARGEST])
def test_up_to_the_largest_length_there_is_one_segment(count):
    ids = list(range(count))
    assert cut_ids(ids, [PARAGRAPH] * count) == [tuple(ids)]


@pytest.mark.parametrize("count", [LARGEST + 1, 2 * LARGEST, 9_999])
@pytest.mark.parametrize("ids", [lambda n: [7] * n, lambda n: list(range(n))], ids=["equal", "different"])
def test_ids_without_any_end_are_cut_all_the_same(count, ids):
    found = lengths(cut_ids(ids(count), [TOKEN] * count))
    assert sum(found) == count
    assert all(SMALLEST <= length <= LARGEST for length in found)


def test_a_text_of_one_token_more_is_cut_in_the_middle():
    ids = list(range(LARGEST + 1))
    assert sorted(lengths(cut_ids(ids, [TOKEN] * len(ids)))) == [SMALLEST, SMALLEST + 1]


@pytest.mark.parametrize(
    ("ids", "ranks", "options"),
    [
        ([1, 2], [0], {}),
        ([1, 2], [0, 0], {"smallest": 0}),
        ([1, 2], [0, 0], {"smallest": 3, "largest": 5}),
    ],
    ids=["ranks are missing", "empty segments", "bounds that not every length can keep to"],
)
def test_what_cannot_be_cut_is_an_error_that_names_the_figures(ids, ranks, options):
    with pytest.raises(ValueError, match=f"got 2 ids, {len(ranks)} ranks"):
        cut_ids(ids, ranks, **options)


# --- edits -----------------------------------------------------------------------------------------------------------


class Writer:
    """Writes documents of random ids: a document is a list of paragraphs, a paragraph one of sentences."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def sentence(self):
        return [self.random.randrange(3, 30_000) for _ in range(max(4, round(self.random.gauss(25, 10))))]

    def paragraph(self):
        return [self.sentence() for _ in range(max(1, round(self.random.gauss(5, 2.5))))]

    def document(self, tokens):
        paragraphs, count = [], 0
        while count < tokens:
            paragraphs.append(self.paragraph())
            count += sum(map(len, paragraphs[-1]))
        return paragraphs

    def edited(self, document):
        """Replace, insert, delete, lengthen one paragraph, or change one word of it."""
        at, paragraphs = self.random.randrange(len(document)), list(document)
        match self.random.choice(["replace", "insert", "delete", "lengthen", "word"]):
            case "replace":
                paragraphs[at] = self.paragraph()
            case "insert":
                paragraphs.insert(at, self.paragraph())
            case "delete":
                del paragraphs[at]
            case "lengthen":
                paragraphs[at] = [*paragraphs[at], self.sentence()]
            case "word":
                paragraphs[at] = [list(sentence) for sentence in paragraphs[at]]
                sentence = self.random.choice(paragraphs[at])
                sentence[self.random.randrange(len(sentence))] = 1
        return paragraphs


def read(document):
    ids, ranks = [], [TOKEN]
    for paragraph in document:
        for sentence in paragraph:
            ids += sentence
            ranks += [*[TOKEN] * (len(sentence) - 1), SENTENCE]
        ranks[-1] = PARAGRAPH
    return ids, ranks[: len(ids)]


def segments_of(document):
    return cut_ids(*read(document))


def test_the_borders_of_one_document_are_pinned():
    """Another rule would orphan every segment in every store."""
    assert lengths(segments_of(Writer(0).document(5_000))) == [609, 685, 544, 619, 531, 796, 684, 548]


@pytest.mark.parametrize("tokens", [4_000, 8_000, 20_000])
def test_an_edit_of_one_paragraph_changes_at_most_two_segments_in_the_median(tokens):
    writer, changed = Writer(tokens), []
    for number in range(EDITS):
        if number % 20 == 0:
            document = writer.document(tokens)
            before = set(segments_of(document))
        changed.append(len(set(segments_of(writer.edited(document))) - before))
    assert median(changed) <= 2
    assert mean(changed) <= 1.6
    assert max(changed) <= 6


@pytest.mark.parametrize("where", ["before", "behind"])
def test_what_is_put_before_or_behind_a_document_leaves_its_segments(where):
    """What comes first in the text does not come first in the rule."""
    writer, kept = Writer(7), []
    for _ in range(10):
        document, more = writer.document(8_000), [writer.paragraph()]
        before, after = (
            set(segments_of(d)) for d in (document, more + document if where == "before" else document + more)
        )
        kept.append(len(before & after) / len(before))
    assert mean(kept) >= 0.8


def test_a_paragraph_in_two_documents_is_cut_alike_in_the_middle_of_both():
    shared = Writer(5).document(8_000)
    one, other = (
        segments_of([*Writer(seed).document(4_000), *shared, *Writer(seed + 1).document(4_000)]) for seed in (1, 3)
    )
    assert len(set(one) & set(other)) >= 5


def test_paragraphs_of_usual_length_end_almost_all_segments_and_sentences_the_others():
    found = []
    for seed in range(5):
        ids, ranks = read(Writer(seed).document(20_000))
        found += [ranks[place] for place in borders(cut_ids(ids, ranks))[1:-1]]
    assert found.count(PARAGRAPH) >= 0.95 * len(found)
    assert found.count(PARAGRAPH) + found.count(SENTENCE) == len(found)


def test_sixteen_ids_before_a_place_decide_and_none_further_away():
    ids, ranks = read(Writer(3).document(4_000))
    place = borders(cut_ids(ids, ranks))[2]

    def is_cut_at_the_place_after_a_change(distance):
        changed = list(ids)
        changed[place - distance] = 1
        return place in borders(cut_ids(changed, ranks))

    assert is_cut_at_the_place_after_a_change(HASHED + 1)
    assert not all(is_cut_at_the_place_after_a_change(distance) for distance in range(1, HASHED + 1))
