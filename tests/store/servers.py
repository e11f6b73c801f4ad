"""Real servers for tests: Redis on a unix socket, S3 on a loopback port. They end with the test that started them."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

LOOPBACK = "127.0.0.1"


class Server:
    """A process that says on its output when it is ready. `start` waits for that."""

    def __init__(self, ready: str) -> None:
        self.ready = ready
        self.process: subprocess.Popen[str] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> str:
        """Return the line that says that the server is ready."""
        command = self.command()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said: list[str] = []
        for line in self.process.stdout:
            said.append(line)
            if self.ready in line:
                return line
        self.stop()
        raise RuntimeError(f"{command[0]} did not start; it said: {''.join(said)}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            self.process = None

    def freeze(self) -> None:
        """Keep the process from answering. Its kernel still accepts connections."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class RedisServer(Server):
    """A server that writes nothing to the disk; on a port, too, if one is given."""

    def __init__(self, *arguments: str, port: int = 0) -> None:
        super().__init__("eady to accept connections")
        self.folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self.arguments = (*arguments, "--port", str(port))
        self.port = port
        self.socket = self.folder / "socket"
        self.url = f"unix://{self.socket}"

    def command(self) -> list[str]:
        options = {"bind": LOOPBACK, "unixsocket": str(self.socket), "dir": str(self.folder), "save": ""}
        given = [part for key, value in options.items() for part in (f"--{key}", value)]
        found = shutil.which("redis-server")
        if found is None:
            raise RuntimeError("these tests need redis-server: apt-get install redis-server")
        return [found, *given, *self.arguments]

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder)


class S3Server(Server):
    """An S3 endpoint in a process of its own."""

    def __init__(self) -> None:
        super().__init__("Running on http")
        self.port = free_port()

    def command(self) -> list[str]:
        return [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", LOOPBACK, "-p", str(self.port)]

    def start(self) -> str:
        line = super().start()
        self.port = int(line.strip().rpartition(":")[2])
        # What it logs about requests must not fill the pipe.
        self.reading = threading.Thread(target=self.process.stdout.read, daemon=True)
        self.reading.start()
        return line

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.reading.join()
        super().stop()

    @property
    def options(self) -> dict[str, object]:
        """What a client needs to come here."""
        return {"key": "test", "secret": "test", "endpoint_url": f"http://{LOOPBACK}:{self.port}"}


def free_port() -> int:
    """Return a port below those that the system hands out by itself, so that it is still free when it is bound."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port


class Proxy:
    """Stands between a client and a server on unix sockets, and falls silent in the middle of an answer.

    Attributes:
        answer_bytes: How much of the answers still passes; None for all.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name("proxy")
        self.url = f"unix://{self.path}"
        self.answer_bytes: int | None = None
        self.listening = socket.socket(socket.AF_UNIX)
        self.open: list[socket.socket] = [self.listening]

    def __enter__(self) -> "Proxy":
        self.listening.bind(str(self.path))
        self.listening.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for one in self.open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self.path.unlink()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.listening.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self.target))
                self.open += (client, server)
                for source, sink, passed in ((client, server, len), (server, client, self._passed)):
                    threading.Thread(target=self._pump, args=(source, sink, passed), daemon=True).start()

    def _passed(self, data: bytes) -> int:
        if self.answer_bytes is None:
            return len(data)
        passed = min(self.answer_bytes, len(data))
        self.answer_bytes -= passed
        return passed

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, passed: Callable[[bytes], int]) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data[: passed(data)])
            sink.shutdown(socket.SHUT_RDWR)
