"""From messages and documents to what an engine is asked.

Documents stand first in the last user's turn: those of the field, then those of elements. Elements in earlier messages
stand first in their own turns, where they were when they were asked about. All else is full attention; earlier turns
are known beginnings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvlink.core.document import Document
from kvlink.core.layout import Turn
from kvlink.engine.engine import Engine
from kvlink.server.elements import split_elements
from kvlink.server.protocol import ChatRequest, InlineDocument, LibraryDocument
from kvlink.server.served import Served
from kvlink.server.view import View

Named = str | LibraryDocument | InlineDocument


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is asked, and the engine that is to answer it."""

    engine: Engine
    system: str | None
    history: Sequence[Turn]
    documents: Sequence[Document]
    question: str


@dataclass(frozen=True, slots=True)
class Brought:
    """The messages of a request without their elements, and the documents that each of the user's turns brings."""

    messages: list[dict[str, str]]
    turns: list[list[Named]]

    @property
    def ids(self) -> list[str]:
        """Those of the library that are named."""
        every = (one for turn in self.turns for one in turn)
        return [one if isinstance(one, str) else one.id for one in every if not isinstance(one, InlineDocument)]


def brought_by(served: Served, body: ChatRequest) -> Brought:
    """Separate the messages of a request and its documents.

    Raises:
        Refused: An element is malformed.
    """
    messages: list[dict[str, str]] = []
    turns: list[list[Named]] = []
    for one in body.messages:
        text, role = one.content, "system" if one.role == "developer" else one.role
        elements: list[Named] = []
        if served.elements and role == "user":
            text, elements[:] = split_elements(text)
        messages.append({"role": role, "content": text})
        if role == "user":
            turns.append(elements)
    turns[-1:] = [[*body.documents, *(turns[-1] if turns else [])]]
    return Brought(messages, turns)


def conversation_of(view: View, brought: Brought, *, labels: bool) -> Conversation:
    """Read messages and documents as the engine takes them.

    Args:
        labels: Whether documents are numbered in the prompt.

    Raises:
        Refused: A document is not known.
        InputError: The messages are in another order.
    """
    messages, ids = brought.messages, brought.ids
    found, engine = view.read(ids, beside=len(ids) < sum(map(len, brought.turns)))

    def document(one: Named, number: int) -> Document:
        if isinstance(one, InlineDocument):
            return Document(one.text, one.title, one.id or f"document {number}")
        return found[one if isinstance(one, str) else one.id]

    _, turns = engine.prompter.conversation(messages)
    history: list[Turn] = []
    before = 0
    for turn, earlier in zip(turns[:-1], brought.turns, strict=False):
        documents = [document(one, 0) for one in earlier]
        kept = [one for one in documents if not one.is_blank]
        numbers = range(before + 1, before + len(kept) + 1) if labels else ()
        before += len(kept)
        segments = tuple(engine.prompter.segments(one, cut=engine.cuts_documents) for one in kept)
        history.append(Turn(segments, turn, tuple(map(engine.prompter.label_ids, numbers))))
    return Conversation(
        engine=engine,
        system=messages[0]["content"] if messages[0]["role"] == "system" else None,
        history=history,
        documents=[document(one, number) for number, one in enumerate(brought.turns[-1], start=1)],
        question=messages[-1]["content"],
    )
