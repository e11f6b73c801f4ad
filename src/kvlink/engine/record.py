"""What a library keeps and tells of its documents: plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from blake3 import blake3

from kvlink.core.document import Document, clean
from kvlink.core.fingerprint import SHARED

Outcome = Literal["added", "changed", "unchanged"]


@dataclass(frozen=True, slots=True)
class Record:
    """A document as the library keeps it, unique by scope and id.

    Attributes:
        metadata: What its owner wants to find again; JSON values.
        parent: The id of what it was cut from, or None.
        scope: Who may use its entries; zeros are everybody.
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    parent: str | None = None
    scope: bytes = SHARED

    def __post_init__(self) -> None:
        for name in ("text", "title"):
            object.__setattr__(self, name, clean(getattr(self, name)))

    @property
    def document(self) -> Document:
        """The document as the model reads it."""
        return Document(self.text, self.title, self.id)

    @property
    def digest(self) -> bytes:
        """BLAKE3 of title and text: equal digests, equal documents."""
        title = self.title.encode()
        return blake3(f"{len(title)}:".encode() + title + self.text.encode()).digest()


@dataclass(frozen=True, slots=True)
class Segment:
    """The name of one segment's entry, and its tokens."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """A document whose entries have to be made.

    Attributes:
        key: Its row.
        change: Bits of the SimHash that changed; `BITS` for a new document.
        tokens: Its tokens.
    """

    key: int
    change: int
    tokens: int
    record: Record


@dataclass(frozen=True, slots=True)
class Listing:
    """A document without its text.

    Attributes:
        segments: Of the reading that was asked for, else of the latest; none if no model has read the document yet.
        names: All names that it uses in any reading, old ones included.
    """

    id: str
    scope: bytes
    simhash: int
    digest: bytes
    parent: str | None
    metadata: Mapping[str, Any]
    segments: tuple[Segment, ...]
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Put:
    """What a put did.

    Attributes:
        change: Bits of the SimHash that changed, of 64; 0 where nothing did.
        tokens, segments: Of the document as it is now.
    """

    id: str
    outcome: Outcome
    change: int
    tokens: int
    segments: int


@dataclass(frozen=True, slots=True)
class Worked:
    """A document whose entries were made.

    Attributes:
        kept: Tokens whose keys and values were there: of equal segments, and of beginnings.
        computed: Tokens that went through the model.
        reason: Why as many were computed.
    """

    id: str
    scope: bytes
    tokens: int
    kept: int
    computed: int
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """A document of the library.

    Attributes:
        state: `ready` if the store holds all its entries; else a request encodes what is missing.
        bytes: Of its objects in the store, those shared with other documents and those of other models included.
    """

    id: str
    scope: bytes
    tokens: int
    segments: int
    state: Literal["ready", "pending"]
    bytes: int


@dataclass(frozen=True, slots=True)
class Near:
    """Two documents that say almost the same.

    Attributes:
        bits: Of their SimHashes that differ, of 64.
        bytes: What the smaller one costs beyond what both share.
    """

    one: str
    other: str
    bits: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Status:
    """How a library is.

    Attributes:
        ready, pending: Documents by their state.
        jobs: Documents that wait to be rebuilt, in any reading.
        removing: Names whose objects have still to be deleted.
        bytes: Of all objects of its documents, each once.
        near: Near-duplicates, the nearest first.
    """

    documents: int
    tokens: int
    ready: int
    pending: int
    jobs: int
    removing: int
    bytes: int
    near: tuple[Near, ...]
