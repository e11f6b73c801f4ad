"""The file of a library's catalogue: its tables, and how it is opened so that what is deleted leaves no bytes."""

import os
import sqlite3
import time
from pathlib import Path

from kvlink.core.errors import StoreUnusable

FILE = "library.db"
"""The database, in the library's folder."""

ENTRIES = "entries"
"""Where a library's entries lie by default: a store in its folder."""

FORMAT = 1
"""Version of the tables."""

_APPLICATION = 0x6B766C62  # "kvlb"
_WAIT_S = 10.0
_PAUSE_S = 0.01
_TABLES = """
CREATE TABLE document (
    key INTEGER PRIMARY KEY, scope BLOB NOT NULL, id BLOB NOT NULL, title TEXT NOT NULL, text TEXT NOT NULL,
    metadata TEXT NOT NULL, parent BLOB, digest BLOB NOT NULL, simhash TEXT NOT NULL, UNIQUE (scope, id));
CREATE TABLE segment (
    document INTEGER NOT NULL REFERENCES document, reading TEXT NOT NULL, current INTEGER NOT NULL,
    place INTEGER NOT NULL, name TEXT NOT NULL, tokens INTEGER NOT NULL);
CREATE INDEX segment_of ON segment (document, reading, current);
CREATE INDEX segment_named ON segment (name);
CREATE TABLE job (
    document INTEGER NOT NULL REFERENCES document, reading TEXT NOT NULL, change INTEGER NOT NULL,
    PRIMARY KEY (document, reading));
CREATE TABLE doomed (name TEXT PRIMARY KEY);
CREATE TABLE mark (what TEXT PRIMARY KEY);
"""


def claim(folder: Path) -> None:
    """Make the library's folder and an empty database that only its owner can read, unless they are there.

    Raises:
        StoreUnusable: The folder holds something else, or cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # List before asking for the database: what another process makes at this moment then never looks foreign.
        foreign = sorted(path.name for path in folder.iterdir() if path.name != ENTRIES)
        if (folder / FILE).exists():
            return
        if foreign:
            raise StoreUnusable(
                f"{folder} has no {FILE} and is not empty (it holds {', '.join(foreign[:3])}), so it is not a "
                "library; choose a new or an empty folder"
            )
        folder.chmod(0o700)
        os.close(os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise StoreUnusable(
            f"cannot make a library in {folder}: {error.strerror}; it must be a folder that this user can write"
        ) from error


def open_database(path: Path) -> sqlite3.Connection:
    """Open the database, with its tables made if it is empty; usable from any thread, one at a time.

    Raises:
        StoreUnusable: It is a database of something else, or of another format.
        sqlite3.Error: It cannot be read or written.
    """
    database = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
    try:
        # A deleted row is overwritten with zeros; VACUUM would else put a copy of everything into a temporary file.
        for setting in ("secure_delete = ON", "temp_store = MEMORY", "foreign_keys = ON", "synchronous = FULL"):
            database.execute(f"PRAGMA {setting}")
        _write_ahead(database)
        database.execute("BEGIN IMMEDIATE")
        if not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in _TABLES.split(";")[:-1]:
                database.execute(statement)
            database.execute(f"PRAGMA application_id = {_APPLICATION}")
            database.execute(f"PRAGMA user_version = {FORMAT}")
        database.execute("COMMIT")
        found = [database.execute(f"PRAGMA {what}").fetchone()[0] for what in ("application_id", "user_version")]
        if found != [_APPLICATION, FORMAT]:
            raise StoreUnusable(
                f"{path} is a database of {'format ' + str(found[1]) if found[0] == _APPLICATION else 'something else'}"
                f", and this version reads libraries of format {FORMAT}; choose another folder"
            )
    except BaseException:
        database.close()
        raise
    return database


def _write_ahead(database: sqlite3.Connection) -> None:
    """Turn to a write-ahead log. SQLite itself does not wait where several processes do so at once."""
    until = time.monotonic() + _WAIT_S
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(_PAUSE_S)
