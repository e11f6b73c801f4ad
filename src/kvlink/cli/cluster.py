"""`cluster`: several replicas on Ray Serve; and what many machines would do, before there are any."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvlink.cli import options, show


class Stores(StrEnum):
    """What a shared store holds at the beginning; `none`: there is none."""

    FULL = "full"
    EMPTY = "empty"
    NONE = "none"


app = typer.Typer(help="Serve from many replicas, or try out how requests would be spread.", no_args_is_help=True)


@app.command()
def up(
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="How many.")] = 2,
    max_replicas: Annotated[
        int | None,
        typer.Option("--max-replicas", min=1, help="Start more under load, up to so many.", show_default="--replicas"),
    ] = None,
    library: Annotated[
        Path | None,
        typer.Option("--library", help="Folder of a library, which all replicas share.", show_default=False),
    ] = None,
    journal: Annotated[str | None, typer.Option("--journal", help="As of `kvlink serve`.", show_default=False)] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="A settings file of `kvlink serve`; options here win.", show_default=False),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address; other machines need a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port.")] = 8000,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve other machines without a key.")] = False,
    address: Annotated[
        str | None,
        typer.Option(
            "--address", help="Of a Ray that runs; a key is needed.", show_default="one that ends with this process"
        ),
    ] = None,
    cpus: Annotated[float, typer.Option("--cpus", min=0, help="Of each replica.")] = 1.0,
    gpus: Annotated[float, typer.Option("--gpus", min=0, help="Of each replica.")] = 0.0,
    model: options.Model = "demo",
    store: options.Store = None,
    remote: options.Remote = None,
    links: options.Links = "auto",
    device_memory: options.DeviceMemory = None,
) -> None:
    """Serve from several replicas of one model on Ray Serve, until a signal; the API is that of `kvlink serve`.

    Keys come from KVLINK_API_KEY or the settings file. Needs the extra `ray`.

    Example: kvlink cluster up --replicas 2 --library handbook.library
    """
    from kvlink.core.errors import InputError

    try:
        from kvlink.cluster.ray_app.up import up as run
    except ImportError as error:
        raise InputError(f"replicas on Ray need {error.name}: pip install 'kvlink[ray]'") from error
    given: dict[str, Any] = {
        "config": config and str(config),
        "library": library and str(library.absolute()),
        "journal": journal,
        "model": str(Path(model).absolute()) if Path(model).exists() else model,
        "store": store,
        "remote": remote,
        "links": links,
        "device_memory": device_memory,
        "replicas": replicas,
        "min_replicas": replicas,
        "max_replicas": max_replicas,
        "num_cpus": cpus,
        "num_gpus": gpus,
    }
    where = f"http://{host}:{port}/v1" if address is None else f"the Ray at {address}"
    show.err.print(f"starting {replicas} replicas on {where}", highlight=False)
    usual = {"model": "demo", "links": "auto"}  # what is not said here may stand in the file
    chosen = {name: value for name, value in given.items() if value is not None and value != usual.get(name)}
    run(chosen, host=host, port=port, insecure=insecure, address=address)


@app.command()
def simulate(
    costs: Annotated[
        Path | None,
        typer.Option("--costs", help="JSON of measured seconds per token; needed but for --cost.", show_default=False),
    ] = None,
    nodes: Annotated[str, typer.Option("--nodes", help="Nodes, separated by commas.")] = "4",
    policies: Annotated[
        str, typer.Option("--policies", help="Of affinity, two-choices, round-robin, random, uneven.")
    ] = "affinity,two-choices,round-robin,random",
    requests: Annotated[int, typer.Option("--requests", min=100, help="Requests of each run.")] = 20_000,
    load: Annotated[
        float, typer.Option("--load", min=0.01, help="Share of the nodes' time if all documents were there.")
    ] = 0.5,
    rate: Annotated[
        float | None,
        typer.Option("--rate", min=1e-6, help="Requests per second, in place of --load.", show_default=False),
    ] = None,
    documents: Annotated[int, typer.Option("--documents", min=1, help="Documents in all.")] = 20_000,
    topic: Annotated[int, typer.Option("--topic", min=1, help="Documents that are asked about together.")] = 10,
    each: Annotated[int, typer.Option("--each", min=1, help="Documents of one request.")] = 5,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Mean tokens of a document.")] = 300,
    question: Annotated[int, typer.Option("--question", min=1, help="Tokens of a question, links included.")] = 60,
    answer: Annotated[int, typer.Option("--answer", min=1, help="Mean tokens of an answer.")] = 64,
    zipf: Annotated[float, typer.Option("--zipf", min=0, help="Exponent of the topics' popularity.")] = 1.0,
    memory: Annotated[
        float, typer.Option("--memory", min=0.001, help="All nodes' memory, in times the size of all documents.")
    ] = 1.0,
    store: Annotated[
        Stores, typer.Option("--store", help="The one that nodes share, as it is at the beginning.")
    ] = Stores.FULL,
    changes: Annotated[float, typer.Option("--changes", min=0, help="Changed documents per hour.")] = 0.0,
    lose: Annotated[int, typer.Option("--lose", min=0, help="Nodes that are lost, one after another.")] = 0,
    back: Annotated[float, typer.Option("--back", min=0, help="Seconds after which a lost node is back.")] = 60.0,
    gap: Annotated[int, typer.Option("--gap", min=0, help="As of `kvlink route`.")] = 8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of documents, arrivals and random choices.")] = 0,
    cost: Annotated[bool, typer.Option("--cost", help="Measure what one choice takes here, and nothing else.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the result to this .svg or .png.")] = None,
    json: options.Json = None,
) -> None:
    """Simulate one day's kind of traffic on many nodes with the policy of `kvlink route` and with others.

    Example: kvlink cluster simulate --costs benchmarks/cluster-costs.json --nodes 10,100 --plot nodes.svg
    """
    from kvlink.cli.bench import numbers
    from kvlink.evaluation.results import require_writable, write_results

    counts = numbers(nodes)
    if json is not None:
        require_writable(json, "the results")
    if cost:
        rows = _cost(counts, requests, each, seed)
        show.out(json).print(_cost_table(rows))
        write_results(json, "cluster simulate", rows, seed=seed, settings={"cost": True})
        return
    from kvlink.cluster.costs import Costs
    from kvlink.cluster.simulate import Cluster
    from kvlink.cluster.traffic import Traffic
    from kvlink.evaluation.plot import require_plot
    from kvlink.evaluation.plot_cluster import plot_cluster

    if costs is None:
        raise typer.BadParameter("name a JSON like benchmarks/cluster-costs.json", param_hint="--costs")
    measured = Costs.read(costs)
    chosen = policies_named(policies)
    if plot is not None:
        require_plot(plot)
    if lose > min(counts):
        raise typer.BadParameter(f"{lose} of {min(counts)} nodes cannot be lost", param_hint="--lose")
    runs: list[tuple[Cluster, Traffic]] = []
    for count in counts:
        per_second = rate or load * count / measured.hit_s(question, answer)
        traffic = Traffic(
            requests=requests,
            rate=per_second,
            documents=documents,
            topic=topic,
            each=each,
            zipf=zipf,
            tokens=tokens,
            question=question,
            answer=answer,
            changes=changes / 3600,
            seed=seed,
        )
        room = max(1, int(memory * documents * tokens / count))
        lost = tuple(0.5 + 0.4 * number / max(1, lose) for number in range(lose))
        runs.append((Cluster(nodes=count, room=room, store=store.value, lost=lost, back_s=back), traffic))
    rows = _simulate(runs, chosen, measured, gap, seed)
    show.out(json).print(_table(rows))
    if plot is not None:
        plot_cluster(rows, plot, title=f"{requests:,} requests, {documents:,} documents, at most {max(counts):,} nodes")
    write_results(json, "cluster simulate", rows, seed=seed, settings={"gap": gap, "costs": costs.name})


def policies_named(text: str) -> list[str]:
    """Read names of policies, separated by commas."""
    from kvlink.cluster.baselines import POLICIES, UNEVEN

    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in (*POLICIES, UNEVEN):
            raise typer.BadParameter(f"{name!r} is none of {', '.join(POLICIES)}, {UNEVEN}", param_hint="--policies")
    return list(dict.fromkeys(chosen))


def _simulate(
    runs: list[tuple[Any, Any]], policies: list[str], costs: Any, gap: int, seed: int
) -> list[dict[str, Any]]:
    from kvlink.cluster.baselines import policy_named
    from kvlink.cluster.simulate import simulate as run
    from kvlink.cluster.traffic import draw

    rows: list[dict[str, Any]] = []
    with show.bar() as progress:
        total = len(policies) * sum(traffic.requests for _, traffic in runs)
        task = progress.add_task("simulating", total=total, rate="")
        for cluster, traffic in runs:
            drawn = draw(traffic)
            for name in policies:
                policy = policy_named(name, seed=seed, gap=gap)
                row = run(
                    policy, cluster, traffic, costs, drawn=drawn, progress=lambda count: progress.advance(task, count)
                )
                rows.append({"policy": name, **row})
    return rows


def _cost(counts: list[int], requests: int, each: int, seed: int) -> list[dict[str, Any]]:
    from kvlink.cluster.policy_cost import STATES, bench_policy

    with show.bar() as progress:
        task = progress.add_task("measuring", total=len(counts) * len(STATES), rate="")
        return bench_policy(
            counts, requests=min(requests, 5000), each=each, seed=seed, progress=lambda: progress.advance(task)
        )


def _table(rows: list[dict[str, Any]]) -> Table:
    is_stored = rows[0]["cluster"]["store"] != "none"
    table = Table("nodes", "policy", "hits", "p50", "p99", "p99.9", title="simulated: time to first token")
    for name in ("imbalance", "moved" if is_stored else "encoded", "failed"):
        table.add_column(name)
    for row in rows:
        times = row["ttft_s"]
        table.add_row(
            f"{row['cluster']['nodes']:,}",
            row["policy"],
            _shown(row["hit_ratio"], "{:.1%}"),
            *(_shown(times[name], "{:.2f} s") for name in ("p50", "p99", "p999")),
            _shown(row["imbalance"], "{:.2f}"),
            show.size(row["moved_bytes"]) if is_stored else f"{row['encoded_tokens']:,}",
            f"{row['broken'] + row['refused']:,}",
        )
    return table


def _cost_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("nodes", "documents are", "median", "p99", title="one choice")
    for row in rows:
        table.add_row(
            f"{row['nodes']:,}", row["state"], f"{row['median_s'] * 1e6:.0f} us", f"{row['p99_s'] * 1e6:.0f} us"
        )
    return table


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
