"""Queries turned back by a document's start, so that its keys stay where they are: at local positions.

    R(p + t)k . R(m)q  =  R(t)k . R(m - p)q

The turn is a pure rotation. Tables of a scaled embedding (YaRN) hold their scale, which both sides have already:
it is taken out. Layers without a rotary embedding are not turned; channels that pass it by are not, either.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlink.models.backends import Rows
from kvlink.models.rotary import LayerRotary, Rotary

Tables = tuple[Float[Tensor, "starts head_dim"], Float[Tensor, "starts head_dim"]]
"""Cosines and sines of some starts, for every channel."""


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """How far rows are turned back, for every layer.

    Attributes:
        tables: For each run of layers cosines and *negative* sines of the starts, without scale, over all channels
            (those that pass by have 1 and 0); None for NoPE.
        widths: Channels of the tables that each run's function takes.
    """

    runs: tuple[LayerRotary, ...]
    tables: tuple[Tables | None, ...]
    widths: tuple[int, ...]

    @classmethod
    def back(cls, rotary: Rotary, starts: Int[Tensor, " starts"], *, head_dim: int, dtype: torch.dtype) -> "Turns":
        """Prepare turns by these many positions each, computed in float32 or in `dtype` if that is wider."""
        like = torch.empty(0, dtype=torch.promote_types(dtype, torch.float32), device=starts.device)
        found: list[tuple[Tables | None, int]] = []
        for number, run in enumerate(rotary.runs):
            same = next((i for i, r in enumerate(rotary.runs[:number]) if _alike(r, run)), None)
            if same is not None:
                found.append(found[same])
            elif run.source is None or len(starts) == 0:
                found.append((None, 0))
            else:
                scale = run.source(like, starts.new_zeros(1))[0][..., :1]  # cosine of 0
                cos, sin = run.source(like, starts)
                found.append((_of_channels(run, cos / scale, -sin / scale, head_dim), cos.shape[-1]))
        return cls(rotary.runs, tuple(tables for tables, _ in found), tuple(width for _, width in found))

    def quarter(self, query: Float[Tensor, "heads rows head_dim"], layer: int) -> Float[Tensor, "heads rows head_dim"]:
        """Return rotated queries of one layer turned by a quarter: what sines are multiplied with."""
        run, tables, width = self._of(layer)
        if tables is None:
            return query
        return _quarter(run, query.to(tables[0].dtype), width)

    def turn(
        self,
        query: Float[Tensor, "heads all_rows head_dim"],
        quarter: Float[Tensor, "heads all_rows head_dim"],
        layer: int,
        rows: Rows,
        starts: Rows,
    ) -> Float[Tensor, "heads _rows head_dim"]:
        """Return some rows of rotated queries turned back; computed in the tables' dtype, given in the queries'.

        Args:
            quarter: `self.quarter` of the queries, computed once for a layer.
            starts: One start for all rows, or one for each, as places among those given to `back`.
        """
        _, tables, _ = self._of(layer)
        if tables is None:
            return query[:, rows]
        cos, sin = (table[starts] for table in tables)
        turned = torch.addcmul(query[:, rows].to(cos.dtype) * cos, quarter[:, rows], sin)
        return turned.to(query.dtype)

    def _of(self, layer: int) -> tuple[LayerRotary, Tables | None, int]:
        runs = zip(self.runs, self.tables, self.widths, strict=True)
        return next(found for found in runs if found[0].start <= layer < found[0].stop)


def _quarter(run: LayerRotary, query: Tensor, width: int) -> Tensor:
    """Turn each pair of channels by 90 degrees; what becomes of those that pass by means nothing.

    Args:
        width: Of the tables that the function takes; it may leave the channels behind it alone by itself.
    """
    dim = run.rotary_dim
    if run.halves:
        half = dim // 2
        turned = (-query[..., half:dim], query[..., :half])
    else:
        assert run.function is not None
        part, none = query[None, ..., :dim], query.new_zeros(1, query.shape[1], width)
        turned = (run.function(part, part[:, :1], none, none + 1)[0][0],)
    return torch.cat((*turned, query[..., dim:]), dim=-1)


def _of_channels(run: LayerRotary, cos: Tensor, sin: Tensor, head_dim: int) -> Tables:
    """Return what each channel and its quarter turn are multiplied with, in whatever way the tables are laid out.

    A rotary function is `x * cos + quarter(x) * sin`, and two quarters are a change of sign.
    """
    ones = cos.new_ones(1, cos.shape[1], run.rotary_dim)
    before, none = -_quarter(run, ones, cos.shape[-1]), torch.zeros_like(cos)
    passing = _rotated(run, ones, none, none)  # 1 where a channel passes the function by
    beside = cos.new_ones(cos.shape[1], head_dim - run.rotary_dim)
    of_quarter = _rotated(run, before, none, sin) * (1 - passing)
    return torch.cat((_rotated(run, ones, cos, none), beside), -1), torch.cat((of_quarter, 0 * beside), -1)


def _rotated(run: LayerRotary, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    assert run.function is not None
    return run.function(vectors[None], vectors[None], cos, sin)[0][0, 0]


def _alike(one: LayerRotary, other: LayerRotary) -> bool:
    if one.source is None or other.source is None:
        return one.source is other.source
    return one.source.same_as(other.source)
