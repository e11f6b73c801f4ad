"""A document that is edited: what of its entry is computed again, how long that takes, and how exact it is."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvlink.core.document import Document
from kvlink.core.entry import CacheEntry
from kvlink.engine.engine import Engine
from kvlink.engine.rebuild import Rebuilder, Rebuilt
from kvlink.evaluation.bench.texts import document_of
from kvlink.evaluation.timing import alternate
from kvlink.store.base import Store
from kvlink.store.memory import MemoryStore

SHARES = tuple(place / 10 for place in range(1, 10))
"""Where the document is edited, in parts of its length."""

WORD = "lighthouse"
"""What takes the place of a word; in no made-up text."""


def runs_of(shares: Sequence[float], repeats: int) -> int:
    """Return how often `progress` is called."""
    return len(shares) * 2 * (repeats + 1)


def bench_update(
    engine: Engine,
    *,
    tokens: int = 1000,
    shares: Sequence[float] = SHARES,
    repeats: int = 5,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Return one row per place of the edit and arm: `whole` encodes the new text, `update` continues the old entry.

    Both put into a store in memory; `update` reads the old object from it. One word is replaced. `share` is the part
    of the tokens that is computed, `ratio` the seconds over those of `whole`, `key_error` and `value_error` the
    greatest difference to the fresh entry, over the greatest magnitude in it.

    Args:
        tokens: Of the document before it is edited.
        shares: Places of the edits.
    """
    document = document_of(engine.prompter, tokens, seed=0)
    old_ids = engine.prompter.document_ids(document)
    rows: list[dict[str, Any]] = []
    for share in shares:
        ids = engine.prompter.document_ids(edited(document, share))
        with MemoryStore(budget_bytes=1 << 36) as store:
            base = _on(engine, store)
            told: list[Rebuilt] = []
            old = base.name(old_ids)
            update = Rebuilder.over(base, scope=base.identity.scope, sources=lambda _, old=old: [old], told=told.append)
            list(base.encode([old_ids]))
            arms = {"whole": base, "update": update}
            made: dict[str, CacheEntry] = {}

            def run(arm: str, loaders: Any = arms, new: Any = ids, into: Any = made) -> None:
                (loaded,) = loaders[arm].encode([new])
                into[arm] = loaded.entry

            samples = alternate(
                {arm: lambda arm=arm, run=run: run(arm) for arm in arms}, repeats=repeats, progress=progress
            )
            for arm, sample in samples.items():
                computed = len(ids) if arm == "whole" else told[-1].computed
                rows.append(
                    {
                        "at": share,
                        "arm": arm,
                        "tokens": len(ids),
                        "computed": computed,
                        "share": computed / len(ids),
                        "ratio": sample.median / samples["whole"].median,
                        "key_error": _error(made[arm].keys, made["whole"].keys),
                        "value_error": _error(made[arm].values, made["whole"].values),
                        **sample.to_json(),
                    }
                )
    return rows


def edited(document: Document, share: float) -> Document:
    """Return a document with one word replaced, at a share of its words."""
    words = document.text.split(" ")
    words[min(len(words) - 1, int(share * len(words)))] = WORD
    return replace(document, text=" ".join(words))


def _on(engine: Engine, store: Store) -> Rebuilder:
    """Return a loader like the engine's that reads and writes a store of its own, and knows no earlier versions."""
    made = Rebuilder.over(engine.loader, scope=engine.loader.identity.scope, sources=lambda _: ())
    made.store = store
    return made


def _error(found: Any, wanted: Any) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())
