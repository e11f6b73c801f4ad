"""What one tenant sees: its own documents, then those that are shared, each read by the engine of its scope.

Own documents and inline ones are named by the tenant's scope. Shared ones are the operator's entries, read by all who
are granted them, but what is computed behind them is known to the tenant alone.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kvlink.core.document import Document
from kvlink.core.errors import InputError
from kvlink.core.fingerprint import SHARED
from kvlink.engine.engine import Engine
from kvlink.engine.library import Library
from kvlink.engine.rebuild import Rebuilder
from kvlink.engine.record import Listing, Put, Record
from kvlink.server.following import Follower
from kvlink.server.refusals import Refused
from kvlink.server.tenants import Tenant

Found = TypeVar("Found")


class View:
    """A model and a library through the eyes of one tenant. Its methods may be called from any thread.

    Args:
        engine: Of the whole server; its own documents are shared.
        library: Over that engine; None knows no ids.
        follower: Keeps it as new as a journal; None where nobody shares it.

    Attributes:
        engine: Reads what comes with a request.
        follower: As above.
    """

    def __init__(
        self, tenant: Tenant, engine: Engine, library: Library | None, follower: Follower | None = None
    ) -> None:
        self.tenant = tenant
        self._library, self.follower = library, follower
        self._lock = threading.Lock()
        scope = tenant.scope
        self.engine = (
            engine
            if tenant.is_operator
            else engine.over(Rebuilder.over(engine.loader, scope=scope, sources=lambda _: ()))
        )
        self._own = None if library is None else library.engine_of(scope)
        self._shared = None if library is None else library.engine_of(SHARED, asker=scope)

    @property
    def library(self) -> Library:
        """The library.

        Raises:
            Refused: 404; there is none.
        """
        if self._library is None:
            raise Refused(404, "no library is served: start kvlink serve with --library DIR", code="no_library")
        return self._library

    async def found(self, function: Callable[[], Found]) -> Found:
        """Return what a function finds that asks for documents by their ids.

        Where a journal is followed it runs in threads of its own: while that is slow, nothing else waits for a thread.
        """
        threads = None if self.follower is None else self.follower.threads
        return await asyncio.get_running_loop().run_in_executor(threads, function)

    def read(self, ids: Sequence[str], *, beside: bool = False) -> tuple[dict[str, Document], Engine]:
        """Return current texts by id, an own one before a shared one, and the engine that reads them.

        Args:
            beside: Whether the request brings documents, too: then shared ones are read in the tenant's own scope.

        Raises:
            Refused: 404; an id is unknown, or there is no library.
        """
        wanted = list(dict.fromkeys(ids))
        if not wanted:
            return {}, self.engine
        self._catch_up()
        library, scope, tenant = self.library, self.tenant.scope, self.tenant
        assert self._own is not None and self._shared is not None, "there is a library"  # noqa: PT018
        own = library.known(wanted, scope=scope)
        try:
            found = {one.name: one for one in library.documents(own, scope=scope)}
            left = [one for one in wanted if one not in found]
            if left and (tenant.is_operator or not tenant.sees_shared):
                raise InputError(f"the library has no {', '.join(left)}")
            found |= {one.name: one for one in library.documents(left)}
        except InputError as error:
            raise Refused(404, str(error), code="document_not_found", param="documents") from error
        return found, (self._own if own or beside else self._shared)

    def put(self, one: str, text: str, title: str, metadata: Mapping[str, Any]) -> Put:
        """Make a text the current one of the tenant's id.

        Raises:
            InputError: It cannot be kept.
            Refused: 413; the tenant's documents would take more than its quota.
        """
        with self._lock:
            self._check_quota(Document(text, title, one))
            if self.follower is not None:
                return self.follower.put(Record(one, text, title, metadata, scope=self.tenant.scope))
            return self.library.put(one, text, title, metadata, scope=self.tenant.scope)

    def get(self, one: str) -> Record:
        """Return a document as it was put, an own one before a shared one.

        Raises:
            Refused: 404; there is none.
        """
        self._catch_up()
        scopes = [self.tenant.scope, SHARED] if self.tenant.sees_shared else [self.tenant.scope]
        for scope in scopes:
            if self.library.known([one], scope=scope):
                return self.library.get(one, scope)
        raise Refused(404, f"the library has no {one}", code="document_not_found")

    def owns(self, one: str) -> bool:
        """Whether the tenant itself has a document of this id."""
        self._catch_up()
        return bool(self.library.known([one], scope=self.tenant.scope))

    def listings(self) -> list[Listing]:
        """Return the tenant's own documents without their texts, by id."""
        self._catch_up()
        return [one for one in self.library.listings() if one.scope == self.tenant.scope]

    def encoder(self) -> Engine:
        """Return the engine that encodes the tenant's own documents."""
        return self.library.engine_of(self.tenant.scope)

    @property
    def used_bytes(self) -> int:
        """What keys and values of the tenant's library documents take, uncompressed."""
        return self._bytes(sum(segment.tokens for one in self.listings() for segment in one.segments))

    def _catch_up(self) -> None:
        if self.follower is not None:
            self.follower.catch_up()

    def _check_quota(self, document: Document) -> None:
        quota = self.tenant.quota_bytes
        if quota is None or document.is_blank:
            return
        others = [one for one in self.listings() if one.id != document.name]
        engine = self.engine
        ids = engine.prompter.segments(document, cut=engine.cuts_documents)
        tokens = sum(map(len, ids)) + sum(segment.tokens for one in others for segment in one.segments)
        if (wanted := self._bytes(tokens)) > quota:
            raise Refused(
                413,
                f"with this document yours would take {wanted:,} bytes of keys and values, and the quota is {quota:,}: "
                "delete some",
                code="quota_exceeded",
            )

    def _bytes(self, tokens: int) -> int:
        runner = self.engine.runner
        return tokens * runner.geometry.bytes_per_token(runner.dtype)
