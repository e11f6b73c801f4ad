"""Self-study makes examples of a folder alone: the model asks and answers, and a run that was killed goes on."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.engines import loaded
from kvlink import Document, InputError
from kvlink.core.errors import ContextOverflow
from kvlink.training.asking import WRITE
from kvlink.training.compose import Source
from kvlink.training.data import QUESTION, SYSTEM
from kvlink.training.example_file import ExampleFile
from kvlink.training.selfstudy import Study, self_study, study_settings

WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty", "knoll", "lagoon")


def page(number: int, paragraphs: int = 4) -> Document:
    """Return a document whose paragraphs can be told apart."""
    texts = [
        f"The {word} office number {number} opens at {at + 6} and closes at {at + 12}, says the {word} board."
        for at, word in enumerate(WORDS[:paragraphs])
    ]
    return Document("\n\n".join([f"# Page {number}", *texts]), name=f"page-{number}.md")


FOLDER = [page(number) for number in range(12)]


def is_prompt(question: str) -> bool:
    return question.startswith("Write three ")


class Model:
    """Writes a question per excerpt and answers with the question's own words; remembers what it was asked."""

    def __init__(self, written: str | None = None, answer: str | None = None) -> None:
        self.written, self.answer = written, answer
        self.asked: list[tuple[tuple[str, ...], str, int]] = []

    def __call__(self, documents: Sequence[Document], question: str, /, *, max_new_tokens: int) -> str:
        self.asked.append((tuple(document.text for document in documents), question, max_new_tokens))
        if is_prompt(question):
            word = documents[0].text.split()[1]
            return f"1. When does the {word} office open?" if self.written is None else self.written
        return f" {len(documents)}: {question} " if self.answer is None else self.answer


def studied(number: int = 20, documents: Sequence[Document] = FOLDER, model: Any = None, **options: Any) -> Source:
    return self_study(documents, model or Model(), number=number, **options)


def written(source: Source) -> int:
    return sum(q.text.startswith("Question: ") for example in source.examples for q in example.questions)


# --- examples -------------------------------------------------------------------------------------------------------


def test_every_example_has_two_to_four_questions_about_one_to_ten_documents_of_the_folder() -> None:
    made = studied(60, study=Study(max_tokens=4000))
    assert len(made.examples) == 60
    assert {len(example.questions) for example in made.examples} == {2, 3, 4}
    assert {len(example.documents) for example in made.examples} == set(range(1, 11))
    for example in made.examples:
        assert set(example.documents) <= set(FOLDER)
        assert len(set(example.documents)) == len(example.documents)
        assert len({question.text for question in example.questions}) == len(example.questions)
        assert (example.system, example.source) == (SYSTEM, "self-study")
    assert len({example.id for example in made.examples}) == 60


def test_documents_come_about_equally_often() -> None:
    counts = Counter(document.name for example in studied(60).examples for document in example.documents)
    assert len(counts) == 12
    assert max(counts.values()) - min(counts.values()) <= 2


def test_answers_are_what_the_model_says_to_the_whole_set() -> None:
    model = Model()
    for example in studied(model=model, study=Study(answer_tokens=17)).examples:
        for question in example.questions:
            assert question.answer == f"{len(example.documents)}: {question.text}".strip()
            assert (tuple(document.text for document in example.documents), question.text, 17) in model.asked


def test_most_questions_are_the_models_own_and_about_a_document_of_the_set() -> None:
    made = studied(40)
    total = sum(len(example.questions) for example in made.examples)
    assert 0.6 * total < written(made) < 0.9 * total
    for example in made.examples:
        text = " ".join(document.text for document in example.documents)
        for question in example.questions:
            if question.text.startswith("Question: "):
                assert f"The {question.text.split()[4]} office" in text


def test_a_question_is_written_about_one_excerpt_at_a_time_and_once_for_each() -> None:
    model = Model()
    studied(40, model=model)
    excerpts = Counter(asked[0] for asked in model.asked if asked[1] == WRITE)
    assert set(excerpts.values()) == {1}
    assert all(len(texts) == 1 and texts[0].count("\n") == 0 for texts in excerpts)


def test_a_document_that_comes_again_is_asked_about_other_excerpts() -> None:
    made = studied(16, [page(0, paragraphs=12)], study=Study(fewest_questions=2, most_questions=2))
    texts = [q.text for example in made.examples for q in example.questions if q.text.startswith("Question: ")]
    assert len(set(texts)) > 0.7 * len(texts[:12])
    assert max(Counter(texts).values()) <= 4


# --- poor models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nonsense", ["", "What a wonderful story.", "What is the answer to this question?\n" * 4])
def test_a_model_that_asks_nothing_is_asked_by_rule(nonsense: str) -> None:
    model = Model(nonsense)
    made = studied(20, model=model)
    assert written(made) == 0
    assert all(2 <= len(example.questions) <= 4 for example in made.examples)
    assert any("Page" in question.text for example in made.examples for question in example.questions)


def test_a_second_prompt_is_tried_where_the_first_one_gave_nothing() -> None:
    model = Model("")
    studied(20, model=model)
    prompts = [question for _, question, _ in model.asked if is_prompt(question) and question != WRITE]
    assert any(prompt.startswith("Write three short questions about the ") for prompt in prompts)


def test_a_question_without_an_answer_is_left_out_and_a_set_without_any_is_counted() -> None:
    class Mute(Model):
        def __call__(self, documents: Sequence[Document], question: str, /, *, max_new_tokens: int) -> str:
            said = super().__call__(documents, question, max_new_tokens=max_new_tokens)
            return said if is_prompt(question) or question.startswith("Question: ") else "  "

    made = studied(60, model=Mute(), study=Study(fewest_questions=1, answer_tokens=40))
    assert all(question.answer for example in made.examples for question in example.questions)
    assert written(made) == sum(len(example.questions) for example in made.examples)
    assert made.left_out["sets without an answer"] == 60 - len(made.examples) > 0


def test_a_model_that_never_answers_is_an_error() -> None:
    with pytest.raises(InputError, match=r"none of 3 sets of documents became an example: .*without an answer"):
        studied(3, model=Model(answer=""))


def test_a_set_that_does_not_fit_is_counted_and_the_others_are_made() -> None:
    class Small(Model):
        def __call__(self, documents: Sequence[Document], question: str, /, *, max_new_tokens: int) -> str:
            if len(documents) > 3:
                raise ContextOverflow("too much", over=1, limit=1)
            return super().__call__(documents, question, max_new_tokens=max_new_tokens)

    made = studied(30, model=Small(), study=Study(max_tokens=4000))
    assert made.left_out["sets longer than the context"] == 30 - len(made.examples) > 0
    assert {len(example.documents) for example in made.examples} == {1, 2, 3}


# --- folders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("documents", [[], [Document(" \n"), Document("\ufeff")]], ids=["empty", "blank"])
def test_a_folder_without_text_is_an_error_that_says_so(documents: list[Document]) -> None:
    with pytest.raises(InputError, match=f"none of {len(documents)} documents holds any text"):
        studied(documents=documents)


def test_one_document_is_enough() -> None:
    made = studied(5, [Document("nothing much here")])
    assert [len(example.documents) for example in made.examples] == [1] * 5
    assert all(len(example.questions) >= 2 for example in made.examples)


def test_blank_documents_and_copies_are_left_out_and_counted() -> None:
    made = studied(10, [*FOLDER, Document(" "), FOLDER[3], Document(FOLDER[4].text, name="copy")])
    assert made.left_out == {"blank documents": 1, "copies of a document": 2}
    assert made.examples == studied(10).examples


def test_a_long_document_is_cut_into_pieces_that_are_documents() -> None:
    huge = Document("\n\n".join(page(number).text for number in range(300)), "Huge", "huge.md")
    made = studied(10, [huge, FOLDER[0]], study=Study(piece_tokens=300, max_tokens=900))
    assert made.left_out == {"documents cut into pieces": 1}
    for example in made.examples:
        for document in example.documents:
            assert document.title in {"Huge", ""}
            assert len(document.text) <= 1200


@pytest.mark.parametrize("budget", [300, 700, 1500])
def test_the_documents_of_a_set_keep_to_the_budget(budget: int) -> None:
    study = Study(max_tokens=budget, piece_tokens=300)
    for example in studied(40, study=study).examples:
        assert sum(study.count(document.render()) for document in example.documents) <= budget


def test_braces_and_lone_surrogates_in_documents_are_text() -> None:
    assert studied(5, [Document("The {office} \ud800 of {0} opens at seven, says the {board}.", "{title}")]).examples


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fewest": 0}, "0 to 10 documents"),
        ({"fewest": 4, "most": 3}, "4 to 3 documents"),
        ({"most_questions": 1}, "2 to 1 questions"),
        ({"piece_tokens": 0}, "up to 0 tokens"),
        ({"max_tokens": 100}, "a set 100"),
        ({"answer_tokens": 0}, "an answer 0"),
    ],
)
def test_a_study_that_cannot_be_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Study(**options)  # type: ignore[arg-type]


# --- again and further ----------------------------------------------------------------------------------------------


def test_a_seed_decides_everything_and_a_smaller_number_gives_the_beginning() -> None:
    whole = studied(20, seed=3)
    assert studied(20, seed=3) == whole
    assert studied(7, seed=3).examples == whole.examples[:7]
    assert [one.documents for one in studied(7, seed=4).examples] != [one.documents for one in whole.examples[:7]]


def settings(**options: Any) -> Any:
    return study_settings(FOLDER, model="m", **options)


def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    class Killed(Model):
        def __call__(self, documents: Sequence[Document], question: str, /, *, max_new_tokens: int) -> str:
            if len(self.asked) > 40:
                raise KeyboardInterrupt
            return super().__call__(documents, question, max_new_tokens=max_new_tokens)

    with ExampleFile(tmp_path / "a.jsonl", settings()) as file, pytest.raises(KeyboardInterrupt):
        studied(model=Killed(), file=file)
    with ExampleFile(tmp_path / "a.jsonl", settings()) as file:
        done = len(file.examples)
        assert 0 < done < 20
        model = Model()
        assert studied(model=model, file=file) == studied()
        answered = [question for _, question, _ in model.asked if not is_prompt(question)]
    assert len(answered) == sum(len(example.questions) for example in studied().examples[done:])


def test_what_is_in_the_file_is_not_asked_again(tmp_path: Path) -> None:
    with ExampleFile(tmp_path / "a.jsonl", settings()) as file:
        first = studied(10, file=file)
    before = (tmp_path / "a.jsonl").read_bytes()
    with ExampleFile(tmp_path / "a.jsonl", settings()) as file:
        model = Model()
        assert studied(10, model=model, file=file) == first
        assert model.asked == []
    assert (tmp_path / "a.jsonl").read_bytes() == before
    with ExampleFile(tmp_path / "a.jsonl", settings()) as file:
        assert studied(20, file=file) == studied(20)
        assert len(file.examples) == 20


def test_whatever_decides_the_examples_stands_in_the_settings_and_their_number_does_not() -> None:
    others = [
        settings(seed=1),
        settings(study=Study(most=5)),
        settings(study=Study(system=None)),
        study_settings(FOLDER, model="n"),
        study_settings(FOLDER[1:], model="m"),
        study_settings([Document(FOLDER[0].text, "Title"), *FOLDER[1:]], model="m"),
    ]
    assert settings() not in others
    assert len({str(one) for one in others}) == len(others)
    assert settings() == settings(study=Study(count=len))


def test_progress_is_told_after_each_set() -> None:
    told: list[tuple[int, int]] = []
    studied(3, progress=lambda done, number: told.append((done, number)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_real_model_asks_and_answers_by_full_attention() -> None:
    engine = loaded()

    def generate(documents: Sequence[Document], question: str, /, *, max_new_tokens: int) -> str:
        return engine.generate(documents, question, system=SYSTEM, max_new_tokens=max_new_tokens, reuse=False).text

    made = studied(2, [page(0, 1), page(1, 1)], generate, study=Study(answer_tokens=6, most_questions=2))
    assert len(made.examples) == 2
    assert not list(engine.store.names())
    for example in made.examples:
        for question in example.questions:
            assert question.answer == generate(example.documents, question.text, max_new_tokens=6).strip()
            assert question.text != QUESTION
