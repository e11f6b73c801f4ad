"""Figures of training: the held-out divergence over steps, and over the number of link tokens or rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlink.evaluation.plot import PALETTE, pyplot, save


def plot_training(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw each run's held-out divergence; with several numbers of link tokens, or of rows, their best beside it.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    plt = pyplot()
    over = "num_links" if len({row["num_links"] for row in rows}) > 1 else "rows"
    counts = sorted({row.get(over, 0) for row in rows})
    figure, found = plt.subplots(
        1, 2 if len(counts) > 1 else 1, figsize=(11 if len(counts) > 1 else 7, 4), squeeze=False, layout="constrained"
    )
    left = found[0][0]
    for number, row in enumerate(rows):
        steps, held_out = [seen["step"] for seen in row["curve"]], [seen["kl"] for seen in row["curve"]]
        label = f"{row['mode']}, K = {row['num_links']}, {row['recipe']['init']}, " + (
            f"{row['rows']:,} rows" if "rows" in row else f"{row['lessons']} lessons"
        )
        left.plot(steps, held_out, marker=".", color=PALETTE[number % len(PALETTE)], label=label)
    for without in sorted({row["scores"]["kl_without"] for row in rows if "scores" in row}):
        left.axhline(without, color="#6b7280", linestyle="--", linewidth=1, label="without links")
    left.set_xlabel("steps")
    left.set_ylabel("held-out KL to full attention, nats per token")
    left.set_ylim(bottom=0)
    known = [row["scores"]["kl_without"] for row in rows if "scores" in row]
    if known:  # a bad beginning would press all else to the floor
        left.set_ylim(top=min(left.get_ylim()[1], 1.6 * max(known)))
    left.legend(frameon=False, fontsize=8)
    if len(counts) > 1:
        right = found[0][1]
        best = [
            min(seen["kl"] for row in rows if row.get(over, 0) == count for seen in row["curve"]) for count in counts
        ]
        right.plot(counts, best, marker="o", color=PALETTE[0])
        if over == "rows":
            right.set_xscale("log")
            right.minorticks_off()
        right.set_xticks(counts, [f"{count:,}" for count in counts])
        right.set_xlabel("link tokens behind each document" if over == "num_links" else "rows learned from")
        right.set_ylabel("best held-out KL")
        right.set_ylim(bottom=0)
    figure.suptitle(title, fontsize=10)
    save(plt, figure, list(found[0]), path)
