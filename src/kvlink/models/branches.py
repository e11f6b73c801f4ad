"""Rows behind constant keys and values, with gradients: the forward of training.

    known columns:  S | D_1 ... D_N                      constant, rotated, at their positions
    rows:           L_1 ... L_N | T_1 A_1 | T_2 A_2      computed; each question is a branch that sees no other one

With all columns in one prompt's order and one branch it is the assembled forward; here order is free, several
questions share the rows behind the documents, and nothing is written in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlink.core.entry import CacheEntry
from kvlink.core.layout import Kind, Layout
from kvlink.models.adapter import Adapter
from kvlink.models.attention import grouped
from kvlink.models.cache import PastCache, Prefix, SlotCache
from kvlink.models.runner import Runner


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """Known keys (rotated) and values, `[layers, kv_heads, columns, dim]`, and the position of each column."""

    keys: Tensor
    values: Tensor
    positions: Int[Tensor, " columns"]

    @classmethod
    def of_entries(cls, runner: Runner, layout: Layout, *, prefix: Prefix, entries: Sequence[CacheEntry]) -> "Past":
        """Place S and the entries where a layout wants them; link slots and T are left to be computed.

        Raises:
            ValueError: An entry is pruned: nothing is learned from documents that are not whole.
        """
        if any(entry.is_pruned for entry in entries):
            raise ValueError("a pruned entry has no rows for some of its columns; load the documents as raw")
        spans = layout.of(Kind.SEGMENT)
        positions = [torch.arange(len(prefix)), *(torch.arange(span.start, span.stop) for span in spans)]
        keys, values = [prefix.keys[:, 0]], [prefix.values[:, 0]]
        for span, entry in zip(spans, entries, strict=True):
            rows = torch.arange(span.start, span.stop, device=runner.device)
            keys.append(runner.rotary.rotate(entry.keys.to(runner.device), rows))
            values.append(entry.values.to(runner.device))
        return cls(torch.cat(keys, dim=2), torch.cat(values, dim=2), torch.cat(positions))

    @classmethod
    def of_cache(cls, cache: SlotCache) -> "Past":
        """Take what a plain forward has written; shares its memory."""
        rows = slice(0, cache.length)
        return cls(cache.keys[:, :, rows], cache.values[:, :, rows], torch.arange(cache.length))


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows to be computed.

    Attributes:
        embeds: Input embeddings.
        positions: Their positions; two branches have rows at the same positions.
        branches: 0 for rows that all see, else the number of the question that a row belongs to.
    """

    embeds: Float[Tensor, "rows hidden"]
    positions: Int[Tensor, " rows"]
    branches: Int[Tensor, " rows"]


def branch_mask(past: Past, rows: Rows, *, window: int | None = None) -> Bool[Tensor, "rows columns"]:
    """Return who sees whom: a row sees what does not lie behind it, of the common columns and its own branch."""
    positions = torch.cat((past.positions, rows.positions))
    branches = torch.cat((torch.zeros_like(past.positions), rows.branches))
    distance = rows.positions[:, None] - positions[None, :]
    visible = (distance >= 0) & ((branches == 0)[None, :] | (branches[None, :] == rows.branches[:, None]))
    return visible if window is None else visible & (distance < window)


def branch_logits(
    runner: Runner,
    past: Past,
    rows: Rows,
    *,
    keep: Int[Tensor, " kept"],
    adapter: Adapter | None = None,
) -> Float[Tensor, "kept vocab"]:
    """Compute the rows and return the logits of those in `keep` (indices into the rows). Gradients flow.

    Args:
        adapter: Acts on all rows: they are behind the first document.
    """
    visible = {window: branch_mask(past, rows, window=window.size) for window in runner.windows}
    with grouped(runner.config, runner.device):
        return runner.forward(
            cache=PastCache(past.keys, past.values),
            adapter=adapter,
            inputs_embeds=rows.embeds[None],
            position_ids=rows.positions[None].to(runner.device),
            attention_mask=runner.masks(visible),
            logits_to_keep=keep.to(runner.device),
        )[0]
