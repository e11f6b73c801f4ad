"""Rendezvous hashing behind a precomputed table: a document finds its homes in constant time, whatever the nodes.

A table of slots holds, for each, the node whose hash with it is the highest. A node that joins takes the slots that it
wins, and one that leaves gives away its own: no other slot moves. (The table of Maglev spreads slots more evenly, but
moves others, too: a share that grows with the number of nodes.)
"""

from collections.abc import Iterable

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

SLOTS = 1 << 16

_EMPTY = -1


class Table:
    """The owners of slots.

    Args:
        slots: A power of two. With 64 of them for each node, a node's share varies by an eighth.

    Source: Thaler and Ravishankar 1998 (rendezvous hashing), over fixed slots; Eisenbud et al. 2016 (Maglev) for the
    table.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        assert slots & (slots - 1) == 0, "words are cut to slots by a mask"
        self._places = np.arange(slots, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self._owners = np.full(slots, _EMPTY, dtype=np.int64)
        self._best = np.zeros(slots, dtype=np.uint64)
        self._seeds: dict[int, np.uint64] = {}

    def join(self, node: int, name: str) -> None:
        """Give a new node the slots that it wins.

        Args:
            node: Number that `homes` returns for it.
            name: What its hashes depend on.
        """
        seed = np.uint64(int.from_bytes(blake3(name.encode("utf-8", "surrogatepass")).digest(8), "little"))
        self._seeds[node] = seed
        found = mixed(self._places ^ seed)
        wins = (found > self._best) | (self._owners == _EMPTY)
        self._owners[wins] = node
        self._best[wins] = found[wins]

    def leave(self, node: int) -> None:
        """Give the slots of a node to those that come second there."""
        del self._seeds[node]
        lost = np.flatnonzero(self._owners == node)
        if not self._seeds:
            self._owners[lost] = _EMPTY
            return
        left = np.array(list(self._seeds), dtype=np.int64)
        seeds = np.array(list(self._seeds.values()), dtype=np.uint64)
        for part in np.array_split(lost, max(1, lost.size * left.size // (1 << 20))):  # within a few MB
            found = mixed(self._places[part, None] ^ seeds)  # [slots, nodes]
            winners = found.argmax(axis=1)
            self._owners[part] = left[winners]
            self._best[part] = found[np.arange(part.size), winners]

    def home(self, document: str) -> int:
        """Return the first home of a document; there has to be a node."""
        return int(self._owners[int.from_bytes(_words(document, 1), "little") & (len(self._owners) - 1)])

    def homes(self, document: str, wanted: int) -> NDArray[np.int64]:
        """Return the first homes of a document, the most important one first.

        Args:
            wanted: How many; a few less come back where it is nearly all nodes.
        """
        words = np.frombuffer(_words(document, 2 * wanted + 8), dtype="<u4")
        owners = self._owners[words & np.uint32(len(self._owners) - 1)].tolist()
        return np.fromiter(_first(owners, wanted), dtype=np.int64)

    def owners(self) -> NDArray[np.int64]:
        """Return the owner of each slot."""
        return self._owners.copy()


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return hashes of numbers, each bit of which depends on all of theirs.

    Source: Stafford's mix 13, the finaliser of SplitMix64 (Steele et al. 2014).
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _words(document: str, count: int) -> bytes:
    """Return a document's sequence of 32-bit words; a longer one begins with the shorter."""
    return blake3(document.encode("utf-8", "surrogatepass")).digest(4 * count)


def _first(owners: list[int], wanted: int) -> Iterable[int]:
    return list(dict.fromkeys(owners))[:wanted]
