"""Discrete events: requests, first tokens, ends, changed documents, lost nodes; the routing is the real policy's code.

A node works first come, first served, so that a request's moments are known when it arrives: a heap of events is all
that is needed. What the policy knows of documents is what a gateway would: names in answers, told with the first token.
"""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any, Literal

import numpy as np

from kvlink.cluster.choice import Choice, Policy
from kvlink.cluster.costs import Costs
from kvlink.cluster.node import Node
from kvlink.cluster.traffic import Drawn, Traffic, draw

WARM = 0.2
"""Share of the requests that come first and are not counted."""

PIECES = 40
"""Of the counted time, for the hit ratio over time."""

Store = Literal["full", "empty", "none"]

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines.

    Attributes:
        nodes: How many.
        room: Tokens of documents that each holds.
        store: The one that they share, from which a node loads what was encoded before: `full` of all documents at the
            beginning, `empty`, or `none`.
        lost: Moments at which a node is lost, as shares of the whole time; the first node first.
        back_s: Seconds after which a lost one is back, with nothing in its memory.
    """

    nodes: int
    room: int
    store: Store = "full"
    lost: tuple[float, ...] = ()
    back_s: float = 60.0


@dataclass(slots=True)
class _Told:
    """What is counted."""

    ttft: list[float] = field(default_factory=list[float])
    hits: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])
    loaded: int = 0
    encoded: int = 0
    retried: int = 0
    broken: int = 0
    refused: int = 0
    reasons: dict[str, int] = field(default_factory=dict[str, int])


def simulate(
    policy: Policy,
    cluster: Cluster,
    traffic: Traffic,
    costs: Costs,
    *,
    drawn: Drawn | None = None,
    progress: Progress = lambda requests: None,
) -> dict[str, Any]:
    """Return what users and operators would see: the same for the same arguments.

    Args:
        policy: A new one; its nodes join here.
        drawn: Of `traffic`, if it was drawn before.
        progress: Is told how many requests have come since it was told last.
    """
    run = _Run(policy, cluster, traffic, costs, drawn or draw(traffic), progress)
    run.go()
    return run.result()


class _Run:
    def __init__(
        self, policy: Policy, cluster: Cluster, traffic: Traffic, costs: Costs, drawn: Drawn, progress: Progress
    ) -> None:
        self._policy, self._cluster, self._traffic, self._costs = policy, cluster, traffic, costs
        self._drawn, self._progress = drawn, progress
        self._lengths = drawn.lengths.tolist()
        self._names = [str(number) for number in range(traffic.documents)]
        self._versions = [0] * traffic.documents
        full = dict.fromkeys(range(traffic.documents), 0)
        self._stored = {"full": full, "empty": {}, "none": None}[cluster.store]
        self._nodes = {f"node-{number}": Node(cluster.room) for number in range(cluster.nodes)}
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._told = _Told()
        self._first = int(traffic.requests * WARM)
        self._work_before = dict.fromkeys(self._nodes, 0.0)

    def go(self) -> None:
        """Let everything happen."""
        for name in self._nodes:
            self._policy.join(name)
        end = float(self._drawn.arrivals[-1])
        for name, share in zip(self._nodes, self._cluster.lost, strict=False):
            self._at(share * end, self._lose, name)
        for moment, document in self._drawn.changes:
            self._at(moment, self._change, document)
        for request, moment in enumerate(self._drawn.arrivals.tolist()):
            while self._events and self._events[0][0] <= moment:
                self._next()
            if request == self._first:
                self._work_before = {name: node.work_s for name, node in self._nodes.items()}
            self._arrive(moment, request, moment)
            if request % 1000 == 999:
                self._progress(1000)
        self._progress(self._traffic.requests % 1000)
        while self._events:
            self._next()

    def result(self) -> dict[str, Any]:
        """Return one row."""
        told, costs = self._told, self._costs
        hits, tokens = (sum(row[place] for row in told.hits) for place in (1, 2))
        work = [node.work_s - self._work_before[name] for name, node in self._nodes.items()]
        return {
            "cluster": asdict(self._cluster),
            "traffic": asdict(self._traffic),
            "costs": asdict(costs),
            "counted": len(told.ttft),
            "hit_ratio": hits / tokens if tokens else None,
            "ttft_s": percentiles(told.ttft),
            "imbalance": max(work) * len(work) / sum(work) if sum(work) else None,
            "moved_bytes": told.loaded * costs.token_bytes,
            "encoded_tokens": told.encoded,
            "retried": told.retried,
            "broken": told.broken,
            "refused": told.refused,
            "reasons": dict(sorted(told.reasons.items())),
            "over_time": self._over_time(),
        }

    def _at(self, moment: float, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (moment, next(self._order), what, arguments))

    def _next(self) -> None:
        moment, _, what, arguments = heapq.heappop(self._events)
        what(moment, *arguments)

    def _arrive(self, now: float, request: int, asked_at: float, without: frozenset[str] = frozenset()) -> None:
        documents = self._drawn.asked[request].tolist()
        weighed = [(self._names[number], self._lengths[number]) for number in documents]
        is_counted = request >= self._first
        choice = self._policy.choose(weighed, without=without)
        if choice is None:
            self._told.refused += is_counted
            return
        node = self._nodes[choice.node]
        if not node.is_up:  # the connection is refused: nobody had noticed yet
            self._policy.done(choice)
            self._policy.leave(choice.node)
            self._told.retried += is_counted
            self._arrive(now, request, asked_at, without | {choice.node})
            return
        served = node.serve(
            now,
            [(number, self._versions[number], self._lengths[number]) for number in documents],
            self._stored,
            self._costs,
            question=self._traffic.question,
            answer=int(self._drawn.answers[request]),
        )
        node.under_way[request] = served.begun
        self._at(served.begun, self._begin, request, asked_at, choice, node.life, [name for name, _ in weighed])
        self._at(served.ended, self._end, request, choice, node.life)
        if is_counted:
            tokens = served.hits + served.loaded + served.encoded
            self._told.hits.append((now, served.hits, tokens))
            self._told.loaded += served.loaded
            self._told.encoded += served.encoded
            self._told.reasons[choice.reason] = self._told.reasons.get(choice.reason, 0) + 1

    def _begin(
        self, now: float, request: int, asked_at: float, choice: Choice, life: int, documents: list[str]
    ) -> None:
        if self._nodes[choice.node].life != life:
            return
        self._policy.note(choice.node, documents)
        if request >= self._first:
            self._told.ttft.append(now - asked_at)

    def _end(self, _: float, request: int, choice: Choice, life: int) -> None:
        node = self._nodes[choice.node]
        if node.life == life:
            del node.under_way[request]
        self._policy.done(choice)

    def _change(self, _: float, document: int) -> None:
        self._versions[document] += 1
        self._policy.forget(self._names[document])

    def _lose(self, now: float, name: str) -> None:
        node = self._nodes[name]
        waiting = [request for request, begun in node.under_way.items() if begun > now]
        self._told.broken += sum(begun <= now and request >= self._first for request, begun in node.under_way.items())
        if node.under_way:  # their connections tell
            self._policy.leave(name)
        node.lose()
        for request in waiting:
            self._told.retried += request >= self._first
            self._arrive(now, request, float(self._drawn.arrivals[request]))
        self._at(now + self._cluster.back_s, self._come_back, name)

    def _come_back(self, now: float, name: str) -> None:
        self._nodes[name].come_back(now)
        self._policy.leave(name)
        self._policy.join(name)

    def _over_time(self) -> list[dict[str, float]]:
        """Return the hit ratio in equal pieces of the counted requests."""
        rows = np.array(self._told.hits, dtype=np.float64).reshape(-1, 3)
        parts = [part for part in np.array_split(rows, PIECES) if len(part)]
        return [
            {"until_s": float(part[-1, 0]), "hit_ratio": float(part[:, 1].sum() / part[:, 2].sum())} for part in parts
        ]


def percentiles(seconds: list[float]) -> Mapping[str, float | None]:
    """Return what the fastest half, nine tenths, ... of the requests took at most."""
    wanted = {"p50": 50, "p90": 90, "p99": 99, "p999": 99.9}
    if not seconds:
        return dict.fromkeys(wanted)
    return {name: float(np.percentile(seconds, at)) for name, at in wanted.items()}
