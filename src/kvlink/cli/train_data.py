"""What `kvlink train` learns from: the sources that were named, and a folder about which the model asks itself."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlink.cli import show

if TYPE_CHECKING:
    from kvlink.engine.engine import Engine
    from kvlink.training.example import Example

EXAMPLES = 200
"""Examples that the model makes of a folder of documents where no limit is given."""


def parse_limits(text: str | None, sources: int) -> list[int | None]:
    """Return `500,200` as one limit for each source; one number is that of all, None leaves all unlimited.

    Raises:
        InputError: It has another form, or another number of limits.
    """
    from kvlink.core.errors import InputError

    if text is None:
        return [None] * sources
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts) or len(parts) not in (1, sources):
        raise InputError(
            f"--limit {text!r}: one number for all, or one for each of the {sources} sources, such as 500,200"
        )
    numbers: list[int | None] = [int(part) for part in parts]
    return numbers * sources if len(parts) == 1 else numbers


def examples_of(
    engine: "Engine",
    data: list[str],
    corpus: Path | None,
    *,
    composition: Any,
    limits: list[int | None],
    long: bool,
    allow_scored: bool,
    seed: int,
    folder: Path,
) -> "list[Example]":
    """Read what was named; let the model ask about a corpus."""
    from kvlink.training.sources import interleave, read_examples

    sources: list[Any] = []
    for source, limit in zip(data, limits, strict=False):
        sources += read_examples(
            source, composition=composition, limit=limit, long=long, allow_scored=allow_scored, seed=seed
        )
    if corpus is not None:
        number = limits[-1] or EXAMPLES
        sources.append(_studied(engine, corpus, composition, number=number, seed=seed, folder=folder))
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
