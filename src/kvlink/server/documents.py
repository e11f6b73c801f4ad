"""`/v1/documents`, `/v1/library` and `/v1/warm`: a library over HTTP, each tenant's own part of it.

Texts are read and put by any thread (SQLite serialises them); what touches the model, the device or the store's
objects runs in the engine's thread, between two steps.
"""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from kvlink.core.errors import InputError
from kvlink.engine.overview import Overview
from kvlink.engine.record import Put
from kvlink.server.protocol import DocumentBody, DocumentsBody, WarmRequest
from kvlink.server.rebuilding import Rebuilding, encoded, in_engine
from kvlink.server.refusals import Refused, answer, refusal_of
from kvlink.server.removing import removed
from kvlink.server.served import Served
from kvlink.server.view import View

LONGEST_ID = 512
PAGE = 1000
"""Documents of one list, at most."""


def view_of(request: Request) -> View:
    """Return what whoever asks sees."""
    return request.app.state.served.view(request.scope["kvlink.tenant"])


Seen = Annotated[View, Depends(view_of)]


def routes(served: Served, rebuilding: Rebuilding) -> APIRouter:
    """Return the routes of the library. An id may hold slashes, as names of files do."""
    router = APIRouter(prefix="/v1")

    @router.put("/documents/{name:path}")
    async def put(name: str, body: DocumentBody, view: Seen) -> Response:
        """Make a text the current one; once this is answered, every new request uses it."""
        one = _checked(name)
        put = await view.found(lambda: view.put(one, body.text, body.title, body.metadata))
        rebuilding.want()
        return answer(_put_row(put), status=201 if put.outcome == "added" else 200)

    @router.post("/documents")
    async def put_many(body: DocumentsBody, view: Seen) -> Response:
        """Put many texts, each as if alone: a row for each says what became of it."""
        rows: list[dict[str, Any]] = []
        for one in body.documents:
            try:
                given = _checked(one.id), one.text, one.title, one.metadata
                put = await view.found(partial(view.put, *given))
                rows.append(_put_row(put))
            except (InputError, Refused) as error:
                refused = error if isinstance(error, Refused) else refusal_of(error)
                rows.append({"id": one.id, "object": "document", "outcome": "refused", **refused.body})
        rebuilding.want()
        return answer({"object": "list", "data": rows})

    @router.get("/documents/{name:path}")
    async def get(name: str, view: Seen) -> Response:
        """Return a document as it was put."""
        one = _checked(name)
        record = await view.found(lambda: view.get(one))
        row = {"id": record.id, "object": "document", "title": record.title, "text": record.text}
        return answer({**row, "metadata": dict(record.metadata)})

    @router.delete("/documents/{name:path}")
    async def delete(name: str, view: Seen) -> Response:
        """Remove a document; no request that comes later uses it. `gone` says whether all of its bytes are, too."""
        library, one, scope = view.library, _checked(name), view.tenant.scope
        if not await view.found(lambda: view.owns(one)):
            raise Refused(404, f"the library has no {one}", code="document_not_found")
        try:
            if (follower := view.follower) is not None:  # the others follow within a second
                await view.found(lambda: follower.remove(one, scope=scope))
                gone = False
            else:
                gone = await in_engine(served, lambda: removed(library, one, scope=scope))
        except InputError as error:  # somebody else was faster
            raise Refused(404, str(error), code="document_not_found") from error
        return answer({"id": one, "object": "document", "deleted": True, "gone": gone})

    @router.get("/documents")
    async def listed(
        view: Seen, limit: Annotated[int, Query(ge=1, le=PAGE)] = PAGE, after: Annotated[str, Query()] = ""
    ) -> Response:
        """Return documents by id with their state: `queued`, `encoding`, `ready` or `failed`."""
        rows, has_more = await view.found(lambda: _page(view, rebuilding, limit, after))
        return answer({"object": "list", "data": rows, "has_more": has_more})

    @router.get("/library")
    async def library(view: Seen) -> Response:
        """Return counts, bytes, and near-duplicates with what they cost."""
        return answer(await view.found(lambda: _overview(view, rebuilding)))

    @router.post("/warm")
    async def warm(body: WarmRequest, view: Seen) -> Response:
        """Encode what some documents lack, so that the first request about them need not."""
        ids = [one if isinstance(one, str) else one.id for one in body.documents]
        found, engine = await view.found(lambda: view.read(ids))
        rows = [(await encoded(served, engine, document)).to_json() for document in found.values()]
        return answer({"object": "list", "data": rows})

    return router


def _put_row(put: Put) -> dict[str, Any]:
    return {
        "id": put.id,
        "object": "document",
        "outcome": put.outcome,
        "tokens": put.tokens,
        "segments": put.segments,
    }


def _page(view: View, rebuilding: Rebuilding, limit: int, after: str) -> tuple[list[dict[str, Any]], bool]:
    own = sorted(view.listings(), key=lambda one: one.id)
    left = [one for one in own if one.id > after]
    rows: list[dict[str, Any]] = []
    for row in Overview(left[:limit], view.library.store).rows():
        state, reason = rebuilding.state(row)
        told = {"status": state, "reason": reason} if reason else {"status": state}
        size = {"tokens": row.tokens, "segments": row.segments, "bytes": row.bytes}
        rows.append({"id": row.id, "object": "document", **told, **size})
    return rows, len(left) > limit


def _overview(view: View, rebuilding: Rebuilding) -> dict[str, Any]:
    overview = Overview(view.listings(), view.library.store)
    status = overview.status(jobs=0, removing=0)
    states = [rebuilding.state(row)[0] for row in overview.rows()]
    return {
        "object": "library",
        "documents": status.documents,
        "tokens": status.tokens,
        "bytes": status.bytes,
        "quota_bytes": view.tenant.quota_bytes,
        "used_bytes": view.used_bytes,
        "states": {state: states.count(state) for state in ("queued", "encoding", "ready", "failed")},
        "near_duplicates": [
            {"ids": [pair.one, pair.other], "bits": pair.bits, "bytes": pair.bytes} for pair in status.near
        ],
    }


def _checked(name: str) -> str:
    """Return an id that can be kept.

    Raises:
        Refused: 400; it is blank, too long, or holds what is no text.
    """
    if not name.strip() or len(name) > LONGEST_ID or not name.isprintable():
        raise Refused(400, f"an id has 1 to {LONGEST_ID} printable characters", code="invalid_id", param="id")
    return name
