"""`store ls|verify|gc`: look after a store on disk. Needs no model."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.table import Table

from kvlink.cli import options, show

if TYPE_CHECKING:
    from kvlink.store.disk import DiskStore

app = typer.Typer(help="Look after a store on disk; no model is needed.", no_args_is_help=True)


def _open(store: Path | None, budget: float = options.GIGABYTES) -> "DiskStore":
    folder = store or options.default_store()
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is no folder", param_hint="--store")
    return options.open_store(folder, budget)


@app.command("ls")
def ls(store: options.Store = None, json: options.Json = None) -> None:
    """List the objects, the least used last."""
    from kvlink.evaluation.results import write_results

    with _open(store) as opened:
        found = [(stat, name, codec) for name in opened.names() for codec, stat in opened.stat(name).items()]
        found.sort(key=lambda row: (-row[0].last_use, row[1]))
        table = Table("fingerprint", "codec", "size", "last use", title=f"{len(found)} objects")
        rows: list[dict[str, object]] = []
        for stat, name, codec in found:
            when = datetime.fromtimestamp(stat.last_use, UTC)
            table.add_row(name[:16], codec, show.size(stat.num_bytes), f"{when:%Y-%m-%d %H:%M}")
            rows.append({"name": name, "codec": codec, "bytes": stat.num_bytes, "last_use": stat.last_use})
        stats = opened.stats()
        console = show.out(json)
        console.print(table)
        console.print(f"{show.size(stats.used_bytes)} of at most {show.size(stats.budget_bytes)}", highlight=False)
        write_results(json, "store ls", rows)


@app.command("verify")
def verify(store: options.Store = None, json: options.Json = None) -> None:
    """Read and check every object. Moves nothing; exits with 1 if anything is damaged."""
    from kvlink.evaluation.results import write_results

    with _open(store) as opened, show.bar() as progress:
        task = progress.add_task("verifying", total=len(opened.names()), rate="")
        verdicts: list[dict[str, object]] = []
        console = show.out(json)
        for verdict in opened.verify():
            progress.advance(task)
            verdicts.append(
                {
                    "name": verdict.name,
                    "codec": verdict.codec,
                    "bytes": verdict.num_bytes,
                    "error": verdict.error,
                }
            )
            if verdict.error:
                console.print(
                    f"[red]damaged[/] {verdict.name} {verdict.codec}: {escape(verdict.error)}", highlight=False
                )
    damaged = sum(1 for verdict in verdicts if verdict["error"])
    console.print(f"{len(verdicts)} objects read, {damaged} damaged", highlight=False)
    write_results(json, "store verify", verdicts)
    if damaged:
        raise typer.Exit(1)


@app.command("gc")
def gc(store: options.Store = None, budget: options.Budget = options.GIGABYTES, json: options.Json = None) -> None:
    """Remove leftovers of interrupted writes, quarantined objects, and what exceeds the budget."""
    from dataclasses import asdict

    from kvlink.evaluation.results import write_results

    with _open(store, budget) as opened:
        report = opened.gc()
    show.out(json).print(
        f"removed {report.num_litter} leftovers, {report.num_quarantined} quarantined, {report.num_evicted} over the "
        f"budget, {report.num_folders} empty folders: {show.size(report.freed_bytes)} freed",
        highlight=False,
    )
    write_results(json, "store gc", [asdict(report)])
