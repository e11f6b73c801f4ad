"""A server in a process of its own, started as anybody starts one, and what the system and its metrics tell of it.

Knows it by its address and its process id alone. Needs `/proc`, which Linux has.
"""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from json import loads
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, runtime_checkable

from kvlink.core.errors import InputError, KVLinkError

HOST = "127.0.0.1"
MODEL = "bench"
"""What clients call the model."""

STARTS_WITHIN_S = 600.0
ANSWERS_WITHIN_S = 600.0
LOGS_WITHIN_S = 10.0

SPARE_FILES = 200
"""Files that a process has open beside its connections."""

HELD = ("kvlink_requests_running", "kvlink_requests_waiting", "kvlink_own_bytes", "kvlink_leased_bytes")
"""Metrics of what requests hold; all are 0 when nobody asks."""

_INHERITED = {"KVLINK_SECRET", "KVLINK_STORE_KEY", "KVLINK_STORE_KEY_FILE", "KVLINK_RECOMPRESS"}


@runtime_checkable
class Connection(Protocol):
    """What is needed of a connection here."""

    def recv(self, size: int, /) -> bytes:
        """Return what has come, at most so many bytes; none at the end."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that answers.

    Attributes:
        log: Where it writes what it says.
    """

    port: int
    pid: int
    log: Path

    def connection(self) -> HTTPConnection:
        """Return a new connection, not yet open."""
        return HTTPConnection(HOST, self.port, timeout=ANSWERS_WITHIN_S)

    def get(self, path: str) -> str:
        """Return the body of an answer of status 200.

        Raises:
            KVLinkError: It has another status.
        """
        with closing(self.connection()) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            text = response.read().decode()
        if response.status != 200:
            raise KVLinkError(f"GET {path} was answered with {response.status}: {text[:200]}")
        return text

    def sent(self, path: str, body: bytes, *, part: float = 1.0) -> Connection:
        """Return a connection on which a POST was sent, or the first part of one, and nothing was read."""
        head = f"POST {path} HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        data = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        connection = socket.create_connection((HOST, self.port), timeout=ANSWERS_WITHIN_S)
        connection.sendall(data[: int(len(data) * part)])
        return connection

    def held(self) -> dict[str, float]:
        """Return what requests hold now, by the metric's name; nothing if they hold nothing."""
        return {name: value for name, value in metrics_of(self.get("/metrics")) if name in HELD and value}

    def logged(self, names: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return what it has logged of these requests, by their ids; it does so a moment behind the last byte.

        Raises:
            KVLinkError: It has not logged some of them.
        """
        end = time.monotonic() + LOGS_WITHIN_S
        while True:
            rows = (loads(line) for line in self.log.read_text("utf-8").splitlines() if line.endswith("}"))
            found = {row["id"]: row for row in rows if row.get("id") in names and "route" in row}
            if len(found) == len(names):
                return found
            if time.monotonic() > end:
                raise KVLinkError(f"the server has logged {len(found)} of {len(names)} requests")
            time.sleep(0.1)

    @property
    def memory_bytes(self) -> int:
        """Resident memory."""
        for line in Path(f"/proc/{self.pid}/status").read_text("utf-8").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
        raise KVLinkError(f"/proc/{self.pid}/status tells no memory: the server has ended")

    @property
    def processor_s(self) -> float:
        """Seconds that processors have spent on it."""
        fields = Path(f"/proc/{self.pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def open_files(self) -> int:
        """Open files, connections among them."""
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())

    @property
    def threads(self) -> int:
        """Threads."""
        return sum(1 for _ in Path(f"/proc/{self.pid}/task").iterdir())


@contextmanager
def serving(options: Sequence[str], *, log: Path, threads: int) -> Generator[ServerProcess]:
    """Start `kvlink serve` with these options, wait until it is ready, and end it.

    Settings of the environment are kept from it, but for what opens the store. SIGTERM to this process ends both.

    Args:
        log: Where what it says is written.
        threads: Of torch.

    Raises:
        KVLinkError: It did not start; the message ends with what it said.
    """
    environment = {name: one for name, one in os.environ.items() if name[:7] != "KVLINK_" or name in _INHERITED}
    environment["OMP_NUM_THREADS"] = str(threads)
    port = _free_port()
    command = [sys.executable, "-m", "kvlink", "serve", "--name", MODEL, "--port", str(port), *options]
    with (
        _left_by_sigterm(),
        log.open("wb") as told,
        subprocess.Popen(command, stdout=told, stderr=told, env=environment) as process,  # noqa: S603 (our own)
    ):
        try:
            server = ServerProcess(port, process.pid, log)
            end = time.monotonic() + STARTS_WITHIN_S
            while not _is_ready(server):
                if process.poll() is not None or time.monotonic() > end:
                    raise KVLinkError(f"the server did not start: {log.read_text('utf-8', 'replace')[-500:]}")
                time.sleep(0.1)
            yield server
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()


@contextmanager
def _left_by_sigterm() -> Generator[None]:
    """Make SIGTERM an exception, so that what was begun is ended; by itself it ends a process at once."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # no other may listen to signals
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def require_proc() -> None:
    """Check that memory and open files of another process can be read here.

    Raises:
        InputError: They cannot.
    """
    if not Path("/proc/self/fd").is_dir():
        raise InputError("memory and open files of the server are read from /proc, which is not here: run it on Linux")


def allow_connections(count: int) -> int:
    """Let this process have so many connections; return how many it may have, if fewer."""
    wanted = count + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return count
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed - SPARE_FILES


def metrics_of(text: str) -> Iterator[tuple[str, float]]:
    """Yield name, labels included, and value of each metric in Prometheus' text format."""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            yield name, float(value)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _is_ready(server: ServerProcess) -> bool:
    try:
        server.get("/ready")
    except (OSError, HTTPException, KVLinkError):
        return False
    return True
