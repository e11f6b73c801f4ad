"""`bench cluster`: real servers behind the gateway, on this machine: policies side by side, and the simulator."""

import json as json_of
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvlink.cli import options, show

TINY = "tiny"


def cluster(
    servers: Annotated[str, typer.Option("--servers", help="How many, separated by commas.")] = "2,4",
    policies: Annotated[
        str, typer.Option("--policies", help="Of affinity, two-choices, round-robin, random, uneven.")
    ] = "affinity,two-choices,round-robin",
    requests: Annotated[int, typer.Option("--requests", min=50, help="Requests of each run.")] = 800,
    load: Annotated[
        float,
        typer.Option("--load", min=0.01, help="Share of the servers' or cores' time if all documents were there."),
    ] = 0.2,
    documents: Annotated[int, typer.Option("--documents", min=1, help="Documents in all.")] = 240,
    topic: Annotated[int, typer.Option("--topic", min=1, help="Documents that are asked about together.")] = 3,
    each: Annotated[int, typer.Option("--each", min=1, help="Documents of one request.")] = 2,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Mean tokens of a document.")] = 400,
    question: Annotated[int, typer.Option("--question", min=1, help="Tokens of a question.")] = 30,
    answer: Annotated[int, typer.Option("--answer", min=1, help="Mean tokens of an answer.")] = 4,
    zipf: Annotated[float, typer.Option("--zipf", min=0, help="Exponent of the topics' popularity.")] = 0.6,
    memory: Annotated[
        float, typer.Option("--memory", min=0.01, help="All servers' device memory, in times all documents.")
    ] = 1.2,
    lose: Annotated[bool, typer.Option("--lose/--no-lose", help="Kill a server in one more run.")] = True,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of documents, arrivals and random choices.")] = 0,
    model: Annotated[
        str, typer.Option("--model", "-m", help="As everywhere, or `tiny`: a random one, where cores are the limit.")
    ] = TINY,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the result to this .svg or .png.")] = None,
    costs: Annotated[
        Path | None, typer.Option("--costs", help="Write what was measured for `cluster simulate` to this file.")
    ] = None,
    json: options.Json = None,
) -> None:
    """Hits, time to first token and balance of several real servers under each policy; then the same, simulated.

    Servers and gateway are processes of this machine. Needs the extras `server` and `cluster`.

    Example: kvlink bench cluster --servers 2,4 --json cluster.json --plot cluster.svg
    """
    from kvlink.cli.bench import numbers
    from kvlink.cli.cluster import policies_named
    from kvlink.cluster.traffic import Traffic
    from kvlink.cluster.trial.run import Trial, num_requests, try_out
    from kvlink.evaluation.bench.store_model import NAME, write_tiny_model
    from kvlink.evaluation.bench.texts import document_of, question_of
    from kvlink.evaluation.plot import require_plot
    from kvlink.evaluation.plot_trial import plot_trial
    from kvlink.evaluation.results import require_writable, write_results

    counts, chosen = numbers(servers), policies_named(policies)
    for path, what in ((json, "the results"), (costs, "the costs")):
        if path is not None:
            require_writable(path, what)
    if plot is not None:
        require_plot(plot)
    traffic = Traffic(
        requests=requests,
        rate=1.0,
        documents=documents,
        topic=topic,
        each=each,
        zipf=zipf,
        tokens=tokens,
        question=question,
        answer=answer,
        seed=seed,
    )
    with ExitStack() as opening:
        folder = Path(opening.enter_context(tempfile.TemporaryDirectory(prefix="kvlink-cluster-")))
        named = str(write_tiny_model(folder / "model", seed=seed)) if model == TINY else model
        with show.open_bench(named, None) as engine:
            prompter, about = engine.prompter, engine.model_info
            token_bytes = engine.runner.geometry.bytes_per_token(engine.runner.dtype)
        trial = Trial(
            model=named,
            options=["--links", "none"],
            text=lru_cache(None)(lambda number, tokens: document_of(prompter, tokens, seed=number).text),
            question=lambda number, tokens: question_of(prompter, tokens, skip=number % 40),
            token_bytes=token_bytes,
            traffic=traffic,
            memory=memory,
            load=load,
        )
        progress = opening.enter_context(show.bar())
        total = num_requests(trial, counts=counts, policies=chosen, lose=lose)
        task = progress.add_task("asking", total=total, rate="")
        found, rows = try_out(
            trial,
            folder,
            counts=counts,
            policies=chosen,
            lose=lose,
            progress=lambda: progress.advance(task),
        )
    if model == TINY:
        about = {**about, "name": NAME}
    show.out(json).print(_table(rows))
    for row in rows:
        if "lost_at_s" in row:
            show.out(json).print(_lost(row), highlight=False)
    settings = {"memory": memory, "load": load, "costs": asdict(found)}
    write_results(json, "bench cluster", rows, model=about, seed=seed, settings=settings)
    if costs is not None:
        told = {"schema": 1, "model": about["name"], "costs": asdict(found), "sources": "kvlink bench cluster"}
        costs.write_text(json_of.dumps(told, indent=1) + "\n", "utf-8")
    if plot is not None:
        plot_trial(rows, plot, title=f"{about['name']}, {requests:,} requests, {documents} documents")


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("servers", "policy", "", "hits", "p50", "p99", "imbalance", title="real and simulated servers")
    for row in rows:
        for kind in ("real", "simulated"):
            if kind not in row or "lost_at_s" in row:
                continue
            found = row[kind]
            times = (found["ttft_s"][name] for name in ("p50", "p99"))
            table.add_row(
                str(row["nodes"]) if kind == "real" else "",
                row["policy"] if kind == "real" else "",
                kind,
                f"{found['hit_ratio']:.1%}",
                *("" if one is None else f"{one * 1000:.0f} ms" for one in times),
                f"{found['imbalance']:.2f}",
            )
    return table


def _lost(row: dict[str, Any]) -> str:
    again = row["recovered_after_s"]
    return (
        f"one of {row['nodes']} killed under {row['policy']}: {row['failed']} requests failed that had not begun, "
        f"{row['broken']} in the middle of an answer; hits {row['hit_ratio_before']:.1%} before, "
        f"{row['hit_ratio_lowest']:.1%} at worst, "
        + ("not made up for" if again is None else f"made up for after {again:.1f} s")
        + f"; it was back after {row['back_after_s']:.1f} s, and its share takes {row['share_s']:.1f} s to encode"
    )
