"""A folder's documents and a library that shall hold them as they are now: what is new, changed, or gone.

Knows documents and where they were read from; reads no files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvlink.core.document import Document
from kvlink.core.errors import InputError
from kvlink.core.fingerprint import SHARED
from kvlink.core.pieces import name_of_piece, split_text
from kvlink.engine.library import Library
from kvlink.engine.record import Listing, Worked

ROOT = "root"
"""Name of the metadata that say which folder a document was read from."""


@dataclass(frozen=True, slots=True)
class Synced:
    """What became of one document.

    Attributes:
        outcome: `gone` is a document whose file is not there any more and that was left in the library; `skipped` one
            that cannot be used: an earlier text of it was removed, so that nothing answers from it.
        kept, computed: Of its tokens, those that were there and those that went through the model.
        reason: Why it was skipped, or why as many tokens were computed.
    """

    id: str
    outcome: Literal["added", "changed", "unchanged", "removed", "gone", "skipped"]
    tokens: int = 0
    segments: int = 0
    kept: int = 0
    computed: int = 0
    seconds: float = 0.0
    reason: str = ""


def sync(
    library: Library,
    documents: Sequence[Document],
    *,
    root: str,
    whole: bool = True,
    split: bool = False,
    prune: bool = False,
    scope: bytes = SHARED,
    progress: Callable[[Worked], None] | None = None,
) -> list[Synced]:
    """Put documents into a library, each under its name, and make their entries.

    Args:
        root: The folder that they were read from.
        whole: Whether these are all documents of that folder; else nothing counts as gone.
        split: Cut each into pieces named `name#hash`. A document that the library holds in pieces is cut again.
        prune: Remove documents that are gone.

    Raises:
        InputError: The library has a document of this name from another folder. Nothing is changed then.
    """
    held = [listing for listing in library.listings() if listing.scope == scope]
    ours = [listing for listing in held if listing.metadata.get(ROOT) == root]
    _check(held, documents, root)
    in_pieces = {listing.parent for listing in ours if listing.parent is not None}
    rows: dict[str, Synced] = {}
    for document in documents:
        parts = [document]
        if split or document.name in in_pieces:
            texts = dict.fromkeys(split_text(document.text)) or {"": None}
            parts = [Document(text, document.title, name_of_piece(document.name, text)) for text in texts]
        for part in parts:
            parent = None if part is document else document.name
            try:
                put = library.put(part.name, part.text, part.title, {ROOT: root}, parent, scope)
            except InputError as error:
                rows[part.name] = Synced(part.name, "skipped", reason=str(error))
            else:
                kept = put.tokens if put.outcome == "unchanged" else 0
                rows[part.name] = Synced(part.name, put.outcome, put.tokens, put.segments, kept)
    present = {document.name for document in documents}
    stale: list[str] = []
    for listing in ours:
        row = rows.get(listing.id)
        of_file = listing.parent if listing.parent is not None else listing.id
        if row is None and of_file not in present and whole and not prune:
            rows[listing.id] = Synced(listing.id, "gone", reason="its file is not there any more")
        elif row is None and (of_file in present or (whole and prune)):
            rows[listing.id] = Synced(listing.id, "removed")
            stale.append(listing.id)
        elif row is not None and row.outcome == "skipped":
            rows[listing.id] = replace(row, reason=f"{row.reason}; what the library had of it was removed")
            stale.append(listing.id)
    if stale:
        library.remove(*stale, scope=scope)

    def worked(made: Worked) -> None:
        row = rows.get(made.id)
        if row and made.scope == scope and row.outcome not in ("gone", "skipped"):
            rows[made.id] = replace(
                row, kept=made.kept, computed=made.computed, seconds=made.seconds, reason=made.reason
            )
        if progress:
            progress(made)

    library.work(progress=worked)
    return list(rows.values())


def _check(held: Sequence[Listing], documents: Sequence[Document], root: str) -> None:
    """Refuse a name that stands for a document of another folder."""
    names = {document.name for document in documents}
    for listing in held:
        of_file = listing.parent if listing.parent is not None else listing.id
        if of_file in names and (other := listing.metadata.get(ROOT)) != root:
            raise InputError(
                f"the library has {of_file} {'of ' + str(other) if other else 'from elsewhere'}, and {root} has one, "
                f"too; use another library, or remove it first: kvlink library rm {listing.id}"
            )
