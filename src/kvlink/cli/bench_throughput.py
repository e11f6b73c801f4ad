"""`bench throughput`: many requests in one forward against full prefill of one after another."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvlink.cli import options, show


class Loops(StrEnum):
    """How requests arrive."""

    CLOSED = "closed"
    OPEN = "open"


def throughput(
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Requests under way, separated by commas.")
    ] = "1,16,64",
    requests: Annotated[int, typer.Option("--requests", min=1, help="Counted requests of each run.")] = 200,
    loop: Annotated[
        Loops, typer.Option("--loop", help="Always so many under way, or arrivals that wait for nothing.")
    ] = Loops.CLOSED,
    rate: Annotated[
        float | None,
        typer.Option("--rate", min=1e-6, help="Arrivals per second of --loop open.", show_default="0.7 of the closed"),
    ] = None,
    arms: Annotated[str, typer.Option("--arms", help="shared, full, or both.")] = "shared,full",
    full_requests: Annotated[int, typer.Option("--full-requests", min=1, help="Counted requests of `full`.")] = 4,
    warmup: Annotated[
        int | None,
        typer.Option("--warmup", min=0, help="Requests before the counted ones.", show_default="2 x concurrency"),
    ] = None,
    documents: Annotated[int, typer.Option("--documents", min=1, help="Documents in each prompt.")] = 10,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of each document.")] = 200,
    question: Annotated[int, typer.Option("--question", min=1, help="Tokens of the question.")] = 30,
    answer: Annotated[int, typer.Option("--answer", min=1, help="Tokens of each answer.")] = 64,
    pool: Annotated[int, typer.Option("--pool", min=1, help="Documents to draw from.")] = 100,
    zipf: Annotated[float, typer.Option("--zipf", min=0, help="Exponent of the documents' popularity.")] = 1.1,
    resident: Annotated[
        float, typer.Option("--resident", min=0, max=1, help="Share of the pool that fits the device tier.")
    ] = 0.5,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of documents, orders and arrivals.")] = 0,
    links: options.Links = "auto",
    foreign_links: options.ForeignLinks = False,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the result to this .svg or .png.")] = None,
    json: options.Json = None,
) -> None:
    """Requests per second and latencies with many requests under way, documents in new orders, eviction on.

    Example: kvlink bench throughput --concurrency 1,16 --requests 100 --json throughput.json
    """
    from dataclasses import asdict

    from kvlink.cli.bench import numbers
    from kvlink.evaluation.bench.throughput import ARMS, bench_throughput, runs_of
    from kvlink.evaluation.bench.throughput_load import Traffic
    from kvlink.evaluation.plot import require_plot
    from kvlink.evaluation.results import require_writable, write_results

    chosen = arms.split(",")
    if not set(chosen) <= set(ARMS):
        raise typer.BadParameter(f"{arms!r} names arms other than {', '.join(ARMS)}", param_hint="--arms")
    if rate is not None and loop is Loops.CLOSED:
        raise typer.BadParameter("a closed loop has no rate; add --loop open", param_hint="--rate")
    traffic = Traffic(
        requests=requests,
        warmup=warmup,
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
    how: dict[str, Any] = {
        "concurrency": numbers(concurrency),
        "loop": loop.value,
        "rate": rate,
        "arms": chosen,
        "full_requests": full_requests,
    }
    with show.open_bench(model, dtype, links=links, foreign_links=foreign_links) as engine, show.bar() as progress:
        task = progress.add_task("serving", total=runs_of(traffic, **how), rate="")
        rows = bench_throughput(engine, traffic, **how, progress=lambda: progress.advance(task))
    show.out(json).print(_table(rows))
    settings = {**asdict(traffic), **how}
    write_results(json, "bench throughput", rows, model=engine.model_info, seed=seed, settings=settings)
    if plot:
        from kvlink.evaluation.plot_throughput import plot_throughput

        plot_throughput(rows, plot, title=f"{engine.model_info['name']}, {documents} documents of {tokens} tokens")


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "arm",
        "at\nonce",
        "req/s",
        "x\nfull",
        "tok/s",
        "first token, s\np50 / p90 / p99",
        "gap, ms\np50 / p90 / p99",
        "hits",
        title="throughput; hits: prompt tokens found on the device",
    )
    for row in rows:
        table.add_row(
            f"{row['arm']}, open" if row["loop"] == "open" else row["arm"],
            str(row["concurrency"]),
            f"{row['requests_per_s']:.3g}",
            f"{row['times_full']:.3g}" if "times_full" in row else "",
            f"{row['output_tokens_per_s']:.3g}",
            _times(row["ttft_s"], "{:.2f}"),
            _times({name: value and value * 1000 for name, value in row["itl_s"].items()}, "{:.0f}"),
            f"{row['hit_ratio']['device']:.0%}",
        )
    return table


def _times(found: dict[str, float | None], form: str) -> str:
    """Return three percentiles; a dash for one that there are too few samples for."""
    values = (found[name] for name in ("p50", "p90", "p99"))
    return " / ".join("-" if value is None else form.format(value) for value in values)
