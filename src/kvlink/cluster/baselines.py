"""What routing by documents is compared with: policies that look at queues, or at nothing."""

from collections.abc import Collection, Iterable, Sequence
from random import Random as Dice

from kvlink.cluster.affinity import GAP, Affinity
from kvlink.cluster.choice import Choice, Policy, Weighed


class Blind:
    """Nodes and their queues, and nothing about documents; those below choose among them."""

    def __init__(self, seed: int = 0) -> None:
        self._dice = Dice(seed)  # noqa: S311
        self._nodes: dict[str, int] = {}
        self._queues: dict[str, int] = {}
        self._births = 0

    def join(self, node: str) -> None:
        """Take a node in."""
        if node not in self._nodes:
            self._births += 1
            self._nodes[node], self._queues[node] = self._births, 0

    def leave(self, node: str) -> None:
        """Choose a node no more."""
        self._nodes.pop(node, None)
        self._queues.pop(node, None)

    def choose(
        self, documents: Sequence[Weighed], *, session: str | None = None, without: Collection[str] = ()
    ) -> Choice | None:
        """Return where a request goes, and count it there."""
        nodes = [name for name in self._nodes if name not in without] if without else list(self._nodes)
        if not nodes:
            return None
        node = self._pick(nodes)
        self._queues[node] += 1
        return Choice(node, "idle", 0.0, self._nodes[node])

    def done(self, choice: Choice) -> None:
        """Count a request no more."""
        if self._nodes.get(choice.node) == choice.birth:
            self._queues[choice.node] -= 1

    def note(self, node: str, documents: Iterable[str]) -> None:
        """Learn nothing."""

    def forget(self, document: str) -> None:
        """Forget nothing."""

    def _pick(self, nodes: list[str]) -> str:
        return self._dice.choice(nodes)


class TwoChoices(Blind):
    """The shorter queue of two random nodes.

    Source: Mitzenmacher 2001 (the power of two choices).
    """

    def _pick(self, nodes: list[str]) -> str:
        if len(nodes) == 1:
            return nodes[0]
        return min(self._dice.sample(nodes, 2), key=self._queues.__getitem__)


class RoundRobin(Blind):
    """One after another."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._turns = 0

    def _pick(self, nodes: list[str]) -> str:
        self._turns += 1
        return nodes[self._turns % len(nodes)]


POLICIES = ("affinity", "two-choices", "round-robin", "random")

UNEVEN = "uneven"
"""Affinity that passes over no node for having got more than its share: what that rule is worth."""


def policy_named(name: str, *, seed: int = 0, gap: int | None = None) -> Policy:
    """Return a new policy by its name in `POLICIES`, or `UNEVEN`."""
    if name == UNEVEN:
        return Affinity(gap=GAP if gap is None else gap, excess=None)
    if name == "affinity":
        return Affinity(gap=GAP if gap is None else gap)
    return {"two-choices": TwoChoices, "round-robin": RoundRobin, "random": Blind}[name](seed)
