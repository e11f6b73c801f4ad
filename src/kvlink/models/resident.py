"""A segment as attention reads it: keys rotated at local positions 0, 1, ..., once, for all requests that hold it.

    R(p + t) k . R(m) q  =  R(t) k . R(m - p) q

A document may stand anywhere: the query is turned back by the document's start, and its keys stay as they are. Knows
no stores and no requests.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvlink.core.entry import CacheEntry
from kvlink.models.runner import Runner


@dataclass(frozen=True, slots=True, eq=False)
class Resident:
    """Rotated keys and values of one segment, on the model's device, in its dtype, contiguous. Never written to.

    Attributes:
        keys: Keys of local positions, bit-equal to what the model caches there. Of a pruned segment each layer and
            head has the rows that it kept, ascending, each rotated at its own position.
        values: Values of the same rows; their `head_dim` may differ from that of the keys.
        token_ids: The ids of the segment; all of them, pruned or not.
    """

    keys: Float[Tensor, "layers kv_heads rows head_dim"]
    values: Float[Tensor, "layers kv_heads rows value_dim"]
    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, entry: CacheEntry, runner: Runner, *, copy_values: bool = False) -> "Resident":
        """Rotate an entry's keys; take its values as they are where device, dtype and strides allow.

        Args:
            entry: From this model; on any device.
            runner: The model.
            copy_values: Copy values in any case, so that nothing keeps the memory of the entry.
        """
        keys = entry.keys.to(runner.device, runner.dtype)
        values = entry.values.to(runner.device, runner.dtype, copy=copy_values).contiguous()
        positions = torch.arange(entry.num_tokens, device=runner.device)
        if entry.kept is None or not entry.is_pruned:
            rotated = torch.empty_like(keys, memory_format=torch.contiguous_format)
            runner.rotary.rotate_into(rotated, keys, runner.rotary.tables(keys, positions))
        else:
            rows = entry.kept.to(runner.device).long()[..., None].expand(keys.shape)
            spread = keys.new_zeros(*keys.shape[:2], entry.num_tokens, keys.shape[3]).scatter_(2, rows, keys)
            rotated = runner.rotary.rotate(spread, positions).gather(2, rows)
        return cls(rotated, values, entry.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens in the segment, pruned ones counted: how far what stands behind it is moved."""
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values together."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def is_pruned(self) -> bool:
        """Whether rows of some tokens are missing."""
        return self.keys.shape[2] < self.num_tokens
