"""`store ls|verify|gc`: look after a store. Needs no model."""

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.table import Table

from kvlink.cli import options, show

if TYPE_CHECKING:
    from kvlink.store.base import StoreStats
    from kvlink.store.disk import DiskStore

app = typer.Typer(help="Look after a store; no model is needed.", no_args_is_help=True)


def fill(stats: "StoreStats") -> str:
    """Return how full a store is, tier by tier where it has tiers; what a server keeps account of is not known."""
    from kvlink.store.tier import TieredStats

    if isinstance(stats, TieredStats):
        return ", ".join(f"in its {tier.source} {fill(tier.stats)}" for tier in stats.tiers)
    if not stats.budget_bytes:
        return "what a server keeps account of"
    return f"{show.size(stats.used_bytes)} of at most {show.size(stats.budget_bytes)}"


def recompressed(stats: "StoreStats") -> dict[str, int]:
    """Return how many objects recompression in the background has written, by codec, all tiers together."""
    from kvlink.store.recompressing import RecompressingStats
    from kvlink.store.tier import TieredStats

    counts: Counter[str] = Counter()
    for one in [tier.stats for tier in stats.tiers] if isinstance(stats, TieredStats) else [stats]:
        if isinstance(one, RecompressingStats):
            counts.update(one.recompression.written)
    return dict(counts)


def lost(stats: "StoreStats") -> list[str]:
    """Say of each tier that could not keep everything how often, and why."""
    from kvlink.store.tier import TieredStats

    tiers = stats.tiers if isinstance(stats, TieredStats) else ()
    return [
        f"the {tier.source} failed {tier.failures} times, so it may lack objects: {tier.reason}"
        for tier in tiers
        if tier.failures
    ]


def _open(store: str | None, budget: float = options.GIGABYTES) -> "DiskStore":
    from kvlink.store.disk import DiskStore

    folder = Path(store or options.default_store())
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is no folder", param_hint="--store")
    opened = options.open_store(folder, budget)
    assert isinstance(opened, DiskStore)
    return opened


def _refuse_url(store: str | None, instead: str) -> None:
    from kvlink.store.address import is_address, without_secrets

    if store is not None and is_address(store):
        raise typer.BadParameter(f"{without_secrets(store)} is no folder: {instead}", param_hint="--store")


@app.command("ls")
def ls(store: options.Store = None, json: options.Json = None) -> None:
    """List the objects, the least used last."""
    from kvlink.evaluation.results import write_results
    from kvlink.store.address import is_address

    with options.open_store(store, options.GIGABYTES) if store and is_address(store) else _open(store) as opened:
        found = [(stat, name, codec) for name in opened.names() for codec, stat in opened.stat(name).items()]
        found.sort(key=lambda row: (-row[0].last_use, row[1]))
        table = Table("fingerprint", "codec", "size", "last use", title=f"{len(found)} objects")
        rows: list[dict[str, object]] = []
        for stat, name, codec in found:
            when = datetime.fromtimestamp(stat.last_use, UTC)
            table.add_row(name[:16], codec, show.size(stat.num_bytes), f"{when:%Y-%m-%d %H:%M}")
            rows.append({"name": name, "codec": codec, "bytes": stat.num_bytes, "last_use": stat.last_use})
        console = show.out(json)
        console.print(table)
        counts = Counter(codec for _, _, codec in found)
        told = f": {', '.join(f'{count} {codec}' for codec, count in counts.items())}" if counts else ""
        console.print(f"the store holds {fill(opened.stats())}{told}", highlight=False)
        write_results(json, "store ls", rows)


@app.command("verify")
def verify(store: options.Store = None, json: options.Json = None) -> None:
    """Read and check every object. Moves nothing; exits with 1 if anything is damaged."""
    from kvlink.evaluation.results import write_results

    _refuse_url(store, "objects of a remote are checked whenever they are read, and removed there if damaged")
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

    _refuse_url(store, "a server evicts by its own rules, and a bucket needs a rule that removes old objects")
    with _open(store, budget) as opened:
        report = opened.gc()
    show.out(json).print(
        f"removed {report.num_litter} leftovers, {report.num_quarantined} quarantined, {report.num_evicted} over the "
        f"budget, {report.num_folders} empty folders: {show.size(report.freed_bytes)} freed",
        highlight=False,
    )
    write_results(json, "store gc", [asdict(report)])
