"""`half`: entries of 32 or 64 bits, rounded to 16.

The 16 bits are float16. Keys before RoPE and values are small numbers (on SmolLM2-135M none is above 23), so the three
bits of mantissa that float16 has more count, and the range of bfloat16 does not: the error is 2.0e-4 against 1.6e-3.
An entry whose numbers float16 cannot hold is refused, not cut off.
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from kvlink.core.entry import CacheEntry
from kvlink.store.codecs.base import Codec, fresh_tensor
from kvlink.store.codecs.raw import Raw
from kvlink.store.header import Geometry, TensorPlan


@final
class Half(Codec):
    """Keys and values as float16. An entry that has 16 bits already is refused: `raw` is as small, and exact."""

    def plan(self, geometry: Geometry, dtype: torch.dtype) -> dict[str, TensorPlan]:
        """Return `keys`, then `values`."""
        _require_wide(dtype)
        return Raw().plan(geometry, torch.float16)

    def pack(self, entry: CacheEntry) -> dict[str, Tensor]:
        """Return rounded keys and values."""
        _require_wide(entry.keys.dtype)
        packed = {"keys": entry.keys.half(), "values": entry.values.half()}
        for name, tensor in packed.items():
            low, high = tensor.aminmax()  # both NaN where there is one
            if not (low.isfinite() and high.isfinite()):
                raise ValueError(
                    f"half holds numbers up to {torch.finfo(torch.float16).max:g}, but rounded {name} reach from "
                    f"{low.item():g} to {high.item():g}; take raw, which holds any"
                )
        return packed

    def unpack(
        self, tensors: Mapping[str, Tensor], *, geometry: Geometry, dtype: torch.dtype, token_ids: tuple[int, ...]
    ) -> CacheEntry:
        """Return an entry of `dtype`."""
        keys, values = (
            fresh_tensor(tuple(tensor.shape), dtype=dtype, device=tensor.device).copy_(tensor)
            for tensor in (tensors["keys"], tensors["values"])
        )
        return CacheEntry(keys, values, token_ids)


def _require_wide(dtype: torch.dtype) -> None:
    if dtype.itemsize <= torch.float16.itemsize:
        raise ValueError(f"half of {dtype} saves nothing; take raw, which is exact")
