"""`bench update`: what an edit of a document costs, against encoding it whole."""

from typing import Annotated

import typer
from rich.table import Table

from kvlink.cli import options, show


def update(
    tokens: Annotated[int, typer.Option("--tokens", min=20, help="Tokens of the document.")] = 1000,
    at: Annotated[str, typer.Option("--at", help="Where it is edited, in percent.")] = "10,20,30,40,50,60,70,80,90",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Counted rounds.")] = 5,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    json: options.Json = None,
) -> None:
    """Keeping the beginning of an edited document against encoding it whole: tokens, seconds, difference."""
    from kvlink.cli.bench import numbers
    from kvlink.evaluation.bench.update import bench_update, runs_of
    from kvlink.evaluation.results import write_results

    places = [percent / 100 for percent in numbers(at, least=0)]
    if max(places) > 1:
        raise typer.BadParameter(f"{at!r} holds a place behind the end of the document", param_hint="--at")
    with show.open_bench(model, dtype) as engine, show.bar() as progress:
        task = progress.add_task("measuring", total=runs_of(places, repeats), rate="")
        rows = bench_update(
            engine, tokens=tokens, shares=places, repeats=repeats, progress=lambda: progress.advance(task)
        )
    table = Table(
        "edited at", "arm", "computed", "of all", "median", "of whole", "keys off", "values off", title="an edit"
    )
    for row in rows:
        table.add_row(
            f"{row['at']:.0%}",
            row["arm"],
            f"{row['computed']:,}",
            f"{row['share']:.0%}",
            f"{row['median_s'] * 1000:.0f} ms",
            f"{row['ratio']:.2f}",
            f"{row['key_error']:.1e}",
            f"{row['value_error']:.1e}",
        )
    show.out(json).print(table)
    write_results(json, "bench update", rows, model=engine.model_info, seed=0)
