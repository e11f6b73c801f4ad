"""The application on this machine, until SIGTERM or Ctrl-C: on a Ray of its own, or on one whose address is given."""

import logging
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from threading import Event
from types import FrameType
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to somebody else

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from kvlink.cluster.ray_app.build import build, cpus_of
from kvlink.core.errors import InputError
from kvlink.server.auth import is_loopback
from kvlink.server.listening import LOOPBACK

NAME = "kvlink"

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def up(arguments: Mapping[str, Any], *, host: str, port: int, insecure: bool, address: str | None = None) -> None:
    """Serve until a signal.

    Args:
        arguments: Of `build`.
        insecure: Serve other machines without a key.
        address: Of a Ray that runs; None starts one that ends with this process. Who reaches that one's proxies is not
            known here, and its other applications stay.

    Raises:
        InputError: As `build`; other machines may ask, and there is no key; no Ray lets this process in at the address.
    """
    is_own = address is None and is_loopback(host)
    application = build({**arguments, "insecure": insecure or is_own, "hosts": LOOPBACK if is_own else None})
    beside: dict[str, Any] = {"address": address} if address else {"address": "local", "num_cpus": cpus_of(arguments)}
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.WARNING}
    try:
        ray.init(**beside, **quiet, namespace=NAME)
    except ConnectionError as error:
        raise InputError(
            f"no Ray at {address} lets this process in: check the address, and, where it asks for a token, that this "
            "is in ~/.ray/auth_token or RAY_AUTH_TOKEN, with RAY_AUTH_MODE=token"
        ) from error
    try:
        for one in _SIGNALS:  # Ray has set its own
            signal.signal(one, _leave)
        serve.start(http_options={"host": host, "port": port})
        with suppress(SystemExit):
            serve.run(application, name=NAME, route_prefix="/")
            Event().wait()
    finally:
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_IGN)  # it is ending
        if address is None:
            serve.shutdown()
        else:
            with suppress(RayServeException):  # Serve itself has not come up
                serve.delete(NAME)
        ray.shutdown()


def _leave(_: int, __: FrameType | None) -> None:
    raise SystemExit(0)
