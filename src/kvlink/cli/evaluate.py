"""`evaluate`: methods on tasks, quality beside speed."""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvlink.cli import options, show


def evaluate(
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks", help="Names, paths of .jsonl(.gz) or sets of the hub, split at commas; `list` shows the names."
        ),
    ] = "hops,needle",
    methods: Annotated[
        str, typer.Option("--methods", help="Names, with parameters: concat_reencoded(sink=none); `list` shows them.")
    ] = "full,block_mask,concat_local,concat_reencoded",
    data: Annotated[
        Path | None, typer.Option("--data", envvar="KVLINK_DATA", help="Folder of the real sets.", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first rows of each task.")] = None,
    max_documents: Annotated[
        int | None, typer.Option("--max-documents", min=1, help="Leave out documents from the back, never gold ones.")
    ] = None,
    max_tokens_context: Annotated[
        int | None, typer.Option("--max-tokens-context", min=1, help="The same, by tokens of prompt and answer.")
    ] = None,
    generate: Annotated[bool, typer.Option("--generate", help="Let each method answer, too; slower.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for rows.jsonl, one line per row and method.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the rows that are in --out.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Say what would run and how long it takes, and stop.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of the synthetic tasks.")] = 0,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the result to this .svg or .png.")] = None,
    json: options.Json = None,
) -> None:
    """Score methods on tasks: each on the same rows and ids, against full attention.

    Scores are taken on the first right answer, teacher-forced; --generate adds answers and their scores.
    Killed at any time, a run goes on with --resume, with more tasks and rows, too. Exit code 1 if nothing of a task
    could be scored.

    Example: kvlink evaluate --tasks nq,hotpotqa --data sets/ --limit 30 --out run/ --json run/results.json
    """
    from kvlink.core.errors import InputError
    from kvlink.evaluation.case import Bench
    from kvlink.evaluation.evaluate import Limits, asked_for, require_scored, settings_of, summarise
    from kvlink.evaluation.evaluate import evaluate as run
    from kvlink.evaluation.methods import available, method_named, split_names
    from kvlink.evaluation.results import write_results
    from kvlink.evaluation.rows import RowsFile
    from kvlink.evaluation.tasks import names, task_rows

    console = show.out(json)
    if "list" in (tasks, methods):
        console.print(f"tasks: {', '.join(names())}\nmethods: {', '.join(sorted(available()))}", highlight=False)
        return
    asked = split_names(methods)
    for name in asked:
        method_named(name)
    if resume and not out:
        raise InputError("--resume goes on with the rows in --out, and no --out is given: name the folder")
    _require_places(out=out, plot=None if plan else plot, json=json)
    rows = {name: task_rows(name, data=data, limit=limit, seed=seed) for name in split_names(tasks)}
    if not asked or not rows:
        raise InputError("no task or no method is named; `--tasks list` shows both")
    _require_rows(rows, generate=generate)
    limits = Limits(max_documents, max_tokens_context)
    with show.open_bench(model, dtype) as engine:
        bench = Bench(engine.runner, engine.prompter, engine.report.context, engine.model_info["digest"])
        if plan:
            _plan(bench, rows, methods=len(asked), limits=limits, generate=generate, json=json, info=engine.model_info)
            return
        settings = settings_of(model=engine.model_info, methods=asked, limits=limits, generate=generate, seed=seed)
        kept = RowsFile(out, settings, resume=resume) if out else None
        found: list[dict[str, Any]] = []
        with kept or nullcontext(), show.bar() as progress:
            if kept:
                for name, own in rows.items():
                    kept.require(name, own)
                found += kept.rows
            task = progress.add_task("evaluating", total=sum(map(len, rows.values())), rate="")
            progress.advance(task, len({(row["task"], row["id"]) for row in asked_for(found, rows)}))
            done = kept.done if kept else lambda task, row: False
            for results in run(bench, rows, asked, limits=limits, generate=generate, done=done):
                found += results
                if kept:
                    kept.append(results)
                progress.advance(task)
    summary = summarise(asked_for(found, rows))
    console.print(_table(summary))
    _tell(summary)
    settings |= {"tasks": list(rows), "limit": limit}
    write_results(json, "evaluate", summary, model=engine.model_info, seed=seed, settings=settings)
    if plot:
        from kvlink.evaluation.plot import plot_quality

        plot_quality(summary, plot, title=engine.model_info["name"])
    require_scored(summary)


def _require_places(*, out: Path | None, plot: Path | None, json: Path | None) -> None:
    """Refuse, before hours of work, places that cannot be written."""
    from kvlink.evaluation.results import require_writable

    if out:
        require_writable(out / "rows.jsonl", "rows")
    if json:
        require_writable(json, "the results")
    if plot:
        from kvlink.evaluation.plot import require_plot

        require_plot(plot)


def _require_rows(rows: dict[str, Any], *, generate: bool) -> None:
    """Refuse tasks without rows, and summaries that nothing could score."""
    from kvlink.core.errors import InputError
    from kvlink.evaluation.evaluate import rouge_scorer

    if empty := [name for name, own in rows.items() if not own]:
        raise InputError(f"{', '.join(empty)} has no rows: nothing can be scored")
    if generate and any(row.task == "summarization" and row.answers for own in rows.values() for row in own):
        rouge_scorer()


def _tell(summary: list[dict[str, Any]]) -> None:
    """Say what the table does not: errors of rows, and rows that are larger than was asked for."""
    for row in summary:
        for error in row.get("errors", []):
            show.err.print(
                f"[yellow]{escape(row['method'])}[/] on {escape(row['task'] + ': ' + error)}", highlight=False
            )
    for row in {row["task"]: row for row in summary if "over_limit" in row}.values():
        show.err.print(
            f"[yellow]{escape(row['task'])}[/]: {row['over_limit']} of {row['rows']} rows exceed the limits, though "
            "all but gold documents were left out; `over_limit` in the rows says by how much",
            highlight=False,
        )


def _table(summary: list[dict[str, Any]]) -> Table:
    table = Table("task", "method", "n", title="mean over rows; differences from full with 95 % intervals")
    for name in ("NLL", "KL", "agreement", "F1", "TTFT"):
        table.add_column(name, justify="right")
    for row in summary:
        against = row["against_full"].get("nll")
        interval = f" ({against['low']:+.2f} to {against['high']:+.2f})" if against else ""
        table.add_row(
            escape(row["task"]),
            escape(row["method"]),
            str(row["n"]) if row["n"] == row["rows"] else f"{row['n']} of {row['rows']}",
            _number(row["nll"]) + interval,
            _number(row["kl"]),
            _number(row["agreement"]),
            _number(row["f1"]),
            _number(row["ttft_s"], " s"),
        )
    return table


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.3f}{unit}"


def _plan(
    bench: Any,
    rows: dict[str, Any],
    *,
    methods: int,
    limits: Any,
    generate: bool,
    json: Path | None,
    info: dict[str, str],
) -> None:
    from kvlink.evaluation.estimate import estimate, total
    from kvlink.evaluation.results import write_results

    with show.waiting("measuring this machine"):
        found = estimate(bench, rows, methods=methods, limits=limits, generate=generate)
    table = Table(
        "task", "rows", "methods", "tokens", "minutes", title=f"about {total(found):.0f} minutes; nothing ran"
    )
    for one in found:
        table.add_row(escape(one.task), str(one.rows), str(one.methods), f"{one.tokens:,}", f"{one.minutes:.1f}")
    show.out(json).print(table)
    write_results(json, "evaluate --plan", [asdict(one) for one in found], model=info)
