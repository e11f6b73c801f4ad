"""Sets that `kvlink evaluate` scores: what was learned from could not be scored any more, so they are refused.

Names decide, and the data set that a file's first row names: a file's content alone cannot tell its split.
"""

import re
from itertools import islice
from pathlib import Path

from kvlink.core.errors import InputError
from kvlink.training.data import read_objects

SETS = {
    "naturalquestions": "nq",
    "nqopen": "nq",
    "2wikimultihop": "2wikimultihopqa",
    "hotpotqa": "hotpotqa",
    "musique": "musique",
    "triviaqa": "triviaqa",
    "multinews": "multi_news",
    "samsum": "samsum",
    "cacheblend": "cacheblend",
}
"""How a name begins, without anything between its letters, and which set that is."""

ALL_SCORED = {"memgpt/qa_data": "nq"}
"""Names of the hub of which all is scored, whatever its only split is called."""

_NOT_TRAIN = ("dev", "val", "test", "eval")


def refuse_scored(source: str | Path, *, allow: bool = False) -> None:
    """Refuse a source that is one of the sets that are scored, unless it says that it is a train split.

    A file is taken for such a set by its name or by the `dataset` of its first row. What says the split is its name,
    else its folder's: `train`, `trainsplit`... is fine; `dev`, `validation`, `test` or nothing is not. A name of the
    hub says its split behind a colon.

    Args:
        allow: Read it all the same; whoever does must not score on that set.

    Raises:
        InputError: It is refused; the message says why and what to do.
    """
    path = Path(source)
    is_file = path.is_file()
    name, _, split = str(source).partition(":")
    whole = None if is_file else ALL_SCORED.get(name.lower())
    found = whole or (_set_of_file(path) if is_file else _set_of_name(name))
    if found is None or allow:
        return
    names = (path.name, path.absolute().parent.name) if is_file else (split,)
    says = next(filter(None, map(_split, names)), "")
    if says == "train" and not whole:
        return
    reason = "neither its name nor its folder's says `train`" if is_file else "it names no split"
    if whole:
        reason = "all of it is scored"
    elif says:
        reason = f"its name says {says!r}"
    raise InputError(
        f"{source} is of {found}, a set that `kvlink evaluate` scores, and {reason}: links that learned from it could "
        "not be scored on it. Give its train split (with `train` in the name of the file or of its folder; on the hub, "
        "with :train), or allow it and do not score on that set"
    )


def _set_of_file(path: Path) -> str | None:
    rows = islice(read_objects(path), 1)
    named = next((str(row.get("dataset") or "") for _, row in rows), "")
    return _set_of_name(path.name) or _set_of_name(named)


def _set_of_name(name: str) -> str | None:
    """Return the set that a file, a data set or a name of the hub (its owner left out) is called after."""
    for piece in name.lower().split("/"):
        words = _words(piece)
        if words[:1] == ["nq"]:
            return "nq"
        together = "".join(words)
        if found := next((known for begin, known in SETS.items() if together.startswith(begin)), None):
            return found
    return None


def _split(name: str) -> str:
    """Return `train`, the word that says another split, or an empty text."""
    words = _words(name)
    if any(word.startswith("train") for word in words):
        return "train"
    return next((word for word in words if word.startswith(_NOT_TRAIN)), "")


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
