"""The application as Ray Serve deploys it: `serve run kvlink.cluster.ray_app.build:build`, or a YAML that names it.

Arguments are those of `Plan`, and the settings of `kvlink serve` by name; a file of settings may hold them, too.
"""

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ray.serve import Application, deployment
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from kvlink.cluster.affinity import GAP
from kvlink.cluster.ray_app.ingress import Ingress
from kvlink.cluster.ray_app.replica import Replica
from kvlink.core.errors import InputError
from kvlink.server.auth import Keys
from kvlink.server.opening import Settings
from kvlink.server.tenants import granted

ROUTER = "kvlink.cluster.ray_app.router:DocumentRouter"

_OF_AN_ADDRESS = {"host", "port", "api_key", "insecure", "drain", "keys"}
"""Settings of `kvlink serve` that are Ray's affair, or are read apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How many replicas there are, and what each gets.

    Attributes:
        replicas: How many; ignored where `max_replicas` is given.
        min_replicas, max_replicas: Between which Ray chooses.
        target_ongoing_requests: Of each replica, at which another one is started.
        max_ongoing_requests: Of each replica; beyond, requests wait in the ingress.
        num_cpus, num_gpus: Of each replica.
        ingresses: How many read requests; each routes by itself.
        gap: As of `kvlink route`.
        report_s: Seconds between two reports of what a replica holds.
        drain_s: Seconds that a replica has to answer what it has, when it is to end.
        config: A settings file of `kvlink serve`, on each machine.
        insecure: Answer without a key.
        hosts: Values of the header `Host` that are answered; any if None.
    """

    replicas: int = 1
    min_replicas: int = 1
    max_replicas: int | None = None
    target_ongoing_requests: int | float = 8
    max_ongoing_requests: int = 256
    num_cpus: int | float = 1
    num_gpus: int | float = 0
    ingresses: int = 1
    gap: int = GAP
    report_s: int | float = 1
    drain_s: int | float = 30
    config: str | None = None
    insecure: bool = False
    hosts: list[str] | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What arguments and a settings file say together.

    Attributes:
        settings: Those of each server, by name.
        keys: Who may ask.
    """

    plan: Plan
    settings: dict[str, Any]
    keys: Keys


def build(arguments: Mapping[str, Any]) -> Application:
    """Return the application.

    Raises:
        InputError: As `wanted`.
    """
    found = wanted(arguments)
    replicas = _replicas(found.plan).bind(found.settings, found.keys, found.plan.hosts)
    ingress = _deployment(Ingress).options(
        name="Ingress",
        num_replicas=found.plan.ingresses,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(replicas, max_bytes=int(found.settings.get("max_body", 16)) << 20)


def wanted(arguments: Mapping[str, Any]) -> Wanted:
    """Read the arguments of `build`.

    Raises:
        InputError: One is none, or there is no key and nobody has said that everybody may ask.
    """
    plan = _plan(arguments)
    given = {name: value for name, value in arguments.items() if not hasattr(plan, name)}
    file = _file(plan.config)
    settings = {**{name: value for name, value in file.items() if name not in _OF_AN_ADDRESS}, **given}
    Settings.of(settings)  # an unknown one is refused here, and not by each replica
    keys = _keys(file)
    if not (keys or plan.insecure):
        raise InputError(
            "there is no API key: set KVLINK_API_KEY where the application is built, or say insecure: true if "
            "everybody may ask"
        )
    return Wanted(plan, settings, keys)


def cpus_of(arguments: Mapping[str, Any]) -> int:
    """Return how many CPUs a Ray must have that nothing else runs on; the machine may have fewer."""
    plan = _plan(arguments)
    return max(1, math.ceil(plan.num_cpus * max(plan.replicas, plan.max_replicas or 0)))


def _plan(arguments: Mapping[str, Any]) -> Plan:
    names = {field.name for field in fields(Plan)}
    return Plan(**{name: value for name, value in arguments.items() if name in names})


def _replicas(plan: Plan) -> Any:
    """Return the deployment of replicas, behind the router."""
    scale: dict[str, Any] = {"num_replicas": plan.replicas}
    if plan.max_replicas is not None:
        autoscaling = AutoscalingConfig(
            min_replicas=plan.min_replicas,
            max_replicas=plan.max_replicas,
            target_ongoing_requests=plan.target_ongoing_requests,
        )
        scale = {"autoscaling_config": autoscaling}
    router: dict[str, Any] = {
        "request_router_class": ROUTER,
        "request_router_kwargs": {"gap": plan.gap},
        "request_routing_stats_period_s": plan.report_s,
    }
    return _deployment(Replica).options(
        name="Replica",
        **scale,
        max_ongoing_requests=plan.max_ongoing_requests,
        request_router_config=RequestRouterConfig(**router),
        graceful_shutdown_timeout_s=plan.drain_s,
        ray_actor_options={"num_cpus": plan.num_cpus, "num_gpus": plan.num_gpus},
    )


_deployment: Any = deployment  # its types name a function, and not what it makes of a class


def _file(config: str | None) -> dict[str, Any]:
    if config is None:
        return {}
    try:
        return tomllib.loads(Path(config).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{config} cannot be read as TOML: {error}") from error


def _keys(file: Mapping[str, Any]) -> Keys:
    secret = os.environ.get("KVLINK_SECRET")
    named = file.get("api_key") or os.environ.get("KVLINK_API_KEY", "").split()
    return Keys(named, granted(file.get("keys", []), secret=secret.encode() if secret else None))
