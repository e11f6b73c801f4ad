"""All parts of `bench serve`, one behind the other, on one server."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlink.core.errors import InputError
from kvlink.engine.engine import Engine
from kvlink.evaluation.bench.serve import bench_cost, bench_soak, device_bytes, engine_arm, server_arm
from kvlink.evaluation.bench.serve_clients import idle_streams, vanishing
from kvlink.evaluation.bench.serve_process import serving
from kvlink.evaluation.bench.throughput_load import Traffic
from kvlink.models import checkpoint

GIB = 1 << 30

Stage = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is done with a server.

    Attributes:
        clients: Clients that ask one request after another.
        rounds, counted: Turns of each arm, and counted requests of each.
        requests: Requests of the server in all; those behind the rounds it gets alone.
        vanish, streams: Clients that vanish, and streams that are open at once.
        threads: Of torch, in both arms.
    """

    clients: int
    rounds: int
    counted: int
    requests: int
    vanish: int
    streams: int
    threads: int

    @property
    def most_requests(self) -> int:
        """Requests of one arm, at most."""
        return self.requests + self.rounds * (self.counted + 2 * self.clients)

    def steps(self, traffic: Traffic) -> int:
        """Return how often `progress` is called, about."""
        cost = self.rounds * (self.clients + self.counted)
        return traffic.pool + cost + max(cost, self.requests) + self.vanish + 2 * self.streams


def bench_serve(
    engine: Engine,
    traffic: Traffic,
    work: Work,
    *,
    options: list[str],
    folder: Path,
    stage: Stage = lambda _: None,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Return a row for each arm, and for each part of what the server bears.

    Args:
        engine: Over the store that the server opens, too.
        options: Of `kvlink serve`: model and store.
        folder: Where the server's log is written.
        stage: Called with what comes next.

    Raises:
        InputError: Such a model is not served, or prompts of this size exceed its context.
        KVLinkError: The server did not start, or no request of a round was answered.
    """
    stage("encoding")
    texts, question = traffic.texts(engine), traffic.asks(engine)
    engine.encode(texts, progress=lambda _: progress())
    stage("starting a server")
    room = ["--device-memory", str(device_bytes(engine, traffic) / GIB), "--max-queue", str(2 * work.streams + 1024)]
    with serving([*options, *room], log=folder / "log", threads=work.threads) as process:
        server = server_arm(process, traffic, texts, question)
        stage("both in turn")
        with engine_arm(engine, traffic, texts) as alone:
            rows = bench_cost(
                alone, server, process, clients=work.clients, rounds=work.rounds, count=work.counted, progress=progress
            )
        stage("the server alone")
        left = max(0, work.requests - rows[1]["asked"])
        rows.append(bench_soak(server, process, clients=work.clients, requests=left, progress=progress))
        if work.vanish:
            stage("clients vanish")
            some = texts[: traffic.documents]
            rows.append(vanishing(process, some, question, clients=work.vanish, progress=progress))
        if work.streams:
            stage("streams wait")
            rows.append(idle_streams(process, question, streams=work.streams, progress=progress))
    return rows


def shortened(model: str, layers: int, folder: Path) -> str:
    """Write the first layers of a model, with its embeddings and tokenizer, as a model of its own; return its name.

    It does the same work in little, and says nothing sensible.

    Raises:
        InputError: It has no such layers.
        ModelError: It cannot be loaded.
    """
    found = checkpoint.load(model)
    decoder = found.model.get_decoder()
    blocks, config = getattr(decoder, "layers", None), found.model.config
    if blocks is None or len(blocks) < layers or found.tokenizer is None:
        raise InputError(f"{model} has no {layers} layers that could be taken out: name fewer, or another model")
    decoder.layers = blocks[:layers]
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    found.model.save_pretrained(folder)
    found.tokenizer.save_pretrained(folder)
    return str(folder)
