"""A server of one engine until SIGTERM or Ctrl-C."""

from kvlink.server.app import make_app
from kvlink.server.auth import Keys, check_address
from kvlink.server.listening import hosts_of, listen
from kvlink.server.served import Served


def serve(served: Served, *, host: str, port: int, keys: Keys, insecure: bool = False, drain_s: int = 30) -> None:
    """Serve until a signal.

    Args:
        insecure: Serve other machines without a key.
        drain_s: Seconds that requests under way have after the signal; then they are given up.

    Raises:
        InputError: The address is not loopback, and there is no key; or the engine assembles documents for each prompt.
    """
    check_address(host, keys, insecure=insecure)
    served.engine.start()  # refuses before anybody connects
    listen(make_app(served, keys=keys, hosts=hosts_of(host, keys)), host=host, port=port, drain_s=drain_s)
