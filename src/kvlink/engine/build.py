"""Wires one process: a model that was proven exact, a tokenizer, a store, and the sink prefix between them."""

import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch

from kvlink.core.errors import BundleRefused, InputError, KVLinkWarning, ModelRefused
from kvlink.core.fingerprint import Identity
from kvlink.engine.beginnings import Beginnings
from kvlink.engine.gate import passed_codecs
from kvlink.engine.loader import Ids, Loader
from kvlink.engine.residency import Residency
from kvlink.engine.residency import device_bytes as usual_device_bytes
from kvlink.engine.session import Sessions
from kvlink.models import checkpoint
from kvlink.models.adapter import Adapter, attention_layers
from kvlink.models.bundle import Bundle, check_bundle, read_bundle, shipped_cards, shipped_for
from kvlink.models.links import LinkTokens
from kvlink.models.probe import ProbeReport, require
from kvlink.models.prompt import Prompter
from kvlink.models.runner import Runner
from kvlink.store.base import Store
from kvlink.store.codec import RAW, codec_named
from kvlink.store.opening import StoreLike, open_store
from kvlink.store.recompressing import under_pressure

SinkKind = Literal["header", "bos", "none"]
Attention = Literal["auto", "shared", "assembled"]

BEGINNINGS_SHARE = 8
"""Of the device's budget, one part in so many is for known beginnings, the rest for documents."""


class Parts(TypedDict):
    """What an engine is made of."""

    runner: Runner
    prompter: Prompter | None
    loader: Loader
    report: ProbeReport
    end_ids: Iterable[int]
    links: LinkTokens | None
    adapter: Adapter | None
    sessions: Sessions | None


def build(
    model: str | Path | Any,
    *,
    store: StoreLike,
    tokenizer: Any,
    sink: SinkKind,
    dtype: torch.dtype | None,
    device: str | torch.device | None,
    context: int | None,
    secret: bytes | None,
    store_key: bytes | None,
    links: str | Path | Bundle | None,
    foreign_links: bool,
    attention: Attention,
    recompress: bool,
    device_bytes: int | None,
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
    kept, passed = _store(store, loaded.digest, secret, store_key, recompress=recompress)
    bundle = _bundle(links, runner, loaded, foreign=foreign_links)
    sink_ids = _sink_ids(kept, loaded.digest, prompter, sink)
    if bundle is not None and bundle.card.sink_ids != sink_ids:
        if sink == "header":  # what a bundle was trained behind binds
            sink_ids = bundle.card.sink_ids
        elif links == "auto":
            _warn(
                f"the shipped link tokens were trained behind another sink prefix than {sink}: answering without links"
            )
            bundle = None
        else:
            raise BundleRefused(
                f"sink={sink} was asked for, but the bundle was trained behind a sink prefix of "
                f"{len(bundle.card.sink_ids)} other ids: leave sink at its default, or pass links=None"
            )
    identity = Identity(loaded.digest, loaded.rope_digest, sink_ids, str(runner.dtype).removeprefix("torch."))
    loader = Loader(
        runner=runner,
        store=kept,
        identity=identity,
        sink=runner.prefix(sink_ids),
        provenance={"model": loaded.name, "template": prompter.template_version if prompter else ""},
        secret=secret,
        accept=(RAW, *passed),
    )
    if prompter:
        ends = prompter.end_ids
    if prompter and bundle and bundle.card.template not in ("", prompter.template_version):
        _warn(
            "the bundle was trained with another chat template, so its figures do not hold: check with kvlink evaluate"
        )
    adapter = bundle.adapter.to(runner.device, runner.dtype) if bundle and bundle.adapter else None
    if attention == "shared" and report.attention != "shared":
        raise ModelRefused(f"documents of this model cannot be attended where they lie: {report.reason}")
    return Parts(
        runner=runner,
        prompter=prompter,
        loader=loader,
        report=report,
        end_ids=ends,
        links=bundle.links if bundle else None,
        adapter=adapter,
        sessions=None
        if attention == "assembled" or report.attention == "assembled"
        else sessions_of(
            loader,
            links=bundle.links if bundle else None,
            adapter=adapter,
            bundle=bundle and bundle.digest,
            device_budget_bytes=device_bytes,
        ),
    )


def sessions_of(
    loader: Loader,
    *,
    links: LinkTokens | None = None,
    adapter: Adapter | None = None,
    bundle: str | None = None,
    device_budget_bytes: int | None = None,
) -> Sessions:
    """Return what shares documents between requests: a device tier over a loader, and a tree of known beginnings.

    Args:
        bundle: Digest of what links and adapter come from.
        device_budget_bytes: What both may take; see `device_bytes`.
    """
    runner = loader.runner
    budget = usual_device_bytes(runner.device) if device_budget_bytes is None else device_budget_bytes
    tree = budget // BEGINNINGS_SHARE
    return Sessions(
        runner=runner,
        residency=Residency(loader, budget_bytes=budget - tree),
        beginnings=Beginnings(budget_bytes=tree),
        links=links,
        adapter=adapter,
        root=root_of(loader, bundle=(bundle or "") if adapter else ""),
        bundle=bundle or "",
    )


def root_of(loader: Loader, *, bundle: str) -> tuple[str, ...]:
    """Return what known beginnings are shared among: the model, what adapts it, and the scope."""
    return loader.identity.model, bundle, loader.identity.scope.hex()


def _store(
    named: StoreLike, digest: str, secret: bytes | None, store_key: bytes | None, *, recompress: bool
) -> tuple[Store, tuple[str, ...]]:
    """Return the store, and what the model's gate has passed there: only into that is anything recompressed."""
    opened = open_store(named, secret=secret, store_key=store_key)
    passed = passed_codecs(opened, digest)
    ladder = [codec for codec in passed if not codec_named(codec).prunes]
    return (under_pressure(opened, ladder=ladder, model=digest) if recompress and ladder else opened), passed


def _bundle(
    links: str | Path | Bundle | None, runner: Runner, loaded: checkpoint.Checkpoint, *, foreign: bool
) -> Bundle | None:
    """Return the link tokens that were asked for, held to the model; None for K = 0."""
    if links is None:
        return None
    if links == "auto":
        found = shipped_for(loaded.digest)
        if found is None and any(card.model == loaded.name for card in shipped_cards().values()):
            _warn(
                f"the link tokens that ship for {loaded.name} were trained for other weights or another dtype than "
                f"here ({str(runner.dtype).removeprefix('torch.')}): answering without links. Name the bundle and pass "
                "foreign_links=True (--foreign-links) to use them all the same"
            )
        return found
    found = links if isinstance(links, Bundle) else read_bundle(links)
    shapes = {name: layer.weight.shape for name, layer in attention_layers(runner.model)}
    hidden = runner.embedding.embedding_dim
    check_bundle(found, digest=loaded.digest, hidden=hidden, layers=shapes, foreign=foreign)
    return found


def _warn(message: str) -> None:
    warnings.warn(message, KVLinkWarning, stacklevel=5)


def _sink_ids(store: Store, digest: str, prompter: Prompter | None, kind: SinkKind) -> Ids:
    """Return the ids of the sink prefix: those that the store was begun with, so that its entries stay valid."""
    if prompter is None or kind == "none":
        return ()
    key = f"sink:{kind}:{digest}:{prompter.template_version}"
    kept: Any = store.keep_setting(key, list(prompter.sink_ids(kind)))
    return tuple(int(token) for token in kept)
