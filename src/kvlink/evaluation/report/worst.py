"""Rows on which a method is farthest from full attention, with another method beside it.

Texts are read from where the rows come from, and only where that may be shown: made-up tasks always, real ones if the
folder of the sets is named. A row whose digest is another one by now is shown without its texts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlink.core.errors import InputError
from kvlink.evaluation.report.names import base_name
from kvlink.evaluation.report.read import Results
from kvlink.evaluation.tasks import SYNTHETIC, task_rows
from kvlink.training.data import Row

SHOWN = 4
"""Rows of each task."""

LONGEST = 1500
"""Characters of a document that are shown."""


@dataclass(frozen=True, slots=True)
class Worst:
    """One row.

    Attributes:
        scores: By method (full, the method, the other one): what results hold of it.
        row: Its texts, or None where they may not be shown or are not to be had.
    """

    task: str
    id: str
    scores: Mapping[str, Mapping[str, Any]]
    row: Row | None

    @property
    def documents(self) -> list[tuple[str, str, bool]]:
        """Title, text (cut where it is long) and whether it holds the answer, of each document."""
        if self.row is None:
            return []
        return [
            (document.title or document.name, _cut(document.text), at in (self.row.gold or ()))
            for at, document in enumerate(self.row.documents)
        ]


def worst_rows(results: Results, method: str, other: str, *, texts: Path | None = None) -> list[Worst]:
    """Return the rows of each task with the greatest KL between full and a method.

    Args:
        other: Shown beside it.
        texts: Folder of the sets; without it, only texts of made-up tasks are shown.
    """
    by_row: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in results.rows:
        if row["method"] in ("full", method, other) and "kl" in row and "error" not in row:
            by_row.setdefault((row["task"], row["id"]), {})[row["method"]] = row
    found: list[Worst] = []
    for task in results.tasks:
        own = [(which, scores) for (name, which), scores in by_row.items() if name == task and method in scores]
        own = sorted(own, key=lambda pair: -pair[1][method]["kl"])[:SHOWN]
        known = _texts(results, task, texts) if own else {}
        for which, scores in own:
            row = known.get(which)
            digest = scores[method].get("digest")
            found.append(Worst(task, which, scores, row if row is not None and row.digest == digest else None))
    return found


def _texts(results: Results, task: str, texts: Path | None) -> dict[str, Row]:
    """Return the rows of a task by id, if their texts may be shown."""
    made_up = base_name(task) in SYNTHETIC
    if not made_up and (texts is None or ("/" in task and not Path(task).is_file())):
        return {}
    limit = max(50, sum(row["task"] == task and row["method"] == "full" for row in results.rows)) if made_up else None
    try:
        rows = task_rows(task, data=texts, limit=limit, seed=int(results.settings.get("seed") or 0))
    except InputError:
        return {}
    return {row.id: row for row in rows}


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST].rstrip()} ..."
