"""Ways to attend one run of keys and values that give the log-sum-exp as well, so that parts can be merged exactly.

All take queries `[heads, rows, head_dim]`, those that share a key head side by side, so that no key is repeated, and
return what was attended, of the same form, with the logarithm of the softmax's denominator, natural and in float32
or better. A row that sees no column has the log-sum-exp minus infinity and attends zeros.

Source of merging by log-sum-exp: Milakov and Gimelshein 2018, used as in Dao et al. 2022 (FlashAttention).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

FEW_ROWS = 16
"""Up to so many rows, the query heads of a key head are laid behind one another: one block of work for each of them."""

Attended = tuple[Float[Tensor, "heads rows value_dim"], Float[Tensor, "heads rows"]]


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """Which columns rows see: all of them, or less.

    Attributes:
        causal: Row i sees columns 0 to i.
        mask: True where a row sees a column; None for all that `causal` leaves.
    """

    causal: bool = False
    mask: Bool[Tensor, "rows columns"] | None = None


EVERYTHING = Sight()

Rows = slice | Int[Tensor, " _rows"]
"""Some rows of a forward."""

Found = tuple[int, Rows, Float[Tensor, "heads _rows value_dim"]]
"""The number of a part, its rows, and what they found in it."""

Backend = Callable[..., Attended]
"""`attend(query, keys, values, *, scale, sight, softcap)`."""


def reference(
    query: Float[Tensor, "heads rows head_dim"],
    keys: Float[Tensor, "kv_heads columns head_dim"],
    values: Float[Tensor, "kv_heads columns value_dim"],
    *,
    scale: float,
    sight: Sight = EVERYTHING,
    softcap: float | None = None,
) -> Attended:
    """Attend by the formula, in float32 or float64; whatever the model asks for, on any device."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(dtype).unflatten(0, (len(keys), -1))
    logits = torch.einsum("hgrd,hcd->hgrc", grouped, keys.to(dtype)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    rows, columns = logits.shape[2:]
    seen = sight.mask
    if sight.causal:
        lower = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
        seen = lower if seen is None else seen & lower
    if seen is not None:
        logits = logits.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.clamp(min=torch.finfo(dtype).min)[..., None])
    found = torch.einsum("hgrc,hcd->hgrd", weights, values.to(dtype))
    return found.flatten(0, 1).to(query.dtype), lse.flatten(0, 1)


def cpu(
    query: Float[Tensor, "heads rows head_dim"],
    keys: Float[Tensor, "kv_heads columns head_dim"],
    values: Float[Tensor, "kv_heads columns value_dim"],
    *,
    scale: float,
    sight: Sight = EVERYTHING,
    softcap: float | None = None,
) -> Attended:
    """Attend by torch's flash kernel for CPUs; what it cannot do, by the formula."""
    if _needs_formula(keys, values, sight, softcap):
        return reference(query, keys, values, scale=scale, sight=sight, softcap=softcap)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 (no public one gives the sums)
    if sight.causal or query.shape[1] > FEW_ROWS:  # the kernel shares key heads by itself
        found, lse = flash(query[None], keys[None], values[None], 0.0, sight.causal, scale=scale)
        return found[0], lse[0]
    found, lse = flash(_folded(query, keys)[None], keys[None], values[None], 0.0, False, scale=scale)
    return _unfolded(found[0], query), _unfolded(lse[0], query)


def cuda(
    query: Float[Tensor, "heads rows head_dim"],
    keys: Float[Tensor, "kv_heads columns head_dim"],
    values: Float[Tensor, "kv_heads columns value_dim"],
    *,
    scale: float,
    sight: Sight = EVERYTHING,
    softcap: float | None = None,
) -> Attended:
    """Attend by the flash kernel of a GPU, or its memory-efficient one in float32; else by the formula."""
    if _needs_formula(keys, values, sight, softcap) or query.dtype.itemsize > 4:
        return reference(query, keys, values, scale=scale, sight=sight, softcap=softcap)
    if sight.causal:  # [kv_heads, group, rows, head_dim]
        asked = query.unflatten(0, (len(keys), -1))
        read, summed = (part[:, None].expand(-1, asked.shape[1], -1, -1) for part in (keys, values))
    else:
        asked, read, summed = _folded(query, keys)[None], keys[None], values[None]
    if query.dtype == torch.float32:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention  # noqa: SLF001
        found, lse, *_ = efficient(asked, read, summed, None, True, 0.0, sight.causal, scale=scale)
        lse = lse[..., : asked.shape[2]]  # its rows are padded
    else:
        flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
        found, lse, *_ = flash(asked, read, summed, 0.0, sight.causal, False, scale=scale)
    if sight.causal:
        return found.flatten(0, 1), lse.flatten(0, 1)
    return _unfolded(found[0], query), _unfolded(lse[0], query)


def backend_for(device: torch.device) -> Backend:
    """Return the fastest way to attend on a device."""
    return {"cpu": cpu, "cuda": cuda}.get(device.type, reference)


def merge(
    found: Sequence[Found],
    lse: Float[Tensor, "parts heads all_rows"],
    *,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "all_rows heads value_dim"]:
    """Join what each row found in its parts, weighted by the parts' log-sum-exp.

    Args:
        found: What is there; a row that a part does not have, or that finds nothing in it, has minus infinity in `lse`.
            Every row has at least one part that is not empty.
        sinks: Learned logits without a value, which take part in the denominator once.
    """
    if sinks is not None:
        lse = torch.cat((lse, sinks.to(lse.dtype)[None, :, None].expand(1, -1, lse.shape[2])))
    weights = torch.softmax(lse, 0)[..., None]
    heads, rows = lse.shape[1:]
    out = lse.new_zeros(rows, heads, found[0][2].shape[-1])
    by_head = out.transpose(0, 1)
    for number, place, values in found:
        if isinstance(place, slice):
            by_head[:, place].addcmul_(values.to(lse.dtype), weights[number, :, place])
        else:
            out.index_add_(0, place, (values.to(lse.dtype) * weights[number, :, place]).transpose(0, 1))
    return out


def merge_gathered(
    found: Float[Tensor, "heads gathered value_dim"],
    lse: Float[Tensor, "heads gathered"],
    rows: Int[Tensor, " gathered"],
    slots: Int[Tensor, " gathered"],
    num_rows: int,
    *,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "num_rows heads value_dim"]:
    """Do what `merge` does for findings of all parts that stand behind one another.

    Args:
        rows: The row that each belongs to.
        slots: Which of the row's parts it comes from, counted from 0.
    """
    heads, _, dim = found.shape
    every = lse.new_full((int(slots.max()) + 1, num_rows, heads), -torch.inf)
    every[slots, rows] = lse.T
    if sinks is not None:
        every = torch.cat((every, sinks.to(lse.dtype).expand(1, num_rows, heads)))
    weights = torch.softmax(every, 0)[slots, rows]
    weighted = found.transpose(0, 1).to(lse.dtype) * weights[..., None]
    return lse.new_zeros(num_rows, heads, dim).index_add_(0, rows, weighted)


def _needs_formula(keys: Tensor, values: Tensor, sight: Sight, softcap: float | None) -> bool:
    """Whether no kernel gives what is asked for together with the sums."""
    return softcap is not None or sight.mask is not None or keys.shape[-1] != values.shape[-1]


def _folded(query: Tensor, keys: Tensor) -> Tensor:
    """Lay the query heads of each key head behind one another."""
    return query.unflatten(0, (len(keys), -1)).flatten(1, 2)


def _unfolded(found: Tensor, query: Tensor) -> Tensor:
    """Undo `_folded` for what was found, which may have other channels or none."""
    return found.reshape(query.shape[:2] + found.shape[2:])
