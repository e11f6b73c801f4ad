"""Examples of passages: answers are in their documents, each question is asked once, long documents are long."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvlink import InputError
from kvlink.training.articles import long_examples, question_sets
from kvlink.training.compose import Composition, Source
from kvlink.training.data import QUESTION, SYSTEM
from kvlink.training.example import Example
from kvlink.training.squad import Passage, read_squad

PLAIN = Composition(no_system=0.0)


def article(number: int, passages: int = 12, asked: int = 5, words: int = 120) -> list[Passage]:
    """Return an article whose passages hold a code word for each of their questions."""
    found: list[Passage] = []
    for at in range(passages):
        pairs = [(f"What is code {number}-{at}-{one}?", f"c{number}x{at}x{one}") for one in range(asked)]
        text = " ".join(answer for _, answer in pairs) + " word" * words
        found.append(Passage(f"Article {number}", text, tuple(pairs)))
    return found


ARTICLES = [article(number) for number in range(5)]


def question_texts(source: Source) -> list[str]:
    return [question.text for example in source.examples for question in example.questions]


def titles(example: Example) -> Counter[str]:
    return Counter(document.title for document in example.documents)


# --- sets -----------------------------------------------------------------------------------------------------------


def test_every_question_is_asked_once_and_answered_in_its_documents() -> None:
    made = question_sets(ARTICLES, name="squad", composition=PLAIN)
    wanted = {QUESTION.format(question=q) for one in ARTICLES for passage in one for q, _ in passage.asked}
    assert sorted(question_texts(made)) == sorted(wanted)
    assert all(example.questions for example in made.examples)
    for example in made.examples:
        text = " ".join(document.text for document in example.documents)
        assert all(question.answer in text.split() for question in example.questions)
    assert made.left_out == {}


@pytest.mark.parametrize("questions", [1, 3, 4])
def test_an_example_has_as_many_questions_as_asked_for_where_they_are_there(questions: int) -> None:
    made = question_sets(ARTICLES, name="squad", questions=questions, limit=30).examples
    assert {len(example.questions) for example in made} <= set(range(1, questions + 1))
    assert sum(len(example.questions) == questions for example in made) >= 25


def test_the_number_of_documents_stays_between_the_bounds_and_varies() -> None:
    few = Composition(fewest=4, most=8, max_tokens=10_000)
    made = question_sets(ARTICLES, name="squad", composition=few).examples
    assert {len(example.documents) for example in made} == {4, 5, 6, 7, 8}
    for example in made:
        assert len({document.text for document in example.documents}) == len(example.documents)


@pytest.mark.parametrize("most", [1, 2])
def test_fewer_documents_than_passages_that_are_asked_about_leave_no_question_out(most: int) -> None:
    made = question_sets(ARTICLES, name="squad", composition=Composition(most=most))
    assert made.left_out == {}
    assert len(question_texts(made)) == 300
    assert {len(example.documents) for example in made.examples} == set(range(1, most + 1))


def test_distractors_are_neighbours_and_strangers() -> None:
    made = question_sets(ARTICLES, name="squad", composition=Composition(fewest=8, most=8, max_tokens=10_000)).examples
    kinds = [len(titles(example)) for example in made]
    assert sum(kind > 1 for kind in kinds) > len(kinds) / 2
    assert sum(max(titles(example).values()) > 3 for example in made) > len(kinds) / 4


def test_gold_passages_stand_anywhere() -> None:
    made = question_sets(ARTICLES, name="squad", composition=Composition(fewest=6, most=6, max_tokens=10_000)).examples
    places = Counter(
        at
        for example in made
        for at, document in enumerate(example.documents)
        if any(question.answer in document.text.split() for question in example.questions)
    )
    assert set(places) == set(range(6))
    assert max(places.values()) < 3 * min(places.values())


def test_documents_keep_to_the_budget_and_gold_stays() -> None:
    tight = Composition(fewest=10, max_tokens=800)
    made = question_sets(ARTICLES, name="squad", composition=tight)
    assert made.examples
    for example in made.examples:
        assert sum(tight.count(document.render()) for document in example.documents) <= 800
        text = " ".join(document.text for document in example.documents)
        assert all(question.answer in text.split() for question in example.questions)


def test_passages_that_are_beyond_the_budget_are_counted_by_their_questions() -> None:
    made = question_sets(ARTICLES, name="squad", composition=Composition(max_tokens=20))
    assert made == Source("squad", (), {"questions whose passages are beyond the bounds": 300})


@pytest.mark.parametrize("make", [question_sets, long_examples])
def test_a_seed_decides_everything_and_a_smaller_limit_gives_the_beginning(make: Any) -> None:
    articles = [article(number, passages=30) for number in range(4)]
    whole = make(articles, name="squad", seed=1)
    assert make(articles, name="squad", seed=1) == whole
    assert make(articles, name="squad", seed=1, limit=7).examples == whole.examples[:7]
    assert make(articles, name="squad", seed=2).examples[:7] != whole.examples[:7]
    ids = [example.id for example in whole.examples]
    assert len(set(ids)) == len(ids)
    assert {example.source for example in whole.examples} == {"squad"}


def test_some_examples_have_no_system_prompt() -> None:
    made = question_sets(ARTICLES, name="squad", composition=Composition(no_system=0.5)).examples
    assert {example.system for example in made} == {None, SYSTEM}


def test_one_article_alone_has_no_strangers() -> None:
    made = question_sets(ARTICLES[:1], name="squad", composition=Composition(fewest=5, max_tokens=10_000)).examples
    assert made
    assert all(set(titles(example)) == {"Article 0"} for example in made)


@pytest.mark.parametrize("make", [question_sets, long_examples])
@pytest.mark.parametrize("articles", [[], [[]], [article(1, asked=0)]], ids=["none", "empty", "nothing asked"])
def test_passages_without_questions_are_an_error_that_says_what_to_give(make: Any, articles: Any) -> None:
    with pytest.raises(InputError, match=r"\d+ passages and no question about any of them; give .* `pid`"):
        make(articles, name="squad")


# --- long documents -------------------------------------------------------------------------------------------------

LONG = [article(number, passages=40) for number in range(3)]


def test_a_long_document_is_consecutive_passages_of_one_article_within_the_bounds() -> None:
    made = long_examples(LONG, name="long", more_than=1024, at_most=2000, composition=PLAIN).examples
    assert len(made) > 20
    for example in made:
        (long,) = [document for document in example.documents if PLAIN.count(document.text) > 1024]
        assert PLAIN.count(long.text) <= 2000
        whole = next(one for one in LONG if one[0].title == long.title)
        assert f"\n\n{long.text}\n\n" in "\n\n".join(["", *(passage.text for passage in whole), ""])


def test_the_questions_about_a_long_document_are_answered_in_it() -> None:
    for example in long_examples(LONG, name="long", composition=PLAIN).examples:
        (long,) = [document for document in example.documents if PLAIN.count(document.text) > 1024]
        assert all(question.answer in long.text.split() for question in example.questions)
        assert example.questions


def test_no_question_about_long_documents_is_asked_twice() -> None:
    texts = question_texts(long_examples(LONG, name="long"))
    assert len(set(texts)) == len(texts)


def test_a_long_document_stands_anywhere_among_short_ones_of_other_articles() -> None:
    made = long_examples(LONG, name="long", composition=Composition(fewest=3, most=3, max_tokens=4000)).examples
    places: set[int] = set()
    for example in made:
        sizes = [len(document.text) for document in example.documents]
        place = sizes.index(max(sizes))
        places.add(place)
        assert titles(example)[example.documents[place].title] == 1
        assert len(sizes) == 3
    assert places == {0, 1, 2}


def test_short_documents_give_way_to_the_budget() -> None:
    tight = Composition(fewest=10, most=10, max_tokens=2600)
    made = long_examples(LONG, name="long", composition=tight).examples
    assert made
    for example in made:
        assert sum(tight.count(document.render()) for document in example.documents) <= 2600
        assert max(tight.count(document.text) for document in example.documents) > 1024


def test_articles_that_are_too_short_are_counted() -> None:
    made = long_examples([*LONG, article(9, passages=3)], name="long")
    assert made.left_out == {"articles of 1024 tokens or fewer": 1}
    assert long_examples([article(9, passages=3)], name="long").examples == ()


@pytest.mark.parametrize("bounds", [(1024, 1024), (2000, 1000), (1024, 5000), (-1, 5)])
def test_bounds_that_contradict_each_other_are_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=f"a long document has {bounds[0]} to {bounds[1]} tokens and an example 3072"):
        long_examples(LONG, name="long", more_than=bounds[0], at_most=bounds[1])


# --- the two files --------------------------------------------------------------------------------------------------

PASSAGE = {"pid": "train/0/0", "title": "Notre_Dame_%28x%29", "text": "A statue stands there.", "split": "train-part"}
ASKED = {"id": "q1", "question": "What stands there?", "answers": ["A statue", "statue"], "pid": "train/0/0"}


def squad(folder: Path, passages: list[dict[str, Any]], asked: list[dict[str, Any]]) -> list[list[Passage]]:
    paths = (folder / "passages.jsonl", folder / "qa.jsonl")
    for path, rows in zip(paths, (passages, asked), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_squad(*paths)


def test_passages_and_questions_are_joined_by_pid(tmp_path: Path) -> None:
    found = squad(tmp_path, [PASSAGE], [ASKED, {**ASKED, "id": "q2", "pid": "train/9/9"}])
    assert found == [[Passage("Notre Dame (x)", PASSAGE["text"], (("What stands there?", "A statue"),))]]


def test_passages_of_another_split_are_never_read(tmp_path: Path) -> None:
    dev = {**PASSAGE, "pid": "dev/0/0", "split": "dev-half1", "text": "A dev passage."}
    found = squad(tmp_path, [PASSAGE, dev], [ASKED, {**ASKED, "pid": "dev/0/0"}])
    made = question_sets(found, name="squad").examples
    assert "dev passage" not in str(made)
    with pytest.raises(InputError, match="no passage whose split begins with `train`"):
        squad(tmp_path, [dev], [ASKED])


@pytest.mark.parametrize("field", ["pid", "title", "text", "split"])
def test_a_passage_without_a_field_is_named_with_file_and_line(tmp_path: Path, field: str) -> None:
    broken = {name: value for name, value in PASSAGE.items() if name != field}
    with pytest.raises(InputError, match=rf"passages.jsonl:2 has no {field}"):
        squad(tmp_path, [PASSAGE, broken], [ASKED])


@pytest.mark.parametrize("field", ["pid", "question", "answers"])
def test_a_question_without_a_field_is_named_with_file_and_line(tmp_path: Path, field: str) -> None:
    broken = {name: value for name, value in ASKED.items() if name != field}
    with pytest.raises(InputError, match=rf"qa.jsonl:2 has no {field}"):
        squad(tmp_path, [PASSAGE], [ASKED, broken])


def test_questions_of_other_passages_alone_are_an_error(tmp_path: Path) -> None:
    found = squad(tmp_path, [PASSAGE], [{**ASKED, "pid": "train/9/9"}])
    with pytest.raises(InputError, match="1 passages and no question"):
        question_sets(found, name="squad")
