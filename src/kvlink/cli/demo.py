"""`demo`: the main job on a made-up company's papers."""

from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING

from rich.markup import escape

from kvlink.cli import options, show

if TYPE_CHECKING:
    from kvlink.engine.usage import Answer


def demo(
    model: options.Model = "demo",
    store: options.Store = None,
    dtype: options.Dtype = None,
    budget: options.Budget = options.GIGABYTES,
    links: options.Links = "auto",
    foreign_links: options.ForeignLinks = False,
    json: options.Json = None,
) -> None:
    """Encode twenty documents once, then answer questions by reuse and by full prefill, side by side.

    Run it twice: the second time nothing is encoded.
    """
    from kvlink.demo import Comparison, compare, corpus, questions
    from kvlink.evaluation.results import write_results

    console = show.out(json)
    documents, asked = corpus(), questions()
    with show.open_engine(model, store, dtype, budget, links=links, foreign_links=foreign_links) as engine:
        with show.bar() as progress:
            task = progress.add_task("encoding", total=len(documents), rate="")
            rows = engine.encode(documents, progress=lambda _: progress.advance(task))
        new = sum(row.source == "encoded" for row in rows)
        tokens = sum(row.tokens for row in rows)
        console.print(
            f"{len(documents)} documents, {tokens:,} tokens: "
            + (f"{new} encoded now, once" if new else "all in the store already, nothing encoded"),
            highlight=False,
        )
        found: list[Comparison] = []
        with show.bar() as progress:
            task = progress.add_task("answering both ways", total=len(asked), rate="")
            for row in compare(engine, asked):
                found.append(row)
                progress.advance(task)
    for number, row in enumerate(found, start=1):
        usage = row.reused.usage
        console.print(
            f"\n[bold]{number}. {row.question.question}[/] [dim](right: {row.question.answer})[/]\n"
            f"   reuse   [cyan]{row.reused.timings.ttft_s:6.2f} s[/]  {_line(row.reused)}\n"
            f"   full    [yellow]{row.full.timings.ttft_s:6.2f} s[/]  {_line(row.full)}\n"
            f"   [green]{row.reduction:.0%} off[/]; {usage.cached_tokens:,} tokens reused, "
            f"{usage.computed_tokens:,} computed; documents from {show.sources(row.reused)}",
            highlight=False,
        )
    console.print()
    both = ([(row, row.reused.text) for row in found], [(row, row.full.text) for row in found])
    same = sum(row.reused.text.strip() == row.full.text.strip() for row in found)
    right = [sum(row.question.answer.lower() in text.lower() for row, text in texts) for texts in both]
    console.print(
        f"median time to first token: {median(r.reused.timings.ttft_s for r in found):.2f} s by reuse, "
        f"{median(r.full.timings.ttft_s for r in found):.2f} s in full "
        f"({median(r.reduction for r in found):.0%} off); {same} of {len(found)} answers are the same; "
        f"right by the key: {right[0]} by reuse, {right[1]} in full",
        highlight=False,
    )
    results = [
        {
            "question": row.question.question,
            "expected": row.question.answer,
            "hops": row.question.hops,
            "reused": {"answer": row.reused.text, **row.reused.usage.to_json(), **asdict(row.reused.timings)},
            "full": {"answer": row.full.text, **row.full.usage.to_json(), **asdict(row.full.timings)},
            "reduction": row.reduction,
        }
        for row in found
    ]
    write_results(json, "demo", results, model=engine.model_info)


def _line(answer: "Answer") -> str:
    """Return an answer on one line, with nothing in it that rich would read as markup."""
    return escape(" ".join(answer.text.split()))
