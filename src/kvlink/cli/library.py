"""`library add|update|watch|rm|ls|status`: documents that change, under ids, with what their texts need kept ready."""

import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvlink.cli import options, show

if TYPE_CHECKING:
    from kvlink.engine.library import Library
    from kvlink.engine.sync import Synced

app = typer.Typer(
    help="Keep documents that change: put them under ids, encode what an edit has changed, remove without a trace.",
    no_args_is_help=True,
)

Texts = Annotated[Path, typer.Argument(help="A folder of text files (.md, .txt, ...), or one file.")]
Dir = Annotated[
    Path, typer.Option("--library", envvar="KVLINK_LIBRARY", help="Folder of the library; made if it is not there.")
]
Entries = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="Where the entries lie, the same for all verbs: a folder, or a URL.",
        show_default="`entries` in the library",
    ),
]
Prune = Annotated[bool, typer.Option("--prune", help="Remove documents whose files are not there any more.")]
SHOWN = 40
"""Rows of a table of documents that are shown; all are in --json."""


@contextmanager
def opened(
    folder: Path,
    model: str,
    store: str | None,
    dtype: str | None,
    budget: float,
    *,
    remote: str | None = None,
    links: str = "auto",
    foreign_links: bool = False,
) -> "Generator[Library]":
    """Open a library with an engine whose store lies in its folder, unless one is named."""
    from kvlink.engine.library import Library
    from kvlink.engine.schema import ENTRIES, claim

    claim(folder)  # a foreign folder is refused before a store is made in it
    entries = store or str(folder / ENTRIES)
    with (
        show.open_engine(
            model, entries, dtype, budget, remote=remote, links=links, foreign_links=foreign_links
        ) as engine,
        Library(folder, engine) as library,
    ):
        yield library


@contextmanager
def _unread(folder: Path, store: str | None) -> "Generator[Library]":
    """Open a library without a model."""
    from kvlink.engine.library import Library
    from kvlink.engine.schema import ENTRIES, FILE

    if not (folder / FILE).is_file():
        raise typer.BadParameter(f"{folder} holds no library; `kvlink library add` makes one", param_hint="--library")
    with (
        options.open_store(store or str(folder / ENTRIES), options.GIGABYTES) as entries,
        Library(folder, store=entries) as library,
    ):
        yield library


@app.command("add")
def add(
    texts: Texts,
    library: Dir,
    split: Annotated[
        bool, typer.Option("--split", help="Cut each file into pieces of 100 to 300 words, named `file#hash`.")
    ] = False,
    model: options.Model = "demo",
    store: Entries = None,
    dtype: options.Dtype = None,
    budget: options.Budget = options.GIGABYTES,
    links: options.Links = "auto",
    foreign_links: options.ForeignLinks = False,
    json: options.Json = None,
) -> None:
    """Put every text file of a folder into the library and encode it.

    A file's id is its path below the folder. Pieces are cut at borders that follow from the words around them, so an
    edit changes the pieces that it touches and leaves the others as they are.

    Example: kvlink library add handbook/ --library handbook.library
    """
    with opened(library, model, store, dtype, budget, links=links, foreign_links=foreign_links) as held:
        rows = _sync(held, texts, split=split)
        _report(rows, json, "library add", held)


@app.command("update")
def update(
    texts: Texts,
    library: Dir,
    prune: Prune = False,
    model: options.Model = "demo",
    store: Entries = None,
    dtype: options.Dtype = None,
    budget: options.Budget = options.GIGABYTES,
    links: options.Links = "auto",
    foreign_links: options.ForeignLinks = False,
    json: options.Json = None,
) -> None:
    """Read a folder again: new files are added, changed ones rebuilt, and the table says what was kept and computed.

    Of a changed file, segments that are equal keep their entries, and in a changed segment only what is behind the
    first change is computed. A file in pieces is cut again. Files that are gone stay in the library without --prune.

    Example: kvlink library update handbook/ --library handbook.library --prune
    """
    with opened(library, model, store, dtype, budget, links=links, foreign_links=foreign_links) as held:
        rows = _sync(held, texts, prune=prune)
        _report(rows, json, "library update", held)


@app.command("watch")
def watch(
    texts: Texts,
    library: Dir,
    prune: Prune = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks at the files.")] = 2.0,
    model: options.Model = "demo",
    store: Entries = None,
    dtype: options.Dtype = None,
    budget: options.Budget = options.GIGABYTES,
    links: options.Links = "auto",
    foreign_links: options.ForeignLinks = False,
) -> None:
    """Update now, and again whenever the time or size of a file changes, until Ctrl-C.

    Example: kvlink library watch handbook/ --library handbook.library --every 5
    """
    with opened(library, model, store, dtype, budget, links=links, foreign_links=foreign_links) as held:
        seen: dict[Path, tuple[int, int]] | None = None
        show.err.print(f"watching {escape(str(texts))}; Ctrl-C ends", highlight=False)
        try:
            while True:
                now = _times(texts)
                if now != seen:
                    _report(_sync(held, texts, prune=prune), None, "library watch", held)
                    seen = now
                time.sleep(every)
        except KeyboardInterrupt:
            show.err.print("stopped; what was finished is kept", highlight=False)


@app.command("rm")
def rm(
    ids: Annotated[list[str], typer.Argument(help="Ids of documents, or of files that were cut into pieces.")],
    library: Dir,
    store: Entries = None,
    json: options.Json = None,
) -> None:
    """Remove documents: their texts, and every object of theirs that no other document uses. Needs no model.

    Example: kvlink library rm leave.md --library handbook.library
    """
    from kvlink.evaluation.results import write_results

    with _unread(library, store) as held:
        listings = held.listings()
        named = [[one.id for one in listings if id_ in (one.id, one.parent)] or [id_] for id_ in ids]
        found = list(dict.fromkeys(one for group in named for one in group))
        complete = held.remove(*found)
        rest = "" if complete else "; another process reads the library, so bytes remain until it is opened again"
        show.out(json).print(f"removed {_shown(', '.join(found))}{rest}", highlight=False)
        write_results(json, "library rm", [{"removed": found, "complete": complete}])


@app.command("ls")
def ls(library: Dir, store: Entries = None, json: options.Json = None) -> None:
    """List the documents: tokens, segments, bytes, and whether all their entries are ready. Needs no model.

    Example: kvlink library ls --library handbook.library
    """
    from kvlink.evaluation.results import write_results

    with _unread(library, store) as held:
        rows = held.rows()
    table = Table("id", "tokens", "segments", "state", "size", title=f"{len(rows)} documents")
    for row in rows:
        table.add_row(_shown(row.id), f"{row.tokens:,}", str(row.segments), row.state, show.size(row.bytes))
    show.out(json).print(table)
    write_results(json, "library ls", [_plain(row) for row in rows])


@app.command("status")
def status(library: Dir, store: Entries = None, json: options.Json = None) -> None:
    """Say how many documents are ready, what waits, and which are near-duplicates and what they cost. Needs no model.

    Example: kvlink library status --library handbook.library
    """
    from kvlink.evaluation.results import write_results

    with _unread(library, store) as held:
        found = held.status()
    console = show.out(json)
    console.print(
        f"{found.documents} documents of {found.tokens:,} tokens: {found.ready} ready, {found.pending} pending "
        f"({found.jobs} jobs), {show.size(found.bytes)}; {found.removing} entries wait to be deleted",
        highlight=False,
    )
    if found.near:
        table = Table("document", "near-duplicate", "bits", "costs", title=f"{len(found.near)} near-duplicates")
        for near in found.near[:SHOWN]:
            table.add_row(_shown(near.one), _shown(near.other), str(near.bits), show.size(near.bytes))
        console.print(table)
    write_results(json, "library status", [asdict(found)])


def _sync(library: "Library", texts: Path, *, split: bool = False, prune: bool = False) -> "list[Synced]":
    from kvlink.corpus import read_corpus
    from kvlink.engine.sync import sync

    root = texts if texts.is_dir() else texts.parent
    documents = read_corpus(texts)
    with show.bar() as progress:
        task = progress.add_task("encoding", total=None, rate="")
        return sync(
            library,
            documents,
            root=str(root.resolve()),
            whole=texts.is_dir(),
            split=split,
            prune=prune,
            progress=lambda _: progress.advance(task),
        )


def _report(rows: "Sequence[Synced]", json: Path | None, command: str, library: "Library") -> None:
    """Show what became of the documents: a table of those that changed, and counts."""
    from kvlink.evaluation.results import write_results

    console = show.out(json)
    moved = [row for row in rows if row.outcome != "unchanged" or row.computed]
    if moved:
        table = Table("id", "outcome", "tokens", "kept", "computed", "seconds", "why")
        for row in moved[:SHOWN]:
            numbers = (f"{row.tokens:,}", f"{row.kept:,}", f"{row.computed:,}", f"{row.seconds:.2f}")
            table.add_row(_shown(row.id), row.outcome, *(numbers if row.tokens else [""] * 4), escape(row.reason))
        console.print(table)
        if len(moved) > SHOWN:
            console.print(f"... and {len(moved) - SHOWN} more", highlight=False)
    counts = Counter(row.outcome for row in rows)
    kept, computed = sum(row.kept for row in rows), sum(row.computed for row in rows)
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    gone = "; --prune removes those that are gone" if counts["gone"] else ""
    console.print(f"{told}; {kept:,} tokens kept, {computed:,} computed{gone}", highlight=False)
    write_results(json, command, [asdict(row) for row in rows], model=library.engine.model_info)


def _times(texts: Path) -> dict[Path, tuple[int, int]]:
    """Return time and size of every file below a folder; files may come and go meanwhile."""
    found: dict[Path, tuple[int, int]] = {}
    for path in [texts] if texts.is_file() else texts.rglob("*"):
        try:
            about = path.stat()
        except OSError:
            continue
        if path.is_file():
            found[path] = (about.st_mtime_ns, about.st_size)
    return found


def _shown(name: str) -> str:
    """Return an id as a console takes it: names of files may hold what is no text."""
    return escape(name.encode("utf-8", "replace").decode())


def _plain(row: Any) -> dict[str, Any]:
    """Return a row as JSON takes it."""
    fields = asdict(row)
    return {**fields, "scope": fields["scope"].hex()}
