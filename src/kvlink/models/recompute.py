"""Tokens of documents computed again into an assembled buffer: the recipe of methods that repair what was reused.

    S | D_1 | D_2 | ... | T        chosen rows of documents run together with T; the others stay as they were read

Row and column meet by position, whatever was chosen: a row that is computed again sees what stands before it, reused
or new, and nothing behind it. No family is known by name: the buffer takes keys and values where they belong, and a
pass that only has to look at one layer is broken off there.
"""

from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.masking_utils import sdpa_mask

from kvlink.core.errors import ModelRefused
from kvlink.core.layout import Layout, Prompt, reference_mask
from kvlink.models.assembler import Assembler
from kvlink.models.attention import grouped, grouped_attention
from kvlink.models.cache import SlotCache

ATTENDED = "kvlink_attended"
"""Under which transformers knows attention that notes its weights."""


class _Enough(Exception):
    """A pass has seen what it was for; the layers behind need not run."""


def recompute(
    assembler: Assembler,
    cache: SlotCache,
    prompt: Prompt,
    layout: Layout,
    rows: Int[Tensor, " rows"],
    *,
    released: bool = False,
    logits_to_keep: int = 1,
) -> Float[Tensor, "kept vocab"]:
    """Compute chosen rows of documents, and all behind the documents, in every layer; the buffer is then complete.

    Args:
        cache: From `Assembler.assemble`.
        prompt: The ids that the layout was made of.
        rows: Positions of document tokens, ascending.
        released: Attend by number instead of by position: row i of n sees all but the last n - 1 - i columns, so that
            all rows but those of T see tokens behind them. This is the fault of CacheBlend's public code.
        logits_to_keep: How many of the last rows' logits to return.
    """
    chosen = torch.cat((rows, torch.arange(layout.spans[-1].start, len(layout))))
    if cache.present is not None:
        cache.present[:, :, rows.to(cache.present.device)] = True
    order = torch.arange(len(chosen)) + len(layout) - len(chosen) if released else chosen
    columns = torch.arange(len(layout))
    nothing = torch.zeros_like(columns)
    visible = {
        window: reference_mask(order, nothing[: len(order)], columns, nothing)
        & (window.size is None or chosen[:, None] - columns[None] < window.size)
        for window in assembler.runner.windows
    }
    return _forward(assembler, cache, prompt, layout, chosen, visible, logits_to_keep=logits_to_keep)


def deviations(
    assembler: Assembler, cache: SlotCache, prompt: Prompt, layout: Layout, rows: Int[Tensor, " rows"], *, layer: int
) -> Float[Tensor, " rows"]:
    """Return how far each row's keys and values in a layer are from those that full attention has there.

    That is the sum of squared differences, in float32 at least. The rows are computed up to that layer, and what they
    have there and in the layers before is written into the buffer: nothing that was computed is thrown away.

    Args:
        rows: Positions of all document tokens whose entries were not encoded behind S itself, ascending.
        layer: Number of the layer.
    """
    comparing = _Comparing(cache, rows.to(assembler.runner.device), layer)
    columns = torch.arange(layout.spans[-1].start)
    length = cache.length
    cache.announce(comparing.rows, length=len(columns))
    try:
        _forward(assembler, comparing, prompt, layout, rows, _by_position(assembler, rows, columns))
    except _Enough:
        assert comparing.found is not None, "it was looked at"
        return comparing.found
    finally:
        cache.length = length
    raise AssertionError("the model has this layer")


def attention_paid(
    assembler: Assembler,
    cache: SlotCache,
    prompt: Prompt,
    layout: Layout,
    rows: Int[Tensor, " rows"],
    *,
    asking: int,
    layer: int,
) -> Float[Tensor, " columns"]:
    """Return how much attention the question pays each position from the first document to its own end in a layer.

    All heads are taken as one: their queries as one long vector, their keys as another. A row's weights sum to 1 over
    these positions, S has no part in them; they are summed over the rows of the question. What the rows have in that
    layer and in those before it is written into the buffer.

    Args:
        rows: Positions of all document tokens whose entries were not encoded behind S itself, then those of the
            question, ascending; they are computed up to that layer.
        asking: How many of them, the last ones, are the question's.

    Raises:
        ModelRefused: The model's attention cannot be replaced, so its weights cannot be seen; or documents are pruned.
    """
    if cache.present is not None:
        raise ModelRefused(
            "tokens of pruned documents cannot be ranked by attention; read the documents in another codec"
        )
    columns = torch.arange(int(rows[-1]) + 1)
    seen = Attended(layer, asking, since=layout.spans[0].stop)
    config, length = assembler.runner.config, cache.length
    before = config._attn_implementation  # noqa: SLF001 (there is no public name)
    cache.announce(rows.to(assembler.runner.device), length=len(columns))
    config._attn_implementation_internal = ATTENDED  # noqa: SLF001
    try:
        _forward(assembler, cache, prompt, layout, rows, _by_position(assembler, rows, columns), attended=seen)
    except _Enough:
        assert seen.weights is not None, "they were noted"
        return seen.weights
    except TypeError as error:
        raise ModelRefused(_no_weights(assembler, str(error))) from error
    finally:
        config._attn_implementation_internal = before  # noqa: SLF001
        cache.length = length
    raise ModelRefused(_no_weights(assembler, "it has an attention of its own"))


class _Comparing(Cache):
    """Writes the rows of the layers up to one into a buffer; compares those of that layer first, and breaks off."""

    def __init__(self, cache: SlotCache, rows: Int[Tensor, " rows"], layer: int) -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.found: Float[Tensor, " rows"] | None = None
        self.present = None if cache.present is None else cache.present.clone()
        if self.present is not None:
            self.present[:, :, rows] = True
        self._cache = cache
        self._layer = layer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write, or compare: `[1, kv_heads, rows, dim]`."""
        if layer_idx < self._layer:
            return self._cache.update(key_states, value_states, layer_idx)
        pairs = ((key_states, self._cache.keys), (value_states, self._cache.values))
        self.found = sum(
            (_wide(new[0]) - _wide(known[layer_idx][:, self.rows])).square().sum(dim=(0, 2)) for new, known in pairs
        ) + torch.zeros(len(self.rows), device=self.rows.device)
        self._cache.update(key_states, value_states, layer_idx)
        raise _Enough

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows that stood in the buffer before."""
        return self._cache.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns of the mask and the index of the first."""
        return self._cache.get_mask_sizes(query_length, layer_idx)


class Attended:
    """What one layer's attention is to be noted of; travels as a keyword of the forward.

    Attributes:
        rows: How many rows ask, the last ones.
        since: The first column that counts.
        weights: What they pay each column from there on, once it was seen.
    """

    def __init__(self, layer: int, rows: int, *, since: int) -> None:
        self.layer = layer
        self.rows = rows
        self.since = since
        self.weights: Float[Tensor, " columns"] | None = None


def attention_logits(
    query: Tensor, key: Tensor, mask: Tensor, *, scaling: float | None, softcap: float | None, options: dict[str, Any]
) -> Tensor:
    """Return masked logits `[1, heads, rows, columns]` in float32 at least, before any softmax.

    Raises:
        ModelRefused: Heads have a learned sink of their own, which nothing here counts.
    """
    if options.get("s_aux") is not None:
        raise ModelRefused("heads of this model have learned sinks, for which this method has not been made")
    logits = _wide(per_kv_head(query, key.transpose(2, 3))) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    return (logits if softcap is None else torch.tanh(logits / softcap) * softcap) + mask


def per_kv_head(rows: Tensor, shared: Tensor) -> Tensor:
    """Return `[1, heads, rows, n] @ [1, kv_heads, n, m]`: heads that share keys or values take them as they lie."""
    batch, heads, count, width = rows.shape
    return (rows.reshape(batch, shared.shape[1], -1, width) @ shared).reshape(batch, heads, count, shared.shape[3])


def _attended_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    attended: Attended,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend, and in the layer that is looked at note the weights and break off."""
    if cast("int", module.layer_idx) == attended.layer:
        query, mask = query[:, :, -attended.rows :], attention_mask[:, :, -attended.rows :]
        logits = attention_logits(query, key, mask, scaling=scaling, softcap=softcap, options=options)
        joint = logits[..., attended.since :].sum(dim=1) / logits.shape[1] ** 0.5  # [1, rows, columns]
        attended.weights = joint.softmax(dim=-1).sum(dim=(0, 1))
        raise _Enough
    if softcap is None and options.get("s_aux") is None:
        return grouped_attention(module, query, key, value, attention_mask, scaling=scaling)
    logits = attention_logits(query, key, attention_mask, scaling=scaling, softcap=softcap, options=options)
    return per_kv_head(logits.softmax(dim=-1).to(value), value).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENDED, _attended_attention)
AttentionMaskInterface.register(ATTENDED, sdpa_mask)


def _forward(
    assembler: Assembler,
    cache: SlotCache | _Comparing,
    prompt: Prompt,
    layout: Layout,
    rows: Int[Tensor, " rows"],
    visible: dict[Any, Bool[Tensor, "rows columns"]],
    *,
    logits_to_keep: int = 1,
    **more: Any,
) -> Float[Tensor, "kept vocab"]:
    """Run these rows of a prompt under these masks."""
    runner = assembler.runner
    if isinstance(cache, SlotCache) and not more:
        cache.announce(rows.to(runner.device), length=len(layout))
    with torch.inference_mode(), grouped(runner.config, runner.device):
        return runner.forward(
            cache=cache,
            inputs_embeds=assembler.embed(prompt.ids(layout)[rows])[None],
            position_ids=rows[None].to(runner.device),
            attention_mask=runner.masks(visible),
            logits_to_keep=logits_to_keep,
            **more,
        )[0]


def _by_position(
    assembler: Assembler, rows: Int[Tensor, " rows"], columns: Int[Tensor, " columns"]
) -> dict[Any, Bool[Tensor, "rows columns"]]:
    nothing = torch.zeros(max(len(rows), len(columns)), dtype=torch.long)
    return {
        window: reference_mask(rows, nothing[: len(rows)], columns, nothing[: len(columns)], window=window.size)
        for window in assembler.runner.windows
    }


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _no_weights(assembler: Assembler, reason: str) -> str:
    return (
        f"the attention weights of {type(assembler.runner.model).__name__} cannot be seen ({reason}); "
        "choose a method that does not rank tokens by them"
    )
