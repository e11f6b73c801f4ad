"""The self-probe: measures whether reuse is exact on a model, instead of trusting its name.

Three questions, each with a planted fault in the same run, so that a figure says something:

1. Do keys and values of a segment stay the same when it is encoded elsewhere? (offset 0 against a small odd
   offset and the last positions of the context, beyond every switch of the rotary tables)
2. Does the forward under our own mask equal the model's own, beyond its sliding window?
3. Does one assembled prompt, behind a sink prefix, equal one reference forward? Does one that attends documents where
   they lie? A model that only fails the latter is served assembled.

A model that fails is refused with the reason. One that only fails far out keeps the context below the switch.
"""

from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvlink.core.errors import ModelRefused
from kvlink.core.layout import Kind, Prompt
from kvlink.models.assembler import Assembler
from kvlink.models.cache import EncodeCache
from kvlink.models.checkpoint import context_length
from kvlink.models.links import LinkTokens
from kvlink.models.reference import reference_logits
from kvlink.models.resident import Resident
from kvlink.models.rotary import watching
from kvlink.models.rows import OwnRows, Run
from kvlink.models.runner import Runner
from kvlink.models.shared import forward

SEGMENT = 24
"""Tokens of the segment that is encoded at several offsets."""

SINK = 5
"""Tokens of the sink prefix that the probe encodes behind."""

NEAR = 7
"""The small odd offset."""

FAULT_SHARE = 0.1
"""An error may be at most this share of the planted fault's."""

LIMIT = 1e-3
"""Largest relative error in float32 and float64."""

HALF_FAULT_SHARE, HALF_LIMIT = 0.5, 0.1
"""The same for values and logits in 16 bits, where rounding alone is a few per cent; keys stay under FAULT_SHARE."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the probe measured. Errors are relative: norm of the difference over norm of the reference.

    Attributes:
        supported: Whether documents can be reused.
        reason: Why not; or what was restricted; empty if there is nothing to say.
        attention: How documents are attended: `shared` where they lie, or `assembled` for each prompt.
        context: Largest number of positions that is accepted.
        key_error, key_fault: Keys rotated by us against cached ones; the same without rotation.
        value_error: Values encoded at the farthest accepted offset against those at 0.
        logit_error, logit_fault: Assembled against reference logits; the same without rotation.
        shared_error, shared_fault: Logits from documents where they lie against the reference; the same with keys
            that are not rotated. None where the attention cannot be replaced.
        mask_error: Reference forward of a plain prompt against the model's own forward.
        far_error: Errors by offset, accepted or not.
        window_crossed: Whether a text longer than the sliding window was tried; None without a window.
        rope: The rotary embedding as it was found.
    """

    supported: bool
    reason: str
    attention: str = "assembled"
    context: int = 0
    key_error: float | None = None
    key_fault: float | None = None
    value_error: float | None = None
    logit_error: float | None = None
    logit_fault: float | None = None
    shared_error: float | None = None
    shared_fault: float | None = None
    mask_error: float | None = None
    far_error: tuple[tuple[int, float, float], ...] = ()
    window_crossed: bool | None = None
    rope: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values, under the names of its fields."""
        return asdict(self)


def probe(runner: Runner, *, context: int | None = None, longest: int = 4608) -> ProbeReport:
    """Measure whether reuse is exact on this model.

    Args:
        runner: The model.
        context: Positions to be accepted; the configuration's `max_position_embeddings` if None.
        longest: Tokens of the longest text that may be tried; a wider sliding window is not crossed.
    """
    context = context or context_length(runner.config)
    half = runner.dtype.itemsize < 4
    limit = HALF_LIMIT if half else LIMIT
    rope = _describe(runner)
    key_error, key_fault, value_error = _moved(runner, 0)
    if not isfinite(key_error + value_error):
        return ProbeReport(
            False, "its keys or values hold NaN or infinity: damaged weights, or a dtype too small", rope=rope
        )
    if not _passes(key_error, key_fault, limit):
        reason = f"keys are changed after RoPE, or by more than it: rotating them again misses by {key_error:.2g}"
        return ProbeReport(False, reason, key_error=key_error, key_fault=key_fault, rope=rope)
    tried: list[tuple[int, float, float]] = []
    accepted, value_error, note = 0, float("inf"), ""
    for candidate in _contexts(runner, context):
        offsets = (NEAR, candidate - SEGMENT)
        moved = [_moved(runner, offset) for offset in offsets]
        tried += [(offset, error, values) for offset, (error, _, values) in zip(offsets, moved, strict=True)]
        allowed = max(limit, candidate * 2.0**-24)  # float32 tables round positions; full attention bears it, too
        if all(_passes(error, fault, limit) and values <= allowed for error, fault, values in moved):
            accepted, key_error, value_error = candidate, max(m[0] for m in moved), max(m[2] for m in moved)
            key_fault = min(m[1] for m in moved)
            break
        note = (
            f"the context is capped: a segment encoded at position {offsets[-1]} has other keys (by "
            f"{moved[-1][0]:.2g}) or values (by {moved[-1][2]:.2g}) than at 0; the rotary tables switch before"
        )
    far = tuple(tried)
    if not accepted:
        _, error, values = max(tried, key=lambda row: row[1] + row[2])
        reason = (
            f"a segment's values change with its place by {values:.2g} and its keys by {error:.2g}: "
            "positions enter elsewhere than in a rotary embedding of the keys (learned absolute positions, ALiBi)"
        )
        return ProbeReport(False, reason, key_error=error, value_error=values, far_error=far, rope=rope)
    logits = _logits(runner, longest=min(longest, accepted // 2))
    if logits["window_crossed"] is False:
        sizes = sorted({window.size for window in runner.windows if window.size})
        more = f"no text longer than the sliding window of {sizes[-1]} was tried; `kvlink probe` tries longer ones"
        note = f"{note}; {more}" if note else more
    report = ProbeReport(
        supported=True,
        reason=note,
        context=accepted,
        key_error=key_error,
        key_fault=key_fault,
        value_error=value_error,
        far_error=far,
        rope=rope,
        **logits,
    )
    if logits["mask_error"] > limit:
        return _refused(
            report, f"its own forward and ours under the reference mask differ by {logits['mask_error']:.2g}"
        )
    if not _passes(logits["logit_error"], logits["logit_fault"], limit, HALF_FAULT_SHARE if half else FAULT_SHARE):
        return _refused(report, f"an assembled prompt misses the reference forward by {logits['logit_error']:.2g}")
    return _with_attention(report, limit, HALF_FAULT_SHARE if half else FAULT_SHARE)


def examine(model: nn.Module, *, context: int | None = None) -> ProbeReport:
    """Probe a model of which nothing is known, not even whether it can be run."""
    try:
        runner = Runner(model)
    except ModelRefused as refusal:
        return ProbeReport(False, str(refusal))
    return probe(runner, context=context)


def require(runner: Runner, *, context: int | None = None, longest: int = 1024) -> ProbeReport:
    """Probe a model and return the report.

    Raises:
        ModelRefused: The model failed.
    """
    report = probe(runner, context=context, longest=longest)
    if not report.supported:
        raise ModelRefused(
            f"{type(runner.model).__name__} cannot reuse documents exactly: {report.reason}. "
            "Use it without KVLink, or see `kvlink probe` for all figures"
        )
    return report


def _passes(error: float, fault: float, limit: float, share: float = FAULT_SHARE) -> bool:
    return error <= limit and error <= share * fault


def _with_attention(report: ProbeReport, limit: float, share: float) -> ProbeReport:
    """Say how documents are attended: where they lie, if that is as exact as a copy."""
    error, fault = report.shared_error, report.shared_fault
    if error is None or fault is None:
        more = "its attention cannot be replaced, so documents are copied into each prompt"
    elif _passes(error, fault, limit, share):
        return replace(report, attention="shared")
    else:
        more = f"attended where they lie, documents miss by {error:.2g}, so they are copied into each prompt"
    return replace(report, reason=f"{report.reason}; {more}" if report.reason else more)


def _refused(report: ProbeReport, reason: str) -> ProbeReport:
    return replace(report, supported=False, reason=reason)


def _ids(runner: Runner, count: int, *, salt: int) -> tuple[int, ...]:
    """Return fixed ids, spread over the vocabulary."""
    vocab = runner.embedding.num_embeddings
    return tuple((salt + 7919 * (index + 1) + index * index) % vocab for index in range(count))


def _relative(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference over the norm of what is wanted."""
    return ((found - wanted).double().norm() / wanted.double().norm().clamp(min=1e-30)).item()


def _moved(runner: Runner, offset: int) -> tuple[float, float, float]:
    """Return key error, key error without rotation, and value error of a segment encoded at `offset`."""
    ids, positions = _ids(runner, SEGMENT, salt=1), torch.arange(SEGMENT, device=runner.device)
    entry = runner.encode([ids])[0]
    with watching(runner.model) as watch, torch.inference_mode():
        cache = EncodeCache(watch)
        tokens = torch.tensor([ids], device=runner.device)
        runner.forward(cache=cache, input_ids=tokens, position_ids=positions[None] + offset)
    keys, values = torch.stack(cache.cached_keys)[:, 0], torch.stack(cache.values)[:, 0]
    rotated = runner.rotary.rotate(entry.keys, positions + offset)
    turning = torch.cat([torch.arange(r.start, r.stop) for r in runner.rotary.runs if r.function] or [positions[:0]])
    if len(turning) == 0:  # nothing rotates: no fault can be planted, the errors must speak for themselves
        return _relative(rotated, keys), 1.0, _relative(values, entry.values)
    fault = _relative(runner.rotary.rotate(entry.keys, (positions + offset) // 2)[turning], keys[turning])
    fault = min(fault, _relative(entry.keys[turning], keys[turning]))
    return _relative(rotated, keys), fault, _relative(values, entry.values)


def _contexts(runner: Runner, context: int) -> list[int]:
    """Return contexts to try, largest first: the wanted one, then those below each switch of the tables."""
    found = {context, context_length(runner.config)}
    parameters: dict[str, Any] = getattr(runner.config, "rope_parameters", None) or {}
    for group in (parameters, *parameters.values()):
        if isinstance(group, dict) and group.get("original_max_position_embeddings"):
            found.add(int(group["original_max_position_embeddings"]))
    return sorted((c for c in found if SEGMENT + NEAR < c <= context), reverse=True)


def _logits(runner: Runner, *, longest: int) -> dict[str, Any]:
    """Compare logits: own forward against reference, and assembled against reference with and without rotation."""
    window = max((w.size for w in runner.windows if w.size), default=0)
    crossed = window + SEGMENT <= longest
    length = window + SEGMENT if window and crossed else 2 * SEGMENT
    sink = _ids(runner, SINK, salt=2)
    links = LinkTokens.random(runner.embedding, num_links=2)
    assembler = Assembler(runner, links=links)
    plain = Prompt(_ids(runner, length, salt=3), (), _ids(runner, 3, salt=4))
    documents = ((_ids(runner, length, salt=5),), (_ids(runner, 9, salt=6), _ids(runner, 5, salt=7)))
    prompt = Prompt(_ids(runner, SINK + 1, salt=8), documents, _ids(runner, 4, salt=9))
    layout = prompt.layout(num_links=links.num_links)

    with torch.inference_mode():
        ids = plain.ids(plain.layout()).to(runner.device)[None]
        own = runner.forward(cache=None, input_ids=ids, logits_to_keep=0)[0]
    mask_error = _relative(reference_logits(assembler, plain), own)
    wanted = reference_logits(assembler, prompt, sink_ids=sink)[len(prompt.system) :]
    prefix, entries = runner.prefix(prompt.system), runner.encode(prompt.segments, prefix=runner.prefix(sink))
    assert prefix is not None

    def assembled(spoil: bool) -> Float[Tensor, "rows vocab"]:
        cache = assembler.assemble(layout, prefix=prefix, entries=entries)
        if spoil:
            for span, entry in zip(layout.of(Kind.SEGMENT), entries, strict=True):
                cache.keys[:, :, span.start : span.stop] = entry.keys
        return assembler.prefill(cache, prompt, layout, logits_to_keep=0)

    rotates = any(run.function for run in runner.rotary.runs)
    ids, rows = prompt.ids(layout), layout.request_rows()

    def shared(spoil: bool) -> Float[Tensor, "rows vocab"]:
        lying = [Resident.of(entry, runner) for entry in entries]
        if spoil:
            lying = [replace(each, keys=entry.keys) for each, entry in zip(lying, entries, strict=True)]
        spans = layout.of(Kind.SEGMENT)
        documents = [(document, span.start) for document, span in zip(lying, spans, strict=True)]
        run = Run(OwnRows(runner, len(rows)), rows, documents)
        return forward(runner, [run], assembler.embed(ids[rows]), keep=torch.arange(len(prompt.system), len(rows)))

    try:
        shared_error: float | None = _relative(shared(spoil=False), wanted)
        shared_fault: float | None = _relative(shared(spoil=True), wanted) if rotates else 1.0
    except ModelRefused:
        shared_error = shared_fault = None
    return {
        "mask_error": mask_error,
        "shared_error": shared_error,
        "shared_fault": shared_fault,
        "logit_error": _relative(assembled(spoil=False), wanted),
        "logit_fault": _relative(assembled(spoil=True), wanted) if rotates else 1.0,
        "window_crossed": crossed if window else None,
    }


def _describe(runner: Runner) -> dict[str, Any]:
    """Return the rotary embedding in words and figures."""
    parameters: dict[str, Any] = getattr(runner.config, "rope_parameters", None) or {}
    kinds = [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    return {
        "type": sorted({str(kind.get("rope_type", "default")) for kind in kinds}),
        "head_dim": runner.geometry.head_dim,
        "layers": [
            {
                "start": run.start,
                "stop": run.stop,
                "rotary_dim": run.rotary_dim,
                "formula": "half-split" if run.halves else ("own function" if run.function else "none"),
            }
            for run in runner.rotary.runs
        ],
    }
