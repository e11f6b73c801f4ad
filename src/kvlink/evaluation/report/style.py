"""How figures look on the page and as files: the same drawing, with colours of a file or of the page's own theme."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlink.evaluation.plot import pyplot

PALETTE = (
    *("#4f7cff", "#e0842a", "#12a594", "#d6409f", "#8e6ee8", "#7a9e2e", "#c2553b", "#3e9bd6"),
    *("#a18072", "#b8860b", "#5b8c85", "#e5739a", "#6a7bd0", "#b05ad8", "#4aa35c", "#d05c70"),
)
"""Colours that are told apart on white and on black."""

FULL = "#8b8f98"

WIDTH = 11.0
"""Of figures, in inches; on the page they are as wide as it."""

PAGE = {"ink": "#010203", "soft": "#010204", "rule": "#010205", "paper": "#010206"}
"""Colours that no figure has: the page puts its own in their place."""

FILE = {"ink": "#1c2024", "soft": "#60646c", "rule": "#d9d9e0", "paper": "#ffffff"}
"""The same in files."""


def colour_of(method: str, methods: Sequence[str]) -> str:
    """Return a method's colour, the same in all figures: ours is the first, `full` is grey."""
    if method == "full":
        return FULL
    others = [name for name in methods if name != "full"]
    ranked = sorted(others, key=lambda name: not name.startswith("kvlink"))
    return PALETTE[ranked.index(method) % len(PALETTE)]


def new_figure(height: float, *, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, list[Any]]:
    """Return a figure and its axes in the house's look, in the page's colours."""
    plt = pyplot()
    figure, grid = plt.subplots(rows, columns, figsize=(WIDTH, height), layout="constrained", squeeze=False, **options)
    axes = [one for row in grid for one in row]
    for one in axes:
        one.set_facecolor("none")
        one.grid(visible=True, color=PAGE["rule"], linewidth=0.7)
        one.set_axisbelow(True)
        one.tick_params(colors=PAGE["soft"], labelsize=8.5, length=0)
        for label in (one.xaxis.label, one.yaxis.label):
            label.set_color(PAGE["soft"])
            label.set_size(9)
        for side, spine in one.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(PAGE["rule"])
    figure.patch.set_alpha(0)
    return figure, axes


def head(axes: Any, text: str) -> None:
    """Write what axes show above them, at their left."""
    axes.set_title(text, loc="left", fontsize=10, color=PAGE["ink"])


def legend(figure: Any, handles: Sequence[Any], *, columns: int = 4) -> None:
    """Put one legend below all axes."""
    if handles:
        figure.legend(
            handles=list(handles),
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            fontsize=8.5,
            labelcolor=PAGE["ink"],
        )


def for_page(figure: Any, name: str) -> str:
    """Return a figure as SVG to stand in a page: its text is text, its colours are the page's."""
    text = _svg(figure, name, text_as_text=True)
    text = re.sub(r"^.*?(?=<svg)", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for use, colour in PAGE.items():
        text = text.replace(colour, f"var(--{use})")
    return re.sub(r'\bid="(?=[a-z]+_\d+")', f'id="{name}-', text)


def to_file(figure: Any, path: Path, name: str) -> None:
    """Write a figure as .svg or .png."""
    if path.suffix == ".svg":
        text = _svg(figure, name, text_as_text=False)
        for use, colour in PAGE.items():
            text = text.replace(colour, FILE[use])
        path.write_text(text, "utf-8")
        return
    _recolour(figure)
    figure.patch.set_alpha(1)
    figure.patch.set_facecolor(FILE["paper"])
    figure.savefig(path, dpi=160)


def _svg(figure: Any, name: str, *, text_as_text: bool) -> str:
    import matplotlib as mpl

    target = io.StringIO()
    fonts = "none" if text_as_text else "path"
    with mpl.rc_context({"svg.fonttype": fonts, "svg.hashsalt": name}):
        figure.savefig(target, format="svg", metadata={"Date": None})
    return target.getvalue()


def _recolour(figure: Any) -> None:
    """Give every artist of the page's colours those of files."""
    from matplotlib.colors import to_hex

    pairs = {colour: FILE[use] for use, colour in PAGE.items()}
    for artist in figure.findobj():
        for what in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
            get, put = getattr(artist, f"get_{what}", None), getattr(artist, f"set_{what}", None)
            if get is None or put is None:
                continue
            try:
                found = to_hex(get())
            except (TypeError, ValueError):  # several colours, or none
                continue
            if found in pairs:
                put(pairs[found])
