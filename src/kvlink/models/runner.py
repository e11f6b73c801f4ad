"""A model as the engine sees it: documents in, entries out; new tokens in, logits out.

One thread owns a runner. It knows no text, no store and no request; what a forward attends is decided by the
cache and the masks that it is given.
"""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from kvlink.core.entry import CacheEntry
from kvlink.core.errors import ModelError, ModelRefused
from kvlink.models.adapter import Adapter
from kvlink.models.attention import pruned, shared
from kvlink.models.cache import EncodeCache, Prefix, SlotCache, cache_argument
from kvlink.models.rotary import Rotary, rotary_modules, watching


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes of one model's keys and values, the same in all layers."""

    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values."""
        return self.layers * self.kv_heads * (self.head_dim + self.value_dim) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Window:
    """The mask type of some layers: `full_attention`, or a sliding window of `size` positions."""

    name: str
    size: int | None


def windows_of(config: Any) -> tuple[Window, ...]:
    """Return the mask type of each of a model's layers, from its text configuration.

    Raises:
        ModelRefused: A layer type is neither full nor sliding attention.
    """
    size = getattr(config, "sliding_window", None)
    layers = config.num_hidden_layers
    types = getattr(config, "layer_types", None) or ["sliding_attention" if size else "full_attention"] * layers
    unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise ModelRefused(
            f"{len(unknown)} of {len(types)} layers are of type {', '.join(sorted(set(unknown)))}, which cannot take "
            "stored documents; only full and sliding-window attention keep keys and values per token"
        )
    return tuple(Window(name, size if name == "sliding_attention" else None) for name in types)


class Runner:
    """Runs one causal language model of transformers.

    Attributes:
        geometry: Shapes of its keys and values.
        rotary: How it rotates.
        windows: Its distinct mask types.
        layer_windows: The size of each layer's window, or None.
        cache_argument: Name under which the model takes a cache.
    """

    def __init__(self, model: nn.Module) -> None:
        """Take a model as it is loaded and learn its anatomy from one small forward.

        Raises:
            ModelRefused: Its layers do not keep keys and values of one shape for each token.
        """
        self.model: Any = model.eval()
        self.config: Any = self.model.config.get_text_config()
        self.embedding: nn.Embedding = self.model.get_input_embeddings()
        self.dtype: torch.dtype = self.embedding.weight.dtype
        self.device: torch.device = self.embedding.weight.device
        each = windows_of(self.config)
        self.windows = tuple(dict.fromkeys(each))
        self.layer_windows = tuple(window.size for window in each)
        self.cache_argument = cache_argument(self.model.forward)
        cache = self._watch_forward()
        self.geometry = Geometry(*_shape_of(cache, self.config.num_hidden_layers))
        self._turning = [call is not None for call in cache.calls]
        try:
            self.rotary = Rotary.of(cache.calls)
        except ValueError as error:
            raise ModelRefused(f"the rotary embedding cannot be repeated outside the model: {error}") from error

    def _watch_forward(self) -> EncodeCache:
        """Run three tokens and return what the layers wrote."""
        if "position_ids" not in inspect.signature(self.model.forward).parameters:
            tables = sum(1 for _ in rotary_modules(self.model))
            raise ModelRefused(
                f"the forward of {type(self.model).__name__} takes no position_ids and has {tables} rotary tables: "
                "its positions are not in the keys (ALiBi, recurrence), so a stored document cannot be placed"
            )
        ids = torch.arange(3, device=self.device)[None] % self.embedding.num_embeddings
        with watching(self.model) as watch, torch.inference_mode():
            cache = EncodeCache(watch)
            try:
                self.forward(cache=cache, input_ids=ids, position_ids=torch.arange(3, device=self.device)[None])
            except (AttributeError, NotImplementedError, ValueError, TypeError, RuntimeError, IndexError) as error:
                raise ModelRefused(
                    f"{type(self.model).__name__} does not run with a plain cache of keys and values "
                    f"({type(error).__name__}: {error}); wanted are layers that keep keys and values per token "
                    "and turn them with apply_rotary_pos_emb(q, k, cos, sin)"
                ) from error
        return cache

    def forward(
        self,
        *,
        cache: Any,
        logits_to_keep: int | Tensor = 1,
        adapter: Adapter | None = None,
        factor: Float[Tensor, "batch rows"] | None = None,
        **inputs: Any,
    ) -> Float[Tensor, "batch kept vocab"]:
        """Run the model over new tokens; what they write and attend is the cache's affair.

        Args:
            logits_to_keep: How many of the last rows' logits to return (0: all), or the indices of rows.
            adapter, factor: Low-rank changes, and what each row's change is multiplied with (None: 1).
        """
        inputs[self.cache_argument] = cache
        acting = nullcontext() if adapter is None else adapter.acting(self.model, factor)
        attending = getattr(cache, "attending", None)
        if attending is None:
            replaced = pruned(self.config, getattr(cache, "present", None))
        else:
            replaced = shared(self.config, attending, layers=self.geometry.layers)
        with acting, replaced as keywords:
            return self.model(**inputs, **keywords, use_cache=cache is not None, logits_to_keep=logits_to_keep).logits

    def embed(self, ids: Sequence[int]) -> Float[Tensor, "tokens hidden"]:
        """Return the input embeddings of ids."""
        return self.embedding(torch.tensor(ids, dtype=torch.long, device=self.device))

    def masks(self, visible: dict[Window, Bool[Tensor, "rows columns"]]) -> Any:
        """Return masks in the form that this model's forward takes: one, or one per mask type.

        They are additive and finite, which every attention of transformers takes; a boolean one would be turned
        into that form again in each layer.
        """
        if len(self.windows) == 1:
            return self._additive(visible[self.windows[0]])
        return {window.name: self._additive(visible[window]) for window in self.windows}

    def _additive(self, mask: Bool[Tensor, "rows columns"]) -> Float[Tensor, "1 1 rows columns"]:
        zeros = torch.zeros(mask.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill_(~mask.to(self.device), torch.finfo(self.dtype).min)[None, None]

    def prefix(self, ids: Sequence[int]) -> Prefix | None:
        """Compute keys and values of a prompt's first tokens, which see nothing else; None for no ids."""
        if not ids:
            return None
        cache = self._encode([tuple(ids)], prefix=None, offset=0)
        return Prefix(torch.stack(cache.cached_keys), torch.stack(cache.values))

    def encode(
        self, batch: Sequence[tuple[int, ...]], *, prefix: Prefix | None = None, offset: int = 0
    ) -> list[CacheEntry]:
        """Encode segments, each alone behind the sink prefix.

        Args:
            batch: Ids of each segment; best of similar length, since shorter ones are padded.
            prefix: The sink prefix at positions 0, 1, ..., or None.
            offset: Position of a segment's first token when there is no prefix; only the probe moves it.
        """
        cache = self._encode(batch, prefix=prefix, offset=offset)
        keys, values = torch.stack(cache.keys), torch.stack(cache.values)  # [layers, batch, kv_heads, tokens, dim]
        return [
            CacheEntry(keys[:, row, :, : len(ids)].contiguous(), values[:, row, :, : len(ids)].contiguous(), ids)
            for row, ids in enumerate(batch)
        ]

    def encode_after(self, kept: CacheEntry, ids: tuple[int, ...], *, prefix: Prefix | None = None) -> CacheEntry:
        """Encode a segment whose beginning is known: its first rows are copied, only the others are computed.

        Exact up to rounding: attention is causal, so a beginning's keys and values do not depend on what follows.

        Args:
            kept: The entry of the beginning, encoded behind the same `prefix` and stored bit for bit.
            ids: Ids of the whole segment.
            prefix: The sink prefix at positions 0, 1, ..., or None.

        Raises:
            ValueError: The segment does not begin with the ids of `kept`, nothing is kept, or rows of it are missing.
        """
        num_kept = kept.num_tokens
        if not num_kept or ids[:num_kept] != kept.token_ids or kept.is_pruned:
            raise ValueError(f"the segment of {len(ids)} ids does not begin with the {num_kept} ids that are kept")
        if num_kept == len(ids):
            return CacheEntry(kept.keys.clone(), kept.values.clone(), ids)
        keys, values = kept.keys.to(self.device), kept.values.to(self.device)
        start = len(prefix) if prefix else 0
        with torch.inference_mode():
            rotated = self.rotary.rotate(keys, torch.arange(start, start + num_kept, device=self.device))
            before = Prefix(rotated[:, None], values[:, None])  # [layers, 1, kv_heads, kept, dim]
            if prefix:
                before = Prefix(
                    torch.cat((prefix.keys, before.keys), dim=3), torch.cat((prefix.values, before.values), dim=3)
                )
            cache = self._encode([ids[num_kept:]], prefix=before, offset=0)
            return CacheEntry(
                torch.cat((keys, torch.stack([layer[0] for layer in cache.keys])), dim=2),
                torch.cat((values, torch.stack([layer[0] for layer in cache.values])), dim=2),
                ids,
            )

    def _encode(self, batch: Sequence[tuple[int, ...]], *, prefix: Prefix | None, offset: int) -> EncodeCache:
        longest = max(map(len, batch))
        start = len(prefix) if prefix else 0
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in batch], device=self.device)
        positions = torch.arange(longest, device=self.device)[None] + start + offset
        mask = None
        if any(len(row) < longest for row in batch):
            lengths = torch.tensor([len(row) for row in batch], device=self.device)
            columns = torch.arange(start + longest, device=self.device)
            mask = (columns[None] < start + lengths[:, None]).long()
        with watching(self.model) as watch, torch.inference_mode():
            cache = EncodeCache(watch, prefix)
            self.forward(cache=cache, input_ids=ids, position_ids=positions, attention_mask=mask)
        self.require_turning([call is not None for call in cache.calls])
        return cache

    def require_turning(self, turned: list[bool]) -> None:
        """Hold the layers that were seen to rotate in a forward to those that did so when the model was loaded.

        Raises:
            ModelError: They are others.
        """
        if turned != self._turning:
            raise ModelError(
                f"the layers that rotate were {self._turning} when the model was loaded and are {turned} now; "
                "something has replaced its rotary function, so what was encoded is thrown away: load the model again"
            )

    def decode(self, cache: SlotCache, token_id: int) -> Float[Tensor, " vocab"]:
        """Append one token behind the last row of the buffer and return its logits."""
        row = cache.length
        cache.announce(slice(row, row + 1), length=row + 1)
        ids = torch.tensor([[token_id]], device=self.device)
        with torch.inference_mode():
            return self.forward(
                cache=cache,
                adapter=cache.adapter,
                input_ids=ids,
                position_ids=torch.full_like(ids, row),
            )[0, -1]

    def synchronize(self) -> None:
        """Wait until the device has done what was asked; timings are taken behind this."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _shape_of(cache: EncodeCache, layers: int) -> tuple[int, int, int, int]:
    """Return layers, kv_heads, head_dim and value_dim, or refuse a model whose layers differ."""
    if len(cache.keys) != layers:
        raise ModelRefused(
            f"{len(cache.keys)} of {layers} layers wrote keys and values; the others keep another state, or none "
            "(recurrent or linear attention, keys and values shared between layers)"
        )
    shapes = {(k.shape[1], k.shape[3], v.shape[3]) for k, v in zip(cache.keys, cache.values, strict=True)}
    if len(shapes) != 1:
        raise ModelRefused(f"its layers keep keys and values of different shapes: {sorted(shapes)}")
    return layers, *shapes.pop()
