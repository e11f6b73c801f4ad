"""`train`: link tokens, and perhaps an adapter, for a model and its documents."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvlink.cli import options, show

if TYPE_CHECKING:
    from kvlink.engine.engine import Engine
    from kvlink.training.example import Example

EXAMPLES = 200
"""Examples that the model makes of a folder of documents where no limit is given."""

MODES = ("links", "links+lora", "lora", "full", "sweep")


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
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Examples of each source.")] = None,
    allow_scored: Annotated[
        bool,
        typer.Option("--allow-scored", help="Learn from sets that `kvlink evaluate` scores; do not score on them."),
    ] = False,
    fewest: Annotated[int, typer.Option("--min-documents", min=1, help="Fewest documents of an example.")] = 3,
    most: Annotated[int, typer.Option("--max-documents", min=1, help="Most documents of an example.")] = 10,
    num_links: Annotated[int, typer.Option("--num-links", "-k", min=1, help="Link tokens behind each document.")] = 6,
    levels: Annotated[int, typer.Option("--levels", min=1, max=2, help="2: long documents are cut and linked.")] = 2,
    counts: Annotated[str, typer.Option("--counts", help="For sweep: numbers of links to compare.")] = "4,6,8",
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
    from kvlink.training.compose import Composition
    from kvlink.training.initialise import require_initialisation
    from kvlink.training.sweep import parse_counts
    from kvlink.training.train import Plan
    from kvlink.training.trainer import Recipe

    if mode not in MODES:
        raise InputError(f"there is no mode {mode!r}; there are {', '.join(MODES)}")
    if not data and corpus is None:
        raise InputError("nothing to learn from: give --data PATH, or --corpus FOLDER and the model asks itself")
    tried, inits = parse_counts(counts), [require_initialisation(name.strip()) for name in init.split(",")]
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
        mode="links" if mode == "sweep" else mode,
        num_links=num_links,
        levels=levels,
        init=inits[0],
        rank=rank,
        held_out=held_out,
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
        examples = _examples(
            engine,
            data or [],
            corpus,
            composition=composition,
            limit=limit,
            long=levels > 1,
            allow_scored=allow_scored,
            seed=seed,
            folder=folder,
        )
        run = _Run(engine, examples, recipe=recipe, start=start, folder=folder, resume=resume)
        rows = _sweep(run, plan, out, counts=tried, inits=inits) if mode == "sweep" else [run.train(plan, out)]
        info = engine.model_info
    console = show.out(json)
    console.print(_table(rows))
    write_results(json, "train", rows, model=info, seed=seed)
    if plot:
        plot_training(rows, plot, title=f"{info['name']}: link tokens, trained by the model's own full attention")


def _examples(
    engine: "Engine",
    data: list[str],
    corpus: Path | None,
    *,
    composition: Any,
    limit: int | None,
    long: bool,
    allow_scored: bool,
    seed: int,
    folder: Path,
) -> "list[Example]":
    """Read what was named; let the model ask about a corpus."""
    from kvlink.training.sources import interleave, read_examples

    sources: list[Any] = []
    for source in data:
        sources += read_examples(
            source, composition=composition, limit=limit, long=long, allow_scored=allow_scored, seed=seed
        )
    if corpus is not None:
        sources.append(_studied(engine, corpus, composition, number=limit or EXAMPLES, seed=seed, folder=folder))
    for source in sources:
        for reason, count in source.left_out.items():
            show.err.print(f"[yellow]left out[/] {count} of {source.name}: {reason}", highlight=False)
    return interleave([source.examples for source in sources])


def _studied(engine: "Engine", corpus: Path, composition: Any, *, number: int, seed: int, folder: Path) -> Any:
    """Let the model ask and answer about a folder of documents; what it said is kept and not asked again."""
    from kvlink.corpus import read_corpus
    from kvlink.training.example_file import ExampleFile
    from kvlink.training.selfstudy import Study, self_study, study_settings

    documents = read_corpus(corpus)
    most, room = composition.most, composition.max_tokens
    study = Study(most=most, max_tokens=room, piece_tokens=min(1024, room), count=composition.count)
    settings = study_settings(documents, model=engine.model_info["digest"], study=study, seed=seed)

    def generate(given: Any, question: str, /, *, max_new_tokens: int) -> str:
        answer = engine.generate(given, question, system=study.system, max_new_tokens=max_new_tokens, reuse=False)
        return answer.text

    with ExampleFile(folder / "self-study.jsonl", settings) as file, show.bar() as progress:
        task = progress.add_task("asking and answering about the documents", total=number, rate="")
        return self_study(
            documents,
            generate,
            number=number,
            study=study,
            seed=seed,
            file=file,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )


class _Run:
    """One engine and one list of examples, on which one or several runs are trained."""

    def __init__(
        self,
        engine: "Engine",
        examples: "list[Example]",
        *,
        recipe: Any,
        start: Path | None,
        folder: Path,
        resume: bool,
    ) -> None:
        from kvlink.models.bundle import read_bundle
        from kvlink.training.teacher import Teacher
        from kvlink.training.train import Base

        self.engine, self.examples, self.recipe, self.folder, self.resume = engine, examples, recipe, folder, resume
        info, sink_ids = engine.model_info, engine.loader.identity.sink_ids
        self.base = Base(engine.runner, engine.prompter, engine.loader.load, info["name"], info["digest"], sink_ids)
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
        split(lessons.kept, plan.held_out)
        with show.bar() as progress:
            task = progress.add_task("encoding, and asking the teacher, once", total=len(lessons.kept), rate="")
            prepare(self.base, self.teacher, lessons.kept, done=lambda: progress.advance(task))
        return list(lessons.kept)


def _sweep(run: _Run, plan: Any, out: Path, *, counts: list[int], inits: list[str]) -> list[dict[str, Any]]:
    """Train with several numbers of links, or several initialisations; the best bundle is the one that is kept."""
    from kvlink.training.sweep import sweep

    rows: list[dict[str, Any]] = []

    def one(count: int) -> float:
        found = []
        for init in inits:
            target = out.with_name(f"{out.stem}-{count}-{init}{out.suffix}")
            rows.append(run.train(replace(plan, num_links=count, init=init), target, name=f"run-{count}-{init}"))
            found.append(_best(rows[-1]))
        return min(found)

    advised = sweep(counts, one)
    best = min((row for row in rows if row["num_links"] == advised.advice), key=_best)
    out.with_name(best["bundle"]).replace(out)
    best["bundle"] = out.name
    for row in rows:
        row["advice"], row["advised"] = advised.advice, advised.reason
    show.err.print(f"[bold]take {advised.advice} links[/]: {advised.reason}", highlight=False)
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
        "data": dict(card.data),
        "scores": dict(card.scores),
        "curve": [{"step": step, **asdict(seen)} for step, seen in outcome.curve],
        "recipe": dict(card.recipe),
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("mode", "K", "begun as", "lessons", "steps", "best", "held-out KL", "agreement", "minutes", "bundle")
    for row in rows:
        first, best = row["curve"][0], min(row["curve"], key=lambda seen: seen["kl"])
        table.add_row(
            row["mode"],
            str(row["num_links"]),
            row["recipe"]["init"],
            str(row["lessons"]),
            f"{row['steps']} ({row['reason']})",
            str(row["best"]),
            f"{first['kl']:.3f} -> {best['kl']:.3f}",
            f"{first['agreement']:.3f} -> {best['agreement']:.3f}",
            f"{row['seconds'] / 60:.1f}",
            row["bundle"],
        )
    return table
