"""A network in a process of its own: listens on a TCP port of the loopback and passes all on to a socket, but late.

Run as a file, `store_proxy.py THERE BYTES_PER_S LATENCY_S`; it prints its port once it listens. Imports nothing of the
package, so that it starts at once. What waits for more to send is switched off (Nagle): it is no part of the network.
"""

import socket
import sys
import threading
import time
from contextlib import suppress
from queue import Queue
from typing import final

CHUNK_BYTES = 1 << 17


@final
class Link:
    """One direction, shared by all connections: what enters is due once all before it has passed, plus the latency."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def due(self, num_bytes: int, now: float) -> float:
        """Return when bytes that enter now have arrived."""
        with self._lock:
            self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s
            return self._free_at + self._latency_s


def serve(listening: socket.socket, target: str, there: Link, back: Link) -> None:
    """Pass on whatever comes, until the socket is closed."""
    with suppress(OSError):
        while True:
            client, _ = listening.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server = socket.socket(socket.AF_UNIX)
            server.connect(target)
            for source, sink, link in ((client, server, there), (server, client, back)):
                passing: Queue[tuple[float, bytes]] = Queue(maxsize=4096)
                threading.Thread(target=_take_in, args=(source, passing, link), daemon=True).start()
                threading.Thread(target=_hand_out, args=(sink, passing), daemon=True).start()


def _take_in(source: socket.socket, passing: "Queue[tuple[float, bytes]]", link: Link) -> None:
    data = b"?"
    while data:
        try:
            data = source.recv(CHUNK_BYTES)
        except OSError:
            data = b""
        passing.put((link.due(len(data), time.monotonic()), data))


def _hand_out(sink: socket.socket, passing: "Queue[tuple[float, bytes]]") -> None:
    with suppress(OSError):
        while True:
            due, data = passing.get()
            time.sleep(max(0.0, due - time.monotonic()))
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(data)


def main(target: str, bytes_per_s: float, latency_s: float) -> None:
    """Listen on a free port, say which, and serve until the process is ended."""
    with socket.socket(socket.AF_INET) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        print(listening.getsockname()[1], flush=True)  # noqa: T201
        serve(listening, target, Link(bytes_per_s, latency_s), Link(bytes_per_s, latency_s))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
