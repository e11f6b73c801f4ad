"""What a codec saves, costs and loses: bytes, speed and error on entries of the model itself."""

import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvlink.core import scores
from kvlink.core.entry import CacheEntry
from kvlink.core.errors import ModelRefused
from kvlink.core.layout import Prompt
from kvlink.engine.engine import Engine
from kvlink.evaluation.bench.texts import document_of, question_of
from kvlink.evaluation.timing import Samples, alternate
from kvlink.models.assembler import Assembler
from kvlink.models.pruning import require_prunable
from kvlink.store.codec import encode, private_memory
from kvlink.store.codecs import CODECS
from kvlink.store.codecs.base import geometry_of
from kvlink.store.disk import DiskStore
from kvlink.store.header import Geometry

QUESTION = 64
"""Tokens of the question whose logits are compared."""

ARMS = ("pack", "unpack", "copy", "load")
"""What is timed, in turn."""


def bench_codecs(
    engine: Engine,
    *,
    tokens: Sequence[int] = (1000, 100),
    threads: Sequence[int] = (1,),
    repeats: int = 7,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Return one row per length, number of threads, codec and what is timed (`ARMS`).

    `load` is a read from a warm page cache with digest, checks and decoding, in turn with `copy`: reading the same
    bytes into memory and copying them once. `gb_per_s` counts bytes of the decoded entry, for `copy` those of the
    file; `of_copy` is the file's bytes per second of a load over those of the copy. `size` is the object over a raw
    one of 16 bits. Errors are those of vectors of one head and token, relative to their length: mean and greatest;
    None where tokens are left out. `kl` and `agreement` are those of the logits of a question of `QUESTION` tokens
    behind the document, against a raw one. A codec that does not take the model's dtype has no rows, nor has one that
    leaves out tokens on a model that cannot attend so.

    Args:
        tokens: Lengths of documents.
        threads: Numbers of threads to compute with; the digest takes as many as it likes.
    """
    rows: list[dict[str, Any]] = []
    for length in tokens:
        ids = engine.prompter.document_ids(document_of(engine.prompter, length, seed=0))
        entry = _entry_of(engine, ids)
        half = CacheEntry(entry.keys.bfloat16(), entry.values.bfloat16(), entry.token_ids)
        least = encode(half, replace(engine.loader.identity, dtype="bfloat16")).nbytes
        logits = _answering(engine, entry)
        for codec in _codecs_for(engine):
            data = encode(entry, engine.loader.identity, codec=codec)
            about = {
                "tokens": length,
                "codec": codec,
                "entry_bytes": entry.num_bytes,
                "object_bytes": data.nbytes,
                "size": data.nbytes / least,
                **errors(codec, entry),
                **distances(logits, _answering(engine, _read(codec, entry))),
            }
            for count in threads:
                with _threads(count):
                    timed = _timed(engine, entry, codec, data, repeats=repeats, progress=progress)
                for what, samples in timed.items():
                    moved = data.nbytes if what == "copy" else entry.num_bytes
                    of_copy = timed["copy"].median / samples.median if what == "load" else None
                    row = {**about, "threads": count, "what": what, "gb_per_s": moved / samples.median / 1e9}
                    rows.append({**row, "of_copy": of_copy, **samples.to_json()})
    return rows


def runs_of(engine: Engine, tokens: Sequence[int], threads: Sequence[int], repeats: int) -> int:
    """Return how often `progress` will be called."""
    return len(tokens) * len(threads) * len(_codecs_for(engine)) * len(ARMS) * (repeats + 1)


def codecs_of(dtype: torch.dtype, *, prunable: bool = True) -> list[str]:
    """Return the codecs that take entries of this dtype.

    Args:
        prunable: Whether those that leave out tokens are among them.
    """
    smallest = Geometry(layers=1, kv_heads=1, tokens=1, head_dim=1, value_dim=1)
    found: list[str] = []
    for name, codec in CODECS.items():
        try:
            codec.plan(smallest, dtype)
        except ValueError:
            continue
        if prunable or not codec.prunes:
            found.append(name)
    return found


def errors(codec: str, entry: CacheEntry) -> dict[str, float | None]:
    """Return mean and greatest relative error of keys and values behind a codec; None where it leaves out tokens."""
    read = _read(codec, entry)
    found: dict[str, float | None] = {}
    for name, before, after in (("key", entry.keys, read.keys), ("value", entry.values, read.values)):
        if CODECS[codec].prunes:  # what is there is exact, and of what is not there an error says nothing
            found |= {f"{name}_error_mean": None, f"{name}_error_max": None}
            continue
        off = _length(after.double() - before.double()) / _length(before).clamp_min(torch.finfo(torch.float32).tiny)
        found |= {f"{name}_error_mean": off.mean().item(), f"{name}_error_max": off.max().item()}
    return found


def distances(reference: Tensor, logits: Tensor) -> dict[str, float]:
    """Return how far logits `[rows, vocab]` are from others: mean KL, and the share of equal most likely ids."""
    return {"kl": scores.kl(reference, logits), "agreement": scores.agreement(reference, logits)}


def _read(codec: str, entry: CacheEntry) -> CacheEntry:
    """Return what a codec makes of an entry."""
    packed = CODECS[codec].pack(entry)
    return CODECS[codec].unpack(packed, geometry=geometry_of(entry), dtype=entry.keys.dtype, token_ids=entry.token_ids)


def _codecs_for(engine: Engine) -> list[str]:
    """Return the codecs that are measured with this model."""
    try:
        require_prunable(engine.runner)
    except ModelRefused:
        return codecs_of(engine.runner.dtype, prunable=False)
    return codecs_of(engine.runner.dtype)


def _answering(engine: Engine, entry: CacheEntry) -> Float[Tensor, "rows vocab"]:
    """Return the logits of a question's tokens behind a document."""
    assembler, prompter = Assembler(engine.runner), engine.prompter
    tail = prompter.tail_ids(question_of(prompter, QUESTION))
    prompt = Prompt(prompter.system_ids(None), ((entry.token_ids,),), tail)
    layout, prefix = prompt.layout(), engine.runner.prefix(prompt.system)
    assert prefix is not None, "S is never empty"
    cache = assembler.assemble(layout, prefix=prefix, entries=[entry])
    return assembler.prefill(cache, prompt, layout, logits_to_keep=0)


def _timed(
    engine: Engine,
    entry: CacheEntry,
    codec: str,
    data: memoryview,
    *,
    repeats: int,
    progress: Callable[[], None],
) -> dict[str, Samples]:
    """Time packing, unpacking, loading from a folder, and what loading is compared with."""
    made = CODECS[codec]
    packed, geometry = made.pack(entry), geometry_of(entry)
    name = engine.loader.name(entry.token_ids)
    with tempfile.TemporaryDirectory() as folder, DiskStore(folder) as store:
        store.put(name, codec, data)
        path = next(Path(folder).rglob("*.safetensors"))

        def unpack() -> None:
            made.unpack(packed, geometry=geometry, dtype=entry.keys.dtype, token_ids=entry.token_ids)

        def load() -> None:
            lease = store.get(name, (codec,))
            assert lease is not None
            with lease:
                lease.object.decode()

        def copy() -> None:
            read, copied = private_memory(data.nbytes), private_memory(data.nbytes)
            with path.open("rb", buffering=0) as file:
                assert file.readinto(read) == data.nbytes, "a file of this size is read at once"
            copied[:] = read

        def pack() -> None:
            made.pack(entry)

        return alternate(dict(zip(ARMS, (pack, unpack, copy, load), strict=True)), repeats=repeats, progress=progress)


def _entry_of(engine: Engine, ids: tuple[int, ...]) -> CacheEntry:
    """Encode a document, in memory of the CPU, where objects are packed and unpacked."""
    entry = engine.runner.encode([ids], prefix=engine.loader.sink)[0]
    return CacheEntry(entry.keys.cpu(), entry.values.cpu(), entry.token_ids)


def _length(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors.double(), dim=-1)


@contextmanager
def _threads(count: int) -> Generator[None]:
    """Compute with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
