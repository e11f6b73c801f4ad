"""A gateway until SIGTERM or Ctrl-C: what is under way is answered first."""

import logging
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

import uvicorn

from kvlink.cluster.affinity import GAP, Affinity
from kvlink.cluster.backends import Backends
from kvlink.cluster.gateway import Gateway
from kvlink.server.auth import Keys, check_address, is_loopback

LOOPBACK = ["127.0.0.1", "localhost"]


def route(
    urls: Sequence[str],
    *,
    host: str,
    port: int,
    keys: Keys,
    insecure: bool = False,
    gap: int = GAP,
    check_s: float = 2.0,
    max_bytes: int = 16 << 20,
    drain_s: int = 30,
) -> None:
    """Route until a signal.

    Args:
        urls: The servers.
        insecure: Serve other machines without a key.
        gap: Requests by which a server's queue may be longer than the shortest, for its documents' sake.
        check_s: Seconds between two checks of a server.
        drain_s: Seconds that requests under way have after the signal.

    Raises:
        InputError: The address is not loopback, and there is no key; or a URL is none.
    """
    check_address(host, keys, insecure=insecure)
    policy = Affinity(gap=gap)
    gateway = Gateway(Backends(urls, policy, check_s=check_s), policy, keys=keys, max_bytes=max_bytes)
    _log_to_stderr()
    hosts = LOOPBACK if is_loopback(host) and not keys else None
    server = uvicorn.Server(
        uvicorn.Config(
            gateway.app(hosts),
            host=host,
            port=port,
            lifespan="on",
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=drain_s,
        )
    )
    signal.signal(signal.SIGTERM, _leave)  # uvicorn raises it again when it has drained
    with suppress(KeyboardInterrupt):
        server.run()


def _log_to_stderr() -> None:
    """Write one line per request, and per backend that comes or goes, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger("kvlink.server.route")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


def _leave(_: int, __: FrameType | None) -> None:
    raise SystemExit(0)
