"""`store recompress` and `store calibrate`: smaller objects, and which of them a model's answers bear."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from kvlink.cli import options, show

if TYPE_CHECKING:
    from kvlink.evaluation.calibrate import Calibration


def recompress(
    to: Annotated[
        str, typer.Option("--to", help="Codecs below raw, split at commas, in the order in which they are taken.")
    ] = "int8",
    down_to: Annotated[
        float, typer.Option("--down-to", min=0, help="Stop when the store takes so many gigabytes.")
    ] = 0.0,
    store: options.Store = None,
    budget: options.Budget = options.GIGABYTES,
    json: options.Json = None,
) -> None:
    """Write objects smaller, the least used first; everything takes one step before anything takes the next.

    Only readers that accept a codec find what is in it: `kvlink store calibrate` measures which a model's answers
    bear. A second run goes on where a killed one stopped.

    Example: kvlink store recompress --to int8 --store handbook.kv --down-to 2
    """
    from dataclasses import asdict

    from kvlink.evaluation.results import write_results
    from kvlink.store.base import BoundedStore
    from kvlink.store.recompress import check_ladder
    from kvlink.store.recompress import recompress as run

    try:
        ladder = check_ladder([codec.strip() for codec in to.split(",") if codec.strip()])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--to") from error
    if not ladder:
        raise typer.BadParameter("no codec is named", param_hint="--to")
    folder = Path(store or options.default_store())
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is no folder", param_hint="--store")
    with options.open_store(folder, budget) as opened, show.bar() as progress:
        assert isinstance(opened, BoundedStore)
        task = progress.add_task("recompressing", total=len(opened.names()), rate="")
        before = opened.stats().used_bytes
        report = run(
            opened,
            ladder,
            target_bytes=int(down_to * 1e9),
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
        after = opened.stats().used_bytes
    written = ", ".join(f"{count} to {codec}" for codec, count in report.written.items()) or "nothing"
    console = show.out(json)
    console.print(
        f"recompressed {written}, {report.left_alone} left as they were: {show.size(before)} became {show.size(after)}",
        highlight=False,
    )
    if report.failures:
        console.print(
            f"[red]{report.failures} objects could not be recompressed[/]: {escape(report.reason)}", highlight=False
        )
    row = {**asdict(report), "before_bytes": before, "after_bytes": after}
    write_results(json, "store recompress", [row])
    if report.failures:
        raise typer.Exit(1)


def calibrate(
    codecs: Annotated[str, typer.Option("--codecs", help="Codecs, split at commas.")] = "half,int8,int4",
    tasks: Annotated[
        str, typer.Option("--tasks", help="Rows: tasks of `kvlink evaluate`, or paths of .jsonl(.gz).")
    ] = "hops,needle",
    data: Annotated[
        Path | None, typer.Option("--data", envvar="KVLINK_DATA", help="Folder of the real sets.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Rows of each task.")] = 15,
    max_tokens_context: Annotated[
        int | None, typer.Option("--max-tokens-context", min=1, help="Leave out documents of longer rows.")
    ] = None,
    thresholds: Annotated[
        str | None,
        typer.Option(
            "--thresholds",
            help="Least agreement with raw by codec, split at commas: int8=0.99,int4=0.97.",
            show_default="half=0.99,int8=0.99,int4=0.97",
        ),
    ] = None,
    model: options.Model = "demo",
    store: options.Store = None,
    dtype: options.Dtype = None,
    budget: options.Budget = options.GIGABYTES,
    seed: Annotated[int, typer.Option("--seed", help="Of the synthetic tasks.")] = 0,
    json: options.Json = None,
) -> None:
    """Measure which codecs a model's answers bear, and keep the verdicts in the store.

    A codec passes if over its entries the model's most likely next token is nearly always the one that it is over raw
    entries. From then on this model's readers of this store take it. A codec that fails is no error: exit code 0.

    Example: kvlink store calibrate -m demo --store handbook.kv --json gate.json
    """
    from kvlink.core.errors import InputError
    from kvlink.engine.gate import keep_verdict
    from kvlink.evaluation.calibrate import NEW_TOKENS, THRESHOLDS
    from kvlink.evaluation.calibrate import calibrate as run
    from kvlink.evaluation.case import Bench
    from kvlink.evaluation.methods import split_names
    from kvlink.evaluation.results import require_writable, write_results
    from kvlink.evaluation.tasks import task_rows

    least = _thresholds(codecs, thresholds, dict(THRESHOLDS))
    if json:
        require_writable(json, "the results")
    rows = [row for name in split_names(tasks) for row in task_rows(name, data=data, limit=limit, seed=seed)]
    if not rows:
        raise InputError(f"{tasks} has no rows: nothing can be scored")
    with show.open_engine(model, store, dtype, budget, links=None, recompress=False) as engine:
        digest = engine.model_info["digest"]
        bench = Bench(engine.runner, engine.prompter, engine.report.context, digest)
        with show.bar() as progress:
            task = progress.add_task("calibrating", total=len(rows), rate="")
            found = run(
                bench,
                rows,
                thresholds=least,
                max_tokens=max_tokens_context,
                progress=lambda: progress.advance(task),
            )
        for one in found:
            if one.verdict is not None:
                keep_verdict(engine.loader.store, digest, one.codec, one.verdict)
    console = show.out(json)
    console.print(_table(found, engine.model_info["name"]))
    for one in found:
        for error in one.errors:
            console.print(f"[yellow]{one.codec}[/]: {escape(error)}", highlight=False)
    settings = {
        "tasks": split_names(tasks),
        "limit": limit,
        "max_tokens_context": max_tokens_context,
        "new_tokens": NEW_TOKENS,
        "thresholds": least,
    }
    write_results(
        json,
        "store calibrate",
        [one.to_json() for one in found],
        model=engine.model_info,
        seed=seed,
        settings=settings,
    )
    if not any(one.verdict for one in found):
        raise InputError("nothing could be scored: " + "; ".join(dict.fromkeys(e for one in found for e in one.errors)))


def _thresholds(codecs: str, given: str | None, default: dict[str, float]) -> dict[str, float]:
    """Return the least agreement of each codec that was asked for."""
    from kvlink.store.codec import CODECS

    asked = [codec.strip() for codec in codecs.split(",") if codec.strip()]
    if wrong := [codec for codec in asked if codec == "raw" or codec not in CODECS] or ([] if asked else ["nothing"]):
        known = ", ".join(codec for codec in CODECS if codec != "raw")
        raise typer.BadParameter(f"{', '.join(wrong)} is none of {known}", param_hint="--codecs")
    least = default
    for part in given.split(",") if given else []:
        codec, _, share = part.partition("=")
        try:
            least[codec.strip()] = float(share)
        except ValueError:
            raise typer.BadParameter(
                f"{part!r} is not of the form codec=share, such as int8=0.99", param_hint="--thresholds"
            ) from None
    return {codec: least.get(codec, min(default.values())) for codec in asked}


def _table(found: "list[Calibration]", model: str) -> Table:
    table = Table("codec", "verdict", "agreement", "needed", "KL", "rows", "tokens", "size", title=f"gate of {model}")
    for one in found:
        if one.verdict is None or one.lost is None:
            table.add_row(one.codec, "[yellow]not measured[/]", "-", "-", "-", "0", "0", "-")
            continue
        told = one.verdict
        table.add_row(
            one.codec,
            "[green]passed[/]" if told.passed else "[red]failed[/]",
            f"{told.agreement:.4f} ({1 + one.lost.low:.3f} to {1 + one.lost.high:.3f})",
            f"{told.threshold:g}",
            f"{told.kl:.5f}",
            str(told.rows),
            str(told.tokens),
            f"{one.size:.3f}",
        )
    return table
