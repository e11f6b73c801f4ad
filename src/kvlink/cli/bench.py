"""`bench`: the figures of the pages, measured here."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvlink.cli import (
    bench_cluster,
    bench_codecs,
    bench_reuse,
    bench_serve,
    bench_store,
    bench_throughput,
    bench_update,
    options,
    show,
)

app = typer.Typer(
    help="Measure on this machine, arms side by side; every sample goes into --json.", no_args_is_help=True
)
app.command()(bench_codecs.codecs)
app.command()(bench_store.store)
app.command()(bench_update.update)
app.command()(bench_reuse.ttft)
app.command()(bench_reuse.decode)
app.command()(bench_reuse.memory)
app.command()(bench_reuse.dialogue)
app.command()(bench_throughput.throughput)
app.command()(bench_serve.serve)
app.command()(bench_cluster.cluster)

Documents = Annotated[int, typer.Option("--documents", min=1, help="Documents in each prompt.")]
Tokens = Annotated[str, typer.Option("--tokens", help="Tokens per document, separated by commas.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Counted rounds.")]


def numbers(text: str, *, least: int = 1) -> list[int]:
    """Read whole numbers, none below `least`, separated by commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [least - 1]
    if min(found) < least:
        raise typer.BadParameter(f"{text!r} is not a list of numbers like 100,200")
    return found


@app.command()
def assembly(
    documents: Documents = 10,
    tokens: Tokens = "100,200,500",
    repeats: Repeats = 15,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    json: options.Json = None,
) -> None:
    """Laying out and rotating documents against a plain copy of the same bytes."""
    from kvlink.evaluation.bench.assembly import bench_assembly
    from kvlink.evaluation.results import write_results

    lengths = numbers(tokens)
    with show.open_bench(model, dtype) as engine, show.bar() as progress:
        task = progress.add_task("measuring", total=len(lengths) * 2 * (repeats + 3), rate="")
        rows = bench_assembly(
            engine, documents=documents, tokens=lengths, repeats=repeats, progress=lambda: progress.advance(task)
        )
    table = Table("tokens", "bytes", "arm", "median", "ratio", title="assembling against copying")
    for row in rows:
        size = show.size(row["bytes"])
        total = f"{row['documents'] * row['tokens']:,}"
        table.add_row(total, size, row["arm"], f"{row['median_s'] * 1000:.1f} ms", f"{row['ratio']:.2f}")
    show.out(json).print(table)
    write_results(json, "bench assembly", rows, model=engine.model_info, seed=0)


@app.command()
def encode(
    lengths: Annotated[str, typer.Option("--lengths", help="Tokens of each document.")] = ",".join(
        str(n) for n in (120, 180, 260, 310, 340, 380, 420, 450, 520, 560, 610, 750)
    ),
    repeats: Repeats = 5,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    json: options.Json = None,
) -> None:
    """Encoding into a store against plain forwards over the same batches."""
    from kvlink.evaluation.bench.assembly import bench_encode
    from kvlink.evaluation.results import write_results

    wanted = numbers(lengths)
    with show.open_bench(model, dtype) as engine, show.bar() as progress:
        task = progress.add_task("measuring", total=2 * (repeats + 1), rate="")
        rows = bench_encode(engine, lengths=wanted, repeats=repeats, progress=lambda: progress.advance(task))
    table = Table("documents", "tokens", "arm", "tokens/s", "ratio", title="encoding against plain forwards")
    for row in rows:
        speed = f"{row['tokens_per_s']:,.0f}"
        table.add_row(str(row["documents"]), f"{row['tokens']:,}", row["arm"], speed, f"{row['ratio']:.2f}")
    show.out(json).print(table)
    write_results(json, "bench encode", rows, model=engine.model_info, seed=0)


@app.command("train-step")
def train_step(
    documents: Documents = 10,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of each document.")] = 200,
    question: Annotated[int, typer.Option("--question", min=1, help="Tokens of the question.")] = 30,
    answer: Annotated[int, typer.Option("--answer", min=1, help="Tokens of the answer.")] = 10,
    links: Annotated[int, typer.Option("--links", min=1, help="Link tokens behind each document.")] = 6,
    repeats: Repeats = 7,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    json: options.Json = None,
) -> None:
    """One step of training links: on stored documents against a packed forward and backward over everything."""
    from kvlink.evaluation.bench.train_step import Work, bench_train_step, runs_of
    from kvlink.evaluation.results import write_results

    work = Work(documents=documents, tokens=tokens, question=question, answer=answer, links=links)
    with show.open_bench(model, dtype) as engine, show.bar() as progress:
        task = progress.add_task("measuring", total=runs_of(repeats), rate="")
        rows = bench_train_step(
            engine, model=model, work=work, repeats=repeats, progress=lambda: progress.advance(task)
        )
    table = Table(
        "arm", "rows", "median", "quartiles", "times faster", "peak memory", "share", title="one training step"
    )
    for row in rows:
        known = row["step_bytes"] is not None
        table.add_row(
            row["arm"],
            f"{row['rows']:,}",
            f"{row['median_s']:.3f} s",
            f"{row['q1_s']:.3f} - {row['q3_s']:.3f}",
            f"{row['times_faster']:.1f} x",
            show.size(row["step_bytes"]) if known else "unknown",
            f"{row['memory_share']:.0%}" if known else "",
        )
    show.out(json).print(table)
    write_results(json, "bench train-step", rows, model=engine.model_info, seed=0)


@app.command()
def segments(
    data: Annotated[Path, typer.Option("--data", help="SQuAD's passages; their questions lie beside them.")],
    split: Annotated[str, typer.Option("--split", help="Of the passages; links learn from `train`.")] = "dev",
    tokens: Annotated[int, typer.Option("--tokens", min=1100, help="Tokens of each document.")] = 4000,
    documents: Annotated[int, typer.Option("--documents", min=1, help="Documents, of four questions each.")] = 8,
    edits: Annotated[int, typer.Option("--edits", min=1, help="Edits of one paragraph.")] = 200,
    links: options.Links = "auto",
    foreign_links: options.ForeignLinks = False,
    seed: Annotated[int, typer.Option("--seed", help="Of passages and edits.")] = 1,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    json: options.Json = None,
) -> None:
    """A long document in segments, with and without links, against the same in one piece; and what edits change."""
    from statistics import median

    from kvlink.evaluation.bench.segments import bench_edits, bench_segments, long_texts, summary
    from kvlink.evaluation.results import write_results
    from kvlink.training.squad import read_squad

    articles = read_squad(data, data.with_name(data.name.replace("passages", "qa")), split=split)
    with show.open_bench(model, dtype, links=links, foreign_links=foreign_links) as engine:
        examples = long_texts(articles, engine, tokens=tokens, documents=documents, seed=seed)
        with show.bar() as progress:
            task = progress.add_task("answering", total=sum(len(one.questions) for one in examples), rate="")
            rows = bench_segments(engine, examples, progress=lambda: progress.advance(task))
        with show.waiting("editing"):
            edited = bench_edits(engine, [one.documents[0] for one in examples], edits=edits, seed=seed)
    found = summary(rows)
    table = Table("arm", "KL to one piece", "agreement", title=f"{len(rows)} questions about {documents} documents")
    for arm in ("without", "links"):
        table.add_row(f"segments, {arm}", f"{found[arm]['kl']:.4f}", f"{found[arm]['agreement']:.3f}")
    show.out(json).print(table)
    changed = [count for one in edited for count in one.changed]
    show.out(json).print(
        f"KL with links: {found['ratio']:.2f} of that without. {edits} edits of a paragraph: {median(changed):g} "
        f"segments encoded again in the median, {max(changed)} at most, of {median(one.segments for one in edited):g}",
        highlight=False,
    )
    results = [{**found, "edits": {str(n): changed.count(n) for n in sorted(set(changed))}, "rows": rows}]
    write_results(json, "bench segments", results, model=engine.model_info, seed=seed)
