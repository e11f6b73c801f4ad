"""How the command line looks: progress on standard error, results on standard output, colours only for people."""

import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvlink.cli.options import dtype_named, open_store, recompresses, secret
from kvlink.core.errors import KVLinkWarning

if TYPE_CHECKING:
    from kvlink.engine.engine import Engine
    from kvlink.engine.usage import Answer


def console(*, stderr: bool = False) -> Console:
    """Return a console that writes no escape codes at all under NO_COLOR, of which rich keeps some: so no bars, too."""
    return Console(stderr=stderr, force_terminal=False if os.environ.get("NO_COLOR") else None)


err = console(stderr=True)


def out(json: Path | None = None) -> Console:
    """Return the console for tables: standard output, unless JSON goes there."""
    return err if json is not None and str(json) == "-" else console()


def bar() -> Progress:
    """Return a progress bar with count, time and remaining time."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,  # it would leave empty lines in a file
    )


@contextmanager
def waiting(what: str) -> Generator[None]:
    """Show that something without a known length goes on."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        progress.add_task(what, total=None)
        yield


def open_engine(
    model: str,
    store: str | Path | None,
    dtype: str | None,
    budget: float,
    *,
    remote: str | None = None,
    links: str | None = "auto",
    foreign_links: bool = False,
    recompress: bool = True,
    **options: Any,
) -> "Engine":
    """Load a model and open the store, showing that it goes on; KVLINK_RECOMPRESS=0 keeps it from recompressing.

    Args:
        options: Further ones of `Engine.from_pretrained`.
    """
    with waiting(f"loading {model}, checking that its keys can be moved"):
        from kvlink.engine.engine import Engine

        opened = open_store(store, budget, remote)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", KVLinkWarning)
            engine = Engine.from_pretrained(
                model,
                store=opened,
                dtype=dtype_named(dtype),
                secret=secret(),
                links=None if links == "none" else links,
                foreign_links=foreign_links,
                recompress=recompress and recompresses(),
                **options,
            )
    for warning in caught:
        err.print(f"[yellow]warning[/] {warning.message}", highlight=False)
    return engine


def open_bench(model: str, dtype: str | None, *, links: str | None = "none", foreign_links: bool = False) -> "Engine":
    """Load a model for a benchmark, with a store in memory that nothing else sees; without links if none are named."""
    with waiting(f"loading {model}, checking that its keys can be moved"):
        from kvlink.engine.engine import Engine

        named = None if links == "none" else links
        return Engine.from_pretrained(model, dtype=dtype_named(dtype), links=named, foreign_links=foreign_links)


def sources(answer: "Answer") -> str:
    """Return where the documents came from, such as `disk 8, encoded 2`."""
    counts: dict[str, int] = {}
    for document in answer.usage.documents:
        counts[document.source] = counts.get(document.source, 0) + 1
    return ", ".join(f"{source} {count}" for source, count in counts.items()) or "no documents"


def usage_line(answer: "Answer") -> str:
    """Return one line of usage."""
    usage, times = answer.usage, answer.timings
    return (
        f"{usage.prompt_tokens:,} prompt tokens: {usage.cached_tokens:,} reused, {usage.computed_tokens:,} computed "
        f"({sources(answer)}); first token {times.ttft_s:.2f} s, "
        f"{usage.completion_tokens} tokens in {times.total_s:.2f} s"
    )


def size(num_bytes: int | float) -> str:
    """Return bytes as people read them."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
