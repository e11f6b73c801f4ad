"""Where examples come from: files of rows, names of the hub, SQuAD's two files, examples that were written before."""

from collections.abc import Sequence
from pathlib import Path

from kvlink.core.errors import InputError
from kvlink.core.segments import LARGEST
from kvlink.training.articles import long_examples, question_sets
from kvlink.training.compose import Composition, Source, row_examples
from kvlink.training.data import read_objects, read_rows
from kvlink.training.example import Example
from kvlink.training.example_file import read_examples_file
from kvlink.training.scored import refuse_scored
from kvlink.training.squad import read_squad

LONGEST = 2560
"""Tokens of a long document at most; it has more than one segment's."""

LONG = 5
"""Examples of short documents to each one with a long document, where passages can be joined."""

SETS = 200
"""Examples that are drawn from passages where no limit is given."""


def read_examples(
    source: str,
    *,
    composition: Composition,
    limit: int | None = None,
    long: bool = True,
    allow_scored: bool = False,
    seed: int = 0,
) -> list[Source]:
    """Return what one source gives: one list of examples, or two where long documents can be made of its passages.

    Args:
        source: A file of rows, a hub name, SQuAD's passages, beside which their questions lie (`qa` for `passages`
            in the name), or a file of examples, which stay as they are.
        limit: Examples at most; those with a long document come on top.
        long: Whether long documents are made, where the budget has room for one.
        seed: Decides what is drawn.

    Raises:
        InputError: It cannot be read, nothing can be learned from it, or it is a set that is scored.
    """
    refuse_scored(source, allow=allow_scored)
    path = Path(source)
    first = next(iter(read_objects(path)), ("", {}))[1] if path.is_file() else {}
    name = path.name.split(".")[0] if path.is_file() else source
    if "pid" in first:
        number = limit or SETS
        articles = read_squad(path, path.with_name(path.name.replace("passages", "qa")))
        name = name.removesuffix("_passages")
        found = [question_sets(articles, name=name, composition=composition, limit=number, seed=seed)]
        at_most = min(LONGEST, composition.max_tokens)
        if long and at_most > LARGEST:
            found.append(
                long_examples(
                    articles,
                    name=f"{name}_long",
                    more_than=LARGEST,
                    at_most=at_most,
                    composition=composition,
                    limit=-(-number // LONG),
                    seed=seed,
                )
            )
    elif set(first) == {"schema", "settings"}:
        found = [Source(name, tuple(read_examples_file(path)[:limit]))]
    else:
        found = [row_examples(read_rows(source), name=name, composition=composition, limit=limit, seed=seed)]
    if not any(one.examples for one in found):
        reasons = "; ".join(f"{count} {reason}" for one in found for reason, count in one.left_out.items())
        raise InputError(f"{source} holds no row with documents and an answer" + (f": {reasons}" if reasons else ""))
    return found


def interleave(sources: Sequence[Sequence[Example]]) -> list[Example]:
    """Return all examples, each source spread evenly over the whole."""
    placed = [(at / len(source), index, at) for index, source in enumerate(sources) for at in range(len(source))]
    return [sources[index][at] for _, index, at in sorted(placed)]
