"""What is learned from: a list of documents and the questions that are asked about it."""

from dataclasses import dataclass

from kvlink.core.document import Document
from kvlink.training.data import SYSTEM


@dataclass(frozen=True, slots=True)
class Question:
    """One question about an example's documents.

    Attributes:
        text: What stands behind the documents in the user's turn, instructions included.
        answer: The text whose tokens are scored.
    """

    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Example:
    """Documents in their order, and questions that share one forward over them.

    Attributes:
        id: Unique within a run; held-out examples are chosen by it.
        system: The system prompt; None is the chat template's default.
        source: What the example was made from; stands in the card of the bundle.
    """

    id: str
    documents: tuple[Document, ...]
    questions: tuple[Question, ...]
    system: str | None = SYSTEM
    source: str = ""
