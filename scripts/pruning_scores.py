"""Compare scores that prune documents: how far answers are from those over whole documents, and which score is nearest.

    python scripts/pruning_scores.py --data FOLDER --limit 12 --json benchmarks/pruning.json

`expected` needs to know a model's queries: they are gathered once, from the demo's papers. It is turned to the 512
positions behind each document. Llama's layout of heads and of rotary halves is taken for granted.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvlink import Document, Engine
from kvlink.core import scores
from kvlink.core.entry import CacheEntry
from kvlink.core.pruning import SCORES, expected_attention, kept_rows
from kvlink.demo import corpus
from kvlink.evaluation.case import Bench, Case
from kvlink.evaluation.methods.concat_reencoded import ConcatReencoded
from kvlink.evaluation.results import write_results
from kvlink.evaluation.tasks import task_rows
from kvlink.models.rotary import ROTARY_FUNCTION
from kvlink.models.runner import Runner
from kvlink.store.codecs.base import geometry_of
from kvlink.store.codecs.pruned import Pruned

AHEAD = 512
"""Positions behind a document at which queries are expected."""

STATISTICS = 1500
"""Tokens whose queries are gathered, the first four left out: attention sinks are like no other."""

NEW_TOKENS = 32
EPSILON = 0.02

Score = Callable[[CacheEntry], torch.Tensor]


class Kept:
    """The entries of a row, of which a score keeps as many tokens as a pruned codec would."""

    def __init__(self, percent: int, score: Score) -> None:
        self._codec, self._score = Pruned(percent), score
        self._case: Case | None = None
        self._entries: list[CacheEntry] = []

    def entries(self, case: Case, sink: tuple[int, ...], *, cut: bool = False) -> tuple[list[CacheEntry], int]:
        """Stand in for `Reading.entries`."""
        if case is not self._case:
            self._case, self._entries = case, [self._pruned(entry) for entry in case.entries(sink, cut=cut)]
        return self._entries, sum(entry.num_bytes for entry in self._entries)

    def _pruned(self, entry: CacheEntry) -> CacheEntry:
        kept = kept_rows(self._score(entry), self._codec.num_kept(geometry_of(entry), entry.keys.dtype))
        rows = kept.long()[..., None].expand(*kept.shape, entry.keys.shape[3])
        return CacheEntry(entry.keys.gather(2, rows), entry.values.gather(2, rows), entry.token_ids, kept)


class PrunedBy(ConcatReencoded):
    """`concat_reencoded` over documents that a score prunes."""

    def __init__(self, percent: int, score: Score) -> None:
        super().__init__()
        self._reading: Any = Kept(percent, score)


class Expected:
    """Expected attention with the queries of one model."""

    def __init__(self, runner: Runner, ids: tuple[int, ...], *, start: int) -> None:
        queries = gathered(runner, ids)[:, :, 4:]
        self._rotate, self._start = runner.rotary.rotate, start
        self._mean = queries.mean(dim=2)
        off = queries - self._mean[:, :, None]
        self._covariance = torch.einsum("lhtd,lhte->lhde", off, off) / queries.shape[2]
        self._turned: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, entry: CacheEntry, *, epsilon: float = 0.0) -> torch.Tensor:
        """Return the scores of an entry whose keys are not rotated."""
        stop = self._start + entry.num_tokens
        if stop not in self._turned:
            turn = self._mean_turn(entry.keys, torch.arange(stop, stop + AHEAD))
            self._turned[stop] = self._mean @ turn.T, turn @ self._covariance @ turn.T
        keys = self._rotate(entry.keys, torch.arange(self._start, stop))
        return expected_attention(keys, entry.values, *self._turned[stop], epsilon=epsilon)

    def _mean_turn(self, like: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the mean of the rotations by some positions, a matrix."""
        half = like.shape[-1] // 2
        ones = torch.zeros(*like.shape[:2], len(positions), 2 * half)
        ones[..., :half] = 1
        cos, sin = map(torch.diag, self._rotate(ones, positions)[0, 0].mean(dim=0).split(half))
        return torch.cat((torch.cat((cos, -sin), dim=1), torch.cat((sin, cos), dim=1)))


def gathered(runner: Runner, ids: tuple[int, ...]) -> torch.Tensor:
    """Return the queries of a text before RoPE, [layers, heads, tokens, head_dim]."""
    home = sys.modules[type(runner.model).__module__]
    original, found = getattr(home, ROTARY_FUNCTION), list[torch.Tensor]()

    def noting(q: torch.Tensor, *rest: Any, **options: Any) -> Any:
        found.append(q[0])
        return original(q, *rest, **options)

    setattr(home, ROTARY_FUNCTION, noting)
    try:
        with torch.inference_mode():
            runner.model(torch.tensor([ids]))
    finally:
        setattr(home, ROTARY_FUNCTION, original)
    return torch.stack(found).clone()


def main() -> None:
    """Measure, and write one row per share and score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--task", default="hotpotqa")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max-tokens-context", type=int, default=900)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with Engine.from_pretrained("demo", links=None) as engine:
        runner, prompter = engine.runner, engine.prompter
        text = "\n\n".join(document.text for document in corpus())
        sink = len(engine.loader.sink) if engine.loader.sink else 0
        expected = Expected(runner, prompter.document_ids(Document(text))[:STATISTICS], start=sink)
        ways: dict[str, Score] = {
            **{name: lambda entry, score=score: score(entry.keys) for name, score in SCORES.items()},
            "expected": expected,
            f"expected, epsilon {EPSILON}": lambda entry: expected(entry, epsilon=EPSILON),
        }
        arms = {(percent, name): PrunedBy(percent, way) for percent in (75, 50) for name, way in ways.items()}
        bench = Bench(runner, prompter, engine.report.context, engine.model_info["digest"])
        kl: dict[tuple[int, str], list[float]] = {arm: [] for arm in arms}
        agreement: dict[tuple[int, str], list[float]] = {arm: [] for arm in arms}
        tokens = 0
        for row in task_rows(given.task, data=given.data, limit=given.limit, seed=0):
            case, raw = Case(bench, row, max_tokens=given.max_tokens_context), ConcatReencoded()
            raw.prepare(case)
            own = raw.generate(case, limit=NEW_TOKENS, end_ids=prompter.end_ids)
            wanted = raw.score(case, own)
            bench.release(wanted.cache)
            tokens += len(own)
            for arm, method in arms.items():
                method.prepare(case)
                here = method.score(case, own)
                bench.release(here.cache)
                kl[arm].append(scores.kl(wanted.logits, here.logits))
                agreement[arm].append(scores.agreement(wanted.logits, here.logits))
            print(f"{row.id}: {case.prompt.num_tokens} tokens of prompt, {len(own)} scored", file=sys.stderr)
        rows: list[dict[str, Any]] = []
        for percent, name in arms:
            arm, usual = (percent, name), (percent, "keydiff")
            row = {
                "percent": percent,
                "score": name,
                "rows": len(kl[arm]),
                "tokens": tokens,
                "kl": vars_of(scores.paired_interval(kl[arm], [0.0] * len(kl[arm]))),
                "agreement": vars_of(scores.paired_interval(agreement[arm], [0.0] * len(kl[arm]))),
                "kl_minus_keydiff": vars_of(scores.paired_interval(kl[arm], kl[usual])),
            }
            rows.append(row)
            print(percent, name, row["kl"], row["agreement"], row["kl_minus_keydiff"])
        settings = {
            "task": given.task,
            "limit": given.limit,
            "max_tokens_context": given.max_tokens_context,
            "new_tokens": NEW_TOKENS,
            "statistics_tokens": STATISTICS,
            "positions_ahead": AHEAD,
        }
        write_results(given.json, "pruning scores", rows, model=engine.model_info, seed=0, settings=settings)


def vars_of(interval: scores.Interval) -> dict[str, float]:
    """Return an interval as JSON takes it."""
    return {name: getattr(interval, name) for name in interval.__dataclass_fields__}


if __name__ == "__main__":
    main()
