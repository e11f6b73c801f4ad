"""An app behind an address until a signal: what is under way is answered first. The only file that knows uvicorn."""

import json
import logging
import signal
import sys
from contextlib import suppress
from datetime import UTC, datetime
from types import FrameType
from typing import Any

import uvicorn

from kvlink.server.auth import Keys, is_loopback

LOOPBACK = ["127.0.0.1", "localhost"]


def hosts_of(host: str, keys: Keys) -> list[str] | None:
    """Return the names by which a server may be called; None for any.

    Without a key only those of loopback, so that no web page reaches it through a name of its own.
    """
    return LOOPBACK if is_loopback(host) and not keys else None


def listen(app: Any, *, host: str, port: int, drain_s: int) -> None:
    """Answer until a signal, and write one JSON line per request to standard error.

    Args:
        drain_s: Seconds that requests under way have after the signal; then they are given up.
    """
    log_to_stderr()
    server = uvicorn.Server(
        uvicorn.Config(
            app,
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
    handler.setFormatter(JsonLines())
    log = logging.getLogger("kvlink.server")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


class JsonLines(logging.Formatter):
    """One JSON object per line: a message that is one gets time and level, any other becomes one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
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
