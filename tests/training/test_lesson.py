"""A lesson is the very ids that serving makes of the same texts, and its rows say what is predicted where."""

from dataclasses import replace
from typing import Any

import pytest
from lessons import PROMPTER, example_of, lesson_of

from kvlink import Document, InputError
from kvlink.core.layout import Prompt, Turn
from kvlink.training.example import Example, Question
from kvlink.training.lesson import Branch, Ids, Lesson, lessons_of
from kvlink.training.lesson import lesson_of as read_lesson

SMALL = Lesson(
    "a",
    "by hand",
    Prompt((1, 2), (((3, 4, 5), (6,)), ((7, 8),)), (10, 11, 12)),
    (Branch((10, 11, 12), (20, 21)), Branch((13,), (22, 23, 24)), Branch((14, 15), (25,))),
)
"""Two documents, the first of two segments, and three questions."""


def segments(document: Document) -> tuple[Ids, ...]:
    return PROMPTER.segments(document, cut=False)


def read(example: Example) -> Lesson:
    return read_lesson(example, prompter=PROMPTER, segments=segments)


# --- rows -----------------------------------------------------------------------------------------------------------


def test_rows_stand_branch_by_branch_and_the_last_id_of_an_answer_is_no_row() -> None:
    rows = SMALL.rows()
    assert rows.ids.tolist() == [10, 11, 12, 20, 13, 22, 23, 14, 15]
    assert rows.offsets.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1]
    assert rows.branches.tolist() == [1, 1, 1, 1, 2, 2, 2, 3, 3]


def test_a_row_that_predicts_an_id_of_the_answer_is_scored() -> None:
    rows = SMALL.rows()
    assert rows.targets.tolist() == [11, 12, 20, 21, 22, 23, 24, 15, 25]
    assert rows.scored.int().tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 1]
    assert rows.targets[rows.scored].tolist() == [20, 21, 22, 23, 24, 25]


def test_tokens_are_those_of_s_the_documents_and_all_questions() -> None:
    assert SMALL.num_tokens == 2 + 6 + 9
    assert SMALL.num_scored == 6 == int(SMALL.rows().scored.sum())


@pytest.mark.parametrize(("num_links", "wanted"), [(0, 2 + 6 + 4), (3, 2 + 6 + 3 * 3 + 4)])
def test_a_lesson_spans_what_its_longest_question_needs(num_links: int, wanted: int) -> None:
    assert SMALL.span(num_links) == wanted


# --- digest ---------------------------------------------------------------------------------------------------------


def test_the_digest_follows_from_ids_alone() -> None:
    assert replace(SMALL, id="b", source="elsewhere").digest() == SMALL.digest()


@pytest.mark.parametrize(
    "other",
    [
        replace(SMALL, branches=SMALL.branches[:2]),
        replace(SMALL, branches=SMALL.branches[::-1]),
        replace(SMALL, branches=(*SMALL.branches[:2], Branch((14,), (15, 25)))),
        replace(SMALL, branches=(*SMALL.branches[:2], Branch((14, 15), (26,)))),
        replace(SMALL, prompt=Prompt((1,), (((2, 3, 4, 5), (6,)), ((7, 8),)), (10, 11, 12))),
        replace(SMALL, prompt=Prompt((1, 2), (((3, 4, 5),), ((6, 7, 8),)), (10, 11, 12))),
    ],
    ids=["fewer", "order", "border", "answer", "system", "documents"],
)
def test_other_ids_or_other_borders_have_another_digest(other: Lesson) -> None:
    assert other.digest() != SMALL.digest()


# --- from texts -----------------------------------------------------------------------------------------------------


def test_ids_are_those_that_serving_makes_of_the_same_texts() -> None:
    example = example_of(7, questions=2, system="Answer briefly.")
    lesson = read(example)
    assert (lesson.id, lesson.source) == ("e7", "huts")
    assert lesson.prompt.system == PROMPTER.system_ids("Answer briefly.")
    assert lesson.prompt.documents == tuple((PROMPTER.document_ids(one),) for one in example.documents)
    assert lesson.prompt.tail == PROMPTER.tail_ids("How high is 7.0?")
    assert [branch.tail for branch in lesson.branches] == [PROMPTER.tail_ids(f"How high is 7.{at}?") for at in (0, 1)]
    assert [branch.answer for branch in lesson.branches] == [PROMPTER.answer_ids(f"{700 + at} m") for at in (0, 1)]


def test_without_a_system_prompt_s_is_that_of_the_template() -> None:
    assert read(example_of(1, system=None)).prompt.system == PROMPTER.system_ids(None)


def test_an_answer_ends_with_the_end_of_its_turn() -> None:
    assert {branch.answer[-1] for branch in read(example_of(1, questions=3)).branches} == {PROMPTER.end_ids[0]}


def test_documents_are_cut_as_they_are_told_to_be() -> None:
    example = example_of(1)
    lesson = read_lesson(example, prompter=PROMPTER, segments=lambda document: ((5,), (6, 7)))
    assert lesson.prompt.documents == (((5,), (6, 7)),) * 2


def test_blank_documents_and_questions_without_an_answer_are_left_out() -> None:
    given = example_of(1, questions=2)
    more = (Document(" \n", "Nothing"), *given.documents)
    asked = (Question("Why?", " "), *given.questions)
    lesson, wanted = read(replace(given, documents=more, questions=asked)), read(given)
    assert lesson.prompt == wanted.prompt
    assert lesson.branches == wanted.branches


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"documents": ()}, "0 documents with text and 1 questions"),
        ({"documents": (Document(" "),)}, "0 documents with text and 1 questions"),
        ({"questions": ()}, "2 documents with text and 0 questions"),
        ({"questions": (Question("Why?", ""),)}, "2 documents with text and 0 questions"),
    ],
)
def test_nothing_to_read_or_to_learn_is_an_error_that_counts(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=f"example e1 has {told} with an answer; at least one of each is needed"):
        read(replace(example_of(1), **fields))


# --- many -----------------------------------------------------------------------------------------------------------


def test_examples_of_no_use_are_counted_by_reason() -> None:
    none, blank = example_of(2, questions=0, id="2"), example_of(3, questions=0, id="0")
    unasked = replace(example_of(4), questions=(Question(" ", "4 m"),))
    found = lessons_of(
        [example_of(1), none, blank, unasked], prompter=PROMPTER, segments=segments, num_links=0, context=9999
    )
    assert [lesson.id for lesson in found.kept] == ["e1"]
    assert sorted(found.refused.values()) == [1, 2]
    assert [reason for reason, count in found.refused.items() if count == 2] == [
        "example ... has 2 documents with text and 0 questions with an answer; at least one of each is needed"
    ]


@pytest.mark.parametrize("num_links", [0, 6])
def test_a_lesson_that_fits_to_the_token_is_kept_and_a_longer_one_is_not(num_links: int) -> None:
    examples = [example_of(1), example_of(2, documents=3)]
    spans = [read(example).span(num_links) for example in examples]
    assert spans[0] < spans[1]
    kept = {
        context: lessons_of(examples, prompter=PROMPTER, segments=segments, num_links=num_links, context=context)
        for context in (spans[0] - 1, spans[0], spans[1])
    }
    assert [len(found.kept) for found in kept.values()] == [0, 1, 2]
    told = f"longer than the {spans[0] - 1} positions asked for"
    assert kept[spans[0] - 1].refused == {told: 2}


def test_a_conversation_of_several_turns_is_no_lesson() -> None:
    prompt = replace(SMALL.prompt, history=(Turn((), (5,)),))
    with pytest.raises(ValueError, match="1 earlier turns"):
        replace(SMALL, prompt=prompt)


def test_a_lesson_of_random_ids_is_one_too() -> None:
    lesson = lesson_of()
    assert lesson.prompt.tail == lesson.branches[0].tail
    assert len(lesson.prompt.segments) == 5
