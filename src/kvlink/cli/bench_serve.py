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
    layers: Annotated[
        int | None,
        typer.Option(
            "--layers",
            min=1,
            help="Take only so many layers of the model: the same work in little, where cores are few.",
            show_default="all",
        ),
    ] = None,
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

    from kvlink.evaluation.bench.serve_process import allow_connections, require_proc
    from kvlink.evaluation.bench.serve_run import Work, bench_serve, shortened
    from kvlink.evaluation.bench.throughput_load import Traffic
    from kvlink.evaluation.plot import require_plot
    from kvlink.evaluation.results import require_writable, write_results

    require_proc()
    work = Work(
        clients=clients,
        rounds=rounds,
        counted=counted,
        requests=requests,
        vanish=vanish,
        streams=allow_connections(streams),
        threads=threads or max(1, len(os.sched_getaffinity(0)) - 1),
    )
    traffic = Traffic(
        requests=work.most_requests,
        documents=documents,
        tokens=tokens,
        question=question,
        answer=answer,
        pool=pool,
        zipf=zipf,
        resident=resident,
        seed=seed,
    )
    if json is not None:
        require_writable(json, "the results")
    if plot:
        require_plot(plot)
    torch.set_num_threads(work.threads)
    with TemporaryDirectory(prefix="kvlink-bench-") as name:
        folder = Path(name)
        asked = model if layers is None else shortened(model, layers, folder / "model")
        store = str(folder / "store")
        how = ["--model", asked, "--store", store, "--links", links, *(["--dtype", dtype] if dtype else [])]
        with show.open_engine(asked, store, dtype, options.GIGABYTES, links=links) as engine, show.bar() as progress:
            task = progress.add_task("", total=work.steps(traffic), rate="")
            rows = bench_serve(
                engine,
                traffic,
                work,
                options=how,
                folder=folder,
                stage=lambda what: progress.update(task, description=what),
                progress=lambda: progress.advance(task),
            )
            info = {**engine.model_info, "name": model, "layers": engine.runner.geometry.layers}
            settings = {**asdict(traffic), **asdict(work), "links": engine.num_links}
    _print(rows, json)
    write_results(json, "bench serve", rows, model=info, seed=seed, settings=settings)
    if plot:
        from kvlink.evaluation.plot_serve import plot_serve

        plot_serve(rows, plot, title=f"{model}, {info['layers']} layers, {clients} clients")


def _print(rows: list[dict[str, Any]], json: Path | None) -> None:
    console = show.out(json)
    console.print(_table(rows[:2]))
    cost, first, added = (rows[1][name] for name in ("cost", "ttft_cost_s", "ttft_added_s"))
    share = f"{cost['median']:.1%} of requests per second (quartiles {cost['q1']:.1%}, {cost['q3']:.1%})"
    late = f"{first['median'] * 1000:.1f} ms of the median time to the first text"
    parts = f"{added['median'] * 1000:.1f} ms lie between the engine's first token and the client's first text"
    for line in (f"the server costs {share}, {late}; {parts}", *_lines(rows[2:])):
        console.print(line, highlight=False, soft_wrap=True)


def _table(rows: list[dict[str, Any]]) -> Table:
    heads = ("arm", "req/s", "first text, ms\np50", "answer, s\np50", "processor, ms\neach", "asked", "errors")
    table = Table(*heads, title="a server, asked over loopback, and its engine alone")
    for row in rows:
        table.add_row(
            row["arm"],
            f"{row['requests_per_s']:.3g}",
            f"{row['ttft_s']['p50'] * 1000:.0f}",
            f"{row['total_s']['p50']:.2f}",
            f"{row['processor_s'] * 1000:.0f}",
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
