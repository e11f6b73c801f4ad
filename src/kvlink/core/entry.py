"""The unit of reuse: the keys and values of one segment, without positions."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CacheEntry:
    """Keys (before RoPE) and values of one segment, of all layers. Never written to after its making.

    Attributes:
        keys: Unrotated keys, in the model's dtype.
        values: Values, in the model's dtype; their `head_dim` may differ from that of the keys.
        token_ids: The ids that were encoded, sink prefix not included.
    """

    keys: Float[Tensor, "layers kv_heads tokens head_dim"]
    values: Float[Tensor, "layers kv_heads tokens value_dim"]
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        tokens = len(self.token_ids)
        if self.keys.shape[:3] != self.values.shape[:3] or self.keys.shape[2] != tokens:
            raise ValueError(
                f"an entry of {tokens} tokens needs keys and values of [layers, kv_heads, {tokens}, head_dim], "
                f"but they have the shapes {tuple(self.keys.shape)} and {tuple(self.values.shape)}"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens in the segment."""
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values together."""
        return self.keys.nbytes + self.values.nbytes

    def equals(self, other: "CacheEntry") -> bool:
        """Whether the other entry holds the same ids and the very same bits."""
        return (
            self.token_ids == other.token_ids
            and same_bits(self.keys, other.keys)
            and same_bits(self.values, other.values)
        )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits. `torch.equal` compares numbers: 0.0 is -0.0 to it."""
    one_bytes, other_bytes = (tensor.contiguous().view(torch.uint8) for tensor in (one, other))
    return one.dtype == other.dtype and torch.equal(one_bytes, other_bytes)
