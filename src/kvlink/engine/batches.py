"""Segments in batches: of similar length, so that a batch is full and holds little padding."""

from collections.abc import Iterable

from kvlink.engine.loaded import Ids

BATCH_TOKENS = 2048
"""Tokens of one encoding batch, padding included: above it a batch gains nothing and costs memory."""

MAX_PADDING = 0.1
"""Share of a batch that may be padding."""


def batches(segments: Iterable[Ids], *, batch_tokens: int = BATCH_TOKENS) -> list[list[Ids]]:
    """Group segments by length, so that a batch is full and holds little padding; longest first."""
    groups: list[list[Ids]] = []
    for ids in sorted(segments, key=len, reverse=True):
        group = groups[-1] if groups else []
        longest = len(group[0]) if group else 0
        padded = longest * (len(group) + 1)
        held = sum(map(len, group)) + len(ids)
        if group and padded <= batch_tokens and held >= (1 - MAX_PADDING) * padded:
            group.append(ids)
        else:
            groups.append([ids])
    return groups
