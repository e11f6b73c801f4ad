"""What a library knows, in SQLite: texts, the names of their entries, jobs, and what has still to be deleted.

Each change is one transaction, so whatever interrupts it, the next one finds the state before or after. A name is
counted by the documents that use it; without any it is doomed until the store says that its objects are gone. Knows
no models and no stores.
"""

import json
import sqlite3
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

from kvlink.core.errors import StoreUnusable
from kvlink.core.simhash import BITS, distance, simhash
from kvlink.engine.record import Job, Listing, Outcome, Record, Segment
from kvlink.engine.schema import FILE, claim, open_database


class Catalogue:
    """The database of one library. A *reading* is what decides the names of a text's entries: model, sink, cut."""

    def __init__(self, folder: Path) -> None:
        """Open the folder's database, or make it.

        Raises:
            StoreUnusable: The folder is not a library's, is of another format, or cannot be made or read.
        """
        self.path = folder / FILE
        self._lock = RLock()
        claim(folder)
        with self._explained():
            self._database = open_database(self.path)

    def put(self, record: Record, *, reading: str, segments: Sequence[Segment]) -> tuple[Outcome, int]:
        """Make a text the current one; acknowledged once this returns.

        Returns:
            What became of it, and the bits of the SimHash that changed; `BITS` for a new document.
        """
        about = (record.title, record.text, json.dumps(dict(record.metadata), sort_keys=True), _bytes(record.parent))
        now = simhash(f"{record.title}\n{record.text}")
        with self._transaction() as run:
            found = run(
                "SELECT key, digest, simhash, metadata, parent FROM document WHERE scope = ? AND id = ?",
                (record.scope, _bytes(record.id)),
            ).fetchone()
            if found and found[1] == record.digest:
                if tuple(found[3:]) != about[2:]:
                    run("UPDATE document SET metadata = ?, parent = ? WHERE key = ?", (*about[2:], found[0]))
                self._read(run, found[0], reading, segments)
                return "unchanged", 0
            values = (*about, record.digest, f"{now:016x}")
            if found is None:
                key = run(
                    "INSERT INTO document (title, text, metadata, parent, digest, simhash, scope, id) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (*values, record.scope, _bytes(record.id)),
                ).lastrowid
                change = BITS
            else:
                key, change = found[0], distance(now, int(found[2], 16))
                run(
                    "UPDATE document SET title = ?, text = ?, metadata = ?, parent = ?, digest = ?, simhash = ? "
                    "WHERE key = ?",
                    (*values, key),
                )
                run("UPDATE segment SET current = 0 WHERE document = ?", (key,))
            self._read(run, key, reading, segments, change=change)
            return ("changed" if found else "added"), change

    def read(self, record: Record, *, reading: str, segments: Sequence[Segment]) -> None:
        """Note what a text's entries are called in a reading, unless it is known or the text has changed meanwhile."""
        with self._transaction() as run:
            found = run(
                "SELECT key FROM document WHERE scope = ? AND id = ? AND digest = ?",
                (record.scope, _bytes(record.id), record.digest),
            ).fetchone()
            if found:
                self._read(run, found[0], reading, segments)

    def _read(self, run: Any, key: Any, reading: str, segments: Sequence[Segment], *, change: int = BITS) -> None:
        """Make these the current segments of a reading that has none, with a job for those that are missing."""
        if run("SELECT 1 FROM segment WHERE document = ? AND reading = ? AND current", (key, reading)).fetchone():
            return
        for segment in segments:
            run("DELETE FROM segment WHERE document = ? AND reading = ? AND name = ?", (key, reading, segment.name))
            run("DELETE FROM doomed WHERE name = ?", (segment.name,))
        run.many(
            "INSERT INTO segment (document, reading, current, place, name, tokens) VALUES (?, ?, 1, ?, ?, ?)",
            [(key, reading, place, segment.name, segment.tokens) for place, segment in enumerate(segments)],
        )
        run(
            "INSERT INTO job (document, reading, change) VALUES (?, ?, ?) "
            "ON CONFLICT DO UPDATE SET change = min(?, change + excluded.change)",
            (key, reading, change, BITS),
        )

    def records(
        self, *, scope: bytes, ids: Sequence[str] | None = None, unread: str | None = None
    ) -> Generator[Record]:
        """Yield the documents of a scope by id.

        Args:
            ids: These, in their order; those that are unknown are left out.
            unread: Only those that have no segments in this reading.
        """
        query = "SELECT id, text, title, metadata, parent, scope FROM document WHERE scope = ?"
        if unread is not None:
            query += " AND key NOT IN (SELECT document FROM segment WHERE reading = ? AND current)"
        fixed = (scope,) if unread is None else (scope, unread)
        if ids is None:
            yield from map(_record, self._rows(f"{query} ORDER BY id", fixed))
            return
        for one in ids:
            yield from map(_record, self._rows(f"{query} AND id = ?", (*fixed, _bytes(one))))

    def scopes(self) -> list[bytes]:
        """Return the scopes of all documents."""
        return [row[0] for row in self._rows("SELECT DISTINCT scope FROM document ORDER BY scope")]

    def listings(self, *, readings: Sequence[str] = ()) -> list[Listing]:
        """Return every document without its text, by scope and id.

        Args:
            readings: Of which to tell the segments; a document that none of them has read tells those of its latest.
        """
        segments: dict[int, dict[str, list[Segment]]] = {}
        names: dict[int, set[str]] = {}
        for key, reading, current, name, tokens in self._rows(
            "SELECT document, reading, current, name, tokens FROM segment ORDER BY current, place, rowid"
        ):
            names.setdefault(key, set()).add(name)
            if current:
                segments.setdefault(key, {}).setdefault(reading, []).append(Segment(name, tokens))
        latest = dict(self._rows("SELECT document, reading FROM segment WHERE current ORDER BY rowid"))
        found: list[Listing] = []
        for key, scope, one, hashed, digest, parent, metadata in self._rows(
            "SELECT key, scope, id, simhash, digest, parent, metadata FROM document ORDER BY scope, id"
        ):
            read = segments.get(key, {})
            chosen = next((reading for reading in readings if reading in read), latest.get(key, ""))
            found.append(
                Listing(
                    id=_text(one),
                    scope=scope,
                    simhash=int(hashed, 16),
                    digest=digest,
                    parent=None if parent is None else _text(parent),
                    metadata=json.loads(metadata),
                    segments=tuple(read.get(chosen, ())),
                    names=frozenset(names.get(key, ())),
                )
            )
        return found

    def jobs(self, *, reading: str, name: str | None = None) -> list[Job]:
        """Return the jobs of a reading, the smallest change first, or those whose document uses a name."""
        query = (
            "SELECT key, change, (SELECT sum(tokens) FROM segment WHERE document = key AND current "
            "AND segment.reading = job.reading) AS total, id, text, title, metadata, parent, scope "
            "FROM job JOIN document ON key = job.document WHERE job.reading = ?"
        )
        values: tuple[str, ...] = (reading,)
        if name is not None:
            query += " AND key IN (SELECT document FROM segment WHERE name = ? AND current)"
            values = (reading, name)
        rows = self._rows(f"{query} ORDER BY change, total, key", values)
        return [Job(key, change, total or 0, _record(rest)) for key, change, total, *rest in rows]

    def count_jobs(self) -> int:
        """Return how many documents wait, in any reading."""
        return self._rows("SELECT count(*) FROM job")[0][0]

    def names(self, key: int, *, reading: str) -> list[str]:
        """Return the names of a document's segments in a reading, in their order."""
        query = "SELECT name FROM segment WHERE document = ? AND reading = ? AND current ORDER BY place"
        return [row[0] for row in self._rows(query, (key, reading))]

    def sources(self, name: str) -> list[str]:
        """Return names of earlier versions from which this segment may keep its beginning, the nearest place first."""
        query = (
            "SELECT old.name FROM segment AS now JOIN segment AS old ON old.document = now.document "
            "AND old.reading = now.reading AND NOT old.current WHERE now.name = ? AND now.current "
            "ORDER BY abs(old.place - now.place), old.rowid DESC"
        )
        return list(dict.fromkeys(row[0] for row in self._rows(query, (name,))))

    def uses(self, name: str) -> bool:
        """Whether any document uses an entry of this name."""
        return bool(self._rows("SELECT 1 FROM segment WHERE name = ? LIMIT 1", (name,)))

    def finish(self, job: Job, *, reading: str) -> None:
        """End a job and let go of earlier versions, unless the text has changed since the job was read."""
        with self._transaction() as run:
            same = run("SELECT 1 FROM document WHERE key = ? AND digest = ?", (job.key, job.record.digest)).fetchone()
            if same:
                run("DELETE FROM job WHERE document = ? AND reading = ?", (job.key, reading))
                self._release(run, "document = ? AND reading = ? AND NOT current", (job.key, reading))

    def remove(self, ids: Sequence[str], *, scope: bytes) -> list[str]:
        """Forget documents; acknowledged once this returns. Their bytes are gone after `purge`.

        Returns:
            Those that were known.
        """
        known: list[str] = []
        with self._transaction() as run:
            for one in dict.fromkeys(ids):
                row = run("SELECT key FROM document WHERE scope = ? AND id = ?", (scope, _bytes(one))).fetchone()
                if row:
                    known.append(one)
                    self._release(run, "document = ?", row)
                    run("DELETE FROM job WHERE document = ?", row)
                    run("DELETE FROM document WHERE key = ?", row)
                    run("INSERT OR IGNORE INTO mark VALUES ('purge')")
        return known

    def doomed(self) -> list[str]:
        """Return names that no document uses and whose objects may still be in the store."""
        query = "SELECT name FROM doomed WHERE name NOT IN (SELECT name FROM segment) ORDER BY name"
        return [row[0] for row in self._rows(query)]

    def gone(self, name: str) -> None:
        """Note that the store holds no object of a name any more."""
        with self._transaction() as run:
            run("DELETE FROM doomed WHERE name = ?", (name,))

    @property
    def must_purge(self) -> bool:
        """Whether bytes of removed documents may still lie in the files."""
        return bool(self._rows("SELECT 1 FROM mark WHERE what = 'purge'"))

    def purge(self) -> bool:
        """Write the files anew, without anything that was removed; False while another process reads them."""
        try:
            with self._lock:
                self._database.execute("VACUUM")
                if not self.checkpoint():
                    return False
                self._database.execute("DELETE FROM mark WHERE what = 'purge'")
                return self.checkpoint()
        except sqlite3.OperationalError:  # locked: the mark stays
            return False

    def checkpoint(self) -> bool:
        """Move everything out of the write-ahead log and empty it; False while another process reads it."""
        with self._lock, self._explained():  # not in the middle of another thread's transaction
            return not self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]

    def close(self) -> None:
        """Close the database; a second time does nothing."""
        with self._lock:
            self._database.close()

    def _release(self, run: Any, where: str, values: Sequence[Any]) -> None:
        """Delete rows of segments; names that nothing uses any more are doomed."""
        names = {row[0] for row in run(f"SELECT name FROM segment WHERE {where}", values)}  # noqa: S608 (our words)
        run(f"DELETE FROM segment WHERE {where}", values)  # noqa: S608 (our words)
        for name in names:
            if not run("SELECT 1 FROM segment WHERE name = ? LIMIT 1", (name,)).fetchone():
                run("INSERT OR IGNORE INTO doomed VALUES (?)", (name,))

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock, self._explained():
            return self._database.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Generator[Any]:
        """Run statements that are all carried out, or none."""
        with self._lock, self._explained():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield _Run(self._database)
                self._database.execute("COMMIT")
            except BaseException:
                self._database.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self) -> Generator[None]:
        """Turn errors of SQLite into those of a store.

        Raises:
            StoreUnusable: The database is locked, damaged, unwritable, or no database.
        """
        try:
            yield
        except sqlite3.Error as error:
            raise StoreUnusable(
                f"the library's {self.path} cannot be used ({error}); it must be a file that this user can write, and "
                "that no other process locks for long"
            ) from error


class _Run:
    """Executes statements of one transaction."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.many = database.executemany
        self._execute = database.execute

    def __call__(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        return self._execute(statement, values)


def _record(row: Sequence[Any]) -> Record:
    one, text, title, metadata, parent, scope = row
    return Record(_text(one), text, title, json.loads(metadata), None if parent is None else _text(parent), scope)


def _bytes(name: str | None) -> bytes | None:
    """Return an id as bytes: names of files may hold what is no text."""
    return None if name is None else name.encode("utf-8", "surrogatepass")


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogatepass")
