"""`bench serve`: what HTTP costs, and what a server bears."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.table import Table

from kvlink.cli import options, show


def serve(
    clients: Annotated[int, typer.Option("--clients", min=1, help="Clients that ask one request after another.")] = 16,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns that each arm takes.")] = 7,
    counted: Annotated[int, typer.Option("--counted", min=1, help="Counted requests of an arm in each round.")] = 40,
    requests: Annotated[
        int,
        typer.Option("--requests", min=0, help="Requests of the server in all; those behind the rounds it gets alone."),
    ] = 2000,
    vanish: Annotated[int, typer.Option("--vanish", min=0, help="Clients that connect and vanish.")] = 300,
    streams: Annotated[int, typer.Option("--streams", min=0, help="Streams that are open at once, unread.")] = 1000,
    documents: Annotated[int, typer.Option("--documents", min=1, help="Documents in each prompt.")] = 5,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of each document.")] = 100,
    question: Annotated[int, typer.Option("--question", min=1, help="Tokens of the question.")] = 20,
    answer: Annotated[int, typer.Option("--answer", min=1, help="Longest answer.")] = 16,
    pool: Annotated[int, typer.Option("--pool", min=1, help="Documents to draw from.")] = 100,
    zipf: Annotated[float, typer.Option("--zipf", min=0, help="Exponent of the documents' popularity.")] = 1.1,
    resident: Annotated[
        float, typer.Option("--resident", min=0, max=1, help="Share of the pool that fits the device tier.")
    ] = 0.5,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, help="Threads of torch in both arms.", show_default="all cores but one"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of documents and orders.")] = 0,
    links: options.Links = "auto",
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the result to this .svg or .png.")] = None,
    json: options.Json = None,
) -> None:
    """Compare a server process, asked over loopback, with the engine alone; then see what it bears.

    The arms take turns. Then the server is asked alone, its memory watched; clients vanish; streams are held unread.

    Example: kvlink bench serve --requests 400 --json serve.json --plot serve.svg
    """
    from dataclasses import asdict

    import torch

    from kvlink.evaluation.bench import serve as bench
    from kvlink.evaluation.bench.serve_clients import idle_streams, vanishing
    from kvlink.evaluation.bench.serve_process import allow_connections, require_proc, serving
    from kvlink.evaluation.bench.throughput_load import Traffic
    from kvlink.evaluation.plot import require_plot
    from kvlink.evaluation.results import require_writable, write_results

    traffic = Traffic(
        requests=requests + rounds * (counted + 2 * clients),
        documents=documents,
        tokens=tokens,
        question=question,
        answer=answer,
        pool=pool,
        zipf=zipf,
        resident=resident,
        seed=seed,
    )
    require_proc()
    if json is not None:
        require_writable(json, "the results")
    if plot:
        require_plot(plot)
    threads = threads or max(1, len(os.sched_getaffinity(0)) - 1)
    torch.set_num_threads(threads)
    open_at_once = allow_connections(streams)
    wanted = pool + 2 * rounds * (clients + counted) + vanish + 2 * open_at_once
    with (
        TemporaryDirectory(prefix="kvlink-bench-") as folder,
        show.open_engine(model, Path(folder) / "store", dtype, options.GIGABYTES, links=links) as engine,
        show.bar() as progress,
    ):
        task = progress.add_task("encoding", total=wanted + requests, rate="")

        def step() -> None:
            progress.advance(task)

        texts, asked = traffic.texts(engine), traffic.asks(engine)
        engine.encode(texts, progress=lambda _: step())
        progress.update(task, description="starting a server")
        how = ["--model", model, "--store", str(Path(folder) / "store"), "--links", links]
        how += [
            "--device-memory",
            str(bench.device_bytes(engine, traffic) / (1 << 30)),
            "--max-queue",
            str(2 * streams + 1024),
        ]
        with serving(
            [*how, *(["--dtype", dtype] if dtype else [])], log=Path(folder) / "log", threads=threads
        ) as process:
            server = bench.server_arm(process, traffic, texts, asked)
            progress.update(task, description="both in turn")
            with bench.engine_arm(engine, traffic, texts) as alone:
                rows = bench.bench_cost(alone, server, clients=clients, rounds=rounds, count=counted, progress=step)
            left = max(0, requests - rows[1]["asked"])
            progress.update(task, description="the server alone", total=wanted + left)
            rows.append(bench.bench_soak(server, process, clients=clients, requests=left, progress=step))
            if vanish:
                progress.update(task, description="clients vanish")
                rows.append(vanishing(process, texts[:documents], asked, clients=vanish, progress=step))
            if open_at_once:
                progress.update(task, description="streams wait")
                rows.append(idle_streams(process, asked, streams=open_at_once, progress=step))
        _print(rows, json)
        settings = {**asdict(traffic), "clients": clients, "rounds": rounds, "counted": counted, "threads": threads}
        settings |= {"requests": requests, "vanish": vanish, "streams": streams, "links": engine.num_links}
        write_results(json, "bench serve", rows, model=engine.model_info, seed=seed, settings=settings)
        if plot:
            from kvlink.evaluation.plot_serve import plot_serve

            plot_serve(rows, plot, title=f"{engine.model_info['name']}, {clients} clients")


def _print(rows: list[dict[str, Any]], json: Path | None) -> None:
    console = show.out(json)
    console.print(_table(rows[:2]))
    for line in _lines(rows[2:]):
        console.print(line, highlight=False)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("arm", "req/s", "costs", "first text\np50", "costs", "answer\np50", "requests", "errors")
    for row in rows:
        cost, first = row.get("cost"), row.get("ttft_cost_s")
        table.add_row(
            row["arm"],
            f"{row['requests_per_s']:.3g}",
            f"{cost['median']:.1%} ({cost['q1']:.1%} - {cost['q3']:.1%})" if cost else "",
            f"{row['ttft_s']['p50'] * 1000:.0f} ms",
            f"{first['median'] * 1000:.1f} ms" if first else "",
            f"{row['total_s']['p50'] * 1000:.0f} ms",
            f"{row['asked']:,}",
            str(sum(row["errors"].values())),
        )
    return table


def _lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return what the parts behind the rounds found, a line each."""
    said: list[str] = []
    for row in rows:
        match row["arm"]:
            case "soak":
                memory = f"{show.size(row['memory_bytes'][0])} -> {show.size(row['memory_bytes'][-1])}"
                text = f"{row['requests']:,} more requests, {sum(row['errors'].values())} errors; memory {memory}"
                said.append(f"{text}, {row['growth']:+.1%} behind the first quarter")
            case "vanished":
                files = f"{row['before']['open_files']} -> {row['after']['open_files']}"
                text = f"{row['clients']} clients vanished: {row['left'] or 'nothing'} left"
                said.append(f"{text} after {row['rests_after_s']:.1f} s, open files {files}")
            case _:
                text = f"{row['streams']:,} streams, {row['open_at_once']:,} open at once: {row['whole']:,} whole"
                health = f"/health in {row['health_s']['median'] * 1000:.1f} ms meanwhile"
                said.append(f"{text}; {show.size(row['bytes_per_stream'])} each, {health}")
    return said
