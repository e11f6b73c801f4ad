"""A conversation: a name for a path in the tree of known beginnings.

    S | documents | T A N | documents | T A N | documents | T

What was said is kept as ids, and each turn is one prompt of all turns so far. The tree knows most of it; where it has
lost something, or a document leaves, more is computed and the answer stays what a fresh computation of these ids gives.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from kvlink.core.document import Document
from kvlink.core.errors import InputError
from kvlink.core.layout import Turn
from kvlink.engine.request import DocumentLike, as_documents
from kvlink.engine.stream import Stream
from kvlink.engine.usage import Answer
from kvlink.models.prompt import Prompter


@dataclass(frozen=True, slots=True)
class Said:
    """One turn that has been answered.

    Attributes:
        documents: Those that it brought and that are still in the conversation.
        question: The user's text.
        answer: What was answered.
    """

    documents: tuple[Document, ...]
    question: str
    answer: Answer


class Chat:
    """One conversation; `Engine.chat` begins it.

    Args:
        stream: Answers a question behind earlier turns.
        cut: Whether a long document becomes several segments.
        system: System prompt; the chat template's default if None.
        labels: Put `[1] `, `[2] `, ... before the documents, counted over all turns.
    """

    def __init__(
        self,
        stream: Callable[..., Stream],
        prompter: Prompter,
        *,
        cut: bool,
        system: str | None = None,
        labels: bool = False,
    ) -> None:
        self._stream, self._prompter, self._cut = stream, prompter, cut
        self._system, self._labels = system, labels
        self._turns: list[Said] = []

    @property
    def turns(self) -> tuple[Said, ...]:
        """What was said so far."""
        return tuple(self._turns)

    @property
    def documents(self) -> tuple[Document, ...]:
        """Documents that are in the conversation now, in the order of reading."""
        return tuple(document for turn in self._turns for document in turn.documents)

    def ask(self, question: str, docs: Sequence[DocumentLike] = (), **options: Any) -> Answer:
        """Say something, and return the answer; options are those of `Engine.stream`.

        Args:
            question: What the user says.
            docs: Documents that this turn brings. One that is in the conversation already stays where it is.
        """
        for _ in self.stream(question, docs, **options):
            pass
        return self._turns[-1].answer

    def stream(self, question: str, docs: Sequence[DocumentLike] = (), **options: Any) -> Generator[str]:
        """Say something, and give the answer piece by piece. One that is not read to its end is no turn."""
        there = {(document.title, document.text) for document in self.documents}
        brought = [one for one in as_documents(docs) if (one.title, one.text) not in there]
        stream = self._stream(
            brought, question, system=self._system, labels=self._labels, history=self._history(), **options
        )
        try:
            yield from stream
        finally:
            stream.close()
        rows = stream.answer.usage.documents
        read = tuple(one for one, row in zip(brought, rows, strict=True) if row.source not in ("skipped", "dropped"))
        self._turns.append(Said(read, question, stream.answer))

    def remove(self, *names: str) -> None:
        """Let documents leave the conversation, by their names: the next answer is given as if they had never been in.

        Brought again by a later turn, a document has moved there.

        Raises:
            InputError: One of them is not in the conversation.
        """
        there = {document.name for document in self.documents}
        if absent := [name for name in names if name not in there]:
            known = ", ".join(sorted(there)) or "none"
            raise InputError(f"{', '.join(absent)}: not in this conversation, whose documents are {known}")
        self._turns = [
            Said(tuple(one for one in turn.documents if one.name not in names), turn.question, turn.answer)
            for turn in self._turns
        ]

    def _history(self) -> list[Turn]:
        """Return all turns so far as ids, the answers as they were generated."""
        turns: list[Turn] = []
        number = 0
        for turn in self._turns:
            first, number = number + 1, number + len(turn.documents)
            turns.append(
                Turn(
                    tuple(self._prompter.segments(document, cut=self._cut) for document in turn.documents),
                    self._prompter.turn_ids(turn.question, turn.answer.ids),
                    tuple(self._prompter.label_ids(at) for at in range(first, number + 1)) if self._labels else (),
                )
            )
        return turns
