"""Servers and a gateway as processes of this machine, each on a port of the loopback, until a block is left."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from kvlink.core.errors import InputError

LOOPBACK = "127.0.0.1"
START_S = 180.0
"""How long a server may take to load its model."""

_PERIOD_S = 0.1


class Program:
    """A `kvlink` that listens; it can be killed, and started again on its port.

    Args:
        words: The verb and its options, but for the port.
        log: Where its standard error goes.
    """

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self.port = _free_port()
        self.url = f"http://{LOOPBACK}:{self.port}"
        self._command = [sys.executable, "-m", "kvlink", *words, "--port", str(self.port)]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        environment = {name: one for name, one in os.environ.items() if not name.startswith("KVLINK_")}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603
                self._command, env={**environment, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=log
            )

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def wait(self, *, backends: int | None = None) -> None:
        """Wait until it says that it is ready.

        Args:
            backends: Of a gateway, how many have to be in.

        Raises:
            InputError: It has ended, or is not ready in time.
        """
        end = time.monotonic() + START_S
        while not self._is_ready(backends):
            if self._process is None or self._process.poll() is not None or time.monotonic() > end:
                said = self._log.read_text("utf-8", errors="replace")[-2000:]
                raise InputError(f"{' '.join(self._command[2:])} does not answer; it said: {said}")
            time.sleep(_PERIOD_S)

    def busy_s(self) -> float:
        """Return the seconds of a core that this process has used since it was started."""
        assert self._process is not None, "it was started"
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _is_ready(self, backends: int | None) -> bool:
        with suppress(httpx.TransportError):
            found = httpx.get(f"{self.url}/ready", timeout=5, trust_env=False, verify=False)  # noqa: S501 (it is no TLS)
            return found.status_code == 200 and backends in (None, found.json().get("backends"))
        return False


@contextmanager
def servers(count: int, words: Sequence[str], folder: Path) -> Generator[list[Program]]:
    """Start servers of one model, each with a store of its own, and wait until all are ready.

    Args:
        words: Options of `kvlink serve`.
    """
    started: list[Program] = []
    try:
        for number in range(count):
            store = str(folder / f"store-{number}")
            started.append(Program(["serve", *words, "--store", store], folder / f"server-{number}.log"))
        for one in started:
            one.wait()
        yield started
    finally:
        for one in started:
            one.kill()


@contextmanager
def gateway(behind: Sequence[Program], policy: str, folder: Path) -> Generator[Program]:
    """Start a gateway, and wait until all servers are in."""
    urls = ",".join(one.url for one in behind)
    words = ["route", "--backends", urls, "--policy", policy, "--check", "0.5"]
    one = Program(words, folder / f"gateway-{policy}.log")
    try:
        one.wait(backends=len(behind))
        yield one
    finally:
        one.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]
