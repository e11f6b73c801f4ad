"""Which nodes hold a document, as they have told: an index from documents to nodes, and back for those that leave."""

from collections import OrderedDict
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

MOST_DOCUMENTS = 100_000
"""Documents that are believed to be on one node; beyond, the one that was told the longest ago is forgotten."""


class Residency:
    """Nodes are numbers here.

    Args:
        most: Documents of one node.
    """

    def __init__(self, most: int = MOST_DOCUMENTS) -> None:
        self._most = most
        self._nodes: dict[str, NDArray[np.int64]] = {}
        self._documents: dict[int, OrderedDict[str, None]] = {}

    def nodes(self, document: str) -> NDArray[np.int64] | None:
        """Return the nodes that hold a document, or None; a changed set is another array."""
        return self._nodes.get(document)

    def note(self, node: int, document: str) -> None:
        """Learn that a node holds a document."""
        held = self._documents.setdefault(node, OrderedDict())
        if document in held:
            held.move_to_end(document)
            return
        held[document] = None
        known = self._nodes.get(document)
        one = np.array([node], dtype=np.int64)
        self._nodes[document] = one if known is None else np.concatenate((known, one))
        if len(held) > self._most:
            self._drop(node, held.popitem(last=False)[0])

    def keep(self, node: int, documents: Collection[str]) -> None:
        """Forget what a node holds but for some documents."""
        for document in [one for one in self._documents.get(node, ()) if one not in documents]:
            del self._documents[node][document]
            self._drop(node, document)

    def leave(self, node: int) -> None:
        """Forget all that a node holds."""
        for document in self._documents.pop(node, ()):
            self._drop(node, document)

    def forget(self, document: str) -> None:
        """Forget who holds a document."""
        known = self._nodes.pop(document, None)
        for node in () if known is None else known.tolist():
            del self._documents[node][document]

    def _drop(self, node: int, document: str) -> None:
        known = self._nodes[document]
        if len(known) == 1:
            del self._nodes[document]
        else:
            self._nodes[document] = known[known != node]
