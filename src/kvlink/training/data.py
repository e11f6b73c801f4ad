"""Rows: a question, documents, right answers; and the prompt that every method and every training step gives them.

The form on disk is JSON Lines, gzipped or not: `{"id", "question", "documents": [{"title", "text"}], "answers",
"task": "qa|summarization", "gold": [positions]}`. It knows nothing of the hub: `hub` gives its sets in the same form.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvlink.core.document import Document, clean
from kvlink.core.errors import InputError
from kvlink.training.hub import hub_rows

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

    @property
    def digest(self) -> str:
        """BLAKE3 (16 hex digits) of all but the id: tells whether a row is still the one that was scored."""
        documents = [(document.title, document.text) for document in self.documents]
        content = json.dumps([self.question, documents, self.answers, self.task, self.gold])
        return blake3(content.encode()).hexdigest(length=8)


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
    """Yield the rows of a JSON Lines file (`.jsonl`, `.jsonl.gz`), or of a set of the hub (`owner/name/config:split`).

    Raises:
        InputError: There is no such file, a line is no row, or the hub cannot be asked or has another layout.
    """
    path = Path(source)
    if not path.is_file() and path.suffix in (".jsonl", ".gz"):
        raise InputError(f"there is no file {source}")
    for where, given in read_objects(path) if path.is_file() else hub_rows(str(source)):
        yield parse_row(given, where)


def read_objects(source: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield file and line, and the object in it, of a JSON Lines file, gzipped or not; blank lines are passed over.

    Raises:
        InputError: The file cannot be read, or a line holds no object.
    """
    path = Path(source)
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            where = f"{path.name}:{number}"
            try:
                given = json.loads(line)
            except ValueError as error:
                raise InputError(f"{where} is no JSON: {error}") from error
            if not isinstance(given, dict):
                raise InputError(f"{where} is {type(given).__name__}, an object is needed")
            yield where, given


def _lines(path: Path) -> Iterator[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            yield from lines
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
