"""Examples keep their gold documents and their bounds, and depend on a seed and an id alone."""

import random
from collections.abc import Sequence

import pytest

from kvlink import Document, InputError
from kvlink.training.compose import (
    Composition,
    DocumentSet,
    filled,
    row_examples,
    seeded,
    set_of_row,
    shuffled,
    thinned,
    within,
)
from kvlink.training.data import QUESTION, SUMMARY_SYSTEM, SYSTEM, Row
from kvlink.training.example import Example

WHOLE = Composition(no_system=0.0)
FIVE = "abcde"


def given(texts: Sequence[str] = FIVE, gold: Sequence[int] = (1, 3)) -> DocumentSet:
    """Return documents of one letter each."""
    return DocumentSet(tuple(Document(text) for text in texts), tuple(gold))


def letters(documents: DocumentSet | Example) -> str:
    return "".join(document.text for document in documents.documents)


def golds(documents: DocumentSet) -> str:
    return "".join(documents.documents[at].text for at in documents.gold)


def row(
    number: int, *, documents: int = 6, gold: tuple[int, ...] | None = (2,), task: str = "qa", words: int = 3
) -> Row:
    """Return a row whose documents say whose they are."""
    texts = tuple(Document(f"row {number}, document {at}. " + "word " * words) for at in range(documents))
    return Row(f"r{number}", f"What is in {number}?", texts, (f"answer {number}",), task, gold)


ROWS = [row(number) for number in range(40)]


# --- one set of documents -------------------------------------------------------------------------------------------


def test_shuffling_keeps_every_document_and_gold_follows() -> None:
    found = [shuffled(given(), random.Random(seed)) for seed in range(60)]
    assert {golds(one) for one in found} == {"bd", "db"}
    assert {"".join(sorted(letters(one))) for one in found} == {FIVE}
    assert len({letters(one) for one in found}) > 30


@pytest.mark.parametrize("number", range(7))
def test_thinning_keeps_gold_and_the_order(number: int) -> None:
    for seed in range(20):
        kept = thinned(given(), number, random.Random(seed))
        assert golds(kept) == "bd"
        assert len(kept.documents) == max(2, min(number, 5))
        assert list(letters(kept)) == sorted(letters(kept))


def test_which_documents_stay_is_drawn() -> None:
    assert len({letters(thinned(given(), 3, random.Random(seed))) for seed in range(30)}) == 3


@pytest.mark.parametrize(("budget", "kept"), [(5, "abcde"), (4, "abcd"), (3, "abd"), (2, "bd"), (1, "bd"), (0, "bd")])
def test_a_budget_takes_documents_from_the_back_and_never_gold(budget: int, kept: str) -> None:
    assert letters(within(given(), budget, lambda text: 1)) == kept


def test_filling_adds_strangers_behind_and_no_text_twice() -> None:
    pool = [Document(text) for text in "abxyxy  z"]
    for seed in range(20):
        full = filled(given(), 7, pool, random.Random(seed))
        assert letters(full)[:5] == FIVE
        assert set(letters(full)[5:]) < set("xyz")
        assert len(set(letters(full))) == 7
        assert golds(full) == "bd"


def test_a_pool_that_is_too_small_gives_what_it_has() -> None:
    assert sorted(letters(filled(given(), 9, [Document("x"), Document("a")], random.Random(0)))) == sorted("abcdex")
    assert letters(filled(given(), 9, [], random.Random(0))) == FIVE


def test_blank_documents_of_a_row_are_left_out_and_gold_follows() -> None:
    documents = tuple(Document(text) for text in ("a", " \n", "b", "\ufeff", "c"))
    assert set_of_row(Row("r", "q", documents, ("x",), gold=(2, 3, 4))) == DocumentSet(
        (documents[0], documents[2], documents[4]), (1, 2)
    )


def test_all_documents_are_gold_where_a_row_does_not_say() -> None:
    assert set_of_row(row(1, gold=None)).gold == (0, 1, 2, 3, 4, 5)
    assert set_of_row(row(1, gold=())).gold == ()


# --- compositions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fewest", "most"), [(1, 20), (2, 4), (3, 3), (1, 1), (6, 6)])
def test_the_number_of_documents_stays_between_the_bounds_and_varies(fewest: int, most: int) -> None:
    numbers = {
        len(Composition(fewest=fewest, most=most).composed(given(gold=[4]), random.Random(seed)).documents)
        for seed in range(80)
    }
    assert numbers == set(range(min(fewest, 5), min(most, 5) + 1))


def test_every_number_between_the_bounds_is_as_likely_as_any_other() -> None:
    plain = Composition(fewest=1, most=20)
    numbers = [len(plain.composed(given(gold=[4]), random.Random(seed)).documents) for seed in range(500)]
    assert all(60 <= numbers.count(number) <= 140 for number in range(1, 6))


def test_distractors_fill_up_to_the_number_that_is_drawn() -> None:
    pool = [Document(f"stranger {number}") for number in range(100)]
    many = Composition(fewest=1, most=20, distractors=True)
    composed = [many.composed(given(), random.Random(seed), pool) for seed in range(300)]
    assert {len(one.documents) for one in composed} == set(range(2, 21))
    assert all(golds(one) in {"bd", "db"} for one in composed)


def test_documents_stay_in_their_order_where_that_is_wanted() -> None:
    ordered = Composition(fewest=5, shuffle=False)
    assert {letters(ordered.composed(given(), random.Random(seed))) for seed in range(20)} == {FIVE}
    shuffling = Composition(fewest=5)
    assert len({letters(shuffling.composed(given(), random.Random(seed))) for seed in range(20)}) > 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fewest": 0}, "0 to 20 documents"),
        ({"fewest": 5, "most": 4}, "5 to 4 documents"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"chunk_tokens": 0}, "chunk_tokens 0"),
        ({"no_system": 1.5}, "no_system is 1.5"),
    ],
)
def test_a_composition_that_cannot_be_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Composition(**options)  # type: ignore[arg-type]


# --- rows -----------------------------------------------------------------------------------------------------------


def test_a_row_becomes_an_example_with_its_question_and_first_answer() -> None:
    (example,) = row_examples([row(7)], name="set", composition=WHOLE).examples
    assert (example.id, example.source, example.system) == ("set:r7", "set", SYSTEM)
    assert [(one.text, one.answer) for one in example.questions] == [
        (QUESTION.format(question="What is in 7?"), "answer 7")
    ]


def test_every_example_keeps_its_gold_document() -> None:
    for distractors in (False, True):
        made = row_examples(ROWS, name="set", composition=Composition(distractors=distractors), seed=3).examples
        assert len(made) == 40
        for example in made:
            assert any(one.text.startswith(f"row {example.id[5:]}, document 2.") for one in example.documents)


def test_the_same_seed_gives_the_same_examples_whatever_the_order_of_the_rows() -> None:
    many = Composition(distractors=True)
    made = row_examples(ROWS, name="set", composition=many, seed=3)
    assert row_examples(list(reversed(ROWS)), name="set", composition=many, seed=3) == made
    assert row_examples(ROWS, name="set", composition=many, seed=4) != made


def test_an_example_without_distractors_does_not_depend_on_the_other_rows() -> None:
    made = {example.id: example for example in row_examples(ROWS, name="set").examples}
    for example in row_examples(ROWS[5:9], name="set").examples:
        assert example == made[example.id]


def test_a_smaller_limit_gives_the_beginning_of_a_larger_one() -> None:
    many = Composition(distractors=True)
    whole = row_examples(ROWS, name="set", composition=many).examples
    other = row_examples(ROWS, name="set", composition=many, seed=1).examples
    assert [example.id for example in whole] != [example.id for example in other]
    for limit in (0, 1, 17, 40, 100):
        assert row_examples(ROWS, name="set", composition=many, limit=limit).examples == whole[:limit]


def test_distractors_come_from_other_rows_alone() -> None:
    made = row_examples(ROWS, name="set", composition=Composition(fewest=10, distractors=True)).examples
    texts = {document.text for one in ROWS for document in one.documents}
    for example in made:
        assert len(example.documents) >= 10
        assert {document.text for document in example.documents} < texts


def test_rows_of_which_no_example_can_be_made_are_counted() -> None:
    rows = [
        Row("silent", "q", (Document("a"),), ()),
        Row("mute", "q", (Document("a"),), (" ",)),
        Row("bare", "q", (), ("x",)),
        Row("blank", "q", (Document(" "),), ("x",)),
        row(1, documents=21, gold=None),
        row(2, documents=3, gold=(0,), words=9000),
        row(3),
    ]
    made = row_examples(rows, name="set")
    assert [example.id for example in made.examples] == ["set:r3"]
    assert made.left_out == {
        "no answer": 2,
        "no documents with text": 2,
        "more than 20 documents that have to stay": 1,
        "more than 3072 tokens that have to stay": 1,
    }


def test_of_two_rows_with_one_id_the_first_one_counts() -> None:
    again = Row("r0", "Something else?", (Document("x"),), ("y",))
    made = row_examples([ROWS[0], again], name="set")
    assert [example.questions[0].answer for example in made.examples] == ["answer 0"]
    assert made.left_out == {"ids that come again": 1}


def test_an_example_stays_within_the_budget() -> None:
    rows = [row(number, documents=12, words=100) for number in range(30)]
    tight = Composition(fewest=12, max_tokens=700)
    for example in row_examples(rows, name="set", composition=tight).examples:
        assert 1 <= sum(tight.count(document.render()) for document in example.documents) <= 700


def test_lengths_are_counted_as_the_composition_says() -> None:
    words = Composition(fewest=6, max_tokens=30, count=lambda text: len(text.split()))
    (example,) = row_examples([row(1)], name="set", composition=words).examples
    assert len(example.documents) == 4  # of seven words each


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0, 0), (0.5, 60, 140), (1.0, 200, 200)])
def test_a_share_of_the_examples_has_no_system_prompt(share: float, low: int, high: int) -> None:
    rows = [row(number, documents=1, gold=(0,)) for number in range(200)]
    made = row_examples(rows, name="set", composition=Composition(no_system=share)).examples
    assert low <= sum(example.system is None for example in made) <= high
    assert {example.system for example in made} <= {None, SYSTEM}


def test_generators_of_their_own_do_not_meet() -> None:
    drawn = [seeded(*names).random() for names in ((0, "a", 1), (0, "a", 2), (0, "b", 1), (1, "a", 1), (0, "a"))]
    assert len(set(drawn)) == 5
    assert seeded(0, "a", 1).random() == drawn[0]


# --- summaries ------------------------------------------------------------------------------------------------------


def test_a_summarys_documents_are_cut_into_chunks_that_keep_their_order() -> None:
    (example,) = row_examples(
        [row(1, documents=2, gold=None, task="summarization", words=600)],
        name="news",
        composition=Composition(chunk_tokens=100, no_system=0.0),
    ).examples
    assert (example.system, example.questions[0].text) == (SUMMARY_SYSTEM, "What is in 1?")
    assert 14 <= len(example.documents) <= 18
    joined = " ".join(document.text for document in example.documents)
    assert joined.split() == " ".join(one.text for one in row(1, documents=2, words=600).documents).split()


@pytest.mark.parametrize("words", [600, 1500, 2300])
def test_chunks_grow_where_there_would_be_too_many(words: int) -> None:
    news = Composition(chunk_tokens=20, most=8)
    (example,) = row_examples(
        [row(1, documents=1, gold=None, task="summarization", words=words)], name="news", composition=news
    ).examples
    assert 5 <= len(example.documents) <= 8


def test_a_summarys_documents_stay_whole_where_that_is_wanted() -> None:
    whole = Composition(chunk_tokens=None)
    (example,) = row_examples(
        [row(1, documents=3, gold=None, task="summarization", words=300)], name="news", composition=whole
    ).examples
    assert example.documents == row(1, documents=3, words=300).documents


DIALOGUE = "Ann: Hi!\nBen: Hello.\nHow are you?\nAnn: Well."


def dialogue(composition: Composition) -> Example:
    rows = [Row("d", "Sum it up.", (Document(DIALOGUE),), ("They greet.",), "summarization")]
    (example,) = row_examples(rows, name="talk", composition=composition).examples
    return example


def test_turns_of_a_dialogue_are_documents_only_where_that_is_wanted() -> None:
    assert [one.text for one in dialogue(Composition()).documents] == [DIALOGUE]
    assert [one.text for one in dialogue(Composition(dialogue_turns=True)).documents] == [
        "Ann: Hi!",
        "Ben: Hello.\nHow are you?",
        "Ann: Well.",
    ]
    assert len(dialogue(Composition(dialogue_turns=True, most=2)).documents) == 2
