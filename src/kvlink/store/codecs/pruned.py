"""`pruned75`, `pruned50`, `pruned25`: so many per cent of a raw object, as fewer tokens in the entry's own dtype.

For each layer and head the tokens that matter least are left out, judged from keys alone (`core.pruning`). What is kept
is kept bit for bit; attention to what is left out is lost. The number of kept tokens follows from the entry's sizes, so
that sizes are known before anything is packed: the int32 position beside each row is paid for, and the tokens that are
always kept make short documents larger than their share.
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from kvlink.core.entry import CacheEntry
from kvlink.core.pruning import ALWAYS, FIRST, SCORES, kept_rows
from kvlink.store.codecs.base import Codec, geometry_of
from kvlink.store.header import Geometry, TensorPlan

POSITION = torch.int32


@final
class Pruned(Codec):
    """Rows of the tokens with the highest scores, and which tokens they are."""

    prunes = True

    def __init__(self, percent: int, *, score: str = "keydiff") -> None:
        """Take a size.

        Args:
            percent: Of the bytes of raw keys and values.
            score: One of `core.pruning.SCORES`. Readers need not know it.
        """
        self.percent = percent
        self._score = SCORES[score]

    def num_kept(self, geometry: Geometry, dtype: torch.dtype) -> int:
        """Return how many tokens of each layer and head are kept."""
        row = (geometry.head_dim + geometry.value_dim) * dtype.itemsize
        fitting = geometry.tokens * row * self.percent // (100 * (row + POSITION.itemsize))
        return min(geometry.tokens, max(ALWAYS, fitting))

    def plan(self, geometry: Geometry, dtype: torch.dtype) -> dict[str, TensorPlan]:
        """Return `keys`, `values`, then `positions`; those before `keys` where their elements are wider."""
        shape = (geometry.layers, geometry.kv_heads, self.num_kept(geometry, dtype))
        plans = {
            "keys": TensorPlan(dtype, (*shape, geometry.head_dim)),
            "values": TensorPlan(dtype, (*shape, geometry.value_dim)),
            "positions": TensorPlan(POSITION, shape),
        }
        return dict(sorted(plans.items(), key=lambda item: -item[1].dtype.itemsize))

    def pack(self, entry: CacheEntry) -> dict[str, Tensor]:
        """Return the rows that are kept and their positions.

        Raises:
            ValueError: The entry is pruned already, or its keys cannot be judged.
        """
        count = self.num_kept(geometry_of(entry), entry.keys.dtype)
        kept = kept_rows(self._score(entry.keys), count)
        rows = kept.long()[..., None]  # [layers, kv_heads, kept, 1]
        keys, values = (
            tensor.gather(2, rows.expand(*kept.shape, tensor.shape[3])) for tensor in (entry.keys, entry.values)
        )
        return {"keys": keys, "values": values, "positions": kept}

    def unpack(
        self, tensors: Mapping[str, Tensor], *, geometry: Geometry, dtype: torch.dtype, token_ids: tuple[int, ...]
    ) -> CacheEntry:
        """Return an entry over the very tensors given, marked as pruned by its `kept`."""
        return CacheEntry(tensors["keys"], tensors["values"], token_ids, tensors["positions"])

    def check(self, tensors: Mapping[str, Tensor], geometry: Geometry) -> None:
        """Refuse positions that do not ascend, are none of the entry's, or miss a token that is always kept."""
        positions = tensors["positions"].long()
        first = torch.arange(min(FIRST, geometry.tokens), device=positions.device)
        if not (
            (positions.diff(dim=-1) > 0).all()
            and (positions[..., : len(first)] == first).all()
            and (positions[..., -1] == geometry.tokens - 1).all()
        ):
            raise ValueError(
                f"its positions are not ascending ones of {geometry.tokens} tokens, with the first {len(first)} and "
                "the last among them"
            )
