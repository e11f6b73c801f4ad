"""The base model with a prefix cache, as a rival: of a prompt that begins like the last one, only the rest is computed.

Full attention, exact. It is made to be fast: rows stand in one buffer and are cropped where they lie, so nothing is
copied, and no mask is built. With the cache of transformers (`DynamicCache`, cropped) all keys are copied in each
layer of each forward, and rows behind known ones need an explicit mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvlink.models.rows import OwnRows, Run
from kvlink.models.runner import Runner
from kvlink.models.shared import forward


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What a prefix cache held at some time."""

    ids: tuple[int, ...]
    keys: Float[Tensor, "layers kv_heads tokens head_dim"]
    values: Float[Tensor, "layers kv_heads tokens value_dim"]


class PrefixCache:
    """Keys and values of the last prompt and its answer.

    Attributes:
        computed: Tokens that the last prompt computed.
    """

    def __init__(self, runner: Runner, *, capacity: int) -> None:
        """Make room for the longest prompt with its answer."""
        self.computed = 0
        self._runner = runner
        self._own = OwnRows(runner, capacity)
        self._ids: tuple[int, ...] = ()

    def prefill(self, ids: Sequence[int]) -> Float[Tensor, " vocab"]:
        """Compute what is not known of a prompt, its last token in any case; returns the logits behind it."""
        common = min(common_beginning(self._ids, ids), len(ids) - 1)
        self.computed = len(ids) - common
        self._own.length = common
        self._ids = tuple(ids)
        return self._forward(ids[common:])

    def append(self, token: int) -> Float[Tensor, " vocab"]:
        """Compute one more token; returns the logits behind it."""
        self._ids = (*self._ids, token)
        return self._forward([token])

    def forget(self) -> None:
        """Know nothing any more."""
        self._ids = ()

    def snapshot(self) -> Snapshot:
        """Return a copy of what is known."""
        rows = slice(0, len(self._ids))
        return Snapshot(self._ids, self._own.keys[:, :, rows].clone(), self._own.values[:, :, rows].clone())

    def restore(self, snapshot: Snapshot) -> None:
        """Know again what was known then."""
        rows = slice(0, len(snapshot.ids))
        self._ids = snapshot.ids
        self._own.keys[:, :, rows], self._own.values[:, :, rows] = snapshot.keys, snapshot.values
        self._own.positions[rows] = torch.arange(len(snapshot.ids))

    def _forward(self, ids: Sequence[int]) -> Float[Tensor, " vocab"]:
        start = self._own.length
        with torch.inference_mode():
            run = Run(self._own, torch.arange(start, start + len(ids)))
            keep = torch.tensor([len(ids) - 1], device=self._runner.device)
            return forward(self._runner, [run], self._runner.embed(ids), keep=keep)[0]


def common_beginning(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many ids two runs have in common at their beginnings."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
