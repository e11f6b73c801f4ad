"""The page: results, figures and rows, put into one file that needs no network and follows the reader's theme."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlink.core.errors import InputError
from kvlink.evaluation.plot import pyplot
from kvlink.evaluation.report import figures
from kvlink.evaluation.report.read import Overall, Results, overall, own_and_rival
from kvlink.evaluation.report.style import colour_of, for_page, to_file
from kvlink.evaluation.report.worst import worst_rows

Draw = Callable[[Results], Any]

DRAWN: dict[str, tuple[str, str, Draw]] = {
    "pareto": (
        "Quality against time",
        "Each point is a method, over all sets. The line joins those that no other one beats in both; the rest are "
        "hollow. Time is that of the scored forward with entries at hand.",
        figures.pareto,
    ),
    "nll": (
        "Set by set",
        "How much less likely the right answer becomes than under full attention, on the same rows. Intervals are of "
        "10,000 paired resamples.",
        lambda results: figures.per_set(results, "nll"),
    ),
    "substring": (
        "Answers, set by set",
        "Share of greedy answers that hold a right one, against full attention.",
        lambda results: figures.per_set(results, "substring"),
    ),
    "gold": (
        "Where the answer stands",
        "The document that holds the answer is moved through the prompt (nq).",
        figures.gold_position,
    ),
    "sweeps": (
        "What links, bytes and computing buy",
        "Methods that differ in one thing alone.",
        figures.sweeps,
    ),
}
"""Figures by the name of their file: title, what they show, how they are drawn."""


def write_figures(results: Results, folder: Path, *, suffix: str = ".svg") -> list[Path]:
    """Write all figures that have something to show as files.

    Raises:
        InputError: They cannot be written.
    """
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (_, _, draw) in DRAWN.items():
            figure = draw(results)
            if figure is not None:
                written.append(folder / f"{name}{suffix}")
                to_file(figure, written[-1], name)
                pyplot().close(figure)
    except (OSError, ValueError) as error:
        raise InputError(f"figures cannot be written to {folder}: {error}") from error
    return written


def render(results: Results, *, title: str, compare: tuple[str, str] | None = None, texts: Path | None = None) -> str:
    """Return the page as HTML.

    Args:
        compare: Two methods whose rows stand side by side; ours and the best rival that is no slower if None.
        texts: Folder of the sets, so that texts of real rows are shown, too.

    Raises:
        InputError: jinja2 or matplotlib is not installed, nothing was scored, or one of the methods was not.
    """
    try:
        from jinja2 import Environment, PackageLoader
    except ImportError as error:
        raise InputError("pages need jinja2: pip install 'kvlink[report]'") from error
    if not results.tasks:
        raise InputError("nothing was scored in these results, so there is nothing to show")
    found = overall(results)
    own, rival = own_and_rival(found)
    pair = compare or _pair(results, own, rival)
    if pair and (missing := [name for name in pair if name not in results.methods]):
        raise InputError(f"{missing[0]!r} was not scored; there are {', '.join(results.methods)}")
    environment = Environment(
        loader=PackageLoader("kvlink.evaluation.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"figure": _number, "share": _share, "signed": _signed}
    return environment.get_template("page.html").render(
        title=title,
        results=results,
        figures=_svgs(results),
        overall=found,
        own=own,
        rival=rival,
        pair=pair,
        worst=worst_rows(results, *pair, texts=texts) if pair and results.rows else [],
        colour=lambda method: colour_of(method, results.methods),
        answers=any("answer" in row for row in results.rows),
    )


def _svgs(results: Results) -> list[tuple[str, str, str, str]]:
    """Return name, title, text and drawing of each figure that has something to show."""
    found: list[tuple[str, str, str, str]] = []
    for name, (title, text, draw) in DRAWN.items():
        figure = draw(results)
        if figure is not None:
            found.append((name, title, text, for_page(figure, name)))
            pyplot().close(figure)
    return found


def _pair(results: Results, own: Overall | None, rival: Overall | None) -> tuple[str, str] | None:
    """Return what is compared row by row where nobody says: ours and the best rival, else the next two."""
    names = [one.method for one in (own, rival) if one is not None]
    names += [name for name in reversed(results.methods) if name not in (*names, "full", "block_mask")]
    return (names[0], names[1]) if len(names) > 1 else None


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"  # noqa: RUF001 (a dash for nothing)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"  # noqa: RUF001


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}"  # noqa: RUF001
