"""The rows file of a run: JSON Lines, one result per line, behind one line that says what the run was.

A row's results are appended together and synced; a killed run leaves at most one unfinished line, which is cut off
when the run goes on. One run at a time owns a folder. Tasks and limits of rows are no part of what a run was: each
result says by a digest which row it belongs to, so that a run may go on with more tasks and more rows.
"""

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlink.core.errors import InputError
from kvlink.evaluation.results import SCHEMA, finite
from kvlink.training.data import Row


class RowsFile:
    """Results of a run below a folder.

    Args:
        folder: Created if it is not there.
        settings: What the run was asked for; a file of another run is refused.
        resume: Go on with what is there; without it a folder that holds results is refused.

    Raises:
        InputError: Another run is at work there, or the results there are another run's, or of another schema.
    """

    def __init__(self, folder: str | Path, settings: dict[str, Any], *, resume: bool) -> None:
        self.path = Path(folder) / "rows.jsonl"
        self.rows: list[dict[str, Any]] = []
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error.strerror}") from error
        try:
            self._lock()
            self._open(settings, resume=resume)
        except BaseException:
            self._file.close()
            raise
        self._done = {(row["task"], row["id"]) for row in self.rows}

    def require(self, task: str, rows: Sequence[Row]) -> None:
        """Make sure that results that are there belong to these rows, not to others of the same ids.

        Raises:
            InputError: A row has changed since; the message names it.
        """
        digests = {row["id"]: row.get("digest") for row in self.rows if row["task"] == task}
        for row in rows:
            if digests.get(row.id, row.digest) != row.digest:
                raise InputError(
                    f"{self.path} holds results of another row {row.id!r} of {task}: its texts, answers or gold "
                    "differ; give the rows of that run, or another --out"
                )

    def done(self, task: str, row_id: str) -> bool:
        """Whether the results of a row are there."""
        return (task, row_id) in self._done

    def append(self, results: Sequence[dict[str, Any]]) -> None:
        """Write the results of one row, of all methods, and see them to the disk."""
        self.rows += results
        self._done |= {(result["task"], result["id"]) for result in results}
        self._file.write("".join(_line(result) for result in results).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let another run have the folder."""
        self._file.close()

    def __enter__(self) -> "RowsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(
                f"another run is writing to {self.path.parent}; wait for it, or give another --out"
            ) from error

    def _open(self, settings: dict[str, Any], *, resume: bool) -> None:
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        whole: list[Any]
        try:
            whole = [json.loads(line) for line in lines[:-1]]  # what stands behind the last line's end was cut short
        except ValueError:
            whole = [None]
        foreign = not (isinstance(whole[0], dict) if whole else _HEAD.startswith(lines[0][: len(_HEAD)]))
        if foreign or not all(isinstance(row, dict) for row in whole):
            raise InputError(f"{self.path} is no file of results, or damaged; give another --out")
        if not whole:
            self._file.truncate(0)
            self._file.write(_line({"schema": SCHEMA, "settings": settings}).encode())
            self._file.flush()
            return
        head = whole[0]
        if head.get("schema") != SCHEMA:
            raise InputError(
                f"{self.path} has schema {head.get('schema')}, this version writes {SCHEMA}; give another --out"
            )
        if not resume:
            raise InputError(f"{self.path} holds results; pass --resume to go on with them, or give another --out")
        if head["settings"] != settings:
            differing = sorted(k for k in settings if settings[k] != head["settings"].get(k))
            raise InputError(
                f"{self.path} is of a run with other settings ({', '.join(differing)}); give another --out, or ask for "
                "the same"
            )
        methods = len(settings["methods"])
        kept = whole[1 : 1 + (len(whole) - 1) // methods * methods]
        self.rows = kept
        size = sum(len(line) + 1 for line in lines[: 1 + len(kept)])
        self._file.truncate(size)


_HEAD = b'{"schema": '


def _line(value: dict[str, Any]) -> str:
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False) + "\n"
