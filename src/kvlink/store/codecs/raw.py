"""`raw`: keys and values bit for bit. The only codec that exact rebuilds start from."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from kvlink.core.entry import CacheEntry
from kvlink.store.codecs.base import Codec
from kvlink.store.header import Geometry, TensorPlan


@final
class Raw(Codec):
    """Keys and values bit for bit, whatever they are. Unpacking copies nothing."""

    def plan(self, geometry: Geometry, dtype: torch.dtype) -> dict[str, TensorPlan]:
        """Return `keys`, then `values`."""
        shape = (geometry.layers, geometry.kv_heads, geometry.tokens)
        return {
            "keys": TensorPlan(dtype, (*shape, geometry.head_dim)),
            "values": TensorPlan(dtype, (*shape, geometry.value_dim)),
        }

    def pack(self, entry: CacheEntry) -> dict[str, Tensor]:
        """Return keys and values as they are."""
        return {"keys": entry.keys, "values": entry.values}

    def unpack(
        self, tensors: Mapping[str, Tensor], *, geometry: Geometry, dtype: torch.dtype, token_ids: tuple[int, ...]
    ) -> CacheEntry:
        """Return an entry over the very tensors given."""
        return CacheEntry(tensors["keys"], tensors["values"], token_ids)
