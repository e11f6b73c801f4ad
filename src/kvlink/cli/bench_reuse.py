"""`bench ttft|decode|memory|dialogue`: what requests about the same documents cost, by reuse and in full."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvlink.cli import options, show
from kvlink.core.errors import InputError

Documents = Annotated[int, typer.Option("--documents", min=1, help="Documents in each prompt.")]
Lengths = Annotated[str, typer.Option("--tokens", help="Tokens per document, separated by commas.")]
Length = Annotated[int, typer.Option("--tokens", min=1, help="Tokens of each document.")]
Links = Annotated[int, typer.Option("--links", min=0, help="Link tokens behind each document (random, for cost).")]
Answer = Annotated[int, typer.Option("--answer", min=1, help="Tokens of each answer.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Counted rounds.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw the result to this .svg or .png.")]

SCENARIO_TOKENS = 300
"""Tokens of each document in the scenarios."""


def ttft(
    documents: Documents = 10,
    tokens: Lengths = "100,200,300,400,500",
    links: Annotated[str, typer.Option("--links", help="Link tokens behind each document (random, for cost).")] = "0,6",
    scenarios: Annotated[
        bool, typer.Option(help=f"Measure changed documents, too, of {SCENARIO_TOKENS} tokens each.")
    ] = True,
    llama_cpp: Annotated[
        bool, typer.Option("--llama-cpp", help="Time llama.cpp on the model's .gguf file, too (llama-cpp-python).")
    ] = False,
    repeats: Repeats = 7,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    plot: Plot = None,
    json: options.Json = None,
) -> None:
    """Time to first token by reuse (cold, host, warm, known beginning) against full prefill and a prefix cache."""
    from kvlink.cli.bench import numbers
    from kvlink.evaluation.bench.ttft import bench_ttft, runs_of
    from kvlink.evaluation.results import write_results
    from kvlink.models.checkpoint import gguf_of

    lengths, counts = numbers(tokens), numbers(links, least=0)
    _require(plot, json)
    gguf = gguf_of(model) if llama_cpp else None
    if llama_cpp and gguf is None:
        raise InputError(f"--llama-cpp needs a model that is a .gguf file, or `demo` with its weights; got {model}")
    with show.open_bench(model, dtype) as engine, show.bar() as progress:
        total = runs_of(engine, lengths, counts, repeats, scenarios=scenarios, llama=llama_cpp)
        task = progress.add_task("measuring", total=total, rate="")
        rows = bench_ttft(
            engine,
            documents=documents,
            tokens=lengths,
            links=counts,
            scenario_tokens=SCENARIO_TOKENS if scenarios else None,
            repeats=repeats,
            gguf=gguf,
            progress=lambda: progress.advance(task),
        )
    if engine.sessions is None:
        show.err.print(f"{engine.report.reason}: nothing is shared, so the arms that share were left out")
    out = show.out(json)
    out.print(ttft_table([row for row in rows if not row["scenario"]], title="time to first token", what="state"))
    if changed := [row for row in rows if row["scenario"]]:
        out.print(ttft_table(changed, title="documents that changed since the prompt before", what="scenario"))
    out.print(
        "limit: the new rows without documents and the bare products of attending them; '/ limit' is a median over it"
    )
    for row in rows:
        if row["arm"] == "read":
            rate = f"{show.size(row['bytes'])} at {show.size(row['read_digest_rate'])}/s"
            out.print(f"{prompt_of(row)}: cold reads and verifies {rate}", highlight=False)
        elif row["arm"] == "shared" and row["state"] == "cold":
            beyond = f"{row['over_read']:.2f} times as long as that"
            out.print(f"{prompt_of(row)}, K = {row['links']}: cold takes {beyond} beyond warm", highlight=False)
    write_results(json, "bench ttft", rows, model=engine.model_info, seed=0)
    if plot:
        from kvlink.evaluation.plot import plot_ttft

        plot_ttft(rows, plot, title=engine.model_info["name"])


def ttft_table(rows: Sequence[Mapping[str, Any]], *, title: str, what: str) -> Table:
    """Return a table of times to first token."""
    table = Table("prompt", "arm", what, "K", "median", "quartiles", "off", "/ limit", title=title)
    for row in rows:
        over = row["over_limit"]
        table.add_row(
            prompt_of(row),
            row["arm"],
            row[what],
            str(row["links"]),
            f"{seconds(row['median_s'])} s",
            f"{seconds(row['q1_s'])}-{seconds(row['q3_s'])}",
            "" if row["arm"] == "full" or row["reduction"] is None else f"{row['reduction']:.1%}",
            "" if over is None else f"{over:.2f}",
        )
    return table


def decode(
    documents: Documents = 10,
    tokens: Lengths = "500",
    links: Links = 6,
    answer: Answer = 16,
    repeats: Repeats = 7,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    json: options.Json = None,
) -> None:
    """Seconds per token of an answer: documents where they lie, copied into the prompt, and by stock transformers."""
    from kvlink.cli.bench import numbers
    from kvlink.evaluation.bench.decode import bench_decode
    from kvlink.evaluation.results import write_results

    lengths = numbers(tokens)
    _require(None, json)
    with show.open_bench(model, dtype) as engine, show.bar() as progress:
        task = progress.add_task("measuring", total=len(lengths) * 3 * (1 + repeats), rate="")
        rows = bench_decode(
            engine,
            documents=documents,
            tokens=lengths,
            links=links,
            answer=answer,
            repeats=repeats,
            progress=lambda: progress.advance(task),
        )
    table = Table("prompt", "arm", "K", "per token", "quartiles", "of stock", title="decoding")
    for row in rows:
        table.add_row(
            prompt_of(row),
            row["arm"],
            str(row["links"]),
            f"{row['decode_s'] * 1000:.1f} ms",
            f"{row['q1_s'] * 1000:.1f}-{row['q3_s'] * 1000:.1f}",
            f"{row['ratio']:.2f}",
        )
    show.out(json).print(table)
    write_results(json, "bench decode", rows, model=engine.model_info, seed=0)


def memory(
    sessions: Annotated[str, typer.Option("--sessions", help="Sessions open at once, separated by commas.")] = "64",
    documents: Documents = 10,
    tokens: Length = 500,
    links: Links = 6,
    answer: Answer = 16,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    plot: Plot = None,
    json: options.Json = None,
) -> None:
    """Bytes of conversations about the same documents that are open at once, shared and assembled."""
    from kvlink.cli.bench import numbers
    from kvlink.evaluation.bench.memory import bench_memory
    from kvlink.evaluation.results import write_results

    counts = numbers(sessions)
    _require(plot, json)
    with show.open_bench(model, dtype) as engine, show.bar() as progress:
        task = progress.add_task("opening", total=max(counts), rate="")
        rows = bench_memory(
            engine,
            sessions=counts,
            documents=documents,
            tokens=tokens,
            links=links,
            answer=answer,
            progress=lambda: progress.advance(task),
        )
    table = Table(
        "sessions",
        "measured",
        "arm",
        "documents",
        "own",
        "together",
        "of least",
        "process",
        "per GiB",
        title=f"sessions on {documents} x {tokens} tokens, K = {links}",
    )
    for row in rows:
        table.add_row(
            str(row["sessions"]),
            str(row["measured_sessions"]),
            row["arm"],
            show.size(row["documents_bytes"]),
            show.size(row["own_bytes"]),
            show.size(row["bytes"]),
            f"{row['ratio']:.2f}",
            f"{row['rss_ratio']:.2f}",
            f"{row['sessions_per_gib']:.1f}",
        )
    show.out(json).print(table)
    show.out(json).print(
        "of least: over keys and values of the documents once and of all own tokens; "
        "process: growth of the process over what was counted"
    )
    write_results(json, "bench memory", rows, model=engine.model_info, seed=0)
    if plot:
        from kvlink.evaluation.plot_sessions import plot_memory

        plot_memory(rows, plot, title=engine.model_info["name"])


def dialogue(
    documents: Annotated[int, typer.Option("--documents", min=4, help="Documents of the first turn.")] = 10,
    tokens: Length = 200,
    turns: Annotated[int, typer.Option("--turns", min=1, help="Turns; documents change in every other one.")] = 10,
    answer: Answer = 16,
    links: Links = 6,
    repeats: Repeats = 7,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    plot: Plot = None,
    json: options.Json = None,
) -> None:
    """A conversation whose documents change: known beginnings against full attention, with and without prefix cache."""
    from kvlink.evaluation.bench.dialogue import bench_dialogue, runs_of
    from kvlink.evaluation.results import write_results

    _require(plot, json)
    with show.open_bench(model, dtype) as engine, show.bar() as progress:
        task = progress.add_task("talking", total=runs_of(turns, repeats), rate="")
        rows = bench_dialogue(
            engine,
            documents=documents,
            tokens=tokens,
            turns=turns,
            answer=answer,
            links=links,
            repeats=repeats,
            progress=lambda: progress.advance(task),
        )
    out = show.out(json)
    for table in dialogue_tables(rows):
        out.print(table)
    write_results(json, "bench dialogue", rows, model=engine.model_info, seed=0)
    if plot:
        from kvlink.evaluation.plot_sessions import plot_dialogue

        plot_dialogue(rows, plot, title=engine.model_info["name"])


def dialogue_tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return a table of the means over all turns, and one of each turn."""
    answer = rows[0]["answer_tokens"]
    means = Table(
        "arm", "K", "response", "quartiles", "first token", "off", "off prefix cache", title="mean of all turns"
    )
    for row in rows:
        means.add_row(
            row["arm"],
            str(row["links"]),
            f"{seconds(row['median_s'])} s",
            f"{seconds(row['q1_s'])}-{seconds(row['q3_s'])}",
            f"{seconds(row['ttft']['median_s'])} s",
            f"{row['reduction']:.1%}",
            f"{row['reduction_to_prefix_cache']:.1%}",
        )
    names = [row["arm"].replace("full+prefix_cache", "prefix cache") for row in rows]
    columns = [column for name in names for column in (name, "computed")]
    each = Table("turn", "documents", *columns, title=f"seconds of each turn, {answer} tokens answered")
    for turn in zip(*(row["turns"] for row in rows), strict=True):
        cells = [cell for one in turn for cell in (seconds(one["response_s"]), f"{one['computed_tokens']:,}")]
        each.add_row(str(turn[0]["turn"]), turn[0]["change"], *cells)
    return [means, each]


def seconds(value: float) -> str:
    """Return seconds as people read them."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def prompt_of(row: Mapping[str, Any]) -> str:
    """Return how many documents of how many tokens a prompt holds."""
    return f"{row['documents']} x {row['tokens']}"


def _require(plot: Path | None, json: Path | None) -> None:
    """Find out before a long run whether its results could be written."""
    from kvlink.evaluation.results import require_writable

    if json is not None:
        require_writable(json, "the results")
    if plot is not None:
        from kvlink.evaluation.plot import require_plot

        require_plot(plot)
