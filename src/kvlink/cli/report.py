"""`report`: results of `evaluate` as a page."""

from pathlib import Path
from typing import Annotated

import typer

from kvlink.cli import show


def report(
    results: Annotated[
        list[Path],
        typer.Argument(help="What `kvlink evaluate` wrote: --json files, rows.jsonl, or folders with them."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page (.html).")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Folder for the figures as files, too.", show_default=False)
    ] = None,
    png: Annotated[bool, typer.Option("--png", help="Write those as .png instead of .svg.")] = False,
    compare: Annotated[
        str | None,
        typer.Option("--compare", help="Two methods to show row by row.", show_default="ours and the best rival"),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option("--texts", help="Folder of the real sets: show their texts, too.", show_default=False),
    ] = None,
    title: Annotated[str, typer.Option("--title", help="Heading of the page.")] = "Reuse against full attention",
) -> None:
    """Draw a page of results: quality against time, set by set, sweeps, rows side by side.

    It is one file that needs no network. Texts of real sets are shown only where --texts names their folder.

    Example: kvlink report run/results.json run/rows.jsonl --out report.html --figures figures/
    """
    from kvlink.core.errors import InputError
    from kvlink.evaluation.methods import split_names
    from kvlink.evaluation.report.page import render, write_figures
    from kvlink.evaluation.report.read import read_results
    from kvlink.evaluation.results import require_writable

    pair = split_names(compare) if compare else []
    if len(pair) not in (0, 2):
        raise InputError(f"--compare {compare!r} names {len(pair)} methods; two stand side by side")
    if texts is not None and not texts.is_dir():
        raise InputError(f"--texts {texts} is no folder; name that of the sets, as for `kvlink evaluate --data`")
    require_writable(out, "the page")
    read = read_results(results)
    page = render(read, title=title, compare=(pair[0], pair[1]) if pair else None, texts=texts)
    written = write_figures(read, figures, suffix=".png" if png else ".svg") if figures else []
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, "utf-8")
    except OSError as error:
        raise InputError(f"the page cannot be written to {out}: {error.strerror}") from error
    show.console().print(
        f"{out}: {len(page.encode()) / 1000:,.0f} kB, {len(written)} figures as files", highlight=False
    )
