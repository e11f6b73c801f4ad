"""A server until SIGTERM or Ctrl-C: what is under way is answered first. The only file that knows uvicorn."""

import json
import logging
import signal
import sys
from contextlib import suppress
from datetime import UTC, datetime
from types import FrameType

import uvicorn

from kvlink.server.app import LOOPBACK, make_app
from kvlink.server.auth import Keys, check_address, is_loopback
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
    log_to_stderr()
    hosts = LOOPBACK if is_loopback(host) and not keys else None
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(served, keys=keys, hosts=hosts),
            host=host,
            port=port,
            lifespan="on",
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=drain_s,
            h11_max_incomplete_event_size=64 << 10,
        )
    )
    signal.signal(signal.SIGTERM, _leave)  # uvicorn raises it again when it has drained
    with suppress(KeyboardInterrupt):
        server.run()


def log_to_stderr() -> None:
    """Write one JSON line per request to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    log = logging.getLogger("kvlink.server")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


class _Lines(logging.Formatter):
    """One JSON object per line: a message that is one gets time and level, any other becomes one."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        text = record.getMessage()
        try:
            row = json.loads(text)
        except ValueError:
            row = text
        facts = row if isinstance(row, dict) else {"message": text}
        return json.dumps({"time": at, "level": record.levelname.lower(), **facts})


def _leave(_: int, __: FrameType | None) -> None:
    raise SystemExit(0)
