"""A library that follows a journal: before it is read it is as new as every change that anybody was told is made.

One question to the journal's server stands before each request that names documents of the library. Where that server
does not answer, such requests are refused: a text that may be old is never used.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock
from typing import Any

from blake3 import blake3

from kvlink.core.errors import InputError, StoreError
from kvlink.engine.library import Library
from kvlink.engine.record import Put, Record
from kvlink.server.refusals import Refused
from kvlink.store.journal import Head, Journal

log = logging.getLogger("kvlink.server")

PERIOD_S = 1.0
"""Within this time a change is applied also where nobody asks."""


class Follower:
    """Puts and removes documents by way of a journal. Its methods may be called from any thread but the engine's.

    Args:
        call: Lets removals run in the engine's thread.

    Attributes:
        epoch: That of the journal; empty before it was reached.
    """

    def __init__(self, library: Library, journal: Journal, call: Callable[[Callable[[], Any]], Future[Any]]) -> None:
        self._library, self._journal, self._call = library, journal, call
        self._lock = Lock()
        self._number = 0
        self.epoch = ""

    def put(self, record: Record) -> Put:
        """Make a text the current one, everywhere, once this returns.

        Raises:
            InputError: It cannot be kept; nobody hears of it.
            Refused: 503; the journal does not answer, so that the change may have been made or not: put it again.
        """
        self.catch_up()
        put = self._library.check(record)
        if put.outcome != "unchanged":
            self._append(record.scope, record.id, _written(record))
            self.catch_up()
        return put

    def remove(self, one: str, *, scope: bytes) -> None:
        """Remove a document, everywhere: no request that begins once this has returned uses it.

        Raises:
            Refused: 503; as for `put`.
        """
        self._append(scope, one, _gone(scope, one))
        self.catch_up()

    def catch_up(self) -> None:
        """Apply what the journal has and the library has not.

        Raises:
            Refused: 503; the journal does not answer.
        """
        try:
            with self._lock:
                head = self._journal.head()
                if (head.epoch, head.number) != (self.epoch, self._number):
                    self._follow(head)
        except StoreError as error:
            raise _unreached(error) from error

    async def run(self) -> None:
        """Catch up again and again, until it is cancelled."""
        is_lost = False
        while True:
            try:
                await asyncio.to_thread(self.catch_up)
                is_lost = False
            except Refused as refused:
                if not is_lost:
                    log.warning("%s", refused)
                is_lost = True
            await asyncio.sleep(PERIOD_S)

    def _follow(self, head: Head) -> None:
        """Apply what is behind the number that was reached; all of a journal that is new here, or was set back."""
        is_new = head.epoch != self.epoch or head.number < self._number
        if is_new:
            self.epoch, self._number = "", 0  # until all of it is applied
        known: set[str] = set()
        for change in self._journal.since(self._number):
            self._apply(json.loads(change.text))
            known.add(change.key)
            self._number = change.number
        if is_new:
            self._add_all_but(known)
        self._number = max(self._number, head.number)
        self.epoch = head.epoch

    def _add_all_but(self, known: set[str]) -> None:
        """Give the journal the documents that it has never heard of."""
        for listing in self._library.listings():
            if _key(listing.scope, listing.id) not in known:
                record = self._library.get(listing.id, listing.scope)
                self._journal.append(_key(record.scope, record.id), _written(record))

    def _apply(self, fields: Mapping[str, Any]) -> None:
        one, scope = fields["id"], bytes.fromhex(fields["scope"])
        if fields["text"] is None:
            self._forget(one, scope)
            return
        try:
            self._library.put(one, fields["text"], fields["title"], fields["metadata"], fields["parent"], scope=scope)
        except InputError as error:  # whoever put it could keep it
            log.error("a document of the journal cannot be kept here, and is not served: %s", type(error).__name__)
            self._forget(one, scope)

    def _forget(self, one: str, scope: bytes) -> None:
        with suppress(InputError, StoreError):  # it is gone; or its bytes go with the next removal
            self._call(lambda: self._library.remove(one, scope=scope)).result()

    def _append(self, scope: bytes, one: str, text: bytes) -> None:
        try:
            self._journal.append(_key(scope, one), text)
        except StoreError as error:
            raise _unreached(error) from error


def _key(scope: bytes, one: str) -> str:
    return blake3(scope + one.encode("utf-8", "surrogatepass")).hexdigest()


def _written(record: Record) -> bytes:
    fields = {name: getattr(record, name) for name in ("id", "text", "title", "parent")}
    return json.dumps({**fields, "metadata": dict(record.metadata), "scope": record.scope.hex()}).encode()


def _gone(scope: bytes, one: str) -> bytes:
    return json.dumps({"id": one, "scope": scope.hex(), "text": None}).encode()


def _unreached(error: StoreError) -> Refused:
    return Refused(503, f"{error}; it says which texts are current, so none of them is used now", code="no_journal")
