"""Tasks: rows under a name. Real sets from a local folder or the hub, synthetic ones of any length, a user's file.

A task is asked for by name with parameters, `nq(gold=4)`, as a path to JSON Lines, or as a name of the hub,
`owner/name/config:split`. Texts of real sets never leave the machine through result files: those hold ids and scores.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

from kvlink.core.document import Document
from kvlink.core.errors import InputError
from kvlink.evaluation.methods import parse_call
from kvlink.training.data import Row, read_rows

NQ_DOCUMENTS = 10
"""Documents of an `nq` row, after the paper."""

NQ_GOLD = (0, 4, 9)
"""Where the gold document of an `nq` row stands; the rows take turns unless one is asked for."""

SHOTS = 5
"""Pairs of dialogue and summary that stand before a `samsum` dialogue."""

FILES = {
    "nq": ("nq.jsonl", "MemGPT/qa_data:train[:2655]"),
    "2wikimultihopqa": ("2wikimultihopqa.jsonl", "framolfese/2WikiMultihopQA:validation"),
    "hotpotqa": ("hotpotqa.jsonl", "hotpotqa/hotpot_qa/distractor:validation"),
    "musique": ("musique.jsonl", "dgslibisey/MuSiQue:validation"),
    "triviaqa": ("triviaqa.jsonl", "mandarjoshi/trivia_qa/rc:validation"),
    "multi_news": ("multi_news.jsonl", "alexfabbri/multi_news:test"),
    "samsum": ("samsum.jsonl", "knkarthick/samsum:test"),
    "cacheblend_musique": ("extra/cacheblend_musique_s.jsonl.gz", None),
    "cacheblend_wikimqa": ("extra/cacheblend_wikimqa_s_clean.jsonl.gz", None),
}
"""Where a real set lies below the data folder, and its public name on the hub."""

EXAMPLES = ("train/samsum_validation.jsonl.gz", "knkarthick/samsum:validation")
"""Where the pairs before a `samsum` dialogue come from, as in `FILES`."""


def names() -> list[str]:
    """Return the names of all tasks."""
    return sorted({*FILES, *SYNTHETIC})


def task_rows(asked: str, *, data: Path | None, limit: int | None, seed: int = 0) -> list[Row]:
    """Return the rows of a task.

    Args:
        asked: A name, perhaps with parameters, the path of a JSON Lines file, or a name of the hub (with a slash).
        data: Folder of the real sets.
        limit: Only the first rows.
        seed: Of the synthetic tasks.

    Raises:
        InputError: There is no such task, or its rows are not to be had.
    """
    path = Path(asked)
    if path.suffix in (".jsonl", ".gz"):
        if not path.is_file():
            raise InputError(f"there is no file {asked}")
        return _distinct(_first(read_rows(path), limit), asked)
    if "/" in asked.partition("(")[0]:
        return _distinct(_first(read_rows(asked), limit), asked)
    name, parameters = parse_call(asked)
    if name not in names():
        raise InputError(
            f"there is no task {name!r}; there are {', '.join(names())}, paths of .jsonl(.gz) files, and names of the "
            "hub (owner/name/config:split)"
        )
    try:
        numbers = {key: int(value) for key, value in parameters.items()}
        if name in SYNTHETIC:
            return _first(SYNTHETIC[name](seed=seed, **numbers), 50 if limit is None else limit)
        rows = _real(*FILES[name], data)
        shape = SHAPES.get(name)
        return _distinct(_first(shape(rows, data, **numbers) if shape else _unshaped(rows, **numbers), limit), asked)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"task {asked!r}: {error}") from error


def _first(rows: Iterable[Row], limit: int | None) -> list[Row]:
    return list(islice(rows, limit))


def _distinct(rows: list[Row], asked: str) -> list[Row]:
    """Return the rows as they are: results are told apart by id, so no two may share one."""
    repeated = [one for one, times in Counter(row.id for row in rows).items() if times > 1]
    if repeated:
        raise InputError(f"{asked} has {len(repeated)} ids more than once, such as {repeated[0]!r}: number its rows")
    return rows


def _real(file: str, hub: str | None, data: Path | None) -> Iterator[Row]:
    """Return the rows of a set: those in the data folder if there is one, else those of the hub."""
    if data is not None and (data / file).is_file():
        return read_rows(data / file)
    if data is not None or hub is None:
        where = f"{data / file} is missing" if data else f"{file} is read from a folder only"
        raise InputError(f"{where}; give the folder of the sets with --data or KVLINK_DATA")
    return read_rows(hub)


def _unshaped(rows: Iterable[Row]) -> Iterable[Row]:
    return rows


def nq_rows(rows: Iterable[Row], data: Path | None, *, gold: int | None = None) -> Iterator[Row]:
    """Make the paper's rows of ten documents: the gold one, else the first, is moved to 0, 4 or 9.

    Source: arXiv 2502.16002, after Liu et al. 2023 (Lost in the Middle).
    """
    if gold is not None and gold < 0:
        raise InputError(f"gold={gold} is no position of a document")
    for number, row in enumerate(rows):
        place = NQ_GOLD[number % len(NQ_GOLD)] if gold is None else gold
        at = row.gold[0] if row.gold else 0
        moved = row.documents[at : at + 1]
        rest = (row.documents[:at] + row.documents[at + 1 :])[: NQ_DOCUMENTS - 1]
        documents = (*rest[:place], *moved, *rest[place:])
        yield replace(row, documents=documents, gold=(min(place, len(rest)),) if moved else ())


def samsum_rows(rows: Iterable[Row], data: Path | None, *, shots: int = SHOTS) -> Iterator[Row]:
    """Put pairs of dialogue and summary before the dialogue, each pair one document; the dialogue itself is gold."""
    try:
        found = _first(_complete(_real(*EXAMPLES, data)), shots) if shots else []
    except InputError as error:
        raise InputError(f"the examples before a samsum dialogue: {error}; or shots=0") from error
    pairs = [
        Document(f"Dialogue:\n{row.documents[0].text}\nSummary: {row.answers[0]}", name=f"pair {number}")
        for number, row in enumerate(found)
    ]
    for row in rows:
        documents = tuple(replace(d, text=f"Dialogue:\n{d.text}") for d in row.documents)
        gold = tuple(range(len(pairs), len(pairs) + len(documents)))
        yield replace(row, documents=(*pairs, *documents), gold=gold)


def _complete(rows: Iterable[Row]) -> Iterator[Row]:
    return (row for row in rows if row.documents and not row.documents[0].is_blank and row.answers)


_NAMES = "Aldo Berta Curdin Dorli Emil Flurina Gion Hanna Ilg Jolanda Kaspar Ladina Meinrad Nora Orsina Peider"
_PLACES = "Alvra Bargun Cluozza Dischma Engi Flem Grialetsch Hospiz Ival Julia Keschhof Lavin Murter Nair"
_THINGS = "lantern compass barometer whistle ledger kettle sledge saddle bell rope anvil flute lens mirror"


def hop_rows(*, seed: int = 0, documents: int = 10, tokens: int = 60) -> Iterator[Row]:
    """Yield questions of two hops over made-up documents: who keeps a thing, and where that person lives.

    Args:
        seed: Same seed, same rows.
        documents: In each row; at least two.
        tokens: Words of filling in each document.
    """
    if documents < 2:
        raise InputError(f"a question of two hops needs two documents, not {documents}")
    for number in count():
        draw = random.Random(f"hops {seed} {number}")  # noqa: S311
        people, places, things = (draw.sample(pool, len(pool)) for pool in map(str.split, (_NAMES, _PLACES, _THINGS)))
        pairs = [
            text
            for at in range((documents + 1) // 2)
            for text in (
                f"The {_pick(things, at)} is kept by {_pick(people, at)}. {_filling(draw, tokens)}",
                f"{_pick(people, at)} lives in {_pick(places, at)}. {_filling(draw, tokens)}",
            )
        ]
        order = draw.sample(range(len(pairs)), len(pairs))
        if len(pairs) > documents:
            order.remove(len(pairs) - 1)
        yield Row(
            id=f"hops-{seed}-{number}",
            question=f"In which place does the keeper of the {things[0]} live?",
            documents=tuple(Document(pairs[at], name=f"document {place}") for place, at in enumerate(order)),
            answers=(places[0],),
            gold=tuple(sorted((order.index(0), order.index(1)))),
        )


def _pick(pool: list[str], at: int) -> str:
    """Return a name from a pool of any size; the first, which the question is about, does not come again."""
    return pool[at if at == 0 else 1 + (at - 1) % (len(pool) - 1)]


def needle_rows(*, seed: int = 0, documents: int = 5, tokens: int = 200) -> Iterator[Row]:
    """Yield questions whose answer is one number in one of many made-up documents.

    Args:
        seed: Same seed, same rows.
        documents: In each row.
        tokens: Words of filling in each document.
    """
    for number in count():
        draw = random.Random(f"needle {seed} {number}")  # noqa: S311
        place, thing, code = draw.randrange(documents), draw.choice(_THINGS.split()), str(draw.randrange(1000, 10000))
        texts = [_filling(draw, tokens) for _ in range(documents)]
        half = len(texts[place]) // 2
        cut = texts[place].find(". ", half) + 2 if ". " in texts[place][half:] else 0
        texts[place] = f"{texts[place][:cut]}The number of the {thing} is {code}. {texts[place][cut:]}"
        yield Row(
            id=f"needle-{seed}-{number}",
            question=f"What is the number of the {thing}?",
            documents=tuple(Document(text, name=f"document {at}") for at, text in enumerate(texts)),
            answers=(code,),
            gold=(place,),
        )


def _filling(draw: random.Random, words: int) -> str:
    """Return sentences of about this many words that answer nothing."""
    subjects = ("The wind", "A late snow", "The old road", "Every second winter", "The valley", "A quiet morning")
    verbs = ("settles over", "crosses", "follows", "slows down", "brightens", "leaves")
    objects = ("the upper meadow", "the stone bridge", "the long ridge", "the empty yard", "the narrow gorge")
    sentences: list[str] = []
    while words > 0:
        sentences.append(f"{draw.choice(subjects)} {draw.choice(verbs)} {draw.choice(objects)}.")
        words -= len(sentences[-1].split())
    return " ".join([*sentences, "So it goes."])


SHAPES: dict[str, Callable[..., Iterable[Row]]] = {"nq": nq_rows, "samsum": samsum_rows}
SYNTHETIC: dict[str, Callable[..., Iterable[Row]]] = {"hops": hop_rows, "needle": needle_rows}
