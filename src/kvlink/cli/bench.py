"""`bench ttft|assembly|encode`: the figures of the documentation, measured here."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvlink.cli import options, show

app = typer.Typer(
    help="Measure on this machine, arms side by side; every sample goes into --json.", no_args_is_help=True
)

Documents = Annotated[int, typer.Option("--documents", min=1, help="Documents in each prompt.")]
Tokens = Annotated[str, typer.Option("--tokens", help="Tokens per document, separated by commas.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Counted rounds.")]


def numbers(text: str, *, least: int = 1) -> list[int]:
    """Read whole numbers, none below `least`, separated by commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [least - 1]
    if min(found) < least:
        raise typer.BadParameter(f"{text!r} is not a list of numbers like 100,200")
    return found


@app.command()
def ttft(
    documents: Documents = 10,
    tokens: Tokens = "100,200,300,400,500",
    links: Annotated[str, typer.Option("--links", help="Link tokens behind each document (random, for cost).")] = "0,6",
    repeats: Repeats = 7,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the result to this .svg or .png.")] = None,
    json: options.Json = None,
) -> None:
    """Time to first token by reuse (cold, host, warm) against full prefill."""
    from kvlink.evaluation.bench.ttft import bench_ttft, runs_of
    from kvlink.evaluation.results import write_results

    lengths = numbers(tokens)
    counts = numbers(links, least=0)
    with show.open_bench(model, dtype) as engine, show.bar() as progress:
        task = progress.add_task("measuring", total=runs_of(lengths, counts, repeats), rate="")
        rows = bench_ttft(
            engine,
            documents=documents,
            tokens=lengths,
            links=counts,
            repeats=repeats,
            progress=lambda: progress.advance(task),
        )
    table = Table("documents", "tokens", "arm", "state", "K", "median", "quartiles", "off", title="time to first token")
    for row in rows:
        table.add_row(
            str(row["documents"]),
            f"{row['documents'] * row['tokens']:,}",
            row["arm"],
            row["state"],
            str(row["links"]),
            f"{row['median_s']:.3f} s",
            f"{row['q1_s']:.3f} - {row['q3_s']:.3f}",
            "" if row["arm"] == "full" else f"{row['reduction']:.1%}",
        )
    show.out(json).print(table)
    write_results(json, "bench ttft", rows, model=engine.model_info, seed=0)
    if plot:
        from kvlink.evaluation.plot import plot_ttft

        plot_ttft(rows, plot, title=engine.model_info["name"])


@app.command()
def assembly(
    documents: Documents = 10,
    tokens: Tokens = "100,200,500",
    repeats: Repeats = 15,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    json: options.Json = None,
) -> None:
    """Laying out and rotating documents against a plain copy of the same bytes."""
    from kvlink.evaluation.bench.assembly import bench_assembly
    from kvlink.evaluation.results import write_results

    lengths = numbers(tokens)
    with show.open_bench(model, dtype) as engine, show.bar() as progress:
        task = progress.add_task("measuring", total=len(lengths) * 2 * (repeats + 3), rate="")
        rows = bench_assembly(
            engine, documents=documents, tokens=lengths, repeats=repeats, progress=lambda: progress.advance(task)
        )
    table = Table("tokens", "bytes", "arm", "median", "ratio", title="assembling against copying")
    for row in rows:
        size = show.size(row["bytes"])
        total = f"{row['documents'] * row['tokens']:,}"
        table.add_row(total, size, row["arm"], f"{row['median_s'] * 1000:.1f} ms", f"{row['ratio']:.2f}")
    show.out(json).print(table)
    write_results(json, "bench assembly", rows, model=engine.model_info, seed=0)


@app.command()
def encode(
    lengths: Annotated[str, typer.Option("--lengths", help="Tokens of each document.")] = ",".join(
        str(n) for n in (120, 180, 260, 310, 340, 380, 420, 450, 520, 560, 610, 750)
    ),
    repeats: Repeats = 5,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    json: options.Json = None,
) -> None:
    """Encoding into a store against plain forwards over the same batches."""
    from kvlink.evaluation.bench.assembly import bench_encode
    from kvlink.evaluation.results import write_results

    wanted = numbers(lengths)
    with show.open_bench(model, dtype) as engine, show.bar() as progress:
        task = progress.add_task("measuring", total=2 * (repeats + 1), rate="")
        rows = bench_encode(engine, lengths=wanted, repeats=repeats, progress=lambda: progress.advance(task))
    table = Table("documents", "tokens", "arm", "tokens/s", "ratio", title="encoding against plain forwards")
    for row in rows:
        speed = f"{row['tokens_per_s']:,.0f}"
        table.add_row(str(row["documents"]), f"{row['tokens']:,}", row["arm"], speed, f"{row['ratio']:.2f}")
    show.out(json).print(table)
    write_results(json, "bench encode", rows, model=engine.model_info, seed=0)
