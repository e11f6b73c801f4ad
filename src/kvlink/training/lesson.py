"""Lessons: examples as ids, each question a branch behind the same documents.

S | D_1 L_1 | ... | D_N L_N | T_1 A_1
                            | T_2 A_2        rows of T and A are computed; those that predict A are scored
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from blake3 import blake3
from jaxtyping import Bool, Int
from torch import Tensor

from kvlink.core.document import Document
from kvlink.core.errors import InputError
from kvlink.core.fingerprint import ids_bytes
from kvlink.core.layout import Prompt
from kvlink.models.prompt import Prompter
from kvlink.training.example import Example

Ids = tuple[int, ...]
Segments = Callable[[Document], tuple[Ids, ...]]


@dataclass(frozen=True, slots=True)
class Branch:
    """One question: T, and the answer with the end of its turn."""

    tail: Ids
    answer: Ids

    @property
    def ids(self) -> Ids:
        """Ids of the rows that are computed; the answer's last id predicts nothing."""
        return (*self.tail, *self.answer[:-1])


@dataclass(frozen=True, slots=True, eq=False)
class TailRows:
    """All rows behind the documents, branch by branch.

    Attributes:
        ids: Their ids.
        offsets: Positions behind the last link token.
        branches: Numbers of the questions, from 1.
        scored: Whether a row predicts an id of the answer.
        targets: The id that follows each row.
    """

    ids: Int[Tensor, " rows"]
    offsets: Int[Tensor, " rows"]
    branches: Int[Tensor, " rows"]
    scored: Bool[Tensor, " rows"]
    targets: Int[Tensor, " rows"]


@dataclass(frozen=True, slots=True)
class Lesson:
    """An example as ids.

    Attributes:
        prompt: S, the documents' segments, and T of the first question; there are no earlier turns.
        branches: The questions.
    """

    id: str
    source: str
    prompt: Prompt
    branches: tuple[Branch, ...]

    def __post_init__(self) -> None:
        """Refuse a conversation: rows of earlier turns have no place in a lesson.

        Raises:
            ValueError: The prompt has earlier turns.
        """
        if self.prompt.history:
            raise ValueError(f"lesson {self.id} has {len(self.prompt.history)} earlier turns; a lesson is of one turn")

    @property
    def num_tokens(self) -> int:
        """Ids of S, documents and all branches."""
        return self.prompt.num_tokens - len(self.prompt.tail) + sum(len(branch.ids) for branch in self.branches)

    @property
    def num_scored(self) -> int:
        """Rows whose predictions are scored."""
        return sum(len(branch.answer) for branch in self.branches)

    def rows(self) -> TailRows:
        """Spell out the rows behind the documents."""
        ids, offsets, numbers, scored, targets = [], [], [], [], []
        for number, branch in enumerate(self.branches, start=1):
            count = len(branch.ids)
            ids += branch.ids
            offsets += range(count)
            numbers += [number] * count
            scored += [at >= len(branch.tail) - 1 for at in range(count)]
            targets += [*branch.tail[1:], *branch.answer]
        return TailRows(
            torch.tensor(ids), torch.tensor(offsets), torch.tensor(numbers), torch.tensor(scored), torch.tensor(targets)
        )

    def span(self, num_links: int) -> int:
        """Return the positions that the longest branch needs, links counted."""
        layout = self.prompt.layout(num_links=num_links)
        return layout.spans[-1].start + max(len(branch.ids) for branch in self.branches)

    def digest(self) -> str:
        """Return BLAKE3 (hex) over all ids, piece by piece."""
        hasher = blake3()
        for run in (
            self.prompt.system,
            *self.prompt.segments,
            *(part for b in self.branches for part in (b.tail, b.answer)),
        ):
            hasher.update(f"{len(run)}:".encode())
            hasher.update(ids_bytes(run))
        return hasher.hexdigest()


def lesson_of(example: Example, *, prompter: Prompter, segments: Segments) -> Lesson:
    """Return an example as ids.

    Args:
        segments: Turns a document into the ids of its segments.

    Raises:
        InputError: It has no documents, no question, or a text that this tokenizer cannot read.
    """
    branches = tuple(
        Branch(prompter.tail_ids(question.text), prompter.answer_ids(question.answer))
        for question in example.questions
        if question.answer.strip()
    )
    documents = tuple(segments(document) for document in example.documents if not document.is_blank)
    if not branches or not documents:
        raise InputError(
            f"example {example.id} has {len(documents)} documents with text and {len(branches)} questions with an "
            "answer; at least one of each is needed"
        )
    prompt = Prompt(prompter.system_ids(example.system), documents, branches[0].tail)
    return Lesson(example.id, example.source, prompt, branches)


@dataclass(frozen=True, slots=True)
class Lessons:
    """What came of a list of examples, and why some could not be used: reasons with their counts."""

    kept: tuple[Lesson, ...]
    refused: dict[str, int]


def lessons_of(
    examples: Iterable[Example], *, prompter: Prompter, segments: Segments, num_links: int, context: int
) -> Lessons:
    """Turn examples into lessons; those longer than `context` positions, or of no use, are counted by reason."""
    kept: list[Lesson] = []
    refused: dict[str, int] = {}
    for example in examples:
        try:
            lesson = lesson_of(example, prompter=prompter, segments=segments)
        except InputError as error:
            reason = str(error).replace(f"example {example.id} ", "example ... ")
        else:
            if lesson.span(num_links) <= context:
                kept.append(lesson)
                continue
            reason = f"longer than the {context} positions asked for"
        refused[reason] = refused.get(reason, 0) + 1
    return Lessons(tuple(kept), refused)
