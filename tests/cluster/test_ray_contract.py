"""The interface for routers of Ray is an alpha one: what is used of it is there, with the arguments that it takes."""

import asyncio
import inspect
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kvlink.cluster.ray_app.passed import Passed
from kvlink.core.errors import InputError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, of its dependencies
    from ray.serve._private.common import DeploymentID, RequestMetadata
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

    from kvlink.cluster.ray_app.build import cpus_of, wanted
    from kvlink.cluster.ray_app.router import DocumentRouter
    from kvlink.cluster.ray_app.up import up

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


def test_the_late_end_of_one_attempt_does_not_end_the_next_one() -> None:
    async def queues() -> list[dict[str, int]]:
        router = object.__new__(DocumentRouter)
        router.initialize_state()
        ids = [ReplicaID(name, DeploymentID("Replica")) for name in ("a", "b")]
        there: list[Any] = [SimpleNamespace(replica_id=one) for one in ids]
        for one in ids:
            router._policy.join(one.unique_id)
        passed, metadata = Passed(method="GET", path="/", query=b"", headers=(), body=b""), RequestMetadata("r", "same")
        found: list[dict[str, int]] = []

        async def attempt() -> ReplicaID:
            ((chosen,),) = await router.choose_replicas(there, PendingRequest([passed], {}, metadata))
            found.append(router._policy.queues())
            return chosen.replica_id

        first, second = await attempt(), await attempt()
        assert first != second
        for one in (first, second):
            router.on_request_completed(one, "same")
            found.append(router._policy.queues())
        return [{"first": queue[first.unique_id], "second": queue[second.unique_id]} for queue in found]

    begun, moved, late, ended = asyncio.run(queues())
    assert begun == {"first": 1, "second": 0}
    assert moved == late == {"first": 0, "second": 1}
    assert ended == {"first": 0, "second": 0}


@pytest.mark.enable_socket
def test_a_ray_that_runs_is_not_served_from_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLINK_API_KEY", raising=False)
    with pytest.raises(InputError, match="KVLINK_API_KEY"):
        up({}, host="127.0.0.1", port=8000, insecure=False, address="127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "KVLINK_API_KEY"),
        ({"insecure": True, "modell": "demo"}, "modell"),
        ({"insecure": True, "config": "none.toml"}, "TOML"),
    ],
)
def test_an_application_that_makes_no_sense_is_refused_before_any_replica_starts(
    arguments: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVLINK_API_KEY", raising=False)
    with pytest.raises(InputError, match=said):
        wanted(arguments)


def test_a_settings_file_of_a_server_is_taken_as_it_is(tmp_path: Path) -> None:
    config = tmp_path / "kvlink.toml"
    config.write_text('model = "demo"\nport = 1111\napi_key = ["one"]\nmax_queue = 7\n')
    found = wanted({"config": str(config), "replicas": 3, "max_queue": 9})
    assert (found.plan.replicas, found.settings) == (3, {"model": "demo", "max_queue": 9})
    assert found.keys.check("Bearer one").is_operator


def test_cpus_are_those_of_the_most_replicas() -> None:
    assert cpus_of({"replicas": 2, "num_cpus": 1.5}) == 3
    assert cpus_of({"replicas": 2, "max_replicas": 4}) == 4
    assert cpus_of({"num_cpus": 0}) == 1


def test_the_examples_name_the_application_and_arguments_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLINK_API_KEY", "one")
    folder = Path(__file__).parents[2] / "examples" / "cluster"
    plain = yaml.safe_load((folder / "serve.yaml").read_text("utf-8"))
    service = yaml.safe_load((folder / "kuberay.yaml").read_text("utf-8"))
    for found in (plain, yaml.safe_load(service["spec"]["serveConfigV2"])):
        (application,) = found["applications"]
        assert application["import_path"] == "kvlink.cluster.ray_app.build:build"
        assert wanted(application["args"]).plan.max_replicas == 8
