"""The caches that a forward writes to, and the one place where transformers' changing names are met.

`EncodeCache` keeps what a document's keys and values are; `SlotCache` is the buffer that a prompt is laid out in.
`PastCache` joins new rows to constant ones, so that gradients can flow. All stand where transformers expects its own
cache and build on nothing of it but the `Cache` interface.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache

from kvlink.models.adapter import Adapter
from kvlink.models.rotary import Call, Watch


def cache_argument(function: Callable[..., Any]) -> str:
    """Return the name under which a forward, or `generate`, takes a cache (renamed in transformers 5.24)."""
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"


def unrotated_keys(call: Call | None, keys: Tensor) -> Tensor:
    """Return the keys that a layer wrote, `[batch, kv_heads, tokens, head_dim]`, as they were before it rotated them.

    Args:
        call: Of its rotary function; None where it has none.
    """
    if call is None:
        return keys
    # partial rotary: the channels that passed the function by stand at the end of the cached key
    return torch.cat((call.keys, keys[..., call.keys.shape[-1] :]), dim=-1)


class EncodeCache(Cache):
    """Collects unrotated keys and values of the rows of one forward, layer by layer.

    Rows may stand behind a known prefix, whose rotated keys and values all rows of the batch attend.
    """

    def __init__(self, watch: Watch, prefix: "Prefix | None" = None) -> None:
        super().__init__(layers=[])
        self.keys: list[Float[Tensor, "batch kv_heads tokens head_dim"]] = []
        self.cached_keys: list[Float[Tensor, "batch kv_heads tokens head_dim"]] = []
        self.values: list[Float[Tensor, "batch kv_heads tokens value_dim"]] = []
        self.calls: list[Call | None] = []
        self._watch = watch
        self._prefix = prefix

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Note one layer's keys and values; return them behind those of the prefix."""
        if layer_idx != len(self.keys):
            raise ValueError(f"layer {layer_idx} wrote keys and values when {len(self.keys)} layers had done so before")
        call = self._watch.take()
        self.calls.append(call)
        self.keys.append(unrotated_keys(call, key_states))
        self.cached_keys.append(key_states)
        self.values.append(value_states)
        if self._prefix is None:
            return key_states, value_states
        batch = len(key_states)
        past_keys = self._prefix.keys[layer_idx].expand(batch, -1, -1, -1)
        past_values = self._prefix.values[layer_idx].expand(batch, -1, -1, -1)
        return torch.cat((past_keys, key_states), dim=2), torch.cat((past_values, value_states), dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that stood in the cache before this forward."""
        return 0 if self._prefix is None else len(self._prefix)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns of the mask and the index of the first."""
        return self.get_seq_length() + query_length, 0


class Prefix:
    """Rotated keys and values of a prompt's first tokens (S, or a sink prefix), at positions 0, 1, ...

    Attributes:
        keys: `[layers, 1, kv_heads, tokens, head_dim]`, rotated.
        values: `[layers, 1, kv_heads, tokens, value_dim]`.
    """

    __slots__ = ("keys", "values")

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values

    def __len__(self) -> int:
        return self.keys.shape[3]


class SlotCache(Cache):
    """One buffer per layer whose rows are written at given positions; physical order is position order.

    That order matters: transformers builds the masks of sliding windows from physical indices.

    Attributes:
        keys: `[layers, kv_heads, capacity, head_dim]`, rotated.
        values: `[layers, kv_heads, capacity, value_dim]`.
        length: Rows that hold something, or will once the forward that was announced has run.
        present: Where documents were pruned, which rows of the prompt are there; None where all are.
        adapter: What acts on rows that are appended: that of the bundle if the prompt has documents, else None.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__(layers=[])
        self.keys = keys
        self.values = values
        self.length = 0
        self.adapter: Adapter | None = None
        self.present: Bool[Tensor, "layers kv_heads rows"] | None = None
        self._rows: Int[Tensor, " rows"] | slice = slice(0, 0)
        self._seen = 0

    @property
    def capacity(self) -> int:
        """Rows that the buffer can hold."""
        return self.keys.shape[2]

    def announce(self, rows: Int[Tensor, " rows"] | slice, *, length: int) -> None:
        """Say which rows the next forward writes, and how many rows it attends.

        Raises:
            ValueError: The buffer is too small.
        """
        if length > self.capacity:
            raise ValueError(f"the buffer holds {self.capacity} rows, {length} were announced")
        self._seen = self.length
        self._rows, self.length = rows, length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the announced rows of one layer; return all rows."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[:, self._rows] = key_states[0]
        values[:, self._rows] = value_states[0]
        return keys[None, :, : self.length], values[None, :, : self.length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows that stood in the cache before the announced forward."""
        return self._seen

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns of the mask and the index of the first."""
        return self.length, 0


class PastCache(Cache):
    """Constant keys and values with the rows of one forward behind them; made for gradients, so nothing is written.

    Physical order is not position order: only for forwards under explicit masks.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Take rotated keys `[layers, kv_heads, columns, head_dim]` and values of the same columns."""
        super().__init__(layers=[])
        self._keys = keys
        self._values = values

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return one layer's new rows behind the constant ones."""
        batch = len(key_states)
        keys = self._keys[layer_idx].expand(batch, -1, -1, -1)
        values = self._values[layer_idx].expand(batch, -1, -1, -1)
        return torch.cat((keys, key_states), dim=2), torch.cat((values, value_states), dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Constant columns."""
        return self._keys.shape[2]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns of the mask and the index of the first."""
        return self.get_seq_length() + query_length, 0
