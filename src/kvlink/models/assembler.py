"""Assembled attention: one buffer per prompt, documents rotated into their spans, one forward over the rest.

    S | D_1 L_1 | D_2 L_2 | T      S and D_i are laid out from what is known; L_i and T are computed

The reference of all faster ways to attend. A row at position p attends every column up to p: that alone gives
the reference mask, because every row that is computed here is in group 0. A pruned document keeps its length: what is
behind it stands where it would stand, and what was pruned is attended in no layer and head that pruned it.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from kvlink.core.entry import CacheEntry
from kvlink.core.errors import InputError, ModelRefused
from kvlink.core.layout import Kind, Layout, Prompt, reference_mask
from kvlink.models.adapter import Adapter
from kvlink.models.attention import grouped
from kvlink.models.cache import Prefix, SlotCache
from kvlink.models.links import LinkTokens, embed
from kvlink.models.rotary import CHUNK_BYTES
from kvlink.models.runner import Runner


class Assembler:
    """Lays prompts out and prefills them. Keeps one buffer between prompts, so that its pages stay mapped."""

    def __init__(self, runner: Runner, *, links: LinkTokens | None = None, adapter: Adapter | None = None) -> None:
        self.runner = runner
        self.links = links
        self.adapter = adapter
        self._spare: SlotCache | None = None

    @property
    def num_links(self) -> int:
        """K, the link tokens behind each segment; 0 without trained ones."""
        return self.links.num_links if self.links else 0

    def assemble(self, layout: Layout, *, prefix: Prefix, entries: Sequence[CacheEntry], room: int = 0) -> SlotCache:
        """Lay out what is known: S at the front, each entry rotated to its span.

        Args:
            layout: Where everything stands.
            prefix: Keys and values of S.
            entries: One per segment, in the prompt's order.
            room: Rows to keep free behind the prompt for the answer.

        Raises:
            ModelRefused: An entry is pruned, and layers of the model attend through a sliding window.
            ValueError: The layout is of other entries.
        """
        spans = layout.of(Kind.SEGMENT)
        if [len(span) for span in spans] != [entry.num_tokens for entry in entries]:
            raise ValueError(
                f"the layout has segments of {[len(s) for s in spans]} tokens, "
                f"the entries hold {[e.num_tokens for e in entries]}"
            )
        is_pruned = any(entry.is_pruned for entry in entries)
        if is_pruned:
            self._require_full_attention()
        cache = self._buffer(len(layout) + room)
        cache.keys[:, :, : len(prefix)] = prefix.keys[:, 0]
        cache.values[:, :, : len(prefix)] = prefix.values[:, 0]
        if spans:
            rotary = self.runner.rotary
            tables = rotary.tables(cache.keys, torch.arange(len(layout), device=self.runner.device))
            scratch = cache.keys.new_empty(CHUNK_BYTES // cache.keys.element_size())
            if is_pruned:
                cache.present = torch.ones(
                    *cache.keys.shape[:2], len(layout), dtype=torch.bool, device=cache.keys.device
                )
            for span, entry in zip(spans, entries, strict=True):
                rows = slice(span.start, span.stop)
                part = [table and (table[0][:, rows], table[1][:, rows]) for table in tables]
                keys = entry.keys.to(cache.keys.device)
                if entry.kept is None:
                    cache.values[:, :, rows] = entry.values
                else:
                    kept = entry.kept.to(cache.keys.device).long()
                    keys = _spread(keys, kept, out=keys.new_empty(*keys.shape[:2], len(span), keys.shape[3]))
                    _spread(entry.values.to(cache.values.device), kept, out=cache.values[:, :, rows])
                    if cache.present is not None:
                        cache.present[:, :, rows] = False
                        cache.present[:, :, rows].scatter_(2, kept, value=True)
                rotary.rotate_into(cache.keys[:, :, rows], keys, part, scratch)
        cache.length = len(prefix)
        return cache

    def prefill(
        self, cache: SlotCache, prompt: Prompt, layout: Layout, *, upto: int | None = None, logits_to_keep: int = 1
    ) -> Float[Tensor, "kept vocab"]:
        """Compute the rows of the request (labels, links, T) into the assembled buffer.

        Args:
            cache: From `assemble`.
            prompt: The ids that the layout was made of.
            layout: Where everything stands.
            upto: Compute rows below this position only; all if None.
            logits_to_keep: How many of the last rows' logits to return; 0 for all of them.
        """
        stop = len(layout) if upto is None else upto
        rows = layout.request_rows(after=len(prompt.system))
        rows = rows[rows < stop].to(self.runner.device)
        cache.announce(rows, length=stop)
        behind = layout.behind_documents
        cache.adapter = None if behind is None else self.adapter
        if not len(rows):
            return self.runner.embedding.weight.new_empty(0, self.runner.embedding.num_embeddings)
        columns = torch.arange(stop, device=self.runner.device)
        nothing = torch.zeros_like(columns)
        visible = {
            window: reference_mask(rows, nothing[: len(rows)], columns, nothing, window=window.size)
            for window in self.runner.windows
        }
        with torch.inference_mode(), grouped(self.runner.config, self.runner.device):
            return self.runner.forward(
                cache=cache,
                adapter=cache.adapter,
                factor=None if behind is None else (rows >= behind).to(self.runner.dtype)[None],
                inputs_embeds=self.embed(prompt.ids(layout)[rows.cpu()])[None],
                position_ids=rows[None],
                attention_mask=self.runner.masks(visible),
                logits_to_keep=logits_to_keep,
            )[0]

    def prefill_plain(
        self, prompt: Prompt, *, room: int = 0, upto: int | None = None, logits_to_keep: int = 1
    ) -> tuple[SlotCache, Float[Tensor, "kept vocab"]]:
        """Compute a prompt in full, by the model's own causal forward: no reuse, the same bits as the base model.

        Args:
            upto: Compute positions below this one only; all if None.
        """
        ids = prompt.ids(prompt.layout()).to(self.runner.device)
        ids = ids[:upto]
        cache = self._buffer(len(ids) + room)
        cache.length, cache.adapter = 0, None
        cache.announce(slice(0, len(ids)), length=len(ids))
        positions = torch.arange(len(ids), device=self.runner.device)[None]
        with torch.inference_mode():
            logits = self.runner.forward(
                cache=cache, input_ids=ids[None], position_ids=positions, logits_to_keep=logits_to_keep
            )
        return cache, logits[0]

    def embed(self, ids: Int[Tensor, " rows"]) -> Float[Tensor, "rows hidden"]:
        """Return input embeddings; ids below zero stand for link tokens of level `-1 - id`, in their order."""
        return embed(self.runner.embedding, self.links, ids.to(self.runner.device))

    def hand_over(self, cache: SlotCache) -> DynamicCache:
        """Return the rows of a buffer as the cache that stock `generate()` continues from.

        Raises:
            InputError: Documents were pruned, of which the model alone knows nothing.
        """
        if cache.present is not None:
            raise InputError(
                "a document of this prompt was read from a pruned object, and the model's own generate() would attend "
                "the tokens that are missing in it: answer with engine.generate(...), or accept no pruned codec"
            )
        stock = DynamicCache()
        for layer in range(self.runner.geometry.layers):
            rows = slice(0, cache.length)
            stock.update(cache.keys[layer][None, :, rows], cache.values[layer][None, :, rows], layer)
        return stock

    def release(self, cache: SlotCache) -> None:
        """Take a buffer back that nobody reads any more; the next prompt is laid out in it."""
        if self._spare is None or cache.capacity > self._spare.capacity:
            self._spare = cache

    def _buffer(self, rows: int) -> SlotCache:
        spare, self._spare = self._spare, None
        if spare is not None and rows <= spare.capacity:
            spare.present = None
            return spare
        shape, runner = self.runner.geometry, self.runner
        rows = -(-rows // 64) * 64
        return SlotCache(
            torch.empty(shape.layers, shape.kv_heads, rows, shape.head_dim, dtype=runner.dtype, device=runner.device),
            torch.empty(shape.layers, shape.kv_heads, rows, shape.value_dim, dtype=runner.dtype, device=runner.device),
        )

    def _require_full_attention(self) -> None:
        """Refuse a model in which a pruned document's tokens could also be out of a window."""
        sizes = [window.size for window in self.runner.windows if window.size]
        if sizes:
            raise ModelRefused(
                f"layers of this model attend through a sliding window of {sizes[0]} positions, for which pruned "
                "documents have not been made; read them in another codec, such as raw"
            )


def _spread(
    rows: Float[Tensor, "layers kv_heads rows dim"],
    kept: Int[Tensor, "layers kv_heads rows"],
    *,
    out: Float[Tensor, "layers kv_heads tokens dim"],
) -> Float[Tensor, "layers kv_heads tokens dim"]:
    """Write rows where they belong in each layer and head, and zeros where there is none; returns `out`."""
    return out.zero_().scatter_(2, kept[..., None].expand(rows.shape), rows)
