"""An app behind an address until a signal: what is under way is answered first. The only file that knows uvicorn."""

import errno
import gc
import json
import logging
import resource
import signal
import socket
import sys
from contextlib import suppress
from datetime import UTC, datetime
from types import FrameType
from typing import Any

import uvicorn

from kvlink.core.errors import InputError
from kvlink.server.auth import Keys, is_loopback
from kvlink.server.faults import fault_of

MOST_FILES = 65_536
"""Open files, connections among them, that a server asks the system for."""

LOOPBACK = ["127.0.0.1", "::1", "localhost"]


def hosts_of(host: str, keys: Keys) -> list[str] | None:
    """Return the names by which a server may be called; None for any.

    Without a key only those of loopback, so that no web page reaches it through a name of its own.
    """
    return sorted({*LOOPBACK, host}) if is_loopback(host) and not keys else None


def url_of(host: str, port: int) -> str:
    """Return the address of a server as people type it."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def check_free(host: str, port: int) -> None:
    """Find out, before anything is loaded, whether an address can be listened on.

    Raises:
        InputError: Somebody listens there, or it is no address of this machine.
    """
    failed: list[OSError] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InputError(f"{host!r} is no address of this machine ({error.strerror}): pass another --host") from error
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise InputError(f"somebody listens on {url_of(host, port)} already: pass another --port") from error
            failed.append(error)
    if len(failed) == len(found):
        reason = failed[0].strerror
        raise InputError(f"{url_of(host, port)} cannot be listened on ({reason}): pass another --host or --port")


def listen(app: Any, *, host: str, port: int, drain_s: int) -> None:
    """Answer until a signal, and write one JSON line per request to standard error.

    Args:
        drain_s: Seconds that requests under way have after the signal; then they are given up.

    Raises:
        InputError: Nobody can listen there.
    """
    check_free(host, port)
    log_to_stderr()
    _allow_files()
    spare()
    server = uvicorn.Server(speaking(app, host=host, port=port, drain_s=drain_s))
    signal.signal(signal.SIGTERM, _leave)  # uvicorn raises it again when it has drained
    with suppress(KeyboardInterrupt):
        server.run()


def spare() -> None:
    """Keep what a start has made out of later collections: one that walks all of torch stops every thread meanwhile."""
    gc.collect()
    gc.freeze()


def speaking(app: Any, *, host: str, port: int, drain_s: int) -> uvicorn.Config:
    """Return how HTTP is spoken: by h11, which limits what a client may send before a body."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http="h11",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=drain_s,
        h11_max_incomplete_event_size=64 << 10,
    )


def log_to_stderr() -> None:
    """Write one JSON line per request to standard error; what anything else has to say becomes such lines, too."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.getLogger().handlers = [handler]
    logging.getLogger("kvlink.server").setLevel(logging.INFO)
    logging.captureWarnings(True)


class JsonLines(logging.Formatter):
    """One JSON object per line: a message that is one gets time and level, any other becomes one.

    An exception is told by its kind and place, and not by what it says.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        text = record.getMessage()
        try:
            row = json.loads(text)
        except ValueError:
            row = text
        facts = row if isinstance(row, dict) else {"message": text.strip()}
        if record.exc_info and record.exc_info[1] is not None:
            facts |= fault_of(record.exc_info[1])
        return json.dumps({"time": at, "level": record.levelname.lower(), **facts})


def _allow_files() -> None:
    """Let this process have as many connections as the system allows: shells allow 1,024 open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _leave(_: int, __: FrameType | None) -> None:
    raise SystemExit(0)
