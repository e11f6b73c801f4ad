"""How much two texts differ, in 64 bits: texts that share most of their words have hashes that share most bits.

Source: Charikar 2002; used on pages as in Manku et al. 2007.
"""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from blake3 import blake3

BITS = 64
"""Bits of a hash; unrelated texts differ in about half of them."""

NEAR = 6
"""Bits up to which two texts count as near-duplicates: about one word in thirty."""

_SHINGLE = 3  # words that are hashed together, so that order counts
_ONES = np.array([byte.bit_count() for byte in range(256)], dtype=np.uint8)


def simhash(text: str) -> int:
    """Return the hash of a text's runs of three words, each as often as it occurs; case does not count."""
    words = re.findall(r"\w+", text.casefold()) or [text]
    runs = Counter(" ".join(words[at : at + _SHINGLE]) for at in range(max(1, len(words) - _SHINGLE + 1)))
    digests = b"".join(blake3(run.encode("utf-8", "replace")).digest(length=BITS // 8) for run in runs)
    bits = np.unpackbits(np.frombuffer(digests, dtype=np.uint8)).reshape(len(runs), BITS).astype(np.int64)
    weights = np.fromiter(runs.values(), dtype=np.int64)
    return int.from_bytes(np.packbits(weights @ (2 * bits - 1) > 0).tobytes(), "big")


def distance(one: int, other: int) -> int:
    """Return the number of bits in which two hashes differ."""
    return (one ^ other).bit_count()


def near_pairs(hashes: Sequence[int], *, at_most: int = NEAR) -> list[tuple[int, int, int]]:
    """Return all pairs of places whose hashes differ in few bits, and in how many; the nearest first."""
    found: list[tuple[int, int, int]] = []
    known = np.array(hashes, dtype=np.uint64)
    for place in range(len(known) - 1):
        differing = (known[place + 1 :] ^ known[place]).view(np.uint8).reshape(-1, BITS // 8)
        counts = _ONES[differing].sum(axis=1)
        found += [(place, place + 1 + int(at), int(counts[at])) for at in np.flatnonzero(counts <= at_most)]
    return sorted(found, key=lambda pair: (pair[2], pair[0], pair[1]))
