"""What conversations take while they are open at once: documents once and own rows each, or everything each.

Bytes are those of the storages behind all tensors that a session holds, each storage counted once; the growth of the
process says whether anything was forgotten.
"""

import ctypes
import gc
import os
import random
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from kvlink.core.errors import InputError
from kvlink.core.layout import Prompt
from kvlink.engine.build import sessions_of
from kvlink.engine.engine import Engine
from kvlink.engine.loader import Ids, Loader
from kvlink.engine.request import Request
from kvlink.engine.session import Session, Sessions
from kvlink.engine.stream import greedy
from kvlink.evaluation.bench.reuse import loader_over
from kvlink.evaluation.bench.texts import document_of, question_of
from kvlink.models.assembler import Assembler
from kvlink.models.cache import SlotCache
from kvlink.models.links import LinkTokens
from kvlink.store.disk import DiskStore

QUESTION_TOKENS = 30
"""Tokens of each question."""

ASSEMBLED_SESSIONS = 3
"""So many sessions are held open by copying; more of them take as much each."""


def bench_memory(
    engine: Engine,
    *,
    sessions: Sequence[int],
    documents: int,
    tokens: int,
    links: int = 6,
    answer: int = 16,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Return one row per number of sessions and arm.

    Every session reads the same documents in an order of its own, has its own question and an answer.

    Args:
        engine: Gives the model; its store is not used.
        sessions: How many are open at once.
        links: K, random link tokens.
        answer: Tokens that each session has answered.
        progress: Called for each session that was opened.

    Raises:
        InputError: The model's documents cannot be shared.
    """
    if engine.sessions is None:
        raise InputError("the documents of this model are copied into each prompt: there is nothing to share")
    prompter = engine.prompter
    ids = [prompter.document_ids(document_of(prompter, tokens, seed=seed + number)) for number in range(documents)]
    shuffler = random.Random(seed)  # noqa: S311
    system = prompter.system_ids(None)
    prompts = [
        Prompt(
            system,
            tuple((one,) for one in shuffler.sample(ids, len(ids))),
            prompter.tail_ids(question_of(prompter, QUESTION_TOKENS, skip=number)),
        )
        for number in range(max(sessions))
    ]
    tokens_of = LinkTokens.random(engine.runner.embedding, num_links=links) if links else None
    with TemporaryDirectory(prefix="kvlink-bench-") as folder, DiskStore(folder) as disk:
        loader = loader_over(engine, disk)
        for _ in loader.encode(ids, must_keep=True):
            pass
        fields = {"documents": documents, "tokens": tokens, "links": links, "answer_tokens": answer}
        opening = _shared(loader, tokens_of, prompts, sorted(sessions), answer, progress)
        rows = [_row("shared", fields, found, ids, engine) for found in opening]
        assembler = Assembler(engine.runner, links=tokens_of)
        measured = _assembled(assembler, loader, prompts[:ASSEMBLED_SESSIONS], ids, answer)
        rows += [_row("assembled", fields, _times(measured, number), ids, engine) for number in sorted(sessions)]
    return rows


def _shared(
    loader: Loader,
    links: LinkTokens | None,
    prompts: Sequence[Prompt],
    sizes: Sequence[int],
    answer: int,
    progress: Callable[[], None],
) -> Generator[dict[str, Any]]:
    """Open sessions one by one; yield what is measured whenever as many are open as were asked for."""
    sessions = sessions_of(loader, links=links, bundle="random")
    with _open(sessions, prompts[:1], answer, lambda: None) as once:
        names = [held.name for held in once[0].held]
    sessions.forget(*names)  # what the first request allocates for good is not counted
    before = resident_bytes()
    opened: list[Session] = []
    try:
        for size in sizes:
            opened += _opened(sessions, prompts[len(opened) : size], answer, progress)
            residents = {id(document): document for session in opened for document, _ in session.documents}
            read = storage_bytes(part for one in residents.values() for part in (one.keys, one.values))
            own = storage_bytes(part for session in opened for part in _tensors(session))
            yield {
                "sessions": size,
                "measured_sessions": size,
                "documents_bytes": read,
                "own_bytes": own,
                "own_tokens": sum(session.own.length for session in opened),
                "rss_bytes": resident_bytes() - before,
            }
    finally:
        _close(sessions, opened)


@contextmanager
def _open(
    sessions: Sessions, prompts: Sequence[Prompt], answer: int, progress: Callable[[], None]
) -> Generator[list[Session]]:
    opened = _opened(sessions, prompts, answer, progress)
    try:
        yield opened
    finally:
        _close(sessions, opened)


def _opened(sessions: Sessions, prompts: Sequence[Prompt], answer: int, progress: Callable[[], None]) -> list[Session]:
    """Begin sessions, compute their prompts and then their answers, all together."""
    opened: list[Session] = []
    for prompt in prompts:
        session = sessions.begin(Request(prompt, (), (), ()), room=answer)
        opened.append(session)
        sessions.advance([(session, len(session.left))])
        progress()
    for _ in range(answer):
        for session in opened:
            assert session.logits is not None, "its prompt is computed"
            session.append(greedy(session.logits), sessions.runner)
        if opened:
            sessions.advance([(session, 1) for session in opened])
    return opened


def _close(sessions: Sessions, opened: Sequence[Session]) -> None:
    for session in opened:
        session.keep = False
        sessions.end(session)


def _tensors(session: Session) -> list[Tensor]:
    """Return all that a session holds besides its documents."""
    own = session.own
    held = [own.keys, own.values, own.positions, session.left, session.embeds]
    return held if session.logits is None else [*held, session.logits]


def _assembled(
    assembler: Assembler, loader: Loader, prompts: Sequence[Prompt], ids: Sequence[Ids], answer: int
) -> dict[str, Any]:
    """Hold some sessions open whose documents are copied into each; return what is measured."""
    prefix = loader.runner.prefix(prompts[0].system)
    assert prefix is not None, "S is never empty"
    caches: list[SlotCache] = []
    before = resident_bytes()
    for prompt in prompts:
        layout = prompt.layout(num_links=assembler.num_links)
        with loader.load(prompt.segments) as loaded:
            entries = [one.entry for one in loaded]
            cache = assembler.assemble(layout, prefix=prefix, entries=entries, room=answer)
            del loaded, entries
        token = greedy(assembler.prefill(cache, prompt, layout)[-1])
        for _ in range(answer):
            token = greedy(loader.runner.decode(cache, token))
        caches.append(cache)
    total = storage_bytes(part for cache in caches for part in (cache.keys, cache.values))
    per_token = loader.runner.geometry.bytes_per_token(loader.runner.dtype)
    copied = len(caches) * sum(map(len, ids)) * per_token
    return {
        "sessions": len(caches),
        "measured_sessions": len(caches),
        "documents_bytes": copied,
        "own_bytes": total - copied,
        "own_tokens": sum(cache.length for cache in caches) - len(caches) * sum(map(len, ids)),
        "rss_bytes": resident_bytes() - before,
    }


def _times(measured: dict[str, Any], sessions: int) -> dict[str, Any]:
    """Return what so many sessions take that share nothing, from some that were measured."""
    factor = sessions / measured["sessions"]
    scaled = ("documents_bytes", "own_bytes", "own_tokens", "rss_bytes")
    return {**measured, "sessions": sessions, **{name: round(measured[name] * factor) for name in scaled}}


def _row(arm: str, fields: dict[str, Any], found: dict[str, Any], ids: Sequence[Ids], engine: Engine) -> dict[str, Any]:
    """Return a row; `ratio` is over the keys and values of the documents' tokens, once, and of all own tokens."""
    total = found["documents_bytes"] + found["own_bytes"]
    per_token = engine.runner.geometry.bytes_per_token(engine.runner.dtype)
    least = (sum(map(len, ids)) + found["own_tokens"]) * per_token
    return {
        "arm": arm,
        **fields,
        **found,
        "bytes": total,
        "ratio": total / least,
        "rss_ratio": found["rss_bytes"] / total,
        "sessions_per_gib": found["sessions"] / (total / 2**30),
    }


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages behind tensors, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def resident_bytes() -> int:
    """Return the memory that this process has resident, or has on its device, after what is free was given back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # of glibc alone
    return int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
