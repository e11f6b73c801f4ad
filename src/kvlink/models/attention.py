"""Attention under our own masks, without repeating keys and values for the query heads that share them.

Stock sdpa repeats them wherever there is a mask, which on long prompts costs as much as attending. Here torch
shares them: the same kernel, the same bits.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

NAME = "kvlink_sdpa"
"""Under which transformers knows it."""


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


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def grouped(config: Any, device: torch.device) -> Generator[None]:
    """Let a model attend this way while the block lasts, where it uses sdpa on a CPU; else change nothing.

    On a GPU torch would answer a mask together with shared heads by its slowest kernel.
    """
    if config._attn_implementation != "sdpa" or device.type != "cpu":  # noqa: SLF001 (there is no public name)
        yield
        return
    config._attn_implementation_internal = NAME  # noqa: SLF001
    try:
        yield
    finally:
        config._attn_implementation_internal = "sdpa"  # noqa: SLF001
