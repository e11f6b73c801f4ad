"""Figures drawn from result files: the same rows that the JSON holds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlink.core.errors import InputError

COLOURS = {"full": "#6b7280", "cold": "#d97706", "host": "#0891b2", "warm": "#4f46e5"}


def plot_ttft(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw time to first token over the prompt's length, with the largest K that was measured.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise InputError("plots need matplotlib: pip install 'kvlink[plot]'") from error

    links = max(row["links"] for row in rows)
    mpl.rcParams["svg.hashsalt"] = "kvlink"
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    for arm in ("full", "cold", "host", "warm"):
        chosen = [
            row
            for row in rows
            if (row["arm"] == "full" if arm == "full" else row["state"] == arm and row["links"] == links)
        ]
        lengths = [row["documents"] * row["tokens"] for row in chosen]
        medians = [row["median_s"] for row in chosen]
        label = "full prefill" if arm == "full" else f"reuse, {arm}"
        axes.plot(lengths, medians, marker="o", color=COLOURS[arm], label=label, linewidth=2)
        axes.fill_between(
            lengths,
            [r["q1_s"] for r in chosen],
            [r["q3_s"] for r in chosen],
            color=COLOURS[arm],
            alpha=0.15,
            linewidth=0,
        )
        if arm in ("full", "warm"):
            for row, length, median in zip(chosen, lengths, medians, strict=True):
                text = f"{median:.1f} s" if arm == "full" else f"-{row['reduction']:.0%}"
                offset = (0, 8) if arm == "full" else (0, -14)
                axes.annotate(text, (length, median), offset, textcoords="offset points", ha="center", fontsize=8)
    axes.set_yscale("log")
    axes.set_xlabel("tokens in 10 documents" if rows[0]["documents"] == 10 else "tokens in documents")
    axes.set_ylabel("time to first token, seconds")
    axes.set_title(f"{title}, {links} link tokens behind each document", fontsize=10)
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise InputError(f"the plot cannot be written to {path}: {error}") from error
    finally:
        plt.close(figure)
