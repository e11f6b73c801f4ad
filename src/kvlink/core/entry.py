"""The unit of reuse: the keys and values of one segment, without positions; of all its tokens, or of those kept."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CacheEntry:
    """Keys (before RoPE) and values of one segment, of all layers. Never written to after its making.

    Attributes:
        keys: Unrotated keys, in the model's dtype.
        values: Values, in the model's dtype; their `head_dim` may differ from that of the keys.
        token_ids: The ids that were encoded, sink prefix not included; all of them, pruned or not.
        kept: For each layer and head the tokens whose rows are here, ascending; None where all are. A pruned entry is
            no base of an exact rebuild.
    """

    keys: Float[Tensor, "layers kv_heads rows head_dim"]
    values: Float[Tensor, "layers kv_heads rows value_dim"]
    token_ids: tuple[int, ...]
    kept: Int32[Tensor, "layers kv_heads rows"] | None = None

    def __post_init__(self) -> None:
        tokens, rows = len(self.token_ids), self.keys.shape[2]
        if self.kept is None:
            if self.keys.shape[:3] != self.values.shape[:3] or rows != tokens:
                raise ValueError(
                    f"an entry of {tokens} tokens needs keys and values of [layers, kv_heads, {tokens}, head_dim], "
                    f"but they have the shapes {tuple(self.keys.shape)} and {tuple(self.values.shape)}"
                )
        elif not self.keys.shape[:3] == self.values.shape[:3] == self.kept.shape or rows > tokens:
            raise ValueError(
                f"a pruned entry of {tokens} tokens needs keys, values and kept of [layers, kv_heads, rows] with at "
                f"most {tokens} rows, but they have the shapes {tuple(self.keys.shape)}, {tuple(self.values.shape)} "
                f"and {tuple(self.kept.shape)}"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens in the segment, pruned ones counted."""
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values together, and of what says which rows they are."""
        return self.keys.nbytes + self.values.nbytes + (0 if self.kept is None else self.kept.nbytes)

    @property
    def is_pruned(self) -> bool:
        """Whether rows of some tokens are missing."""
        return self.keys.shape[2] < self.num_tokens

    def equals(self, other: "CacheEntry") -> bool:
        """Whether the other entry holds the same ids and the very same bits, of the same rows."""
        pairs = [(self.keys, other.keys), (self.values, other.values)]
        if self.kept is not None and other.kept is not None:
            pairs.append((self.kept, other.kept))
        return (
            self.token_ids == other.token_ids
            and (self.kept is None) == (other.kept is None)
            and all(same_bits(one, another) for one, another in pairs)
        )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits. `torch.equal` compares numbers: 0.0 is -0.0 to it."""
    one_bytes, other_bytes = (tensor.contiguous().view(torch.uint8) for tensor in (one, other))
    return one.dtype == other.dtype and torch.equal(one_bytes, other_bytes)
