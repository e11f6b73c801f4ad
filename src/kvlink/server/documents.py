"""`/v1/documents` and `/v1/warm`: a library over HTTP, and the task that makes its entries while there is time.

Texts are read and put by any thread (SQLite serialises them); what touches the model, the device or the store's
objects runs in the engine's thread, between two steps.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.responses import Response

from kvlink.core.document import Document
from kvlink.core.errors import InputError, StoreError
from kvlink.engine.record import Record
from kvlink.engine.usage import DocumentUsage
from kvlink.server.protocol import DocumentBody, WarmRequest
from kvlink.server.refusals import Refused, answer
from kvlink.server.served import Served

log = logging.getLogger("kvlink.server")

LONGEST_ID = 512

Found = TypeVar("Found")


class Rebuilding:
    """Makes the entries of documents that were put, one at a time, between the steps of requests."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._wanted = asyncio.Event()
        self._wanted.set()  # what an earlier process left

    def want(self) -> None:
        """Say that a document was put."""
        self._wanted.set()

    async def run(self) -> None:
        """Go on until it is cancelled."""
        library = self._served.library
        if library is None:
            return
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                rows = await asyncio.to_thread(library.rows)
                for row in rows:
                    if row.state == "pending":
                        await self._encode(row.id)
                await in_engine(self._served, library.work)  # what is left: entries of old texts, above all
            except Exception as error:  # requests encode what they need; the next put tries again
                log.warning("documents wait to be encoded: %s", type(error).__name__)

    async def _encode(self, one: str) -> None:
        with suppress(Refused):  # it was deleted meanwhile
            found = await asyncio.to_thread(self._served.texts, [one])
            await in_engine(self._served, lambda: _encoded(self._served, found[one]))


async def in_engine(served: Served, function: Callable[[], Found]) -> Found:
    """Return what a function finds in the thread that runs the engine."""
    return await asyncio.wrap_future(served.engine.call(function))


def routes(served: Served, rebuilding: Rebuilding) -> APIRouter:
    """Return the routes of the library. An id may hold slashes, as names of files do."""
    router = APIRouter(prefix="/v1")

    @router.put("/documents/{name:path}")
    async def put(name: str, body: DocumentBody) -> Response:
        """Make a text the current one; once this is answered, every new request uses it."""
        library = served.shelves()
        one = _checked(name)
        put = await asyncio.to_thread(library.put, one, body.text, body.title, body.metadata)
        rebuilding.want()
        row = {"id": put.id, "object": "document", "outcome": put.outcome, "tokens": put.tokens}
        return answer({**row, "segments": put.segments}, status=201 if put.outcome == "added" else 200)

    @router.get("/documents/{name:path}")
    async def get(name: str) -> Response:
        """Return a document as it was put."""
        record = await asyncio.to_thread(_record, served, _checked(name))
        row = {"id": record.id, "object": "document", "title": record.title, "text": record.text}
        return answer({**row, "metadata": dict(record.metadata)})

    @router.delete("/documents/{name:path}")
    async def delete(name: str) -> Response:
        """Remove a document; no request that comes later uses it. `gone` says whether all of its bytes are, too."""
        library, one = served.shelves(), _checked(name)
        await asyncio.to_thread(_record, served, one)
        try:
            gone = await in_engine(served, lambda: library.remove(one))
        except StoreError:  # no request uses it any more; the next removal goes on
            gone = False
        except InputError as error:  # somebody else was faster
            raise Refused(404, str(error), code="document_not_found") from error
        return answer({"id": one, "object": "document", "deleted": True, "gone": gone})

    @router.get("/documents")
    async def listed() -> Response:
        """Return every document with its state: `ready`, or `pending` until its entries are made."""
        rows = await asyncio.to_thread(served.shelves().rows)
        return answer(
            {
                "object": "list",
                "data": [
                    {
                        "id": row.id,
                        "object": "document",
                        "status": row.state,
                        "tokens": row.tokens,
                        "segments": row.segments,
                        "bytes": row.bytes,
                    }
                    for row in rows
                ],
            }
        )

    @router.post("/warm")
    async def warm(body: WarmRequest) -> Response:
        """Encode what some documents lack, so that the first request about them need not."""
        ids = [one if isinstance(one, str) else one.id for one in body.documents]
        served.shelves()
        found = await asyncio.to_thread(served.texts, ids)
        rows: list[dict[str, Any]] = []
        for document in found.values():
            rows += [row.to_json() for row in await in_engine(served, lambda one=document: _encoded(served, one))]
        return answer({"object": "list", "data": rows})

    return router


def _encoded(served: Served, document: Document) -> list[DocumentUsage]:
    return served.shelves().engine.encode([document])


def _record(served: Served, one: str) -> Record:
    try:
        return served.shelves().get(one)
    except InputError as error:
        raise Refused(404, str(error), code="document_not_found") from error


def _checked(name: str) -> str:
    """Return an id that can be kept.

    Raises:
        Refused: 400; it is blank, too long, or holds what is no text.
    """
    if not name.strip() or len(name) > LONGEST_ID or not name.isprintable():
        raise Refused(400, f"an id has 1 to {LONGEST_ID} printable characters", code="invalid_id", param="id")
    return name
