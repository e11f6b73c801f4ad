"""Queries turned back by a document's start, so that its keys stay where they are: at local positions.

    R(p + t)k . R(m)q  =  R(t)k . R(m - p)q

The turn is a pure rotation. Tables of a scaled embedding (YaRN) hold their scale, which both sides have already:
it is taken out. Layers without a rotary embedding are not turned; channels that pass it by are not, either.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlink.models.rotary import LayerRotary, Rotary, Tables


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """How far each row of a forward is turned back, for every layer.

    Attributes:
        tables: For each run of layers cosines and *negative* sines of the starts, without scale; None for NoPE.
    """

    runs: tuple[LayerRotary, ...]
    tables: tuple[Tables | None, ...]

    @classmethod
    def back(cls, rotary: Rotary, starts: Int[Tensor, " rows"], *, dtype: torch.dtype) -> "Turns":
        """Prepare turns by these many positions each, computed in float32 or in `dtype` if that is wider."""
        like = torch.empty(0, dtype=torch.promote_types(dtype, torch.float32), device=starts.device)
        found: list[Tables | None] = []
        for number, run in enumerate(rotary.runs):
            same = next((i for i, r in enumerate(rotary.runs[:number]) if _alike(r, run)), None)
            if same is not None:
                found.append(found[same])
            elif run.source is None:
                found.append(None)
            else:
                scale = run.source(like, starts.new_zeros(1))[0][..., :1]  # cosine of 0
                cos, sin = run.source(like, starts)
                found.append((cos / scale, -sin / scale))
        return cls(rotary.runs, tuple(found))

    def turn(
        self, query: Float[Tensor, "kv_heads rows group head_dim"], layer: int
    ) -> Float[Tensor, "kv_heads rows group head_dim"]:
        """Return rotated queries of one layer turned back; computed in the tables' dtype, given in the queries'.

        May write into `query`.
        """
        run, tables = next(
            (run, table) for run, table in zip(self.runs, self.tables, strict=True) if run.start <= layer < run.stop
        )
        if run.function is None or tables is None:
            return query
        cos, sin = tables
        dim, part = run.rotary_dim, query[..., : run.rotary_dim].to(cos.dtype)
        if run.halves:
            half, (cos, sin) = dim // 2, (cos[0, :, None], sin[0, :, None])
            turned = part * cos
            turned[..., :half].addcmul_(part[..., half:], sin[..., :half], value=-1)
            turned[..., half:].addcmul_(part[..., :half], sin[..., half:])
        else:  # a function of transformers takes [batch, heads, tokens, dim]
            asked = part.transpose(1, 2)
            turned = run.function(asked, asked[:1, :1], cos, sin)[0].transpose(1, 2)
        if dim == query.shape[-1]:
            return turned.to(query.dtype)
        return torch.cat((turned.to(query.dtype), query[..., dim:]), dim=-1)


def _alike(one: LayerRotary, other: LayerRotary) -> bool:
    if one.source is None or other.source is None:
        return one.source is other.source
    return one.source.same_as(other.source)
