"""Where reuse pays: how long an object takes from each tier, against encoding its document afresh."""

import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from kvlink.core.errors import InputError
from kvlink.engine.engine import Engine
from kvlink.engine.loader import Ids
from kvlink.evaluation.bench.codecs import bench_codecs
from kvlink.evaluation.bench.codecs import runs_of as runs_of_codecs
from kvlink.evaluation.bench.page_cache import drop_page_cache
from kvlink.evaluation.bench.texts import document_of
from kvlink.evaluation.timing import Arm, alternate
from kvlink.store.base import Store
from kvlink.store.codec import encode
from kvlink.store.disk import DiskStore
from kvlink.store.memory import MemoryStore
from kvlink.store.opening import open_remote

TIERS = ("host", "disk", "disk, cold")
"""Tiers on this machine; `disk` is read from a warm page cache, `disk, cold` from the disk where that is permitted."""


def bench_load(
    engine: Engine, *, tokens: int = 1000, repeats: int = 7, progress: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Return rows of `bench_codecs` for one length on one thread: of each codec its load and its decoding.

    A load reads, verifies and decodes; `of_copy` is its speed over that of `readinto` and a copy of the same bytes.
    """
    rows = bench_codecs(engine, tokens=(tokens,), threads=(1,), repeats=repeats, progress=progress)
    kept = {"load": "load", "unpack": "decode", "copy": "copy"}
    return [{**row, "what": kept[row["what"]]} for row in rows if row["what"] in kept]


def runs_of_load(engine: Engine, tokens: int, repeats: int) -> int:
    """Return how often `progress` will be called."""
    return runs_of_codecs(engine, (tokens,), (1,), repeats)


def bench_break_even(
    engine: Engine,
    *,
    tokens: Sequence[int] = (100, 300, 1000),
    remote: str | None = None,
    repeats: int = 7,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Return one row per length and tier.

    `ratio` is a load over an encode; below 1 reuse `pays`. `break_even_bytes_per_s` is the speed from which a tier
    without latency would pay.

    Args:
        tokens: Lengths of documents.
        remote: URL of a store to measure, too. What is put there is removed again.
    """
    rows: list[dict[str, Any]] = []
    for length in tokens:
        ids = engine.prompter.document_ids(document_of(engine.prompter, length, seed=0))
        with tempfile.TemporaryDirectory(prefix="kvlink-bench-") as folder, _stores(Path(folder), remote) as stores:
            size = _fill(engine, ids, stores)
            arms: dict[str, Arm] = {
                tier: _loading(engine, ids, store, tier, cold=Path(folder) if tier == "disk, cold" else None)
                for tier, store in stores.items()
            }
            arms["encode"] = _encoding(engine, ids)
            timed = alternate(arms, repeats=repeats, progress=progress)
            for store in stores.values():
                store.delete(engine.loader.name(ids))
        fresh = timed.pop("encode")
        rows += [
            {
                "what": "break-even",
                "tokens": length,
                "tier": tier,
                "bytes": size,
                "load_s": samples.median,
                "encode_s": fresh.median,
                "ratio": samples.median / fresh.median,
                "pays": samples.median < fresh.median,
                "break_even_bytes_per_s": size / fresh.median,
                **samples.to_json(),
            }
            for tier, samples in timed.items()
        ]
    return rows


def runs_of_break_even(tokens: Sequence[int], remote: str | None, repeats: int) -> int:
    """Return how often `progress` will be called."""
    return len(tokens) * (len(TIERS) + 1 + (remote is not None)) * (repeats + 1)


@contextmanager
def _stores(folder: Path, remote: str | None) -> Generator[dict[str, Store]]:
    with ExitStack() as opened:
        disk = opened.enter_context(DiskStore(folder / "kv"))
        stores: dict[str, Store] = {
            "host": opened.enter_context(MemoryStore(budget_bytes=1 << 40)),
            "disk": disk,
            "disk, cold": disk,
        }
        if remote is not None:
            stores["remote"] = opened.enter_context(open_remote(remote))
        yield stores


def _fill(engine: Engine, ids: Ids, stores: dict[str, Store]) -> int:
    """Put the document everywhere, and return its bytes.

    Raises:
        StoreUnusable: The remote does not answer.
    """
    entry = engine.runner.encode([ids], prefix=engine.loader.sink)[0]
    data = encode(entry, engine.loader.identity)
    for store in dict.fromkeys(stores.values()):
        store.put(engine.loader.name(ids), "raw", bytearray(data))
    return data.nbytes


def _loading(engine: Engine, ids: Ids, store: Store, tier: str, *, cold: Path | None) -> Arm:
    """Read, verify and decode, up to the device; `cold` is the folder whose pages the system forgets before."""
    name = engine.loader.name(ids)

    def load() -> tuple[float, dict[str, float]]:
        if cold is not None:
            drop_page_cache(cold)
        start = perf_counter()
        lease = store.get(name, ("raw",))
        if lease is None:
            raise InputError(f"the {tier} has lost an object of {len(ids)} tokens; give it room for that")
        with lease:
            entry = lease.object.decode()
            entry.keys.to(engine.runner.device)
            entry.values.to(engine.runner.device)
            engine.runner.synchronize()
        return perf_counter() - start, {}

    return load


def _encoding(engine: Engine, ids: Ids) -> Arm:
    def encode_one() -> None:
        engine.runner.encode([ids], prefix=engine.loader.sink)
        engine.runner.synchronize()

    return encode_one
