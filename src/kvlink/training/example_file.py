"""A file of examples: JSON Lines, one example per line, behind one line that says how they were made.

Examples that cost a model's time are appended one by one and synced: a killed run leaves at most one unfinished line,
which is cut off when the run goes on. One run at a time owns a file.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvlink.core.document import Document, clean
from kvlink.core.errors import InputError
from kvlink.training.data import read_objects
from kvlink.training.example import Example, Question

SCHEMA = 1
"""Of the file; another one is refused."""


def example_to_json(example: Example) -> dict[str, Any]:
    """Return an example as it stands in a file."""
    return {
        "id": clean(example.id),
        "source": clean(example.source),
        "system": None if example.system is None else clean(example.system),
        "documents": [
            {"title": clean(one.title), "text": clean(one.text), "name": clean(one.name)} for one in example.documents
        ],
        "questions": [{"text": clean(one.text), "answer": clean(one.answer)} for one in example.questions],
    }


def example_from_json(given: Mapping[str, Any], where: str) -> Example:
    """Return an example from its JSON form.

    Args:
        where: File and line, for errors.

    Raises:
        InputError: A field is missing or of the wrong kind; the message names it.
    """

    def text(holder: Mapping[str, Any], name: str, path: str = "") -> str:
        if not isinstance(value := holder.get(name), str):
            raise InputError(f"{where}: {path}{name} is {type(value).__name__}, a text is needed")
        return value

    def objects(name: str) -> Sequence[Mapping[str, Any]]:
        value = given.get(name)
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise InputError(f"{where}: {name} is no list of objects")
        return value

    return Example(
        id=text(given, "id"),
        documents=tuple(
            Document(*(text(one, name, f"documents[{at}].") for name in ("text", "title", "name")))
            for at, one in enumerate(objects("documents"))
        ),
        questions=tuple(
            Question(*(text(one, name, f"questions[{at}].") for name in ("text", "answer")))
            for at, one in enumerate(objects("questions"))
        ),
        system=None if given.get("system") is None else text(given, "system"),
        source=text(given, "source"),
    )


def write_examples(path: str | Path, examples: Iterable[Example], *, settings: Mapping[str, Any] | None = None) -> None:
    """Write examples to a file, all or none; a file that is there is replaced.

    Raises:
        InputError: It cannot be written.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(_line(_head(settings or {})))
            file.writelines(_line(example_to_json(example)) for example in examples)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()


def read_examples_file(path: str | Path) -> list[Example]:
    """Return the examples of a file, gzipped or not.

    Raises:
        InputError: It cannot be read, is of another schema, or a line is no example.
    """
    lines = read_objects(path)
    where, head = next(lines, (f"{Path(path).name}:1", {}))
    if head.get("schema") != SCHEMA:
        raise InputError(
            f"{where} is no file of examples of schema {SCHEMA}: its first line says {head.get('schema')!r}"
        )
    return [example_from_json(given, where) for where, given in lines]


class ExampleFile:
    """Examples that are written as they are made.

    Args:
        path: Created if it is not there; else what is there is kept, and a last line without its end is cut off.
        settings: How the examples are made; a file of other settings is refused.

    Raises:
        InputError: It cannot be written, another run is at work on it, or it is another file than that.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.examples: list[Example] = []
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error.strerror}") from error
        try:
            self._lock()
            self._open(_head(settings))
        except BaseException:
            self._file.close()
            raise

    def append(self, example: Example) -> None:
        """Write an example and see it to the disk."""
        self._file.write(_line(example_to_json(example)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.examples.append(example)

    def close(self) -> None:
        """Let another run have the file."""
        self._file.close()

    def __enter__(self) -> "ExampleFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"another run is writing to {self.path}; wait for it, or give another file") from error

    def _open(self, head: Mapping[str, Any]) -> None:
        self._file.seek(0)
        *lines, unfinished = self._file.read().split(b"\n")
        if not lines:
            if not _line(head).startswith(unfinished):
                raise InputError(f"{self.path} is no file of examples; give another file")
            self._file.truncate(0)
            self._file.write(_line(head))
            self._file.flush()
            return
        try:
            there, *given = [json.loads(line) for line in lines]
        except ValueError as error:
            raise InputError(f"{self.path} is no file of examples, or damaged: {error}; give another file") from error
        if there != head:
            raise InputError(
                f"{self.path} was made with other settings: it says {_shown(there)}, asked for is {_shown(head)}; give "
                "another file, or ask for the same"
            )
        for number, one in enumerate(given, start=2):
            where = f"{self.path.name}:{number}"
            if not isinstance(one, dict):
                raise InputError(f"{where} is {type(one).__name__}, an example is needed")
            self.examples.append(example_from_json(one, where))
        self._file.truncate(sum(len(line) + 1 for line in lines))


def _head(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"schema": SCHEMA, "settings": json.loads(json.dumps(settings))}


def _line(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False) + "\n").encode()


def _shown(head: Any) -> str:
    return json.dumps(head, ensure_ascii=False)[:300]
