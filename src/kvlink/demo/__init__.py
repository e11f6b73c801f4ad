"""A made-up company's papers and questions about them, and the main job on both: encode once, reuse, answer."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Any

from kvlink.core.document import Document
from kvlink.corpus import read_corpus
from kvlink.engine.engine import Engine
from kvlink.engine.usage import Answer

MAX_NEW_TOKENS = 24
"""Tokens of a demo answer."""

INSTRUCTION = "Answer in a few words."
"""Stands behind each question."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its right answer.

    Attributes:
        documents: Names of the documents that are handed over, distractors included.
        gold: Names of those that hold the answer.
        hops: How many documents have to be put together.
    """

    question: str
    answer: str
    hops: int
    documents: tuple[str, ...]
    gold: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One question, answered by reuse and by full prefill of the same ids."""

    question: Question
    reused: Answer
    full: Answer

    @property
    def reduction(self) -> float:
        """Return the share of the time to first token that reuse saves."""
        return 1 - self.reused.timings.ttft_s / self.full.timings.ttft_s


def corpus() -> list[Document]:
    """Return the documents, named after their files."""
    with as_file(files(__name__) / "corpus") as folder:
        return read_corpus(folder)


def questions() -> list[Question]:
    """Return the questions."""
    rows: list[dict[str, Any]] = json.loads((files(__name__) / "questions.json").read_text("utf-8"))
    return [Question(r["question"], r["answer"], r["hops"], tuple(r["documents"]), tuple(r["gold"])) for r in rows]


def compare(engine: Engine, asked: Sequence[Question]) -> Iterator[Comparison]:
    """Answer each question both ways, the order of the two alternating."""
    by_name = {document.name: document for document in corpus()}
    engine.generate([], "Hello", max_new_tokens=2)  # the first forward of a process pays for all

    def answer(question: Question, *, reuse: bool) -> Answer:
        documents = [by_name[name] for name in question.documents]
        text = f"{question.question} {INSTRUCTION}"
        return engine.generate(documents, text, max_new_tokens=MAX_NEW_TOKENS, reuse=reuse)

    for number, question in enumerate(asked):
        if number % 2:
            full, reused = answer(question, reuse=False), answer(question, reuse=True)
        else:
            reused, full = answer(question, reuse=True), answer(question, reuse=False)
        yield Comparison(question, reused, full)
