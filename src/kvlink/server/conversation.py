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

Brought = str | LibraryDocument | InlineDocument


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is asked, and the engine that is to answer it."""

    engine: Engine
    system: str | None
    history: Sequence[Turn]
    documents: Sequence[Document]
    question: str


def conversation_of(served: Served, view: View, body: ChatRequest) -> Conversation:
    """Read the messages of a request.

    Raises:
        Refused: An element is malformed, or a document is not known.
        InputError: The messages are in another order.
    """
    messages: list[dict[str, str]] = []
    brought: list[list[Brought]] = []
    for one in body.messages:
        text, role = one.content, "system" if one.role == "developer" else one.role
        elements: list[Brought] = []
        if served.elements and role == "user":
            text, elements[:] = split_elements(text)
        messages.append({"role": role, "content": text})
        if role == "user":
            brought.append(elements)
    brought[-1:] = [[*body.documents, *(brought[-1] if brought else [])]]
    everything = [one for turn in brought for one in turn]
    ids = [one if isinstance(one, str) else one.id for one in everything if not isinstance(one, InlineDocument)]
    found, engine = view.read(ids, beside=len(ids) < len(everything))

    def document(one: Brought, number: int) -> Document:
        if isinstance(one, InlineDocument):
            return Document(one.text, one.title, one.id or f"document {number}")
        return found[one if isinstance(one, str) else one.id]

    _, turns = engine.prompter.conversation(messages)
    history: list[Turn] = []
    before = 0
    for turn, earlier in zip(turns[:-1], brought, strict=False):
        documents = [document(one, 0) for one in earlier]
        kept = [one for one in documents if not one.is_blank]
        numbers = range(before + 1, before + len(kept) + 1) if body.labels else ()
        before += len(kept)
        segments = tuple(engine.prompter.segments(one, cut=engine.cuts_documents) for one in kept)
        history.append(Turn(segments, turn, tuple(map(engine.prompter.label_ids, numbers))))
    return Conversation(
        engine=engine,
        system=messages[0]["content"] if messages[0]["role"] == "system" else None,
        history=history,
        documents=[document(one, number) for number, one in enumerate(brought[-1], start=1)],
        question=messages[-1]["content"],
    )
