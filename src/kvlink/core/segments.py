"""Where a long document is cut: at borders that follow from its ids, so that they stay where an edit is not.

Every place where a document could be cut has a rank (the end of a paragraph before that of a sentence before any
other) and a hash of the 16 ids before it. The places are taken in that order over the whole document. A place becomes
a border if the piece around it is too long and neither part gets too short. Any length can be cut so.

From left to right, the best place of each window in turn would keep the same bounds, but then every border depends on
the one before it, and now and then an edit moves many. Here a border depends on the places that come before it in the
order, wherever they stand, and those that an edit does not touch keep their order.

A piece just longer than the longest segment can be cut at few places only, and seldom does a paragraph end there. So
places that leave such a piece wait until the others of their rank have had their turn.
"""

from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise

from blake3 import blake3

from kvlink.core.fingerprint import ids_bytes

SMALLEST, LARGEST = 512, 1024
"""Tokens of a segment, where a document is cut."""

HASHED = 16
"""Ids before a place that decide when it is taken."""


def cut_ids(
    ids: Sequence[int], ranks: Sequence[int], *, smallest: int = SMALLEST, largest: int = LARGEST
) -> list[tuple[int, ...]]:
    """Cut ids into segments; joined they are the ids again.

    Args:
        ids: Token ids of one document.
        ranks: For each id how good it is to cut before it: lower is better.
        smallest: Tokens that each segment has at least, unless all ids together are fewer.
        largest: Tokens that each segment has at most.

    Raises:
        ValueError: There is not one rank for each id, or `smallest` is not between 1 and half of `largest`.
    """
    if len(ids) != len(ranks) or not 1 <= smallest <= largest / 2:
        raise ValueError(
            f"got {len(ids)} ids, {len(ranks)} ranks, segments of {smallest} to {largest} tokens: each id has a rank, "
            "and the longest segment at least twice the tokens of the shortest, which has at least one"
        )
    borders, data = [0, len(ids)], ids_bytes(ids)
    width = len(data) // max(1, len(ids))

    def order(place: int) -> tuple[bytes, int]:
        return blake3(data[max(0, place - HASHED) * width : place * width]).digest(), place

    for rank in sorted(set(ranks)):
        for spare in (smallest // 4, 0):
            windows = [range(a + smallest, b - smallest + 1) for a, b in pairwise(borders) if b - a > largest]
            for place in sorted((p for window in windows for p in window if ranks[p] == rank), key=order):
                at = bisect(borders, place)
                start, stop = borders[at - 1 : at + 1]
                parts = (place - start, stop - place)
                if stop - start > largest and all(smallest <= p <= largest or p >= largest + spare for p in parts):
                    borders.insert(at, place)
    return [tuple(ids[start:stop]) for start, stop in pairwise(borders)]
