"""Documents side by side at the same positions, right behind S: parallel context windows, and their adaptive form.

    columns:    S | D_1 | D_2 | ... | T
    positions:  0   |S|   |S|         |S| + longest document

Rows of T attend all columns. What they get from documents, their logits divided by a temperature T, and what they get
from everything else is merged by log-sum-exp; that of the documents is multiplied with T and with a scale S. With
T = S = 1 that is one softmax over all.

Source: Ratner et al. 2023 (Parallel Context Windows); Yang et al. 2025 (APE, arXiv 2502.05431).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kvlink.core.errors import ModelRefused
from kvlink.core.layout import Kind, Layout, reference_mask
from kvlink.models.cache import Prefix, SlotCache
from kvlink.models.recompute import attention_logits, per_kv_head
from kvlink.models.runner import Runner

MERGED = "kvlink_merged"
"""Under which transformers knows this attention."""


@dataclass(slots=True, eq=False)
class Merging:
    """How attention to documents is merged with the rest; travels as a keyword of the forward.

    Attributes:
        columns: Those of documents.
        temperature: What logits of documents are divided by.
        scale: What their log-sum-exp is multiplied with besides the temperature, which gives it back its size.
        served: Layers that have attended so in this forward.
    """

    columns: slice
    temperature: float
    scale: float
    served: set[int] = field(default_factory=set)


class ParallelCache(SlotCache):
    """A buffer in which positions are not those of the rows: documents overlap.

    Attributes:
        positions: Of each row, those of an answer included.
        documents: The rows of documents.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, positions: Int[Tensor, " capacity"], documents: slice, length: int
    ) -> None:
        super().__init__(keys, values)
        self.positions = positions
        self.documents = documents
        self.length = length


def parallel_cache(
    runner: Runner,
    layout: Layout,
    *,
    prefix: Prefix,
    documents: Sequence[tuple[Tensor, Tensor]],
    room: int = 0,
) -> ParallelCache:
    """Lay out S and documents that are rotated for positions from `len(S)` on.

    Args:
        layout: Says which row is whose.
        prefix: Keys and values of S.
        documents: Rotated keys and values of each, `[layers, kv_heads, tokens, dim]`.
        room: Rows to keep free behind the prompt for the answer.
    """
    shape, start, stop = runner.geometry, len(prefix), layout.spans[-1].start
    rows = len(layout) + room
    keys, values = (
        torch.empty(shape.layers, shape.kv_heads, rows, dim, dtype=runner.dtype, device=runner.device)
        for dim in (shape.head_dim, shape.value_dim)
    )
    keys[:, :, :start], values[:, :, :start] = prefix.keys[:, 0], prefix.values[:, 0]
    positions = torch.arange(rows)
    longest = 0
    for span, (own_keys, own_values) in zip(layout.of(Kind.SEGMENT), documents, strict=True):
        keys[:, :, span.start : span.stop], values[:, :, span.start : span.stop] = own_keys, own_values
        positions[span.start : span.stop] = torch.arange(start, start + len(span))
        longest = max(longest, len(span))
    positions[stop:] += start + longest - stop
    return ParallelCache(keys, values, positions, slice(start, stop), start)


def parallel_logits(
    runner: Runner,
    cache: ParallelCache,
    ids: Sequence[int],
    *,
    temperature: float,
    scale: float,
    at: int | None = None,
    logits_to_keep: int = 1,
) -> Float[Tensor, "kept vocab"]:
    """Compute rows of T, or of an answer, behind what is there.

    Args:
        at: Row of the first id; the next free one if None.

    Raises:
        ModelRefused: The model's attention cannot be replaced by one that merges two parts.
    """
    start = cache.length if at is None else at
    rows = slice(start, start + len(ids))
    cache.announce(rows, length=rows.stop)
    positions, columns = cache.positions[rows], cache.positions[: rows.stop]
    nothing = torch.zeros_like(columns)
    visible = {
        window: reference_mask(positions, nothing[: len(ids)], columns, nothing, window=window.size)
        for window in runner.windows
    }
    merging = Merging(cache.documents, temperature, scale)
    config, before = runner.config, runner.config._attn_implementation  # noqa: SLF001 (there is no public name)
    config._attn_implementation_internal = MERGED  # noqa: SLF001
    try:
        with torch.inference_mode():
            logits = runner.forward(
                cache=cache,
                inputs_embeds=runner.embed(ids)[None],
                position_ids=positions[None].to(runner.device),
                attention_mask=runner.masks(visible),
                logits_to_keep=logits_to_keep,
                merging=merging,
            )[0]
    except TypeError as error:
        raise ModelRefused(_refused(runner, f"it takes no further keyword: {error}")) from error
    finally:
        config._attn_implementation_internal = before  # noqa: SLF001
    if len(merging.served) != runner.geometry.layers:
        raise ModelRefused(_refused(runner, f"{len(merging.served)} of {runner.geometry.layers} layers did so"))
    return logits


def _refused(runner: Runner, reason: str) -> str:
    return (
        f"the attention of {type(runner.model).__name__} cannot be replaced by one that merges documents with the rest "
        f"({reason}); choose another method"
    )


def _merged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    merging: Merging,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend documents and the rest apart, and merge."""
    merging.served.add(cast("int", module.layer_idx))
    logits = attention_logits(query, key, attention_mask, scaling=scaling, softcap=softcap, options=options)
    start, stop = merging.columns.start, merging.columns.stop
    rest = torch.cat((logits[..., :start], logits[..., stop:]), dim=-1)
    halves = (
        (logits[..., start:stop] / merging.temperature, value[:, :, start:stop], merging.scale * merging.temperature),
        (rest, torch.cat((value[:, :, :start], value[:, :, stop:]), dim=2), 1.0),
    )
    parts: list[Tensor] = []
    weights: list[Tensor] = []
    for own, values, scale in halves:
        if own.shape[-1]:
            parts.append(per_kv_head(own.softmax(dim=-1).to(values), values))
            weights.append(own.logsumexp(dim=-1) * scale)
    share = torch.stack(weights).softmax(dim=0)[..., None].to(value)  # [parts, 1, heads, rows, 1]
    return (share * torch.stack(parts)).sum(dim=0).transpose(1, 2).contiguous(), None


AttentionInterface.register(MERGED, _merged_attention)
AttentionMaskInterface.register(MERGED, sdpa_mask)
