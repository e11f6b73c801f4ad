"""What routing has to know of a request and of its answer: names and lengths of documents, and the conversation.

A body that cannot be read names no documents: some server will say what is wrong with it. So does one that names more
than servers take. Names are short, however long a client makes them: they are kept for many requests.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from blake3 import blake3

CHARACTERS_PER_TOKEN = 4
"""What an inline document's length is taken from, until an answer has told its tokens."""

UNKNOWN_TOKENS = 256
"""Of a library's document that no answer has told of."""

MOST_LENGTHS = 1_000_000

MOST_DOCUMENTS = 1000
"""Documents of one request; servers refuse more."""

LONGEST = 128
"""Characters of an id, or of a conversation's name; what is longer is known by its digest."""

_GONE = frozenset({"computed", "skipped", "dropped"})
"""Sources of documents that were not kept."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for.

    Attributes:
        documents: A name and characters of each, in the request's order; None for what is in the library.
        session: Name of its conversation; None for the first turn.
    """

    documents: tuple[tuple[str, int | None], ...] = ()
    session: str | None = None


def read(body: bytes, session: str | None = None) -> Asked:
    """Return what a body asks for.

    Args:
        session: The conversation, if the client has named it. Else it is known by how it began: everything up to its
            first answer.
    """
    fields = _object(body)
    if fields is None:
        return Asked()
    documents = [named(one) for one in _listed(fields)]
    known = _short(session) if session else _session(fields.get("messages"))
    return Asked(tuple(one for one in documents if one is not None), known)


def named(document: Any) -> tuple[str, int | None] | None:
    """Return the name under which a document is routed, and its characters; None if it is no document."""
    if isinstance(document, str):
        return in_library(document), None
    if not isinstance(document, Mapping):
        return None
    fields = cast("Mapping[str, Any]", document)
    one, text, title = fields.get("id"), fields.get("text"), fields.get("title") or ""
    if isinstance(text, str) and isinstance(title, str):  # an id beside a text names it in the usage alone
        return f"text:{_digest([title, text])}", len(text)
    return (in_library(one), None) if isinstance(one, str) and text is None else None


def put_in(body: bytes) -> list[str]:
    """Return the names of a library's documents that a body puts, many at once."""
    rows = _listed(_object(body) or {})
    ids = [cast("Mapping[str, Any]", row).get("id") for row in rows if isinstance(row, Mapping)]
    return [in_library(one) for one in ids if isinstance(one, str)]


def in_library(one: str) -> str:
    """Return the name under which a library's document is routed."""
    return f"id:{_short(one)}"


class Lengths:
    """Tokens of documents, as answers have told them."""

    def __init__(self, most: int = MOST_LENGTHS) -> None:
        self._most = most
        self._known: OrderedDict[str, int] = OrderedDict()

    def weighed(self, asked: Asked) -> list[tuple[str, int]]:
        """Return the documents of a request with their tokens, or what they may be."""
        return [(name, self._known.get(name) or _guess(characters)) for name, characters in asked.documents]

    def learn(self, asked: Asked, usage: Any) -> list[str]:
        """Remember what an answer tells; return the documents that its server now holds.

        Args:
            usage: The answer's `usage`; one without the block `kvlink` tells nothing.
        """
        rows = _rows(usage)
        if len(rows) != len(asked.documents):
            return []
        held: list[str] = []
        for (name, _), row in zip(asked.documents, rows, strict=True):
            tokens = row.get("tokens")
            if isinstance(tokens, int) and tokens > 0:
                self._known[name] = tokens
                self._known.move_to_end(name)
            if row.get("source") not in _GONE:
                held.append(name)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return held


def usage_of(body: bytes) -> Any:
    """Return the `usage` of a whole answer, or None."""
    fields = _object(body)
    return None if fields is None else fields.get("usage")


def usage_in(events: bytes) -> Any:
    """Return the `usage` in the last of some server-sent events, or None: clients have to ask for it."""
    for line in reversed(events.split(b"\n")):
        if line.startswith(b"data:") and b'"usage"' in line:
            return usage_of(line[len(b"data:") :])
    return None


def _rows(usage: Any) -> list[Mapping[str, Any]]:
    block = cast("Mapping[str, Any]", usage).get("kvlink") if isinstance(usage, Mapping) else None
    rows = cast("Mapping[str, Any]", block).get("documents") if isinstance(block, Mapping) else None
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in cast("list[Any]", rows)):
        return []
    return cast("list[Mapping[str, Any]]", rows)


def _listed(fields: Mapping[str, Any]) -> list[Any]:
    """Return what a body lists as documents; nothing if that is more than servers take."""
    listed = fields.get("documents")
    found = cast("list[Any]", listed) if isinstance(listed, list) else []
    return found if len(found) <= MOST_DOCUMENTS else []


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"long:{_digest(name)}"


def _session(messages: Any) -> str | None:
    """Return a conversation's name by its beginning, its first answer included; None before that."""
    if not isinstance(messages, list):
        return None
    for place, message in enumerate(cast("list[Any]", messages)):
        if isinstance(message, Mapping) and cast("Mapping[str, Any]", message).get("role") == "assistant":
            return _digest(cast("list[Any]", messages)[: place + 1])
    return None


def _guess(characters: int | None) -> int:
    return UNKNOWN_TOKENS if characters is None else characters // CHARACTERS_PER_TOKEN + 1


def _object(body: bytes) -> Mapping[str, Any] | None:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else None


def _digest(value: Any) -> str:
    return blake3(json.dumps(value).encode()).hexdigest(16)
