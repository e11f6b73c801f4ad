"""The library: documents that change. Ids to current texts, and to the entries that their texts need now.

    put -> the text is current -> its entries are made by `work`, or by the first request that needs them

A request tokenises the text that the catalogue holds, so it never answers from an older one. Entries of segments that
an edit left alone stay; changed ones keep their longest common beginning. Used by the thread that runs the engine.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, islice
from pathlib import Path
from time import perf_counter
from typing import Any

from kvlink.core.document import Document
from kvlink.core.errors import InputError, StoreError
from kvlink.core.fingerprint import SHARED
from kvlink.engine.catalogue import Catalogue
from kvlink.engine.engine import Engine
from kvlink.engine.overview import Overview
from kvlink.engine.rebuild import Rebuilder, Rebuilt
from kvlink.engine.record import Job, Listing, Put, Record, Row, Segment, Status, Worked
from kvlink.engine.schema import ENTRIES
from kvlink.engine.stream import Stream
from kvlink.engine.usage import Answer, DocumentUsage
from kvlink.store.base import Store
from kvlink.store.disk import DiskStore

BATCH = 32
"""Documents that are handed to the engine at once: enough to fill its batches."""


class Library:
    """Documents under ids, with one store for their entries.

    Args:
        folder: Its own folder; made (mode 0700) if it is not there.
        engine: Reads and encodes. Without one, documents can be listed and removed.
        store: Where the entries are, if there is no engine; `entries` in the folder if None.

    Raises:
        StoreUnusable: The folder is not a library's, or cannot be used.
        InputError: A store is named beside an engine's own.
    """

    def __init__(self, folder: str | Path, engine: Engine | None = None, *, store: Store | None = None) -> None:
        if engine is not None and store not in (None, engine.store):
            raise InputError("an engine brings its own store; name the store where the engine is made")
        self.folder = Path(folder)
        self._base = engine
        self._catalogue = Catalogue(self.folder)
        self._closes_store = engine is None and store is None
        self.store: Store = engine.store if engine else store or DiskStore(self.folder / ENTRIES)
        self._engines: dict[bytes, Engine] = {}
        self._rebuilt: dict[str, Rebuilt] | None = None
        self._leaving: set[str] = set()
        with suppress(StoreError):  # it is tried again with the next removal
            self._sweep()

    @property
    def engine(self) -> Engine:
        """The engine of shared documents. It keeps only entries of documents that are in the library.

        Raises:
            InputError: The library was opened without one.
        """
        return self._engine(SHARED)

    def engine_of(self, scope: bytes, *, asker: bytes | None = None) -> Engine:
        """Return the engine of a scope's documents.

        Args:
            asker: Another scope, of who asks about them: what was computed behind the documents is its own.

        Raises:
            InputError: The library was opened without an engine.
        """
        engine = self._engine(scope)
        return engine if asker in (None, scope) else engine.over(engine.loader, uses=self._catalogue.uses, asker=asker)

    def put(
        self,
        id: str,  # noqa: A002 (it is one)
        text: str,
        title: str = "",
        metadata: Mapping[str, Any] | None = None,
        parent: str | None = None,
        scope: bytes = SHARED,
    ) -> Put:
        """Make a text the current one of an id; once this returns, every new request uses it.

        Nothing is encoded here: `work` does that, or the first request that needs it.

        Args:
            metadata: What a retriever wants to find again; JSON values.
            parent: The id of what this was cut from.
            scope: 16 bytes; zeros are shared, all else belongs to one tenant.

        Raises:
            InputError: The text is blank, or longer than the model's context. What was there before stays.
        """
        record = Record(id, text, title, metadata or {}, parent, scope)
        engine = self._engine(scope)
        segments = self._fitting(engine, record)
        outcome, change = self._catalogue.put(record, reading=_reading(engine), segments=segments)
        return Put(id, outcome, change, _tokens(segments), len(segments))

    def check(self, record: Record) -> Put:
        """Return what `put` of a document would do, and do nothing.

        Raises:
            InputError: As `put` would.
        """
        segments = self._fitting(self._engine(record.scope), record)
        known = list(self._catalogue.records(scope=record.scope, ids=[record.id]))
        outcome = "added" if not known else "unchanged" if known == [record] else "changed"
        return Put(record.id, outcome, 0, _tokens(segments), len(segments))

    def remove(self, *ids: str, scope: bytes = SHARED) -> bool:
        """Remove documents, and every codec of entries that no other document uses. Needs no model.

        Returns:
            Whether all bytes are gone. If not, another process reads the files; the next removal, or the next opening,
            goes on.

        Raises:
            InputError: An id is unknown; the others are removed all the same.
            StoreError: The store cannot delete now: no new request uses the documents, and the next opening goes on. Or
                the library's file cannot be written: then they are still `known`.
        """
        known = self._catalogue.remove(ids, scope=scope)
        gone = self._sweep()
        if unknown := [one for one in dict.fromkeys(ids) if one not in known]:
            raise InputError(f"the library has no {', '.join(unknown)}; kvlink library ls shows what it has")
        return gone

    def get(self, id: str, scope: bytes = SHARED) -> Record:  # noqa: A002 (it is one)
        """Return a document with all that was put.

        Raises:
            InputError: There is none of this id.
        """
        for record in self._catalogue.records(scope=scope, ids=[id]):
            return record
        raise InputError(f"the library has no {id}; kvlink library ls shows what it has")

    def known(self, ids: Sequence[str], *, scope: bytes = SHARED) -> list[str]:
        """Return those of some ids that have a document, in their order."""
        return [record.id for record in self._catalogue.records(scope=scope, ids=ids)]

    def documents(self, ids: Sequence[str] | None = None, *, scope: bytes = SHARED) -> list[Document]:
        """Return current texts, named by their ids: all of a scope by id, or these in their order.

        Raises:
            InputError: An id is unknown.
        """
        found = list(self._catalogue.records(scope=scope, ids=ids))
        known = {record.id for record in found}
        if ids is not None and (unknown := [one for one in ids if one not in known]):
            raise InputError(f"the library has no {', '.join(unknown)}; kvlink library ls shows what it has")
        if self._base:
            engine = self._engine(scope)
            self._read(engine, self._catalogue.records(scope=scope, ids=ids, unread=_reading(engine)))
        return [record.document for record in found]

    def stream(
        self, question: str, ids: Sequence[str] | None = None, *, scope: bytes = SHARED, **options: Any
    ) -> Stream:
        """Answer from documents as they are now; options are those of `Engine.stream`.

        What is not ready is encoded now, and the usage says `rebuilding`.
        """
        return self._engine(scope).stream(self.documents(ids, scope=scope), question, **options)

    def generate(
        self, question: str, ids: Sequence[str] | None = None, *, scope: bytes = SHARED, **options: Any
    ) -> Answer:
        """Answer like `stream`, at once; options are those of `Engine.generate`."""
        return self._engine(scope).generate(self.documents(ids, scope=scope), question, **options)

    def work(self, max_jobs: int | None = None, *, progress: Callable[[Worked], None] | None = None) -> list[Worked]:
        """Make the entries of documents that wait, the smallest change first. Runs on the caller's thread.

        Interrupted at any time, what was done is kept and the rest waits.

        Args:
            max_jobs: At most so many documents; all if None.
            progress: Called with each document as it is done.

        Raises:
            StoreFull, StoreUnusable: The store cannot take another entry.
        """
        self._sweep()
        jobs: list[tuple[Job, Engine]] = []
        for scope in self._catalogue.scopes():
            engine = self._engine(scope)
            self._read(engine, self._catalogue.records(scope=scope, unread=_reading(engine)))
            jobs += [(job, engine) for job in self._catalogue.jobs(reading=_reading(engine))]
        jobs.sort(key=lambda pair: (pair[0].change, pair[0].tokens))
        done: list[Worked] = []

        def finished(worked: Worked) -> None:
            done.append(worked)
            if progress:
                progress(worked)

        for _, group in groupby(jobs[:max_jobs], key=lambda pair: pair[0].record.scope):
            while batch := list(islice(group, BATCH)):
                self._encode([job for job, _ in batch], batch[0][1], finished)
        self._catalogue.checkpoint()
        return done

    def rows(self) -> list[Row]:
        """Return one row per document, by scope and id."""
        return Overview(self.listings(), self.store).rows()

    def listings(self) -> list[Listing]:
        """Return every document without its text: parent, metadata and the names of its entries."""
        readings = [] if self._base is None else [_reading(self._engine(scope)) for scope in self._catalogue.scopes()]
        return self._catalogue.listings(readings=readings)

    def status(self) -> Status:
        """Return counts, bytes, what is pending, and near-duplicates with what they cost."""
        overview = Overview(self.listings(), self.store)
        return overview.status(jobs=self._catalogue.count_jobs(), removing=len(self._catalogue.doomed()))

    def close(self) -> None:
        """Close the catalogue; an engine that was handed over stays open."""
        with suppress(StoreError):
            self._catalogue.checkpoint()
        self._catalogue.close()
        if self._closes_store:
            self.store.close()

    def __enter__(self) -> "Library":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _engine(self, scope: bytes) -> Engine:
        """Return the engine whose entries belong to a scope, and which knows earlier versions."""
        base = self._base
        if base is None:
            raise InputError("this library was opened without an engine, so it can only list and remove documents")
        if scope not in self._engines:
            known = self._catalogue
            loader = Rebuilder.over(base.loader, scope=scope, sources=known.sources, uses=known.uses, told=self._told)
            self._engines.setdefault(scope, base.over(loader, uses=known.uses))
        return self._engines[scope]

    def _segments(self, engine: Engine, record: Record) -> list[Segment]:
        """Return the names that a document's entries have with an engine."""
        if record.document.is_blank:
            raise InputError(f"{record.id} is blank: leave it out, or remove it")
        segments = engine.prompter.segments(record.document, cut=engine.cuts_documents)
        return [Segment(engine.loader.name(ids), len(ids)) for ids in segments]

    def _fitting(self, engine: Engine, record: Record) -> list[Segment]:
        """Return what `_segments` does, of a text that the model can read as a whole."""
        segments, most = self._segments(engine, record), engine.report.context
        if (tokens := _tokens(segments)) > most:
            raise InputError(
                f"{record.id} has {tokens} tokens, and the model's context {most}: cut it into several documents "
                "(kvlink library add --split)"
            )
        return segments

    def _read(self, engine: Engine, records: Iterator[Record]) -> None:
        """Note what entries are called with this engine, for documents that another one has read before."""
        for record in records:
            with suppress(InputError):  # a request, or work, says what is wrong with it
                self._catalogue.read(record, reading=_reading(engine), segments=self._segments(engine, record))

    def _encode(self, jobs: Sequence[Job], engine: Engine, finished: Callable[[Worked], None]) -> None:
        """Let the engine encode what the store lacks of some documents."""
        waiting = {job.record.id: job for job in jobs}
        told: dict[str, Rebuilt] = {}
        start = perf_counter()

        def done(row: DocumentUsage) -> None:
            nonlocal start
            job, now = waiting[row.name], perf_counter()
            names = self._catalogue.names(job.key, reading=_reading(engine))
            encoded = [found for name in dict.fromkeys(names) if (found := told.pop(name, None))]
            computed = sum(found.computed for found in encoded)
            reasons = "; ".join(dict.fromkeys(found.reason for found in encoded)) or row.reason
            if row.source != "skipped":
                self._catalogue.finish(job, reading=_reading(engine))
            finished(
                Worked(row.name, job.record.scope, row.tokens, row.tokens - computed, computed, now - start, reasons)
            )
            start = now

        self._rebuilt = told
        try:
            engine.encode([job.record.document for job in jobs], progress=done)
        finally:
            self._rebuilt = None
        self._sweep()

    def _told(self, rebuilt: Rebuilt) -> None:
        """Note an encoded segment; end the jobs that waited for nothing else."""
        if self._rebuilt is not None:
            self._rebuilt[rebuilt.name] = rebuilt
        for engine in list(self._engines.values()):  # another thread may add one
            reading = _reading(engine)
            for job in self._catalogue.jobs(reading=reading, name=rebuilt.name):
                if all(self.store.stat(name) for name in self._catalogue.names(job.key, reading=reading)):
                    self._catalogue.finish(job, reading=reading)

    def _sweep(self) -> bool:
        """Delete what no document uses any more, and what its deletion left in the files; whether all is gone."""
        for name in self._catalogue.doomed():
            self.store.delete(name)
            self._catalogue.gone(name)
            self._leaving.add(name)
        if self._base is None or self._base.forget(*self._leaving):
            self._leaving.clear()
        purged = self._catalogue.purge() if self._catalogue.must_purge else True
        return purged and not self._leaving


def _tokens(segments: Sequence[Segment]) -> int:
    return sum(segment.tokens for segment in segments)


def _reading(engine: Engine) -> str:
    """Return what decides the names of a text's entries: the identity of the model, and whether documents are cut."""
    return f"{engine.loader.name(())}{'/cut' if engine.cuts_documents else ''}"
