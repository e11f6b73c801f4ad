"""`bench store`: loading objects, where that pays, and what loading ahead does under traffic."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvlink.cli import options, show


def store(
    break_even: Annotated[bool, typer.Option("--break-even", help="From which tier reuse pays here.")] = False,
    prefetch: Annotated[
        bool, typer.Option("--prefetch", help="Traffic with and without loading ahead; needs redis-server.")
    ] = False,
    soak: Annotated[
        bool, typer.Option("--soak", help="Many requests in new orders, in a store too small for all documents.")
    ] = False,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="Tokens per document.", show_default="1000; 100,300,1000 for --break-even"),
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", min=20, help="Requests.", show_default="5000, or 2000 for --soak")
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option("--network", help="MB/s and ms of latency for --prefetch.", show_default="100,20 and 1000,1"),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Counted rounds.")] = 7,
    remote: options.Remote = None,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw --prefetch to this .svg or .png.")] = None,
    json: options.Json = None,
) -> None:
    """Loading an object against reading and copying its bytes; or one of --break-even, --prefetch, --soak."""
    from kvlink.evaluation.results import write_results

    if break_even + prefetch + soak > 1:
        raise typer.BadParameter("choose one of --break-even, --prefetch and --soak")
    if prefetch:
        about, rows = _prefetch(requests, network or [], plot)
        table = _prefetch_table(rows)
    elif soak:
        about, rows = _soak(requests)
        table = _soak_table(rows)
    else:
        about, rows = _measure(model, dtype, tokens, repeats, remote, break_even=break_even)
        table = _break_even_table(rows) if break_even else _load_table(rows)
    show.out(json).print(table)
    write_results(json, "bench store", rows, model=about, seed=0)


def _measure(
    model: str, dtype: str | None, tokens: str | None, repeats: int, remote: str | None, *, break_even: bool
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    from kvlink.cli.bench import numbers
    from kvlink.evaluation.bench import store as bench

    lengths = numbers(tokens) if tokens else [100, 300, 1000] if break_even else [1000]
    with show.open_bench(model, dtype) as engine, show.bar() as progress:
        if break_even:
            task = progress.add_task("measuring", total=bench.runs_of_break_even(lengths, remote, repeats), rate="")
            rows = bench.bench_break_even(
                engine, tokens=lengths, remote=remote, repeats=repeats, progress=lambda: progress.advance(task)
            )
        else:
            total = sum(bench.runs_of_load(engine, length, repeats) for length in lengths)
            task = progress.add_task("measuring", total=total, rate="")
            rows = [
                row
                for length in lengths
                for row in bench.bench_load(
                    engine, tokens=length, repeats=repeats, progress=lambda: progress.advance(task)
                )
            ]
        return engine.model_info, rows


def _prefetch(
    requests: int | None, networks: list[str], plot: Path | None
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    from kvlink.evaluation.bench.store_network import Network, require_redis
    from kvlink.evaluation.bench.store_prefetch import NETWORKS, Traffic, bench_prefetch, runs_of
    from kvlink.evaluation.plot import plot_prefetch, require_plot

    require_redis()
    if plot:
        require_plot(plot)
    chosen: list[Network] = []
    for text in networks:
        try:
            rate, latency = map(float, text.split(","))
        except ValueError:
            rate, latency = 0.0, 0.0
        if rate <= 0 or latency < 0:
            raise typer.BadParameter(f"{text!r} is not MB/s and ms, like 100,20", param_hint="--network")
        chosen.append(Network(rate * 1e6, latency / 1000))
    traffic = Traffic(requests=requests or 5000)
    with show.bar() as progress:
        task = progress.add_task("serving", total=runs_of(traffic, len(chosen or NETWORKS)), rate="")
        about, rows = bench_prefetch(traffic, networks=chosen or NETWORKS, progress=lambda: progress.advance(task))
    if plot:
        plot_prefetch(rows, plot)
    return about, rows


def _soak(requests: int | None) -> tuple[dict[str, str], list[dict[str, Any]]]:
    from kvlink.evaluation.bench.store_soak import bench_soak, runs_of

    count = requests or 2000
    with show.bar() as progress:
        task = progress.add_task("serving", total=runs_of(count), rate="")
        return bench_soak(requests=count, progress=lambda: progress.advance(task))


def _load_table(rows: list[dict[str, Any]]) -> Table:
    """Return the table; what is read as it lies is not decoded."""
    from kvlink.store.codec import RAW, codec_named

    table = Table("tokens", "codec", "bytes", "load", "decode", "of copy", title="loading from a warm page cache")
    for row in rows:
        if row["what"] == "load":
            same = {"codec": row["codec"], "tokens": row["tokens"], "what": "decode"}
            decode = next(other for other in rows if all(other[key] == value for key, value in same.items()))
            table.add_row(
                f"{row['tokens']:,}",
                row["codec"],
                show.size(row["object_bytes"]),
                f"{row['median_s'] * 1000:.1f} ms",
                "" if row["codec"] == RAW or codec_named(row["codec"]).prunes else f"{decode['gb_per_s']:.2f} GB/s",
                f"{row['of_copy']:.2f}",
            )
    return table


def _break_even_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("tokens", "tier", "bytes", "load", "encode", "ratio", "pays", "from", title="where reuse pays")
    for row in rows:
        table.add_row(
            f"{row['tokens']:,}",
            row["tier"],
            show.size(row["bytes"]),
            f"{row['load_s'] * 1000:.1f} ms",
            f"{row['encode_s'] * 1000:.1f} ms",
            f"{row['ratio']:.3f}",
            "yes" if row["pays"] else "no",
            f"{show.size(row['break_even_bytes_per_s'])}/s",
        )
    return table


def _prefetch_table(rows: list[dict[str, Any]]) -> Table:
    from kvlink.evaluation.bench.store_network import Network

    table = Table(
        "network", "prefetch", "p50", "p90", "p99", "p99.9", "interval", "p99 against no", title="time to first token"
    )
    for row in rows:
        low, high = row["p999_interval_s"]
        table.add_row(
            Network(**row["network"]).name,
            "yes" if row["prefetch"] else "no",
            *(f"{row['ttft_s'][name] * 1000:.1f} ms" for name in ("p50", "p90", "p99", "p999")),
            f"{low * 1000:.0f} - {high * 1000:.0f}",
            f"{row['change']['p99']:+.1%}" if row["prefetch"] else "",
        )
    return table


def _soak_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("quarter", "hit ratio", "memory", title="requests in orders never seen")
    for row in rows:
        for number, (hits, held) in enumerate(zip(row["hit_ratio"]["quarters"], row["memory_bytes"], strict=True)):
            table.add_row(str(number + 1), f"{hits:.1%}", show.size(held))
        for tier, most in row["most_bytes"].items():
            table.add_row(tier, f"at most {show.size(most)}", f"of {show.size(row['budget_bytes'][tier])}")
    return table
