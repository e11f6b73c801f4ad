"""The promise that every codec keeps: an entry becomes named tensors, and these an entry again. Knows no bytes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvlink.core.entry import CacheEntry
from kvlink.store.header import Geometry, TensorPlan


class Codec(ABC):
    """How the numbers of an entry become named tensors and back. The file around them is the same for all codecs."""

    prunes: ClassVar[bool] = False
    """Whether tokens are left out, which not every model can attend. Nothing is turned into such a codec unasked."""

    @abstractmethod
    def plan(self, geometry: Geometry, dtype: torch.dtype) -> dict[str, TensorPlan]:
        """Return the tensors that an object holds, in the order of their bytes, wide elements first.

        Args:
            geometry: Sizes of the entry.
            dtype: That of the entry.

        Raises:
            ValueError: Nothing would be gained for entries of this dtype.
        """

    @abstractmethod
    def pack(self, entry: CacheEntry) -> dict[str, Tensor]:
        """Return the planned tensors of `entry`, on its device.

        Raises:
            ValueError: A number of the entry has no place in this codec.
        """

    @abstractmethod
    def unpack(
        self, tensors: Mapping[str, Tensor], *, geometry: Geometry, dtype: torch.dtype, token_ids: tuple[int, ...]
    ) -> CacheEntry:
        """Return the entry that was packed, in its own dtype, as exactly as this codec can; on the tensors' device."""

    def check(  # noqa: B027 (where any bits are an entry, none are refused)
        self, tensors: Mapping[str, Tensor], geometry: Geometry
    ) -> None:
        """Refuse tensors that `pack` never makes and that would give numbers which are none, or rows of no token.

        Args:
            tensors: As `plan` says.
            geometry: Sizes of the entry.

        Raises:
            ValueError: There are such.
        """


def geometry_of(entry: CacheEntry) -> Geometry:
    """Return the sizes of an entry that is to be packed.

    Raises:
        ValueError: It is empty, or pruned: what a codec has left out no other one can hold.
    """
    if entry.kept is not None:
        raise ValueError(
            f"a pruned entry ({entry.keys.shape[2]} of {entry.num_tokens} tokens) is packed by no codec: pass on the "
            "object that it came from, or encode the document again"
        )
    layers, kv_heads, tokens, head_dim = entry.keys.shape
    return Geometry(layers=layers, kv_heads=kv_heads, tokens=tokens, head_dim=head_dim, value_dim=entry.values.shape[3])


def private_memory(num_bytes: int) -> memoryview:
    """Return fresh memory. numpy asks for huge pages, which makes it five times as fast to fill as a bytearray."""
    return np.empty(num_bytes, dtype=np.uint8).data


def fresh_tensor(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor to be filled, on a CPU in `private_memory`."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(private_memory(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
