"""SQuAD's articles: passages in their order, with what is asked about each.

Read from two files that are joined by `pid`: passages `{"pid", "title", "text", "split"}` and questions
`{"id", "question", "answers", "pid"}`. Passages of the train split alone are learned from.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from kvlink.core.errors import InputError
from kvlink.training.data import read_objects


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage and what is asked about it: pairs of question and answer."""

    title: str
    text: str
    asked: tuple[tuple[str, str], ...]


def read_squad(passages: str | Path, questions: str | Path, *, split: str = "train") -> list[list[Passage]]:
    """Return the passages of a split by article, in the article's order.

    Args:
        split: How the passages' `split` begins. Only `train` is learned from.

    Raises:
        InputError: A file cannot be read, a line lacks a field, or no passage is of that split.
    """
    asked: dict[str, list[tuple[str, str]]] = {}
    for where, row in read_objects(questions):
        pid, question, answers = _fields(row, where, "pid", "question", "answers")
        if answers:
            asked.setdefault(pid, []).append((question, answers[0]))
    articles: dict[str, list[Passage]] = {}
    for where, row in read_objects(passages):
        pid, title, text, of = _fields(row, where, "pid", "title", "text", "split")
        if of.startswith(split):
            name = unquote(title).replace("_", " ")
            articles.setdefault(name, []).append(Passage(name, text, tuple(asked.get(pid, ()))))
    if not articles:
        raise InputError(f"{passages} has no passage whose split begins with `{split}`")
    return list(articles.values())


def _fields(row: dict[str, Any], where: str, *names: str) -> list[Any]:
    if missing := [name for name in names if name not in row]:
        raise InputError(f"{where} has no {', '.join(missing)}; it has {', '.join(sorted(row))}")
    return [row[name] for name in names]
