"""Rows: a question, documents, right answers; and the prompt that every method and every training step gives them.

The form on disk is JSON Lines, gzipped or not: `{"id", "question", "documents": [{"title", "text"}], "answers",
"task": "qa|summarization", "gold": [positions]}`. Hub names are read through `datasets` where it is installed.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from kvlink.core.document import Document, clean
from kvlink.core.errors import InputError

PROMPT_VERSION = 1
"""Changes whenever one of the texts below changes; stands in every result file."""

SYSTEM = "Answer the question using the documents."
"""System prompt of question answering."""

QUESTION = "Question: {question}\nAnswer in a few words."
"""The user's text behind the documents."""

SUMMARY_SYSTEM = "Summarize the documents."
"""System prompt of summarization; the row's own question stands behind the documents."""


@dataclass(frozen=True, slots=True)
class Row:
    """One question with its documents.

    Attributes:
        answers: Right answers, the first one is scored; empty if there is none.
        task: `qa` or `summarization`.
        gold: Positions of the documents that hold the answer, or None if that is not known.
    """

    id: str
    question: str
    documents: tuple[Document, ...]
    answers: tuple[str, ...]
    task: str = "qa"
    gold: tuple[int, ...] | None = None

    @property
    def system(self) -> str:
        """The system prompt of this row's task."""
        return SYSTEM if self.task == "qa" else SUMMARY_SYSTEM

    @property
    def text(self) -> str:
        """What stands behind the documents."""
        return QUESTION.format(question=self.question) if self.task == "qa" else self.question


def parse_row(given: Mapping[str, Any], where: str) -> Row:
    """Return a row from its JSON form.

    Args:
        given: The object.
        where: File and line, for errors.

    Raises:
        InputError: A field is missing or of the wrong kind; the message names it.
    """

    def text(value: Any, field: str) -> str:
        if not isinstance(value, str):
            raise InputError(f"{where}: {field} is {type(value).__name__}, a text is needed")
        return value

    documents = given.get("documents", [])
    answers = given.get("answers", [])
    if not isinstance(documents, list) or not isinstance(answers, list):
        raise InputError(f"{where}: documents and answers are lists")
    gold = given.get("gold")
    if gold is not None and not (
        isinstance(gold, list) and all(isinstance(at, int) and 0 <= at < len(documents) for at in gold)
    ):
        raise InputError(f"{where}: gold is {gold}, a list of positions among the {len(documents)} documents is needed")
    if wrong := [at for at, document in enumerate(documents) if not isinstance(document, dict)]:
        raise InputError(f"{where}: documents[{wrong[0]}] is {type(documents[wrong[0]]).__name__}, an object is needed")
    return Row(
        id=where if given.get("id") in (None, "") else clean(str(given["id"])),
        question=text(given.get("question"), "question"),
        documents=tuple(
            Document(
                text(document.get("text"), f"documents[{at}].text"),
                text(document.get("title") or "", f"documents[{at}].title"),
                f"document {at}",
            )
            for at, document in enumerate(documents)
        ),
        answers=tuple(text(answer, "answers") for answer in answers),
        task="summarization" if given.get("task") == "summarization" else "qa",
        gold=None if gold is None else tuple(gold),
    )


def read_rows(source: str | Path) -> Iterator[Row]:
    """Yield the rows of a JSON Lines file (`.jsonl`, `.jsonl.gz`), or of a hub name with a split (`name:split`).

    Raises:
        InputError: There is no such file, a line is no row, or the hub cannot be asked.
    """
    path = Path(source)
    if not path.is_file():
        yield from _hub_rows(str(source))
        return
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            where = f"{path.name}:{number}"
            try:
                given = json.loads(line)
            except ValueError as error:
                raise InputError(f"{where} is no JSON: {error}") from error
            if not isinstance(given, dict):
                raise InputError(f"{where} is {type(given).__name__}, an object is needed")
            yield parse_row(given, where)


def _lines(path: Path) -> Iterator[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            yield from lines
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _hub_rows(name: str) -> Iterator[Row]:
    dataset, _, split = name.partition(":")
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        raise InputError(
            f"{name!r} is no file here; to read it as a data set of the hub, install kvlink[data], or give a path"
        ) from error
    try:
        loaded: Any = datasets.load_dataset(dataset, split=split or "validation")
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"the hub's data set {dataset!r} cannot be read: {error}; give a path instead") from error
    for number, given in enumerate(loaded):
        if missing := sorted({"question", "documents", "answers"} - given.keys()):
            raise InputError(
                f"{name}:{number} has no {', '.join(missing)}: the hub's own layout of this set is not read yet; "
                "write its rows as JSON Lines (docs/how-to/evaluate.md) and give the path"
            )
        yield parse_row(given, f"{name}:{number}")
