"""`probe`: the verb that looks at a model alone."""

from typing import Annotated

import typer
from rich.table import Table

from kvlink.cli import options, show


def probe(
    model: Annotated[str, typer.Argument(help="A folder, a hub name, a .gguf file, or `demo`.")] = "demo",
    context: Annotated[
        int | None, typer.Option("--context", help="Positions that shall be accepted.", show_default="the model's own")
    ] = None,
    dtype: options.Dtype = None,
    json: options.Json = None,
) -> None:
    """Measure whether reuse is exact on a model. Exits with 1 when it is refused.

    Example: kvlink probe Qwen/Qwen3-0.6B --json -
    """
    from kvlink.evaluation.results import write_results

    with show.waiting(f"probing {model}"):
        from kvlink.models import checkpoint
        from kvlink.models.probe import examine

        loaded = checkpoint.load(model, dtype=options.dtype_named(dtype))
        report = examine(loaded.model, context=context)
    verdict = "[green]supported[/]" if report.supported else "[red]refused[/]"
    table = Table(title=f"{loaded.name}: {verdict}", show_header=False)
    for name, value in report.to_json().items():
        if name not in ("supported", "far_error", "rope") and value not in (None, ""):
            table.add_row(name, f"{value:.3g}" if isinstance(value, float) else str(value))
    console = show.out(json)
    console.print(table)
    write_results(json, "probe", [report.to_json()], model={"name": loaded.name, "digest": loaded.digest})
    if not report.supported:
        raise typer.Exit(1)
