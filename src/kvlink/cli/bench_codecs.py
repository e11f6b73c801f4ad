"""`bench codecs`: what each codec of the store saves, costs and loses."""

import os
from typing import Annotated

import typer
from rich.table import Table

from kvlink.cli import options, show


def codecs(
    tokens: Annotated[str, typer.Option("--tokens", help="Tokens per document, separated by commas.")] = "1000,100",
    threads: Annotated[
        str | None,
        typer.Option("--threads", help="Numbers of threads, separated by commas.", show_default="one, and all"),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Counted rounds.")] = 7,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    json: options.Json = None,
) -> None:
    """Size, speed and error of the store's codecs, and loading against reading and copying the same bytes."""
    from kvlink.cli.bench import numbers
    from kvlink.evaluation.bench.codecs import bench_codecs, runs_of
    from kvlink.evaluation.results import write_results

    lengths = numbers(tokens)
    counts = numbers(threads) if threads else sorted({1, len(os.sched_getaffinity(0))})
    with show.open_bench(model, dtype) as engine, show.bar() as progress:
        task = progress.add_task("measuring", total=runs_of(engine, lengths, counts, repeats), rate="")
        rows = bench_codecs(
            engine, tokens=lengths, threads=counts, repeats=repeats, progress=lambda: progress.advance(task)
        )
    table = Table(
        "tokens",
        "codec",
        "size",
        "keys off",
        "values off",
        "KL",
        "agreement",
        "threads",
        "pack",
        "unpack",
        "load",
        "of copy",
        title="codecs",
    )
    for row in rows:
        if row["what"] != "load":
            continue
        same = [other for other in rows if all(other[key] == row[key] for key in ("tokens", "codec", "threads"))]
        speed = {other["what"]: f"{other['gb_per_s']:.2f} GB/s" for other in same}
        raw = row["codec"] == "raw"
        table.add_row(
            f"{row['tokens']:,}",
            row["codec"],
            f"{row['size']:.3f}",
            "" if row["key_error_mean"] is None else f"{row['key_error_mean']:.2%}",
            "" if row["value_error_mean"] is None else f"{row['value_error_mean']:.2%}",
            f"{row['kl']:.4f}",
            f"{row['agreement']:.1%}",
            str(row["threads"]),
            "" if raw else speed["pack"],  # a view
            "" if raw or row["key_error_mean"] is None else speed["unpack"],
            speed["load"],
            f"{row['of_copy']:.2f}" if raw else "",  # the others decode meanwhile
        )
    show.out(json).print(table)
    write_results(json, "bench codecs", rows, model=engine.model_info, seed=0)
