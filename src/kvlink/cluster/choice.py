"""What every routing policy promises: it knows no clock, no network and no text, and is told all that happens."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

Weighed = tuple[str, int]
"""A document's name and its tokens."""

Reason = Literal["session", "documents", "load", "idle"]
"""Why a node was chosen: it has the conversation, or most of the documents, or most of them among those that are not
too busy; or its queue is the shortest."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes; handed back to `done` when it has ended.

    Attributes:
        node: Its name.
        reason: Why.
        share: Share of the request's document tokens that are expected there.
        birth: Which of the lives of a node of this name was meant; one that came back knows nothing of it.
    """

    node: str
    reason: Reason
    share: float
    birth: int


@runtime_checkable
class Policy(Protocol):
    """Chooses among nodes that join and leave."""

    def join(self, node: str) -> None:
        """Take a node in; one that is in already stays as it is."""
        ...

    def leave(self, node: str) -> None:
        """Choose a node no more, and forget what it holds; one that is not in is no error."""
        ...

    def choose(
        self, documents: Sequence[Weighed], *, session: str | None = None, without: Collection[str] = ()
    ) -> Choice | None:
        """Return where a request goes, and count it there; None if no node is left.

        Args:
            documents: Those of the request, in any order.
            session: Name of its conversation, if it is one.
            without: Nodes that have failed this request.
        """
        ...

    def done(self, choice: Choice) -> None:
        """Count a request no more; each choice is handed back once."""
        ...

    def note(self, node: str, documents: Iterable[str]) -> None:
        """Learn that a node holds documents, as its answer told."""
        ...

    def forget(self, document: str) -> None:
        """Learn that a document has changed or is gone: what any node holds of it is of no use."""
        ...
