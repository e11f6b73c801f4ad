"""The interface for routers of Ray is an alpha one: what is used of it is there, with the arguments that it takes."""

import inspect
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, of its dependencies
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

    from kvlink.cluster.ray_app.router import DocumentRouter

USED = {
    "initialize_state": ["kwargs"],
    "update_replicas": ["replicas"],
    "on_replica_actor_died": ["replica_id"],
    "choose_replicas": ["candidate_replicas", "pending_request"],
    "on_request_routed": ["pending_request", "replica_id", "result"],
    "on_request_completed": ["replica_id", "internal_request_id"],
}


@pytest.mark.parametrize("name", USED)
def test_each_method_that_is_overridden_is_there_with_its_arguments(name: str) -> None:
    theirs = inspect.signature(getattr(RequestRouter, name)).parameters
    assert [one for one in theirs if one != "self"] == USED[name]
    ours = inspect.signature(getattr(DocumentRouter, name)).parameters
    assert set(USED[name]) <= set(ours)
    assert inspect.iscoroutinefunction(getattr(RequestRouter, name)) == (name == "choose_replicas")


def test_what_is_read_of_requests_and_replicas_is_there() -> None:
    assert {"args", "metadata", "future"} <= set(PendingRequest.__dataclass_fields__)
    for name in ("replica_id", "routing_stats"):
        assert isinstance(getattr(RunningReplica, name), property)


def test_what_a_deployment_is_told_is_there() -> None:
    wanted = {"request_router_class", "request_router_kwargs", "request_routing_stats_period_s"}
    assert wanted <= set(RequestRouterConfig.model_fields)
    assert {"min_replicas", "max_replicas", "target_ongoing_requests"} <= set(AutoscalingConfig.model_fields)
