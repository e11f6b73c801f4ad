"""Ray Serve's request router, over the policy. It runs in the ingress, on one event loop; Ray's interface is alpha.

Ray asks for replicas, perhaps several times for one request, probes the queue of the chosen one, and says where the
request went and when it has ended. What replicas hold they report themselves; what was sent to one counts as held there
until the next report but one.
"""

from collections import OrderedDict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvlink.cluster.affinity import GAP, Affinity
from kvlink.cluster.choice import Choice
from kvlink.cluster.ray_app.passed import Passed

MOST_TRIED = 10_000
"""Requests of which it is remembered where they were sent, so that another attempt goes elsewhere."""


class DocumentRouter(RequestRouter):
    """Sends each request where most of its documents are and the queue is not too long."""

    def initialize_state(self, gap: int = GAP, **kwargs: Any) -> None:
        """Begin; Ray calls it with `request_router_kwargs`."""
        self._policy = Affinity(gap=gap, **kwargs)
        self._choices: dict[str, Choice] = {}
        self._tried: OrderedDict[str, set[str]] = OrderedDict()
        self._told: dict[str, dict[str, Any]] = {}
        self._serves: str | None = None

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Learn who is there and what each holds; of replicas that serve different things, the first kind is asked."""
        super().update_replicas(replicas)
        told: dict[str, dict[str, Any]] = {one.replica_id.unique_id: one.routing_stats or {} for one in replicas}
        kinds = [stats["serves"] for stats in told.values() if "serves" in stats]
        if self._serves not in kinds:
            self._serves = kinds[0] if kinds else None
        told = {name: stats for name, stats in told.items() if stats.get("serves", self._serves) == self._serves}
        for name in self._told.keys() - told.keys():
            self._policy.leave(name)
        for name, stats in told.items():
            self._policy.join(name)
            if "held" in stats and stats != self._told.get(name):  # else it is no new report
                self._policy.report(name, stats["held"], is_all=stats["is_all"])
        self._told = told

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Send nothing there any more."""
        super().on_replica_actor_died(replica_id)
        self._policy.leave(replica_id.unique_id)
        self._told.pop(replica_id.unique_id, None)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica for a request: another one than before, as long as there is one."""
        passed = _passed(pending_request)
        if passed is None or pending_request is None:
            return [candidate_replicas]
        name, tried = pending_request.metadata.internal_request_id, self._tried_by(passed)
        self.on_request_completed(None, name)  # what was chosen before has come to nothing
        choice = self._chosen(passed, tried)
        if choice is None and tried:
            tried.clear()
            choice = self._chosen(passed, tried)
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        if choice is None or choice.node not in by_name:
            return [candidate_replicas]
        self._choices[name] = choice
        tried.add(choice.node)
        pending_request.future.add_done_callback(
            lambda one: self.on_request_completed(None, name) if one.cancelled() else None
        )
        return [[by_name[choice.node]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count a request where it really went, and its documents as held there."""
        passed, node = _passed(pending_request), replica_id.unique_id
        name = pending_request.metadata.internal_request_id
        if passed is None:
            return
        choice = self._choices.get(name)
        if choice is not None and choice.node != node:
            self._policy.done(self._choices.pop(name))
            if (instead := self._chosen(passed, self._told.keys() - {node})) is not None:
                self._choices[name] = instead
        self._policy.note(node, [document for document, _ in passed.documents])

    def on_request_completed(self, replica_id: ReplicaID | None, internal_request_id: str) -> None:
        """Count a request no more; the end of one attempt may come when the next one is counted elsewhere already.

        Args:
            replica_id: None for whichever it was counted at.
        """
        choice = self._choices.get(internal_request_id)
        if choice is not None and (replica_id is None or replica_id.unique_id == choice.node):
            self._policy.done(self._choices.pop(internal_request_id))

    def _chosen(self, passed: Passed, without: set[str]) -> Choice | None:
        return self._policy.choose(passed.documents, session=passed.session, without=without)

    def _tried_by(self, passed: Passed) -> set[str]:
        found = self._tried.setdefault(passed.token, set())
        if len(self._tried) > MOST_TRIED:
            self._tried.popitem(last=False)
        return found


def _passed(pending: PendingRequest | None) -> Passed | None:
    arguments: list[Any] = list(pending.args) if pending is not None else []
    return arguments[0] if arguments and isinstance(arguments[0], Passed) else None
