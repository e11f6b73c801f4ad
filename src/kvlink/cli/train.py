"""`train`: link tokens, and perhaps an adapter, for a model and its documents."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvlink.cli import options, show
from kvlink.cli.train_data import examples_of, parse_limits

if TYPE_CHECKING:
    from kvlink.engine.engine import Engine
    from kvlink.training.example import Example

MODES = ("links", "links+lora", "lora", "full", "sweep", "packet", "packet+sink")


def train(
    mode: Annotated[str, typer.Argument(help=f"What is trained: {', '.join(MODES)}.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The bundle (.safetensors); a folder for lora and full.")],
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help="Rows as JSON Lines, a hub name, or SQuAD's passages; may be given again."),
    ] = None,
    corpus: Annotated[
        Path | None, typer.Option("--corpus", help="A folder of documents: the model asks itself.")
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option("--work", help="Where entries, predictions and the state are kept.", show_default="OUT.work"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --work.")] = False,
    limit: Annotated[
        str | None,
        typer.Option("--limit", help="Examples of each source; 500,200,40: of each --data in turn, then the corpus."),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option("--rows", help="Learn from the first N questions alone; for sweep several: 250,500,1000."),
    ] = None,
    allow_scored: Annotated[
        bool,
        typer.Option("--allow-scored", help="Learn from sets that `kvlink evaluate` scores; do not score on them."),
    ] = False,
    fewest: Annotated[int, typer.Option("--min-documents", min=1, help="Fewest documents of an example.")] = 3,
    most: Annotated[int, typer.Option("--max-documents", min=1, help="Most documents of an example.")] = 10,
    num_links: Annotated[
        int,
        typer.Option(
            "--num-links", "-k", min=1, help="Link tokens behind each document; soft tokens on each side of a packet."
        ),
    ] = 6,
    levels: Annotated[int, typer.Option("--levels", min=1, max=2, help="2: long documents are cut and linked.")] = 2,
    counts: Annotated[str, typer.Option("--counts", help="For sweep: numbers of links to compare.")] = "4,6,8",
    swept: Annotated[str, typer.Option("--sweep-mode", help="For sweep: links or links+lora.")] = "links",
    init: Annotated[str, typer.Option("--init", help="How links begin: mean, state, separator, random.")] = "separator",
    start: Annotated[Path | None, typer.Option("--start", help="A bundle to begin with, instead of --init.")] = None,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of an adapter.")] = 8,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Times that each example is seen.")] = 3,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Examples of one step.")] = 4,
    lr: Annotated[float, typer.Option("--lr", help="Peak learning rate of the links.")] = 0.01,
    lr_adapter: Annotated[float, typer.Option("--lr-adapter", help="Peak learning rate of all else.")] = 1e-3,
    answer: Annotated[
        float, typer.Option("--answer-loss", min=0, max=1, help="Share of the loss that wants the right answer.")
    ] = 0.0,
    question: Annotated[
        float, typer.Option("--question-loss", min=0, help="Weight of the question's own tokens; the answer's is 1.")
    ] = 0.0,
    held_out: Annotated[int, typer.Option("--held-out", min=1, help="Examples to look at, not to learn from.")] = 40,
    every: Annotated[int, typer.Option("--every", min=1, help="Steps between two looks at them.")] = 25,
    patience: Annotated[int, typer.Option("--patience", min=1, help="Looks without gain before stopping.")] = 6,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens-context", min=64, help="Most tokens of an example's documents.")
    ] = 3072,
    seed: Annotated[int, typer.Option("--seed", help="Of the draw, the order and the beginning.")] = 0,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    budget: options.Budget = 40.0,
    codec: Annotated[str, typer.Option("--codec", help="How entries are kept: raw, half, int8, int4.")] = "raw",
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the held-out curve to this .svg or .png.")] = None,
    json: options.Json = None,
) -> None:
    """Train link tokens on cached documents: no labels needed, the model's own full attention teaches.

    Documents are encoded once and the teacher's predictions are computed once; both are kept in --work and reused in
    every epoch. Killed at any time, a run goes on with --resume.

    Example: kvlink train links --corpus handbook/ --out handbook.links.safetensors
    """
    from kvlink.core.errors import InputError
    from kvlink.evaluation.curves import plot_training
    from kvlink.evaluation.plot import require_plot
    from kvlink.evaluation.results import require_writable, write_results
    from kvlink.store.codec import codec_named
    from kvlink.training.compose import Composition
    from kvlink.training.initialise import require_initialisation
    from kvlink.training.sweep import parse_counts
    from kvlink.training.train import Plan
    from kvlink.training.trainer import Recipe

    if mode not in MODES:
        raise InputError(f"there is no mode {mode!r}; there are {', '.join(MODES)}")
    if not data and corpus is None:
        raise InputError("nothing to learn from: give --data PATH, or --corpus FOLDER and the model asks itself")
    codec_named(codec)
    tried, inits = parse_counts(counts), [require_initialisation(name.strip()) for name in init.split(",")]
    sizes = parse_counts(rows, option="--rows", what="numbers of rows such as 250,500") if rows else []
    limits = parse_limits(limit, len(data or []) + (corpus is not None))
    if len(sizes) > 1 and mode != "sweep":
        raise InputError(f"--rows {rows!r} names {len(sizes)} numbers, which sweep alone compares; choose one")
    if swept not in ("links", "links+lora"):
        raise InputError(f"--sweep-mode {swept!r} cannot be compared; there are links and links+lora")
    if len(inits) > 1 and mode != "sweep":
        raise InputError(f"--init {init!r} names {len(inits)} beginnings, which sweep alone compares; choose one")
    recipe = Recipe(
        epochs=epochs,
        batch=batch,
        lr=lr,
        lr_adapter=lr_adapter,
        answer=answer,
        question=question,
        every=every,
        patience=patience,
        seed=seed,
    )
    plan = Plan(
        mode=swept if mode == "sweep" else mode,
        num_links=num_links,
        levels=levels,
        init=inits[0],
        rank=rank,
        held_out=held_out,
        rows=sizes[0] if len(sizes) == 1 else None,
    )
    if mode in ("lora", "full"):
        require_writable(out / "config.json", "the model")
    else:
        require_writable(out, "the bundle")
    if plot:
        require_plot(plot)
    if json:
        require_writable(json, "the result")
    folder = work or out.with_name(f"{out.name}.work")
    with show.open_engine(model, folder / "entries", dtype, budget, links="none") as engine:
        composition = Composition(
            fewest=min(fewest, most),
            most=most,
            max_tokens=max_tokens,
            count=lambda text: len(engine.prompter.plain_ids(text)),
        )
        examples = examples_of(
            engine,
            data or [],
            corpus,
            composition=composition,
            limits=limits,
            long=levels > 1,
            allow_scored=allow_scored,
            seed=seed,
            folder=folder,
        )
        run = _Run(engine, examples, recipe=recipe, start=start, codec=codec, folder=folder, resume=resume)
        if mode == "sweep":
            found = _sweep(run, plan, out, counts=tried, inits=inits, sizes=sizes)
        else:
            found = [run.train(plan, out)]
        info = engine.model_info
    console = show.out(json)
    console.print(_table(found))
    write_results(json, "train", found, model=info, seed=seed)
    if plot:
        plot_training(found, plot, title=f"{info['name']}: link tokens, trained by the model's own full attention")


class _Run:
    """One engine and one list of examples, on which one or several runs are trained."""

    def __init__(
        self,
        engine: "Engine",
        examples: "list[Example]",
        *,
        recipe: Any,
        start: Path | None,
        codec: str,
        folder: Path,
        resume: bool,
    ) -> None:
        from kvlink.engine.loader import Loader
        from kvlink.models.bundle import read_bundle
        from kvlink.training.teacher import Teacher
        from kvlink.training.train import Base

        self.engine, self.examples, self.recipe, self.folder, self.resume = engine, examples, recipe, folder, resume
        info, identity = engine.model_info, engine.loader.identity
        loader = Loader(
            runner=engine.runner,
            store=engine.store,
            identity=identity,
            sink=engine.loader.sink,
            provenance=engine.loader.provenance,
            secret=options.secret(),
            codec=codec,
        )
        self.base = Base(engine.runner, engine.prompter, loader.load, info["name"], info["digest"], identity.sink_ids)
        self.start = None if start is None else read_bundle(start)
        self.teacher = Teacher(engine.runner, model=info["digest"], folder=folder / "teacher")

    def train(self, plan: Any, out: Path, *, name: str = "run") -> dict[str, Any]:
        """Train once, write what came of it, and return the result's row."""
        from kvlink.training.train import train as run

        lessons = self._prepared(plan)
        with show.bar() as progress:
            task = progress.add_task(f"training {plan.num_links} links", total=None, rate="")

            def told(step: int, steps: int, loss: float, held_out: float) -> None:
                progress.update(task, total=steps, completed=step, rate=f"loss {loss:.3f}, held out {held_out:.3f}")

            made = run(
                self.base,
                self.teacher,
                lessons,
                plan=plan,
                recipe=self.recipe,
                start=self.start,
                folder=self.folder / name,
                resume=self.resume,
                progress=told,
            )
        made.save(out, tokenizer=self.engine.prompter.tokenizer)
        return _row(made, plan, out)

    def _prepared(self, plan: Any) -> list[Any]:
        """Return the lessons, with entries and predictions at hand."""
        from kvlink.core.errors import InputError
        from kvlink.training.train import lessons_for, prepare, require_start, split

        if self.start is not None:
            require_start(self.base, self.start, plan)
        lessons = lessons_for(self.base, self.examples, plan, context=self.engine.report.context)
        for reason, count in lessons.refused.items():
            show.err.print(f"[yellow]left out[/] {count} examples: {reason}", highlight=False)
        if not lessons.kept:
            raise InputError(f"none of {len(self.examples)} examples can be learned from")
        learned, looked = split(lessons.kept, plan.held_out, rows=plan.rows)
        with show.bar() as progress:
            needed = [*looked, *learned]
            task = progress.add_task("encoding, and asking the teacher, once", total=len(needed), rate="")
            prepare(self.base, self.teacher, needed, done=lambda: progress.advance(task))
        return list(lessons.kept)


def _sweep(
    run: _Run, plan: Any, out: Path, *, counts: list[int], inits: list[str], sizes: list[int]
) -> list[dict[str, Any]]:
    """Train with several numbers of rows, of links, or with several beginnings; the best bundle is kept."""
    from kvlink.training.sweep import sweep

    rows: list[dict[str, Any]] = []

    def one(number: int) -> float:
        found = []
        for init in inits:
            changed = replace(plan, rows=number, init=init) if over_rows else replace(plan, num_links=number, init=init)
            name = f"{number}-rows-{init}" if over_rows else f"{number}-{init}"
            target = out.with_name(f"{out.stem}-{name}{out.suffix}")
            rows.append(run.train(changed, target, name=f"run-{name}"))
            found.append(_best(rows[-1]))
        return min(found)

    over_rows = len(sizes) > 1
    advised = sweep(sizes, one, of="rows", whole=True) if over_rows else sweep(counts, one)
    advice, unit = advised.advice, "rows" if over_rows else "links"
    best = min(rows if over_rows else [row for row in rows if row["num_links"] == advice], key=_best)
    out.with_name(best["bundle"]).replace(out)
    best["bundle"] = out.name
    for row in rows:
        row["advice"], row["advised"] = advice, advised.reason
    show.err.print(f"[bold]take {advice:,} {unit}[/]: {advised.reason}", highlight=False)
    return rows


def _best(row: dict[str, Any]) -> float:
    return min(seen["kl"] for seen in row["curve"])


def _row(made: Any, plan: Any, out: Path) -> dict[str, Any]:
    """Return a run as it stands in results."""
    card, outcome = made.card, made.outcome
    return {
        "mode": card.mode,
        "num_links": plan.num_links,
        "bundle": out.name,
        "steps": outcome.steps,
        "best": outcome.best,
        "reason": outcome.reason,
        "bad_steps": outcome.bad_steps,
        "seconds": outcome.seconds,
        "lessons": sum(card.data.values()),
        "rows": made.rows,
        "data": dict(card.data),
        "scores": dict(card.scores),
        "curve": [{"step": step, **asdict(seen)} for step, seen in outcome.curve],
        "recipe": dict(card.recipe),
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "mode", "K", "begun as", "lessons", "rows", "steps", "best", "held-out KL", "agreement", "minutes", "bundle"
    )
    for row in rows:
        first, best = row["curve"][0], min(row["curve"], key=lambda seen: seen["kl"])
        table.add_row(
            row["mode"],
            str(row["num_links"]),
            row["recipe"]["init"],
            str(row["lessons"]),
            str(row["rows"]),
            f"{row['steps']} ({row['reason']})",
            str(row["best"]),
            f"{first['kl']:.3f} -> {best['kl']:.3f}",
            f"{first['agreement']:.3f} -> {best['agreement']:.3f}",
            f"{row['seconds'] / 60:.1f}",
            row["bundle"],
        )
    return table
