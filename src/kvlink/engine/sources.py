"""Where the documents of a prompt came from, and what it used: what usage tells of them. Plain values."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import get_args

from kvlink.engine.loaded import Loaded
from kvlink.engine.request import Request
from kvlink.engine.residency import Held
from kvlink.engine.session import Session
from kvlink.engine.usage import DocumentUsage, Source, Usage

SOURCES = get_args(Source)
"""Where a segment can come from, nearest first."""


def usage_of(request: Request, session: Session, *, labels: bool, reuse: bool) -> Usage:
    """Return what a prompt used; its documents stand in the order of the request."""
    asked = session.request
    if not reuse or not asked.prompt.segments:
        known = session.known_rows
        rows = computed_rows(request)
        return Usage(request.prompt.num_tokens, known, 0, 0, "exact", labels=labels, documents=rows)
    found = sum(one.resident.num_tokens for one in session.held if one.codec)
    return Usage(
        prompt_tokens=request.prompt.num_tokens,
        cached_tokens=found + session.known_rows - session.known_links,
        link_tokens=session.num_links,
        completion_tokens=0,
        mode="documents",
        labels=labels,
        documents=document_rows(asked, session.held),
        known_links=session.known_links,
    )


def computed_rows(request: Request) -> tuple[DocumentUsage, ...]:
    """Say of each document in the prompt that it was part of one full forward."""
    rows = list(request.rows)
    for index in request.kept:
        rows[index] = replace(rows[index], source="computed", reason="computed in full, as asked")
    return tuple(rows)


def document_rows(request: Request, loaded: Sequence[Loaded | Held]) -> tuple[DocumentUsage, ...]:
    """Fill in where each document of the last turn came from: the farthest place from which a segment of it came."""
    earlier = sum(len(document) for turn in request.prompt.history for document in turn.documents)
    rows, left = list(request.rows), iter(loaded[earlier:])
    for index, document in zip(request.kept, request.prompt.documents, strict=True):
        segments = list(islice(left, len(document)))
        farthest = max(segments, key=lambda segment: SOURCES.index(segment.source))
        reasons = [segment.reason for segment in segments if segment.source == "encoded"]
        reason = share(len(reasons), len(segments)) + "; ".join(dict.fromkeys(reasons))
        rows[index] = replace(rows[index], source=farthest.source, codec=farthest.codec, reason=reason)
    return tuple(rows)


def share(encoded: int, segments: int) -> str:
    """Say how many of a document's segments were encoded; nothing where none was, or where it is not cut."""
    return f"{encoded} of {segments} segments: " if encoded and segments > 1 else ""
