"""Whether pruned documents are exact on a model: measured when a pruned codec is asked for, not trusted to a name.

The same tokens are left out in all layers and heads, so that the model's own attention under one plain mask is what
pruned entries are held to, in a prefill and in a step of decoding; leaving nothing out is the planted fault.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlink.core.entry import CacheEntry
from kvlink.core.errors import ModelRefused
from kvlink.core.layout import Kind, Layout, Prompt, reference_mask
from kvlink.models.assembler import Assembler
from kvlink.models.cache import Prefix
from kvlink.models.probe import FAULT_SHARE, HALF_FAULT_SHARE, HALF_LIMIT, LIMIT
from kvlink.models.runner import Runner


def require_prunable(runner: Runner) -> float:
    """Return the relative error of logits behind pruned documents on this model.

    Raises:
        ModelRefused: Its layers attend through sliding windows, or in a way that takes no mask per layer and head, or
            the error is too large; the message says which.
    """
    vocab = runner.embedding.num_embeddings

    def ids(count: int, salt: int) -> tuple[int, ...]:
        return tuple((salt + 7919 * (index + 1) + index * index) % vocab for index in range(count))

    prompt = Prompt(ids(6, 1), ((ids(24, 2),), (ids(11, 3),)), ids(5, 4))
    layout = prompt.layout()
    prefix, entries = runner.prefix(prompt.system), runner.encode(prompt.segments)
    assert prefix is not None, "S is not empty"
    assembler = Assembler(runner)
    try:
        found = _logits(assembler, prompt, layout, prefix, [_halved(entry) for entry in entries])
    except TypeError as error:
        raise ModelRefused(
            f"the attention of {type(runner.model).__name__} takes no mask per layer and head ({error}), so documents "
            "cannot be pruned; take raw"
        ) from error
    wanted = _under_one_mask(assembler, prompt, layout, prefix, entries)
    whole = _logits(assembler, prompt, layout, prefix, entries)
    error, fault = (((logits - wanted).double().norm() / wanted.double().norm()).item() for logits in (found, whole))
    limit, share = (HALF_LIMIT, HALF_FAULT_SHARE) if runner.dtype.itemsize < 4 else (LIMIT, FAULT_SHARE)
    if not (error <= limit and error <= share * fault):
        raise ModelRefused(
            f"behind pruned documents the logits of {type(runner.model).__name__} miss those of its own attention by "
            f"{error:.2g} (nothing pruned: {fault:.2g}), so documents cannot be pruned; take raw"
        )
    return error


def _stays(tokens: int) -> Bool[Tensor, " tokens"]:
    """Return which tokens of a segment stay: every second one."""
    return torch.arange(tokens) % 2 == 0


def _halved(entry: CacheEntry) -> CacheEntry:
    rows = torch.nonzero(_stays(entry.num_tokens))[:, 0].to(entry.keys.device)
    kept = rows.to(torch.int32).expand(*entry.keys.shape[:2], -1)
    return CacheEntry(entry.keys[:, :, rows], entry.values[:, :, rows], entry.token_ids, kept)


def _logits(
    assembler: Assembler, prompt: Prompt, layout: Layout, prefix: Prefix, entries: list[CacheEntry]
) -> Float[Tensor, "rows vocab"]:
    """Return the logits of T: all but the last row prefilled, the last one decoded."""
    cache = assembler.assemble(layout, prefix=prefix, entries=entries, room=1)
    logits = assembler.prefill(cache, prompt, layout, upto=len(layout) - 1, logits_to_keep=0)
    return torch.cat((logits, assembler.runner.decode(cache, prompt.tail[-1])[None]))


def _under_one_mask(
    assembler: Assembler, prompt: Prompt, layout: Layout, prefix: Prefix, entries: list[CacheEntry]
) -> Float[Tensor, "rows vocab"]:
    """Return the logits of T with everything laid out, and what does not stay hidden by the model's one mask."""
    runner = assembler.runner
    cache = assembler.assemble(layout, prefix=prefix, entries=entries)
    rows, columns = layout.request_rows(after=len(prompt.system)), torch.arange(len(layout))
    group = torch.zeros_like(columns)
    visible = reference_mask(rows, group[: len(rows)], columns, group)
    for span in layout.of(Kind.SEGMENT):
        visible[:, span.start : span.stop] &= _stays(len(span))
    cache.announce(rows.to(runner.device), length=len(layout))
    with torch.inference_mode():
        return runner.forward(
            cache=cache,
            inputs_embeds=assembler.embed(prompt.ids(layout)[rows])[None],
            position_ids=rows[None].to(runner.device),
            attention_mask=runner.masks(dict.fromkeys(runner.windows, visible)),
            logits_to_keep=0,
        )[0]
