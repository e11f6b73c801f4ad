"""`chat`: a conversation over a library or a folder, in a terminal."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from kvlink.cli import options, show

if TYPE_CHECKING:
    from kvlink.core.document import Document
    from kvlink.engine.chat import Chat

HELP = "/docs lists the documents of this conversation, /drop NAME takes one out, /quit leaves."


def chat(
    library: Annotated[
        Path | None,
        typer.Option("--library", envvar="KVLINK_LIBRARY", help="A library: its documents.", show_default=False),
    ] = None,
    docs: Annotated[
        Path | None, typer.Option("--docs", help="A folder of text files, or one file.", show_default=False)
    ] = None,
    top: Annotated[
        int, typer.Option("--top", min=0, help="Documents that each question brings, the best by BM25.")
    ] = 3,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    labels: Annotated[bool, typer.Option("--labels", help="Number the documents, for citations.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Longest answer.")] = 256,
    model: options.Model = "demo",
    store: options.Store = None,
    remote: options.Remote = None,
    dtype: options.Dtype = None,
    budget: options.Budget = options.GIGABYTES,
    links: options.Links = "auto",
    foreign_links: options.ForeignLinks = False,
) -> None:
    """Talk about documents: each question brings the best ones it finds, and what was said before is known.

    Questions are lines of standard input. Under each answer stands what it cost.

    Example: kvlink chat --library handbook.library
    """
    from kvlink.cli.library import opened
    from kvlink.corpus import best_documents, read_corpus

    if docs and library:
        raise typer.BadParameter(f"it names documents, and so does --docs {docs}; choose one", param_hint="--library")
    wanted: dict[str, Any] = {"remote": remote, "links": links, "foreign_links": foreign_links}
    with ExitStack() as opening:
        if library is not None:
            if store == os.environ.get("KVLINK_STORE"):
                store = None  # that one is for folders
            held = opening.enter_context(opened(library, model, store, dtype, budget, **wanted))
            engine, documents = held.engine, held.documents
        else:
            engine = opening.enter_context(show.open_engine(model, store, dtype, budget, **wanted))
            texts = read_corpus(docs) if docs else []

            def documents() -> "list[Document]":
                return texts

        talk = engine.chat("terminal", system=system, labels=labels)
        show.err.print(f"{len(documents())} documents. {HELP}", highlight=False)
        while (asked := _line()) is not None:
            if not asked.strip():
                continue
            if asked.startswith("/"):
                if asked.strip() in ("/quit", "/q", "/exit"):
                    return
                _command(talk, asked.strip())
                continue
            _answer(talk, asked, best_documents(documents(), asked, top=top) if top else [], max_new_tokens)


def _line() -> str | None:
    """Return what is asked next, or None at the end."""
    try:
        return show.err.input("[bold]> [/]") if show.err.is_terminal else input()
    except EOFError:
        return None


def _command(talk: "Chat", line: str) -> None:
    """Carry a line out that begins with a slash."""
    from kvlink.core.errors import InputError

    verb, _, name = line.partition(" ")
    if verb == "/docs":
        for one in talk.documents:
            show.err.print(f"  {escape(one.name)} {escape(one.title)}", highlight=False)
    elif verb == "/drop" and name:
        try:
            talk.remove(name)
        except InputError as error:
            show.err.print(f"[red]{escape(str(error))}[/]", highlight=False)
    else:
        show.err.print(HELP, highlight=False)


def _answer(talk: "Chat", question: str, documents: "list[Document]", room: int) -> None:
    """Stream an answer, and say what it cost. One that cannot be given leaves the conversation as it was."""
    from kvlink.core.errors import KVLinkError

    console = show.out()
    try:
        for piece in talk.stream(question, documents, max_new_tokens=room):
            typer.echo(piece, nl=False)  # as it is: rich would turn :100: into an emoji
    except KVLinkError as error:
        show.err.print(f"[red]{escape(str(error))}[/]", highlight=False)
        return
    except KeyboardInterrupt:
        typer.echo()
        return
    console.print()
    show.err.print(f"[dim]{show.usage_line(talk.turns[-1].answer)}[/]", highlight=False)
