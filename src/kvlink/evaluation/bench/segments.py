"""Long documents in segments: what links restore of the whole, and how little an edit changes."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvlink.core import scores
from kvlink.core.document import Document
from kvlink.core.errors import InputError
from kvlink.core.layout import Prompt
from kvlink.engine.engine import Engine
from kvlink.models.assembler import Assembler
from kvlink.training.articles import long_examples
from kvlink.training.compose import Composition
from kvlink.training.example import Example
from kvlink.training.squad import Passage

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Edits:
    """One document, edited one paragraph at a time: how many segments had to be encoded again."""

    segments: int
    changed: tuple[int, ...]


def long_texts(
    articles: Sequence[Sequence[Passage]], engine: Engine, *, tokens: int, documents: int, seed: int
) -> list[Example]:
    """Return examples of one document each, within a tenth of `tokens`, with questions about it.

    Raises:
        InputError: The articles do not give as many.
    """

    def count(text: str) -> int:
        return len(engine.prompter.plain_ids(text))

    alone = Composition(fewest=1, most=1, max_tokens=2 * tokens, shuffle=False, no_system=0, count=count)
    bounds = {"more_than": round(tokens * 0.9), "at_most": round(tokens * 1.1)}
    found = long_examples(articles, name="long", composition=alone, limit=documents, seed=seed, **bounds).examples
    if len(found) < documents:
        raise InputError(f"{documents} documents of {tokens} tokens are asked for, the passages give {len(found)}")
    return list(found)


def bench_segments(
    engine: Engine, examples: Sequence[Example], *, progress: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Compare a document in segments, without and with links, to the same document in one piece without links.

    Returns:
        A row for each question: `kl` and `agreement` of both arms against the piece, at the answer's tokens.

    Raises:
        InputError: The engine has no link tokens of two levels.
    """
    links = engine.assembler.links
    if links is None or links.levels < 2:
        raise InputError("long documents are cut where a bundle of two levels is in use; name one with --links")
    plain, linked = Assembler(engine.runner), engine.assembler
    rows: list[dict[str, Any]] = []
    for example in examples:
        document, prompter = example.documents[0], engine.prompter
        whole, cut = prompter.segments(document, cut=False), prompter.segments(document, cut=True)
        for number, question in enumerate(example.questions):
            answer = prompter.answer_ids(question.answer)
            tail = (*prompter.tail_ids(question.text), *answer[:-1])
            system = prompter.system_ids(example.system)
            wanted = _logits(engine, plain, Prompt(system, (whole,), tail), keep=len(answer))
            row: dict[str, Any] = {"id": f"{example.id}:{number}", "tokens": len(whole[0]), "segments": len(cut)}
            for arm, assembler in (("without", plain), ("links", linked)):
                logits = _logits(engine, assembler, Prompt(system, (cut,), tail), keep=len(answer))
                row[arm] = {"kl": scores.kl(wanted, logits), "agreement": scores.agreement(wanted, logits)}
            rows.append(row)
            progress()
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over questions of both arms, the ratio of their divergences, and its paired interval."""
    found: dict[str, Any] = {"n": len(rows)}
    for arm in ("without", "links"):
        found[arm] = {key: sum(row[arm][key] for row in rows) / len(rows) for key in ("kl", "agreement")}
    found["ratio"] = found["links"]["kl"] / found["without"]["kl"] if found["without"]["kl"] else None
    pairs = [[row[arm]["kl"] for row in rows] for arm in ("links", "without")]
    interval = scores.paired_interval(*pairs)
    found["kl_links_minus_without"] = {"difference": interval.difference, "low": interval.low, "high": interval.high}
    return found


def _logits(engine: Engine, assembler: Assembler, prompt: Prompt, *, keep: int) -> Any:
    """Return the last rows' logits by reuse; segments are encoded once and kept in the engine's store."""
    prefix = engine.runner.prefix(prompt.system)
    assert prefix is not None, "S is never empty"
    layout = prompt.layout(num_links=assembler.num_links)
    with engine.loader.load(prompt.segments) as loaded:
        cache = assembler.assemble(layout, prefix=prefix, entries=[segment.entry for segment in loaded])
    logits = assembler.prefill(cache, prompt, layout, logits_to_keep=keep)
    assembler.release(cache)
    return logits


def bench_edits(engine: Engine, documents: Sequence[Document], *, edits: int, seed: int) -> list[Edits]:
    """Edit one paragraph of a document at a time (words swapped, added or taken away) and count changed segments."""
    draw = random.Random(seed)  # noqa: S311 (a draw, no secret)
    found: dict[int, list[int]] = {}
    cuts = [engine.prompter.segments(document, cut=True) for document in documents]
    for _ in range(edits):
        index = draw.randrange(len(documents))
        document = documents[index]
        edited = Document(_edited(document.text, draw), document.title)
        known = Counter(cuts[index])
        now = engine.prompter.segments(edited, cut=True)
        found.setdefault(index, []).append(sum(segment not in known for segment in now))
    return [Edits(len(cuts[index]), tuple(changed)) for index, changed in sorted(found.items())]


def _edited(text: str, draw: random.Random) -> str:
    """Return a text with one paragraph changed: some words taken away, others put in."""
    paragraphs = text.split("\n\n")
    at = draw.randrange(len(paragraphs))
    words = paragraphs[at].split(" ")
    first = draw.randrange(len(words))
    last = min(len(words), first + draw.randint(1, 12))
    new = [draw.choice(words) for _ in range(draw.randint(0, 12))]
    paragraphs[at] = " ".join([*words[:first], *new, *words[last:]]) or "Nothing."
    return "\n\n".join(paragraphs)
