"""Routing by documents: a request goes where most of its document tokens are, unless that node is too busy.

The rules, in this order. Nodes whose queue is longer than the shortest by more than `gap` are out. A conversation
stays on its node. Of the others, the node with most of the request's document tokens is chosen; among equals the one
with the shortest queue, then the one whose queue has rested the longest. A document counts where it was reported; one
that nobody has reported counts at its home by rendezvous hashing. One that is in more than a node's fair share of
requests has as many homes as it needs, reported or not.

A node that lately got more than its share of requests is passed over, too, so that documents which are asked for
together, and too often for one node, find a second one; conversations stay. Else load does not decide: a load term in
the score would give away hits for queues that do not differ.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvlink.cluster.choice import Choice, Reason, Weighed
from kvlink.cluster.heat import Heat, window
from kvlink.cluster.residency import MOST_DOCUMENTS, Residency
from kvlink.cluster.table import SLOTS, Table

GAP = 8
"""Requests by which a queue may be longer than the shortest, for the documents' sake."""

EXCESS = 1.25
"""How much of its fair share of the last requests a node gets before it is passed over."""

LUCK = 2.0
"""Standard deviations that chance may add to that."""

MOST_SESSIONS = 100_000

_SHIFT = 40
_GONE = 1 << 62


class Affinity:
    """The policy; choosing takes microseconds at a thousand nodes.

    A node's place in the order of choice is one number: its queue, then the moment when that last changed, counted in
    changes. So one comparison finds those that are not too busy, and one minimum the best of equals.

    Args:
        gap: Requests by which a queue may be longer than the shortest.
        excess: How much of its fair share of the last requests a node gets before it is passed over; None for any.
        slots: Of the table of homes, a power of two.
        most_documents: Documents that are remembered of each node.
        most_sessions: Conversations that are remembered.
    """

    def __init__(
        self,
        *,
        gap: int = GAP,
        excess: float | None = EXCESS,
        slots: int = SLOTS,
        most_documents: int = MOST_DOCUMENTS,
        most_sessions: int = MOST_SESSIONS,
    ) -> None:
        self._gap, self._excess, self._most_sessions = gap, excess, most_sessions
        self._table, self._heat, self._residency = Table(slots), Heat(), Residency(most_documents)
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._births: list[int] = []
        self._free: list[int] = []
        self._order = np.empty(0, dtype=np.int64)
        self._changes = 0
        self._recent = np.empty((2, 0), dtype=np.int64)
        self._sessions: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._fresh: dict[int, set[str]] = {}
        self._hot: dict[str, tuple[int, NDArray[np.int64] | None, NDArray[np.int64]]] = {}

    def join(self, node: str) -> None:
        """Take a node in; one that is in already stays as it is."""
        if node in self._numbers:
            return
        if self._free:
            number = self._free.pop()
        else:
            number = len(self._names)
            self._names.append("")
            self._births.append(0)
            self._order = np.append(self._order, _GONE)
            self._recent = np.append(self._recent, [[0], [0]], axis=1)
        self._changes += 1
        self._numbers[node], self._names[number] = number, node
        self._births[number] = self._order[number] = self._changes
        self._table.join(number, node)
        self._hot.clear()

    def leave(self, node: str) -> None:
        """Choose a node no more, and forget what it holds; one that is not in is no error."""
        number = self._numbers.pop(node, None)
        if number is None:
            return
        self._order[number] = _GONE
        self._births[number] = 0
        self._recent[:, number] = 0
        self._free.append(number)
        self._table.leave(number)
        self._residency.leave(number)
        self._fresh.pop(number, None)
        self._hot.clear()

    def choose(
        self, documents: Sequence[Weighed], *, session: str | None = None, without: Collection[str] = ()
    ) -> Choice | None:
        """Return where a request goes, and count it there; None if no node is left."""
        order = self._order
        if without:
            order = order.copy()
            order[[self._numbers[name] for name in without if name in self._numbers]] = _GONE
        least = int(order.min(initial=_GONE))
        if least == _GONE:
            return None
        if self._heat.count({name for name, _ in documents}, len(self._numbers)):
            self._recent = np.stack((np.zeros_like(self._recent[0]), self._recent[0]))
        busy = order >= ((least >> _SHIFT) + self._gap + 1) << _SHIFT
        scores = self._scores(documents)
        number = self._stays(session, busy)
        reason: Reason = "session"
        if number is None:
            most = scores.max()
            passed = busy | self._has_had_enough()
            scores[busy if passed.all() else passed] = -1
            best = scores.max()
            equal = np.flatnonzero(scores == best)
            number = int(equal[order[equal].argmin()])
            reason = "load" if best < most else "documents" if best > 0 else "idle"
        self._count(number, 1)
        self._recent[0, number] += 1
        self._remember(session, number)
        total = sum(tokens for _, tokens in documents)
        share = int(scores[number]) / total if total else 0.0
        return Choice(self._names[number], reason, share, self._births[number])

    def done(self, choice: Choice) -> None:
        """Count a request no more; each choice is handed back once."""
        number = self._numbers.get(choice.node)
        if number is not None and self._births[number] == choice.birth:
            self._count(number, -1)

    def note(self, node: str, documents: Iterable[str]) -> None:
        """Learn that a node holds documents, as its answer told; of a node that has left, nothing is learned."""
        number = self._numbers.get(node)
        if number is not None:
            for document in documents:
                self._residency.note(number, document)
                if number in self._fresh:
                    self._fresh[number].add(document)

    def report(self, node: str, documents: Collection[str], *, is_all: bool) -> None:
        """Learn what a node itself says it holds.

        Args:
            is_all: Whether it holds nothing else; what was noted since its report before stays all the same, since a
                report says nothing yet of what is on its way.
        """
        number = self._numbers.get(node)
        if number is None:
            return
        if is_all:
            self._residency.keep(number, {*documents, *self._fresh.get(number, ())})
            self._fresh[number] = set()
        for document in documents:
            self._residency.note(number, document)

    def forget(self, document: str) -> None:
        """Learn that a document has changed or is gone: what any node holds of it is of no use."""
        self._residency.forget(document)

    def queues(self) -> dict[str, int]:
        """Return how many requests each node has."""
        return {name: int(self._order[number]) >> _SHIFT for name, number in self._numbers.items()}

    def _scores(self, documents: Sequence[Weighed]) -> NDArray[np.int64]:
        """Return the tokens of a request that each node has, or will have."""
        scores = np.zeros(len(self._order), dtype=np.int64)
        for name, tokens in documents:
            scores[self._places(name)] += tokens
        return scores

    def _places(self, document: str) -> NDArray[np.int64] | int:
        """Return where a document counts."""
        wanted = self._heat.homes(document, len(self._numbers))
        known = self._residency.nodes(document)
        if known is not None and len(known) >= wanted:
            return known
        if wanted == 1:
            return self._table.home(document)
        found = self._hot.get(document)
        if found is None or found[0] != wanted or found[1] is not known:
            homes = self._table.homes(document, wanted)
            found = wanted, known, homes if known is None else np.union1d(known, homes)
            if len(self._hot) > window(len(self._numbers)):
                self._hot.clear()  # what was hot once
            self._hot[document] = found
        return found[2]

    def _has_had_enough(self) -> NDArray[np.bool_]:
        """Return which nodes got more than their share of the last requests, and than chance explains."""
        recent = self._recent[0] + self._recent[1]
        if self._excess is None:
            return np.zeros_like(recent, dtype=np.bool_)
        fair = int(recent.sum()) / len(self._numbers)
        return recent > self._excess * fair + LUCK * fair**0.5

    def _stays(self, session: str | None, busy: NDArray[np.bool_]) -> int | None:
        """Return the node of a conversation, if it lives and is not too busy."""
        if session is None or session not in self._sessions:
            return None
        number, birth = self._sessions[session]
        return number if self._births[number] == birth and not busy[number] else None

    def _remember(self, session: str | None, number: int) -> None:
        if session is None:
            return
        self._sessions[session] = number, self._births[number]
        self._sessions.move_to_end(session)
        if len(self._sessions) > self._most_sessions:
            self._sessions.popitem(last=False)

    def _count(self, number: int, by: int) -> None:
        self._changes += 1
        queue = (int(self._order[number]) >> _SHIFT) + by
        self._order[number] = (queue << _SHIFT) | self._changes
