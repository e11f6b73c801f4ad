"""Which tokens of a document are worth their bytes, judged from its keys alone: no question is known yet.

A score is given per layer and head, the highest are kept. Keys are judged as they are stored, before RoPE, so that the
verdict does not depend on where a document will stand.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from jaxtyping import Float, Int32
from torch import Tensor

FIRST = 4
"""Tokens at a document's beginning that are always kept: attention rests on them where there is nothing to attend."""

ALWAYS = FIRST + 1
"""Those, and the last one."""

Keys = Float[Tensor, "layers kv_heads tokens head_dim"]
Scores = Float[Tensor, "layers kv_heads tokens"]


def knorm(keys: Keys) -> Scores:
    """Prefer keys with a small norm, which draw much attention.

    A rotation changes no norm, so keys before and after RoPE get the same score.

    Raises:
        ValueError: A key has no length: NaN, infinity, or a square beyond what the dtype holds.

    Source: Devoto et al. 2024 (A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression).
    """
    return -torch.linalg.vector_norm(_wide(keys), dim=-1)


def keydiff(keys: Keys) -> Scores:
    """Prefer keys that differ most from the others: the least cosine to the mean of all directions.

    The source judges keys of a running cache, which are rotated: there, distance counts as difference. Before RoPE only
    content does.

    Raises:
        ValueError: As in `knorm`.

    Source: Park et al. 2025 (KeyDiff: Key Similarity-Based KV Cache Eviction).
    """
    directions = torch.nn.functional.normalize(_wide(keys), dim=-1)
    mean = directions.mean(dim=2, keepdim=True)
    return -torch.nn.functional.cosine_similarity(directions, mean, dim=-1)


def expected_attention(
    keys: Keys,
    values: Float[Tensor, "layers kv_heads tokens value_dim"],
    mean: Float[Tensor, "layers heads head_dim"],
    covariance: Float[Tensor, "layers heads head_dim head_dim"],
    *,
    epsilon: float = 0.0,
) -> Scores:
    """Prefer tokens that queries to come would attend, weighed by the norms of their values.

    The only score that knows a model: what its queries are like. No codec uses it, because on the demo's model it kept
    answers less well than `keydiff` (`benchmarks/pruning.json`). The source weighs with values behind the output
    projection, and gives no document a place of its own.

    Args:
        keys: Keys behind RoPE, at their places; unlike those of the other scores.
        values: The values.
        mean, covariance: Of the queries, turned to the positions where they are expected and averaged over them.
        epsilon: Is added to each share of attention, so that values count where attention is next to nothing.

    Raises:
        ValueError: As in `knorm`.

    Source: Devoto et al. 2025 (Expected Attention: KV Cache Compression by Estimating Attention from Future Queries).
    """
    wide, dim = _wide(keys), keys.shape[-1]
    group = mean.shape[1] // keys.shape[1]
    each = wide.repeat_interleave(group, dim=1)  # [layers, heads, tokens, head_dim]
    linear = torch.einsum("lhtd,lhd->lht", each, mean.to(wide)) / dim**0.5
    square = torch.einsum("lhtd,lhde,lhte->lht", each, covariance.to(wide), each) / (2 * dim)
    shares = (linear + square).softmax(dim=-1) + epsilon  # [layers, heads, tokens]
    shares = shares.unflatten(1, (-1, group)).mean(dim=2)  # [layers, kv_heads, tokens]
    return shares * torch.linalg.vector_norm(values.to(wide), dim=-1)


SCORES: Mapping[str, Callable[[Keys], Scores]] = MappingProxyType({"knorm": knorm, "keydiff": keydiff})
"""Ways to judge, by name."""


def kept_rows(scores: Scores, count: int) -> Int32[Tensor, "layers kv_heads kept"]:
    """Return the tokens to keep for each layer and head, ascending: the first `FIRST`, the last, and the best others.

    Args:
        scores: The higher the better; of equal ones the earlier token is kept.
        count: How many to keep; at least `ALWAYS`, or all where there are fewer.

    Raises:
        ValueError: There are more to be kept than tokens, or too few.
    """
    tokens = scores.shape[2]
    if not min(ALWAYS, tokens) <= count <= tokens:
        raise ValueError(f"of {tokens} tokens {min(ALWAYS, tokens)} to {tokens} can be kept, not {count}")
    first = scores.clone()
    first[..., :FIRST] = torch.inf
    first[..., -1] = torch.inf
    best = first.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return best.sort(dim=-1).values.to(torch.int32)


def _wide(keys: Keys) -> Keys:
    """Return keys in which squares of 16-bit numbers do not overflow.

    Raises:
        ValueError: A key has no length.
    """
    wide = keys if keys.dtype == torch.float64 else keys.float()
    if not wide.square().sum(dim=-1).isfinite().all():
        raise ValueError("keys that are no numbers, or too great ones, cannot be judged; take raw, which holds any")
    return wide
