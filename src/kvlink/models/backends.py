"""Ways to attend one run of keys and values that give the log-sum-exp as well, so that parts can be merged exactly.

All take queries by the key head that they share, `[kv_heads, rows, group, head_dim]`, so that no key is repeated,
and return what was attended, of the same form, with the logarithm of the softmax's denominator, natural and in
float32 or better. A row that sees no column has the log-sum-exp minus infinity and attends zeros.

Source of merging by log-sum-exp: Milakov and Gimelshein 2018, used as in Dao et al. 2022 (FlashAttention).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

FEW_ROWS = 16
"""Up to so many rows, the query heads of a key head are laid behind one another: one block of work for each of them."""

Attended = tuple[Float[Tensor, "kv_heads rows group value_dim"], Float[Tensor, "kv_heads rows group"]]


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

Backend = Callable[..., Attended]
"""`attend(query, keys, values, *, scale, sight, softcap)`."""


def reference(
    query: Float[Tensor, "kv_heads rows group head_dim"],
    keys: Float[Tensor, "kv_heads columns head_dim"],
    values: Float[Tensor, "kv_heads columns value_dim"],
    *,
    scale: float,
    sight: Sight = EVERYTHING,
    softcap: float | None = None,
) -> Attended:
    """Attend by the formula, in float32 or float64; whatever the model asks for, on any device."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    logits = torch.einsum("hrgd,hcd->hrgc", query.to(dtype), keys.to(dtype)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    rows, columns = logits.shape[1], logits.shape[3]
    seen = sight.mask
    if sight.causal:
        lower = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
        seen = lower if seen is None else seen & lower
    if seen is not None:
        logits = logits.masked_fill(~seen[:, None], -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.clamp(min=torch.finfo(dtype).min)[..., None])
    return torch.einsum("hrgc,hcd->hrgd", weights, values.to(dtype)).to(query.dtype), lse


def cpu(
    query: Float[Tensor, "kv_heads rows group head_dim"],
    keys: Float[Tensor, "kv_heads columns head_dim"],
    values: Float[Tensor, "kv_heads columns value_dim"],
    *,
    scale: float,
    sight: Sight = EVERYTHING,
    softcap: float | None = None,
) -> Attended:
    """Attend by torch's flash kernel for CPUs; what it cannot do, by the formula."""
    rows, group = query.shape[1:3]
    if _needs_formula(keys, values, sight, softcap):
        return reference(query, keys, values, scale=scale, sight=sight, softcap=softcap)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 (no public one gives the sums)
    if sight.causal or rows > FEW_ROWS:
        found, lse = flash(query.transpose(1, 2), keys[:, None], values[:, None], 0.0, sight.causal, scale=scale)
        return found.transpose(1, 2), lse.transpose(1, 2)
    folded = query.flatten(1, 2)[None]
    found, lse = flash(folded, keys[None], values[None], 0.0, False, scale=scale)
    return found[0].unflatten(1, (rows, group)), lse[0].unflatten(1, (rows, group))


def cuda(
    query: Float[Tensor, "kv_heads rows group head_dim"],
    keys: Float[Tensor, "kv_heads columns head_dim"],
    values: Float[Tensor, "kv_heads columns value_dim"],
    *,
    scale: float,
    sight: Sight = EVERYTHING,
    softcap: float | None = None,
) -> Attended:
    """Attend by the flash kernel of a GPU, or its memory-efficient one in float32; else by the formula."""
    rows, group = query.shape[1:3]
    if _needs_formula(keys, values, sight, softcap) or query.dtype.itemsize > 4:
        return reference(query, keys, values, scale=scale, sight=sight, softcap=softcap)
    if sight.causal:  # [kv_heads, group, rows, head_dim]
        asked = query.transpose(1, 2)
        read, summed = (part[:, None].expand(-1, group, -1, -1) for part in (keys, values))
    else:
        asked, read, summed = query.flatten(1, 2)[None], keys[None], values[None]
    if query.dtype == torch.float32:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention  # noqa: SLF001
        found, lse, *_ = efficient(asked, read, summed, None, True, 0.0, sight.causal, scale=scale)
        lse = lse[..., : asked.shape[2]]  # its rows are padded
    else:
        flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
        found, lse, *_ = flash(asked, read, summed, 0.0, sight.causal, False, scale=scale)
    if sight.causal:
        return found.transpose(1, 2), lse.transpose(1, 2)
    return found[0].unflatten(1, (rows, group)), lse[0].unflatten(1, (rows, group))


def backend_for(device: torch.device) -> Backend:
    """Return the fastest way to attend on a device."""
    return {"cpu": cpu, "cuda": cuda}.get(device.type, reference)


def _needs_formula(keys: Tensor, values: Tensor, sight: Sight, softcap: float | None) -> bool:
    """Whether no kernel gives what is asked for together with the sums."""
    return softcap is not None or sight.mask is not None or keys.shape[-1] != values.shape[-1]
