"""A Redis behind a network of known rate and latency: a real server, and a proxy between."""

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvlink.core.errors import InputError

_START_S = 20.0


@dataclass(frozen=True, slots=True)
class Network:
    """What lies between this machine and the remote.

    Attributes:
        bytes_per_s: Rate in each direction, shared by all connections.
        latency_s: Delay in each direction.
    """

    bytes_per_s: float
    latency_s: float

    @property
    def name(self) -> str:
        """How it is called in tables."""
        return f"{self.bytes_per_s / 1e6:g} MB/s, {self.latency_s * 1000:g} ms"


@contextmanager
def behind(network: Network, place: Path) -> Generator[str]:
    """Put a network before a unix socket while the block lasts; yields the URL of its near end, a port of the loopback.

    The proxy is a process of its own, so that it takes no turns with the threads that are measured.

    Raises:
        InputError: It does not start.
    """
    program = Path(__file__).with_name("store_proxy.py")
    command = [sys.executable, "-I", str(program), str(place), repr(network.bytes_per_s), repr(network.latency_s)]
    proxy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603
    assert proxy.stdout is not None
    try:
        port = proxy.stdout.readline().strip()
        if not port:
            raise InputError("the proxy that stands for a network did not start; see what it says above")
        yield f"redis://127.0.0.1:{port}"
    finally:
        proxy.kill()
        proxy.wait()
        proxy.stdout.close()


def require_redis() -> str:
    """Return where redis-server is.

    Raises:
        InputError: It is not installed.
    """
    found = shutil.which("redis-server")
    if found is None:
        raise InputError("bench store --prefetch needs a real redis-server on PATH (apt-get install redis-server)")
    return found


@contextmanager
def redis_server() -> Generator[Path]:
    """Run a server that keeps everything in memory, while the block lasts; yields its unix socket.

    Raises:
        InputError: It is not installed, or does not start.
    """
    program = require_redis()
    with tempfile.TemporaryDirectory(prefix="kvlink-redis-") as folder:
        place = Path(folder) / "socket"
        options = {"port": "0", "unixsocket": str(place), "dir": folder, "save": "", "appendonly": "no"}
        given = [part for key, value in options.items() for part in (f"--{key}", value)]
        server = subprocess.Popen([program, *given], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
        try:
            until = time.monotonic() + _START_S
            while not _answers(place):
                if server.poll() is not None or time.monotonic() > until:
                    raise InputError(f"{program} did not start within {_START_S:g} s; try it by hand")
                time.sleep(0.02)
            yield place
        finally:
            server.kill()
            server.wait()


def _answers(place: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.connect(str(place))
        probe.sendall(b"PING\r\n")
        return probe.recv(7) == b"+PONG\r\n"
    return False
