"""What reuse costs beside the model: assembling against a plain copy, encoding against a plain forward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvlink.core.layout import Kind, Prompt
from kvlink.engine.batches import batches
from kvlink.engine.engine import Engine
from kvlink.engine.loader import Loader
from kvlink.evaluation.bench.texts import document_of
from kvlink.evaluation.timing import alternate
from kvlink.models.cache import SlotCache
from kvlink.store.memory import MemoryStore


def bench_assembly(
    engine: Engine,
    *,
    documents: int,
    tokens: Sequence[int],
    repeats: int = 15,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Time `Assembler.assemble` against copying the same keys and values to the same places, without rotating.

    Both write into a buffer whose pages are mapped; `ratio` is assembling over copying.
    """
    runner, assembler = engine.runner, engine.assembler
    rows: list[dict[str, Any]] = []
    for length in tokens:
        ids = [
            engine.prompter.document_ids(document_of(engine.prompter, length, seed=seed)) for seed in range(documents)
        ]
        entries = [entry for seed in ids for entry in runner.encode([seed], prefix=engine.loader.sink)]
        system = engine.prompter.system_ids(None)
        prompt = engine.prompter.tail_ids("why")
        layout = Prompt(system, tuple((seed,) for seed in ids), prompt).layout()
        prefix = runner.prefix(system)
        assert prefix is not None
        spans = layout.of(Kind.SEGMENT)
        target = assembler.assemble(layout, prefix=prefix, entries=entries)

        def copy(cache: SlotCache = target, places: Any = spans, what: Any = entries) -> None:
            for span, entry in zip(places, what, strict=True):
                cache.keys[:, :, span.start : span.stop] = entry.keys
                cache.values[:, :, span.start : span.stop] = entry.values
            runner.synchronize()

        def assemble(placed: Any = layout, first: Any = prefix, what: Any = entries) -> None:
            assembler.release(assembler.assemble(placed, prefix=first, entries=what))
            runner.synchronize()

        samples = alternate({"copy": copy, "assemble": assemble}, repeats=repeats, warmup=3, progress=progress)
        moved = sum(entry.num_bytes for entry in entries)
        for arm, sample in samples.items():
            ratio = sample.median / samples["copy"].median
            row = {"documents": documents, "tokens": length, "arm": arm, "bytes": moved, "ratio": ratio}
            rows.append(row | sample.to_json())
    return rows


def bench_encode(
    engine: Engine, *, lengths: Sequence[int], repeats: int = 5, progress: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Time encoding into a store against plain forwards over the same batches, which keep nothing.

    Args:
        lengths: Tokens of each document.
    """
    runner, base = engine.runner, engine.loader
    ids = [
        engine.prompter.document_ids(document_of(engine.prompter, length, seed=seed))
        for seed, length in enumerate(lengths)
    ]

    def encode() -> None:
        with MemoryStore(budget_bytes=1 << 40) as store:
            loader = Loader(runner=runner, store=store, identity=base.identity, sink=base.sink)
            for _ in loader.encode(ids):
                pass

    def plain() -> None:
        for batch in batches(ids):
            longest = max(map(len, batch))
            rows = torch.tensor([[*row, *[0] * (longest - len(row))] for row in batch], device=runner.device)
            mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch], device=runner.device)
            padded = any(len(row) < longest for row in batch)
            with torch.inference_mode():
                runner.forward(cache=None, input_ids=rows, attention_mask=mask if padded else None)
        runner.synchronize()

    samples = alternate({"plain": plain, "encode": encode}, repeats=repeats, progress=progress)
    total = sum(lengths)
    return [
        {
            "documents": len(lengths),
            "tokens": total,
            "arm": arm,
            "tokens_per_s": total / sample.median,
            "ratio": samples["plain"].median / sample.median,
            **sample.to_json(),
        }
        for arm, sample in samples.items()
    ]
