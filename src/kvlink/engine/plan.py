"""What encoding a corpus would cost and when it pays, from a small measurement on this machine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from kvlink.core.document import Document
from kvlink.core.errors import InputError
from kvlink.engine.engine import Engine
from kvlink.engine.loader import Ids
from kvlink.store import codec
from kvlink.store.memory import MemoryStore

SAMPLE = 5
"""Segments that are measured, spread over the lengths; a document that is not cut is one segment."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Figures of a corpus; a use is one prompt that holds a document.

    Attributes:
        documents, tokens, longest_tokens: The corpus, without blank documents and those longer than the context.
        num_bytes: What all entries take in the store.
        stored: Documents that the store holds already, with all their segments.
        tokens_per_s: Speed of encoding.
        encode_s: Time to encode what is missing.
        full_s, load_s: Seconds to compute, and to load, verify and rotate a segment of median length.
        break_even: Uses of a segment from which encoding it pays, or None if loading is no faster.
    """

    documents: int
    tokens: int
    longest_tokens: int
    num_bytes: int
    stored: int
    tokens_per_s: float
    encode_s: float
    full_s: float
    load_s: float
    break_even: int | None


def make_plan(engine: Engine, documents: Sequence[Document]) -> Plan:
    """Measure a sample and extrapolate. Keeps nothing.

    Raises:
        InputError: There is no document with text that fits the context.
    """
    cut = engine.cuts_documents
    parts = [engine.prompter.segments(document, cut=cut) for document in documents if not document.is_blank]
    parts = [segments for segments in parts if _tokens(segments) <= engine.report.context]
    ids = sorted((tokens for segments in parts for tokens in segments), key=len)
    if not ids:
        raise InputError(f"there is no document with text that fits the context of {engine.report.context} tokens")
    count = min(SAMPLE, len(ids))
    sample = [ids[round(at * (len(ids) - 1) / max(1, count - 1))] for at in range(count)]
    runner, loader = engine.runner, engine.loader
    runner.encode([sample[0][:32]], prefix=loader.sink)
    encode_s: list[float] = []
    load_s: list[float] = []
    with MemoryStore(budget_bytes=1 << 40) as scratch:
        for tokens in sample:
            start = perf_counter()
            entry = runner.encode([tokens], prefix=loader.sink)[0]
            runner.synchronize()
            encode_s.append(perf_counter() - start)
            name = loader.name(tokens)
            scratch.put(name, "raw", codec.encode(entry, loader.identity))
            start = perf_counter()
            lease = scratch.get(name, ("raw",))
            assert lease is not None
            with lease:
                runner.rotary.rotate(lease.object.decode().keys.to(runner.device), torch.arange(len(tokens)))
                runner.synchronize()
            load_s.append(perf_counter() - start)
    speed = sum(map(len, sample)) / sum(encode_s)
    missing = {tokens for tokens in ids if not loader.has(tokens)}
    full, load = len(ids[len(ids) // 2]) / speed, median(load_s)
    return Plan(
        documents=len(parts),
        tokens=sum(map(len, ids)),
        longest_tokens=max(map(_tokens, parts)),
        num_bytes=sum(map(len, set(ids))) * runner.geometry.bytes_per_token(runner.dtype),
        stored=sum(missing.isdisjoint(segments) for segments in parts),
        tokens_per_s=speed,
        encode_s=sum(map(len, missing)) / speed,
        full_s=full,
        load_s=load,
        break_even=math.ceil(full / (full - load)) if load < full else None,
    )


def _tokens(segments: tuple[Ids, ...]) -> int:
    return sum(map(len, segments))
