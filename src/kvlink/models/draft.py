"""An entry in the making: a segment's rows go through the forwards of others, some at a time.

    S* | D        S*: the sink prefix as it is known; rows of D attend it and what of D stands before them

The rows stand at the positions that `Runner.encode` gives them; what they write is kept rotated, for the rows that
follow, and unrotated, for the entry.
"""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from kvlink.core.entry import CacheEntry
from kvlink.models.cache import Prefix
from kvlink.models.rows import OwnRows, Run
from kvlink.models.runner import Runner


@final
class Draft:
    """Rows of one segment, those that are computed and those that are left.

    Args:
        ids: Of the whole segment.
        prefix: The sink prefix at positions 0, 1, ..., or None.
        kept: The entry of a beginning of the segment, encoded behind the same prefix and stored bit for bit: it is
            copied. See `Runner.encode_after`.

    Attributes:
        own: Keys and values behind the prefix, rotated.
    """

    def __init__(
        self, runner: Runner, ids: tuple[int, ...], *, prefix: Prefix | None = None, kept: CacheEntry | None = None
    ) -> None:
        self._runner, self.token_ids = runner, ids
        self._start = len(prefix) if prefix else 0
        self.own = OwnRows(runner, self._start + len(ids))
        self._unrotated = self.own.keys.new_empty(*self.own.keys.shape[:2], len(ids), runner.geometry.head_dim)
        if prefix:
            self._copy(Prefix(prefix.keys[:, 0], prefix.values[:, 0]), slice(0, self._start))
        if kept is not None:
            rows = slice(self._start, self._start + kept.num_tokens)
            keys = kept.keys.to(runner.device)
            at = torch.arange(rows.start, rows.stop, device=runner.device)
            self._copy(Prefix(runner.rotary.rotate(keys, at), kept.values), rows)
            self._unrotated[:, :, : kept.num_tokens] = keys

    @property
    def num_left(self) -> int:
        """Rows that are not computed yet."""
        return self.own.capacity - self.own.length

    def rows(self, number: int) -> tuple[Run, Float[Tensor, "rows hidden"]]:
        """Return the next rows and their embeddings. They are computed once a forward with them has ended well."""
        first = self.own.length
        done = slice(first - self._start, first - self._start + number)
        run = Run(self.own, torch.arange(first, first + number), unrotated=self._unrotated[:, :, done])
        return run, self._runner.embed(self.token_ids[done])

    def entry(self) -> CacheEntry:
        """Return the entry; no row is left."""
        return CacheEntry(self._unrotated, self.own.values[:, :, self._start :].contiguous(), self.token_ids)

    def _copy(self, known: Prefix, rows: slice) -> None:
        self.own.keys[:, :, rows], self.own.values[:, :, rows] = known.keys, known.values
        self.own.positions[rows] = torch.arange(rows.start, rows.stop)
        self.own.length = rows.stop
