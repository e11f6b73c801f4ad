"""How often documents are asked for: counts of the last requests, in two generations, so that old ones wear off."""

LEAST_WINDOW = 1024
"""Requests of one generation; more where there are many nodes."""

PER_NODE = 16
"""Requests of one generation for each node: a document that fills one node is counted that often."""


class Heat:
    """Counts requests by document; knows no clock, so that an hour without requests cools nothing."""

    def __init__(self) -> None:
        self._young: dict[str, int] = {}
        self._old: dict[str, int] = {}
        self._requests = self._before = 0

    def count(self, documents: set[str], nodes: int) -> bool:
        """Count one request; return whether a new generation begins with it."""
        is_new = self._requests >= window(nodes)
        if is_new:
            self._young, self._old = {}, self._young
            self._requests, self._before = 0, self._requests
        self._requests += 1
        for name in documents:
            self._young[name] = self._young.get(name, 0) + 1
        return is_new

    def homes(self, document: str, nodes: int) -> int:
        """Return how many nodes a document needs, so that none of them gets more than its fair share of requests by it.

        A power of two, so that it seldom changes; at most all nodes.
        """
        count = self._young.get(document, 0) + self._old.get(document, 0)
        total = max(self._requests + self._before, window(nodes))  # few requests say little
        wanted = -(-count * nodes // total)
        return 1 if wanted <= 1 else min(1 << (wanted - 1).bit_length(), nodes)


def window(nodes: int) -> int:
    """Return the requests of one generation."""
    return max(LEAST_WINDOW, PER_NODE * nodes)
