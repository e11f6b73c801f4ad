"""Wires one process: a model that was proven exact, a tokenizer, a store, and the sink prefix between them."""

import os
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch

from kvlink.core.errors import InputError, KVLinkWarning
from kvlink.core.fingerprint import Identity
from kvlink.engine.loader import Ids, Loader
from kvlink.models import checkpoint
from kvlink.models.probe import ProbeReport, require
from kvlink.models.prompt import Prompter
from kvlink.models.runner import Runner
from kvlink.store.base import Store
from kvlink.store.disk import DiskStore
from kvlink.store.memory import MemoryStore

SinkKind = Literal["header", "bos", "none"]


class Parts(TypedDict):
    """What an engine is made of."""

    runner: Runner
    prompter: Prompter | None
    loader: Loader
    report: ProbeReport
    end_ids: Iterable[int]


def build(
    model: str | Path | Any,
    *,
    store: str | Path | Store | None,
    tokenizer: Any,
    sink: SinkKind,
    dtype: torch.dtype | None,
    device: str | torch.device | None,
    context: int | None,
    secret: bytes | None,
) -> Parts:
    """Load and wire the parts; arguments and errors as in `Engine.from_pretrained`."""
    if isinstance(model, (str, Path)):
        loaded = checkpoint.load(model, dtype=dtype, device=device)
        if tokenizer is not None:
            loaded = replace(loaded, tokenizer=tokenizer)
    else:
        if dtype is not None or device is not None:
            raise InputError("a ready model keeps its dtype and device; cast and move it before handing it over")
        loaded = checkpoint.checkpoint_of(model, tokenizer=tokenizer)
    runner = Runner(loaded.model)
    report = require(runner, context=context)
    if report.reason:
        warnings.warn(report.reason, KVLinkWarning, stacklevel=3)
    ends = loaded.end_ids
    prompter = None if loaded.tokenizer is None else Prompter(tokenizer=loaded.tokenizer, end_ids=ends)
    kept = open_store(store, secret=secret)
    sink_ids = _sink_ids(kept, loaded.digest, prompter, sink)
    identity = Identity(loaded.digest, loaded.rope_digest, sink_ids, str(runner.dtype).removeprefix("torch."))
    loader = Loader(
        runner=runner,
        store=kept,
        identity=identity,
        sink=runner.prefix(sink_ids),
        provenance={"model": loaded.name, "template": prompter.template_version if prompter else ""},
        secret=secret,
    )
    if prompter:
        ends = prompter.end_ids
    return Parts(runner=runner, prompter=prompter, loader=loader, report=report, end_ids=ends)


def open_store(store: str | Path | Store | None, *, secret: bytes | None = None) -> Store:
    """Return a store for what a caller named: a folder, a ready store, or None for a tenth of the memory."""
    match store:
        case None:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            return MemoryStore(budget_bytes=total // 10, secret=secret)
        case Store():
            return store
        case _:
            return DiskStore(store, secret=secret)


def _sink_ids(store: Store, digest: str, prompter: Prompter | None, kind: SinkKind) -> Ids:
    """Return the ids of the sink prefix: those that the store was begun with, so that its entries stay valid."""
    if prompter is None or kind == "none":
        return ()
    key = f"sink:{kind}:{digest}:{prompter.template_version}"
    kept: Any = store.keep_setting(key, list(prompter.sink_ids(kind)))
    return tuple(int(token) for token in kept)
