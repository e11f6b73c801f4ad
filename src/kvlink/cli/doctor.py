"""`doctor`: is reuse good enough for my own documents?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlink.cli import options, show

if TYPE_CHECKING:
    from kvlink.engine.engine import Engine
    from kvlink.evaluation.doctor import Diagnosis, Setup

WORSE, CANNOT = 1, 2
"""Exit codes: measurably worse than full attention; could not be found out."""


def doctor(
    corpus: Annotated[Path, typer.Option("--corpus", help="A folder of your documents, or one file.")],
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions",
            help='Yours, one a line, or JSON Lines {"question", "answers"}.',
            show_default="the model writes its own",
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Questions at most.")] = 12,
    top: Annotated[int, typer.Option("--top", min=1, help="Documents of a question.")] = 5,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens-context", min=64, help="Most tokens of a prompt and its answer.")
    ] = 2048,
    links: options.Links = "auto",
    foreign_links: options.ForeignLinks = False,
    codec: Annotated[str, typer.Option("--codec", help="How entries are kept: raw, half, int8, int4, ...")] = "raw",
    sink: Annotated[
        str, typer.Option("--sink", help="Without links: what documents are encoded behind: header, bos or none.")
    ] = "header",
    seed: Annotated[int, typer.Option("--seed", help="Of the documents that are asked about.")] = 0,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    json: options.Json = None,
) -> None:
    """Find out whether reuse is as good as full attention on your own documents, and say what to change.

    As good means: the same most likely token at 95 % of the answers' tokens or more, or answers that are at most 0.02
    nats per token less likely; worse is said only where 95 % intervals exclude both.
    Exits with 0 if it is as good within the intervals, 1 if it is measurably worse, 2 if it cannot be found out.

    Example: kvlink doctor --corpus handbook/ --questions questions.txt
    """
    from kvlink.core.errors import KVLinkError
    from kvlink.evaluation.doctor import AGREEMENT, NLL, Setup
    from kvlink.evaluation.results import require_writable, write_results

    info: dict[str, str] = {"name": model, "digest": ""}
    about: dict[str, Any] = {
        "thresholds": {"agreement": AGREEMENT, "nll": NLL},
        "limit": limit,
        "top": top,
        "max_tokens_context": max_tokens,
        "links": links,
        "codec": codec,
        "sink": sink,
    }
    try:
        if json:
            require_writable(json, "the result")
        setup = Setup(links=links, foreign=foreign_links, codec=codec, sink=sink)
        asked = _questions(questions, limit) if questions else None
        documents = _documents(corpus)
        with show.open_bench(model, dtype) as engine:
            info = engine.model_info
            about["probe"] = engine.report.to_json()
            found = _found(engine, documents, asked, setup, limit=limit, top=top, max_tokens=max_tokens, seed=seed)
    except KVLinkError as error:
        show.err.print(f"cannot find out: {error}", style="red", markup=False, highlight=False)
        write_results(
            json, "doctor", [{"verdict": "cannot run", "reason": str(error)}], model=info, seed=seed, settings=about
        )
        raise typer.Exit(CANNOT) from error
    console = show.out(json)
    console.print(found.words, markup=False, highlight=False, soft_wrap=True)
    for sentence in found.advice:
        console.print(f"- {sentence}", markup=False, highlight=False, soft_wrap=True)
    write_results(json, "doctor", found.results, model=info, seed=seed, settings=about)
    if not found.is_good:
        raise typer.Exit(WORSE)


def _documents(corpus: Path) -> list[Any]:
    from kvlink.corpus import read_corpus

    return read_corpus(corpus)


def _questions(path: Path, limit: int) -> list[tuple[str, tuple[str, ...]]]:
    """Read questions, one a line, or rows of JSON Lines."""
    from kvlink.core.errors import InputError
    from kvlink.training.data import read_rows

    if path.suffix in (".jsonl", ".gz"):
        found = [(row.question, row.answers) for row, _ in zip(read_rows(path), range(limit), strict=False)]
    else:
        try:
            lines = path.read_text("utf-8", errors="replace").splitlines()
        except OSError as error:
            raise InputError(f"the questions cannot be read from {path}: {error.strerror}") from error
        found = [(line.strip(), ()) for line in lines if line.strip()][:limit]
    if not found:
        raise InputError(f"{path} holds no question: write one a line")
    return found


def _found(
    engine: "Engine",
    documents: list[Any],
    asked: list[tuple[str, tuple[str, ...]]] | None,
    setup: "Setup",
    *,
    limit: int,
    top: int,
    max_tokens: int,
    seed: int,
) -> "Diagnosis":
    from kvlink.evaluation.case import Bench
    from kvlink.evaluation.doctor import asked_rows, diagnose, studied_rows
    from kvlink.training.data import SYSTEM

    def generate(given: Any, question: str, /, *, max_new_tokens: int) -> str:
        return engine.generate(given, question, system=SYSTEM, max_new_tokens=max_new_tokens, reuse=False).text

    room = min(max_tokens, engine.report.context)
    if asked is None:
        with show.waiting("asking about the documents"):
            rows = studied_rows(documents, generate, number=limit, top=top, max_tokens=room * 3 // 4, seed=seed)
    else:
        rows = asked_rows(asked, documents, top=top)
    bench = Bench(engine.runner, engine.prompter, engine.report.context, engine.model_info["digest"])
    with show.bar() as progress:
        task = progress.add_task("answering by reuse and in full", total=len(rows), rate="")
        return diagnose(bench, rows, setup, max_tokens=room, progress=lambda: progress.advance(task))
