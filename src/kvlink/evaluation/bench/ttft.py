"""Time to first token by reuse against full prefill: from the request's text to the first token on the host.

States of reuse: `cold` (objects on disk, page cache dropped, S unknown), `host` (encoded objects in memory),
`warm` (decoded entries held here, in an order never seen). S is known in `host` and `warm`. The full arm gets
its input tensor ready-made and keeps no cache: it is timed at its best.
"""

import os
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from kvlink.core.document import Document
from kvlink.engine.engine import Engine
from kvlink.engine.loader import Ids, Loaded, Loader, LoadTimes
from kvlink.engine.stream import greedy
from kvlink.evaluation.bench.texts import document_of, question_of
from kvlink.evaluation.timing import Arm, alternate
from kvlink.models.links import LinkTokens
from kvlink.store.base import Store
from kvlink.store.disk import DiskStore
from kvlink.store.memory import MemoryStore

QUESTION_TOKENS = 30
"""Tokens of the question."""

MEMORY_BYTES = 8 << 30
"""Budget of the store behind the state `host`."""


class HeldLoader(Loader):
    """Hands out decoded entries that are held here: what a warm engine has on its device."""

    held: Mapping[Ids, Loaded]

    @contextmanager
    def load(self, segments: Sequence[Ids], times: LoadTimes | None = None) -> Generator[list[Loaded]]:
        """Hold the entries of these segments; nothing is read."""
        start = perf_counter()
        found = [self.held[ids] for ids in segments if self.name(ids)]
        if times:
            times.load_s += perf_counter() - start
        yield found


def bench_ttft(
    engine: Engine,
    *,
    documents: int,
    tokens: Sequence[int],
    links: Sequence[int] = (0, 6),
    repeats: int = 7,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Return one row per number of tokens, arm, state and K.

    Args:
        engine: Gives the model; its store is not used.
        documents: Documents in each prompt.
        tokens: Tokens of each document; one comparison for each number.
        links: Numbers of link tokens; random embeddings, since only their cost is measured.
        repeats: Counted rounds.
        progress: Called after each run.
    """
    rows: list[dict[str, Any]] = []
    question = question_of(engine.prompter, QUESTION_TOKENS)
    for length in tokens:
        texts = [document_of(engine.prompter, length, seed=seed + number) for number in range(documents)]
        with (
            TemporaryDirectory(prefix="kvlink-bench-") as folder,
            _arms(engine, texts, question, links, folder) as arms,
        ):
            samples = alternate(arms, repeats=repeats, progress=progress)
        full = samples["full - 0"].median
        for name, sample in samples.items():
            arm, state, count = name.split()
            rows.append(
                {
                    "documents": documents,
                    "tokens": length,
                    "arm": arm,
                    "state": state,
                    "links": int(count),
                    **sample.to_json(),
                    "reduction": 1 - sample.median / full,
                }
            )
    return rows


def runs_of(tokens: Sequence[int], links: Sequence[int], repeats: int) -> int:
    """Return how often `progress` is called."""
    return len(tokens) * (1 + 3 * len(links)) * (1 + repeats)


@contextmanager
def _arms(
    engine: Engine, texts: list[Document], question: str, links: Sequence[int], folder: str
) -> Generator[dict[str, Arm]]:
    """Prepare the arms of one comparison: all on one model, one set of documents, one question."""
    runner, base = engine.runner, engine.loader
    with DiskStore(folder) as disk, MemoryStore(budget_bytes=MEMORY_BYTES) as host:

        def loader(kind: type[Loader], store: Store) -> Any:
            return kind(runner=runner, store=store, identity=base.identity, sink=base.sink)

        on_disk, in_memory, held = loader(Loader, disk), loader(Loader, host), loader(HeldLoader, host)
        ids = [engine.prompter.document_ids(text) for text in texts]
        for each in (on_disk, in_memory):
            list(each.encode(ids))
        with in_memory.load(ids) as loaded:
            held.held = dict(zip(ids, loaded, strict=True))
            shuffler = random.Random(0)  # noqa: S311

            def reuse(by: Loader, count: int, *, cold: bool = False) -> Arm:
                tokens = LinkTokens.random(runner.embedding, num_links=count, levels=1) if count else None
                arm = Engine(runner=runner, prompter=engine.prompter, loader=by, report=engine.report, links=tokens)

                def run() -> tuple[float, Mapping[str, float]]:
                    order = shuffler.sample(texts, len(texts))
                    if cold:
                        arm.forget_beginnings()
                        drop_page_cache(Path(folder))
                    times = arm.generate(order, question, max_new_tokens=1).timings
                    parts = asdict(times)
                    return parts.pop("ttft_s"), {k: v for k, v in parts.items() if k not in ("total_s", "encode_s")}

                return run

            prompt = (engine.prompter.system_ids(None), engine.prompter.tail_ids(question))
            everything = [*prompt[0], *(token for document in ids for token in document), *prompt[1]]
            tensor = torch.tensor([everything], device=runner.device)

            def full() -> None:
                with torch.inference_mode():
                    greedy(runner.forward(cache=None, input_ids=tensor)[0, -1])

            arms: dict[str, Arm] = {"full - 0": full}
            for count in links:
                arms[f"assembled cold {count}"] = reuse(on_disk, count, cold=True)
                arms[f"assembled host {count}"] = reuse(in_memory, count)
                arms[f"assembled warm {count}"] = reuse(held, count)
            yield arms


def drop_page_cache(folder: Path) -> None:
    """Ask the system to forget the contents of all files below a folder, so that they are read from the disk."""
    for file in folder.rglob("*.safetensors"):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
