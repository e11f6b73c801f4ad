"""Attention under our own masks, without repeating keys and values for the query heads that share them.

Stock sdpa repeats them wherever there is a mask, which on long prompts costs as much as attending. Here torch
shares them: the same kernel, the same bits.

Where tokens were pruned, each layer and head has a mask of its own. It travels as a keyword of the forward, from which
each layer takes its part; a layer that the keyword does not reach fails instead of attending what is not there.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kvlink.core.errors import ModelRefused

NAME = "kvlink_sdpa"
"""Under which transformers knows it."""

PRUNED = "kvlink_pruned"
"""The same, where tokens were pruned."""

SHARED = "kvlink_shared"
"""Documents where they lie; see `kvlink.models.shared`."""


@runtime_checkable
class Attends(Protocol):
    """How the rows of one forward attend, in all layers.

    Attributes:
        served: Layers that have attended.
    """

    served: set[int]

    def attend(
        self,
        query: Float[Tensor, "1 heads rows head_dim"],
        layer: int,
        *,
        scale: float,
        softcap: float | None,
        sinks: Float[Tensor, " heads"] | None,
    ) -> Float[Tensor, "1 rows heads value_dim"]:
        """Return what rotated queries of one layer find."""
        ...


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend like transformers' sdpa; `[batch, heads, tokens, dim]` in, `[batch, tokens, heads, dim]` out."""
    found = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return found.transpose(1, 2).contiguous(), None


@dataclass(slots=True, eq=False)
class Present:
    """Which columns are there, for each layer and head; all behind those that are named.

    Attributes:
        columns: Those of the prompt; what is False holds zeros and is not attended.
        served: Layers that have attended in this forward.
    """

    columns: Bool[Tensor, "layers kv_heads columns"]
    served: set[int] = field(default_factory=set)

    def mask(self, layer: int, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """Return a layer's mask, `[1, heads, rows, columns]`, of the kind that was given.

        To a column that is not there minus infinity is added: its weight is exactly 0 in every dtype, whatever finite
        numbers stand in it. A row sees itself, so none is left without a weight.

        Args:
            mask: Additive or boolean, the same for all heads; None for one row that sees everything.

        Raises:
            ValueError: Several rows have no mask.
        """
        self.served.add(layer)
        columns = key.shape[2]
        gone = torch.zeros(key.shape[1], columns, dtype=torch.bool, device=key.device)
        named = min(columns, self.columns.shape[2])
        gone[:, :named] = ~self.columns[layer, :, :named]
        gone = gone.repeat_interleave(query.shape[1] // key.shape[1], dim=0)[None, :, None]  # [1, heads, 1, columns]
        if mask is None:
            if query.shape[2] != 1:
                raise ValueError(f"{query.shape[2]} rows came without a mask; only one alone sees everything")
            mask = torch.zeros(1, 1, 1, columns, dtype=query.dtype, device=query.device)
        return mask & ~gone if mask.dtype == torch.bool else mask.masked_fill(gone, -torch.inf)


def pruned_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    present: Present,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend like `grouped_attention` what is there in this layer."""
    layer = cast("int", module.layer_idx)
    mask = present.mask(layer, query, key, attention_mask)
    if key.device.type != "cpu" and query.shape[1] != key.shape[1]:
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    return grouped_attention(module, query, key, value, mask, **options)


def shared_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attending: Attends,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend what the forward was told; keys and values of the new rows were written before, there is no mask."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = cast("int", module.layer_idx)
    return attending.attend(query, layer, scale=scale, softcap=softcap, sinks=s_aux), None


def no_mask(*_: Any, **__: Any) -> None:
    """Make no mask: who attends what is known without one."""


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
AttentionInterface.register(PRUNED, pruned_attention)
AttentionMaskInterface.register(PRUNED, sdpa_mask)
AttentionInterface.register(SHARED, shared_attention)
AttentionMaskInterface.register(SHARED, no_mask)


@contextmanager
def _implementation(config: Any, name: str) -> Generator[None]:
    """Let a model attend in another way while the block lasts."""
    before = config._attn_implementation  # noqa: SLF001 (there is no public name)
    config._attn_implementation_internal = name  # noqa: SLF001
    try:
        yield
    finally:
        config._attn_implementation_internal = before  # noqa: SLF001


@contextmanager
def grouped(config: Any, device: torch.device) -> Generator[None]:
    """Let a model attend this way while the block lasts, where it uses sdpa on a CPU; else change nothing.

    On a GPU torch would answer a mask together with shared heads by its slowest kernel.
    """
    if config._attn_implementation != "sdpa" or device.type != "cpu":  # noqa: SLF001 (there is no public name)
        yield
        return
    with _implementation(config, NAME):
        yield


@contextmanager
def pruned(config: Any, columns: Bool[Tensor, "layers kv_heads columns"] | None) -> Generator[dict[str, Present]]:
    """Let a model attend only what is there while the block lasts; gives the keywords that its forward must be passed.

    Args:
        columns: As in `Present`; None where nothing was pruned, which changes nothing.

    Raises:
        ModelRefused: The model attends in another way than by sdpa, or its layers do not take the keyword.
    """
    if columns is None:
        yield {}
        return
    before = config._attn_implementation  # noqa: SLF001 (there is no public name)
    if before not in ("sdpa", NAME):
        raise ModelRefused(f"pruned documents need sdpa attention, but this model was loaded with {before}; take raw")
    present = Present(columns)
    with _implementation(config, PRUNED):
        yield {"present": present}
    if len(present.served) != len(columns):
        raise ModelRefused(
            f"{len(present.served)} of {len(columns)} layers attended under masks of their own: the others have an "
            "attention that cannot be replaced; take raw"
        )


@contextmanager
def shared(config: Any, attending: Attends, *, layers: int) -> Generator[dict[str, Attends]]:
    """Let a model attend as it is told while the block lasts; gives the keywords that its forward must be passed.

    Raises:
        ModelRefused: Its layers do not take the keyword.
    """
    with _implementation(config, SHARED):
        yield {"attending": attending}
    if len(attending.served) != layers:
        raise ModelRefused(
            f"{len(attending.served)} of {layers} layers attended documents where they lie: the others have an "
            'attention that cannot be replaced; load the engine with attention="assembled"'
        )
