"""A library that follows a journal: before it is read it is as new as every change that anybody was told is made.

Before each request that names documents of the library the journal's server is asked whether there are changes; those
that wait at once share a question. Where it does not answer, such requests are refused: a text that may be old is never
used. All others go on: what waits for a journal has threads of its own.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from threading import Lock
from typing import Any

from blake3 import blake3

from kvlink.core.errors import InputError, StoreError
from kvlink.engine.catalogue import Catalogue
from kvlink.engine.library import Library
from kvlink.engine.record import Put, Record
from kvlink.engine.schema import FILE
from kvlink.server.refusals import Refused
from kvlink.server.removing import removed
from kvlink.store.journal import Head, Journal

log = logging.getLogger("kvlink.server")

PERIOD_S = 1.0
"""Within this time a change is applied also where nobody asks."""

THREADS = 32
"""Requests that wait for a journal at once, each in a thread; the others wait for one of those."""


class Follower:
    """Puts and removes documents by way of a journal. Its methods may be called from any thread but the engine's.

    Args:
        call: Lets removals run in the engine's thread.

    Attributes:
        epoch: That of the journal; empty before it was reached.
        is_behind: Whether the first look at the journal has still to end.
        joining: Folder of another library whose texts join the journal, too, once it is reached; None for none.
        threads: Where what may wait for the journal runs.
    """

    def __init__(self, library: Library, journal: Journal, call: Callable[[Callable[[], Any]], Future[Any]]) -> None:
        self._library, self._journal, self._call = library, journal, call
        self._lock, self._asking = Lock(), Lock()
        self._next: Future[None] | None = None
        self._number = 0
        self.epoch, self.is_behind = "", True
        self.joining: Path | None = None
        self.threads = ThreadPoolExecutor(THREADS, "kvlink-journal")

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

        A question that was asked before does not count; the next one is shared by all who wait for it.

        Raises:
            Refused: 503; the journal does not answer, or the library cannot be written.
        """
        with self._lock:
            if is_first := self._next is None:
                self._next = Future()
            shared = self._next
        if is_first:
            with self._asking:  # the question before it has ended
                with self._lock:
                    self._next = None  # whoever comes now needs another one
                self._answer(shared)
        shared.result()

    def close(self) -> None:
        """Take no more requests, and wait for those that run."""
        self.threads.shutdown(cancel_futures=True)

    async def run(self) -> None:
        """Catch up again and again, until it is cancelled."""
        is_lost = False
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(self.threads, self.catch_up)
                is_lost = False
            except Refused as refused:
                if not is_lost:
                    log.warning("%s", refused)
                is_lost = True
            await asyncio.sleep(PERIOD_S)

    def _answer(self, shared: "Future[None]") -> None:
        """Ask, and tell those who share the question."""
        error = self._asked()
        self.is_behind = False
        if error is None:
            shared.set_result(None)
        else:
            shared.set_exception(error)

    def _asked(self) -> BaseException | None:
        """Ask the journal, and apply what is new; return what went wrong."""
        try:
            head = self._journal.head()
            if (head.epoch, head.number) != (self.epoch, self._number):
                self._follow(head)
        except StoreError as error:
            return _unreached(error)
        except BaseException as error:  # those who wait are told, or would wait for ever
            return error
        return None

    def _follow(self, head: Head) -> None:
        """Apply what is behind the number that was reached; all of a journal that is new here, or was set back."""
        is_new = head.epoch != self.epoch or head.number < self._number
        if is_new:
            self.epoch, self._number = "", 0  # until all of it is applied
        known = self._apply_all()
        if is_new:
            self._add_all_but(known)
            if self.joining is not None:
                self._add_all_of(self.joining, known)
                self.joining = None
                self._apply_all()
        self._number = max(self._number, head.number)
        self.epoch = head.epoch

    def _apply_all(self) -> set[str]:
        """Apply what is behind the number that was reached; return the keys of it."""
        known: set[str] = set()
        for change in self._journal.since(self._number):
            self._apply(json.loads(change.text))
            known.add(change.key)
            self._number = change.number
        return known

    def _add_all_but(self, known: set[str]) -> None:
        """Give the journal the documents that it has never heard of; another server may be about to do the same."""
        for listing in self._library.listings():
            if (key := _key(listing.scope, listing.id)) not in known:
                with suppress(InputError):  # another process has removed it meanwhile
                    self._journal.add(key, _written(self._library.get(listing.id, listing.scope)))

    def _add_all_of(self, folder: Path, known: set[str]) -> None:
        """Give the journal the documents of another library that it has never heard of."""
        if not (folder / FILE).exists():
            return
        with closing(Catalogue(folder)) as catalogue:
            for listing in catalogue.listings():
                if (key := _key(listing.scope, listing.id)) not in known:
                    for record in catalogue.records(scope=listing.scope, ids=[listing.id]):
                        self._journal.add(key, _written(record))

    def _apply(self, fields: Mapping[str, Any]) -> None:
        one, scope = fields["id"], bytes.fromhex(fields["scope"])
        if fields["text"] is None:
            self._forget(one, scope)
            return
        given = fields["text"], fields["title"], fields["metadata"], fields["parent"]
        if self._has(Record(one, *given, scope)):
            return  # and need not be read by the model again
        try:
            self._library.put(one, *given, scope=scope)
        except InputError as error:  # whoever put it could keep it
            log.error("a document of the journal cannot be kept here, and is not served: %s", type(error).__name__)
            self._forget(one, scope)

    def _has(self, record: Record) -> bool:
        with suppress(InputError):  # there is none of this id
            return self._library.get(record.id, record.scope) == record
        return False

    def _forget(self, one: str, scope: bytes) -> None:
        with suppress(InputError):  # it is gone
            self._call(lambda: removed(self._library, one, scope=scope)).result()

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
