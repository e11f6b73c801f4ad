"""A gateway until SIGTERM or Ctrl-C: what is under way is answered first."""

from collections.abc import Sequence

from kvlink.cluster.affinity import GAP
from kvlink.cluster.backends import Backends
from kvlink.cluster.baselines import policy_named
from kvlink.cluster.gateway import Gateway
from kvlink.server.auth import Keys, check_address
from kvlink.server.listening import hosts_of, listen


def route(
    urls: Sequence[str],
    *,
    host: str,
    port: int,
    keys: Keys,
    insecure: bool = False,
    policy: str = "affinity",
    gap: int = GAP,
    check_s: float = 2.0,
    max_bytes: int = 16 << 20,
    drain_s: int = 30,
) -> None:
    """Route until a signal.

    Args:
        urls: The servers.
        insecure: Serve other machines without a key.
        policy: One of `baselines.POLICIES`.
        gap: Requests by which a server's queue may be longer than the shortest, for its documents' sake.
        check_s: Seconds between two checks of a server.
        drain_s: Seconds that requests under way have after the signal.

    Raises:
        InputError: The address is not loopback, and there is no key; or a URL is none.
    """
    check_address(host, keys, insecure=insecure)
    chosen = policy_named(policy, gap=gap)
    gateway = Gateway(Backends(urls, chosen, check_s=check_s), chosen, keys=keys, max_bytes=max_bytes)
    listen(gateway.app(hosts_of(host, keys)), host=host, port=port, drain_s=drain_s)
