"""What shared attention reads and writes: documents, a request's own rows, and the new ones of a forward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlink.models.runner import Runner


@runtime_checkable
class Readable(Protocol):
    """A document as it lies in memory: keys rotated at positions 0, 1, ..., those that were pruned left out."""

    @property
    def keys(self) -> Float[Tensor, "layers kv_heads kept head_dim"]:
        """Keys of all layers."""
        ...

    @property
    def values(self) -> Float[Tensor, "layers kv_heads kept value_dim"]:
        """Values of all layers."""
        ...

    @property
    def num_tokens(self) -> int:
        """Positions that it takes, pruned ones counted."""
        ...


class OwnRows:
    """Keys and values of one request's own tokens, in position order, rotated at their global positions.

    Attributes:
        keys: `[layers, kv_heads, capacity, head_dim]`.
        values: `[layers, kv_heads, capacity, value_dim]`.
        positions: Global positions of the rows; those behind `length` mean nothing.
        length: Rows that hold something, or will once the forward that was announced has run.
    """

    def __init__(self, runner: Runner, capacity: int) -> None:
        shape = runner.geometry
        rows = shape.layers, shape.kv_heads, capacity
        self.keys = torch.empty(*rows, shape.head_dim, dtype=runner.dtype, device=runner.device)
        self.values = torch.empty(*rows, shape.value_dim, dtype=runner.dtype, device=runner.device)
        self.positions = torch.empty(capacity, dtype=torch.long)
        self.length = 0

    @property
    def capacity(self) -> int:
        """Rows that it can hold."""
        return self.keys.shape[2]

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values, free rows counted."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """New rows of one request in a forward.

    Attributes:
        own: What the request has computed; the new rows are written behind it.
        positions: Global positions of the new rows, ascending.
        documents: Documents with their first positions, ascending; a row attends those that start before it.
        unrotated: Where the keys of the new rows are noted as they are before the rotary embedding, or None.
    """

    own: OwnRows
    positions: Int[Tensor, " rows"]
    documents: Sequence[tuple[Readable, int]] = ()
    unrotated: Float[Tensor, "layers kv_heads rows head_dim"] | None = None
