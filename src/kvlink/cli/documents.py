"""`encode`, `ask` and `plan`: the verbs that read a folder of documents."""

import os
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvlink.cli import options, show
from kvlink.cli.store import fill, lost, recompressed

Folder = Annotated[Path, typer.Argument(help="A folder of text files (.md, .txt, ...), or one file.")]


def encode(
    folder: Folder,
    model: options.Model = "demo",
    store: options.Store = None,
    remote: options.Remote = None,
    dtype: options.Dtype = None,
    budget: options.Budget = options.GIGABYTES,
    links: options.Links = "auto",
    foreign_links: options.ForeignLinks = False,
    json: options.Json = None,
) -> None:
    """Encode every document of a folder into the store, once.

    Run it again at any time: what the store holds already is not encoded again, so an interrupted run goes on
    where it stopped. Another machine with the same weights can use the folder of the store.

    Example: kvlink encode handbook/ --store handbook.kv
    """
    from kvlink.corpus import read_corpus
    from kvlink.engine.usage import DocumentUsage
    from kvlink.evaluation.results import write_results
    from kvlink.store.tiered import TieredStore

    documents = read_corpus(folder)
    with show.open_engine(
        model, store, dtype, budget, remote=remote, links=links, foreign_links=foreign_links
    ) as engine:
        counts: dict[str, int] = dict.fromkeys(("encoded", engine.store.source, "skipped"), 0)
        tokens, start = 0, perf_counter()
        with show.bar() as progress:
            task = progress.add_task("encoding", total=len(documents), rate="")

            def done(row: DocumentUsage) -> None:
                nonlocal tokens
                counts[row.source] += 1
                if row.source == "encoded":
                    tokens += row.tokens
                if row.source == "skipped":
                    progress.print(f"[yellow]skipped[/] {escape(f'{row.name}: {row.reason}')}")
                progress.update(task, advance=1, rate=f"{tokens / (perf_counter() - start):,.0f} tokens/s")

            before = engine.store.stats().evictions
            rows = engine.encode(documents, progress=done)
            if isinstance(engine.store, TieredStore):
                engine.store.flush()
        seconds = perf_counter() - start
        stats = engine.store.stats()
        speed = f" ({tokens / seconds:,.0f} tokens/s)" if tokens else ""
        show.out(json).print(
            f"{counts['encoded']} encoded{speed}, {counts[engine.store.source]} already in the store, "
            f"{counts['skipped']} skipped; the store holds {fill(stats)}",
            highlight=False,
        )
        smaller = recompressed(stats)
        if smaller:
            told = ", ".join(f"{count} to {codec}" for codec, count in smaller.items())
            show.err.print(f"the store is full: the least used were recompressed, {told}", highlight=False)
        for warning in lost(stats):
            show.err.print(f"[yellow]warning[/] {escape(warning)}", highlight=False)
        if evicted := stats.evictions - before:
            show.err.print(
                f"[yellow]warning[/] the budget is too small: {evicted} objects, the least used, were dropped for new "
                "ones. Raise --budget",
                highlight=False,
            )
        results = [
            {
                "seconds": seconds,
                "tokens": tokens,
                "evicted": evicted,
                "recompressed": smaller,
                **counts,
                "documents": [row.to_json() for row in rows],
            }
        ]
        write_results(json, "encode", results, model=engine.model_info)


def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    docs: Annotated[Path | None, typer.Option("--docs", help="A folder of text files, or one file.")] = None,
    library: Annotated[
        Path | None, typer.Option("--library", help="A library instead: its documents as they are now.")
    ] = None,
    top: Annotated[int | None, typer.Option("--top", help="Only the best N documents by BM25, best first.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    labels: Annotated[bool, typer.Option("--labels", help="Number the documents, for citations.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Longest answer.")] = 128,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End the answer at this string.")] = None,
    drop_last: Annotated[
        bool,
        typer.Option("--drop-last", help="Leave out documents from the back when they exceed the context."),
    ] = False,
    model: options.Model = "demo",
    store: options.Store = None,
    remote: options.Remote = None,
    dtype: options.Dtype = None,
    budget: options.Budget = options.GIGABYTES,
    links: options.Links = "auto",
    foreign_links: options.ForeignLinks = False,
    json: options.Json = None,
) -> None:
    """Answer a question from documents, reusing what the store holds.

    Without --top all documents are read, in path order. The answer is streamed; one line of usage follows.

    Example: kvlink ask --docs handbook/ --top 5 "How many days of leave are there?"

    Example: kvlink ask --library handbook.library --top 5 "How many days of leave are there?"
    """
    from kvlink.cli.library import opened
    from kvlink.corpus import best_documents, read_corpus
    from kvlink.evaluation.results import write_results

    if docs and library:
        raise typer.BadParameter(f"it names documents, and so does --docs {docs}; choose one", param_hint="--library")
    documents = read_corpus(docs) if docs else []
    wanted: dict[str, Any] = {
        "system": system,
        "labels": labels,
        "max_new_tokens": max_new_tokens,
        "stop": stop or (),
        "on_overflow": "drop_last" if drop_last else "error",
    }
    with ExitStack() as opening:
        if library:
            if store == os.environ.get("KVLINK_STORE"):
                store = None  # that one is for folders: a library's entries lie with it unless --store says otherwise
            held = opening.enter_context(
                opened(library, model, store, dtype, budget, remote=remote, links=links, foreign_links=foreign_links)
            )
            engine, documents = held.engine, held.documents()
        else:
            held = None
            engine = opening.enter_context(
                show.open_engine(model, store, dtype, budget, remote=remote, links=links, foreign_links=foreign_links)
            )
        if top is not None:
            documents = best_documents(documents, question, top=top)
        stream = (
            held.stream(question, [document.name for document in documents], **wanted)
            if held
            else engine.stream(documents, question, **wanted)
        )
        console = show.out(json)
        for piece in stream:
            typer.echo(piece, file=console.file, nl=False)  # as it is: rich would turn :100: into an emoji
        console.print()
        answer = stream.answer
        for warning in answer.warnings:
            show.err.print(f"[yellow]warning[/] {escape(warning)}", highlight=False)
        show.err.print(f"[dim]{show.usage_line(answer)}[/]", highlight=False)
        row = {
            "question": question,
            "answer": answer.text,
            "finish_reason": answer.finish_reason,
            "usage": answer.usage.to_json(),
            "timings": asdict(answer.timings),
        }
        write_results(json, "ask", [row], model=engine.model_info)


def plan(
    corpus: Annotated[Path, typer.Option("--corpus", help="A folder of text files, or one file.")],
    model: options.Model = "demo",
    store: options.Store = None,
    remote: options.Remote = None,
    dtype: options.Dtype = None,
    budget: options.Budget = options.GIGABYTES,
    links: options.Links = "auto",
    foreign_links: options.ForeignLinks = False,
    json: options.Json = None,
) -> None:
    """Say what encoding a folder would cost, and from how many uses on it pays; nothing is kept.

    Encode, load and full prefill are measured on a sample of the documents, on this machine.

    Example: kvlink plan --corpus handbook/
    """
    from kvlink.corpus import read_corpus
    from kvlink.engine.plan import make_plan
    from kvlink.evaluation.results import write_results

    documents = read_corpus(corpus)
    with (
        show.open_engine(
            model, store, dtype, budget, remote=remote, links=links, foreign_links=foreign_links
        ) as engine,
        show.waiting("measuring on a sample"),
    ):
        made = make_plan(engine, documents)
    table = Table(title=f"{made.documents} documents in {escape(str(corpus))}", show_header=False)
    for name, value in (
        ("tokens", f"{made.tokens:,} (longest {made.longest_tokens:,})"),
        ("bytes in the store", show.size(made.num_bytes)),
        ("already there", f"{made.stored} documents"),
        ("to encode now", f"{made.encode_s:.1f} s ({made.tokens_per_s:,.0f} tokens/s)"),
        ("one use: full prefill", f"{made.full_s * 1000:.0f} ms a document"),
        ("one use: load", f"{made.load_s * 1000:.1f} ms a document"),
        ("pays from", f"{made.break_even} uses of a document" if made.break_even else "never on this machine"),
    ):
        table.add_row(name, value)
    show.out(json).print(table)
    write_results(json, "plan", [asdict(made)], model=engine.model_info)
