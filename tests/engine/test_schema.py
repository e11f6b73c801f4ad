"""How the file of a library's catalogue is made while other processes make it, too."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

import pytest

from kvlink.core.errors import StoreUnusable
from kvlink.engine.schema import FILE, claim, open_database


def test_a_database_that_another_process_begins_at_this_moment_is_waited_for(tmp_path: Path) -> None:
    claim(tmp_path)
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):  # SQLite itself does not wait here
        sqlite3.connect(tmp_path / FILE, timeout=60.0).execute("PRAGMA journal_mode = WAL")
    Timer(0.3, other.rollback).start()
    database = open_database(tmp_path / FILE)
    assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    database.close()
    other.close()


def test_a_database_that_another_process_makes_while_the_folder_is_listed_is_not_foreign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Path.iterdir

    def made_before(folder: Path) -> Iterator[Path]:
        (folder / FILE).touch()
        return listed(folder)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Path, "iterdir", made_before)
        claim(tmp_path / "library")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").touch()
    with pytest.raises(StoreUnusable, match="it holds notes"):
        claim(tmp_path / "other")
