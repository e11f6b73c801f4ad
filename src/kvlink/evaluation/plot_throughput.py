"""The figure of `bench throughput`: rates and percentiles over the number of requests under way."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlink.evaluation.plot import COLOURS, PALETTE, log_heights, pyplot, save

LINES = {"p50": "-", "p90": "--", "p99": "-.", "p999": ":"}


def plot_throughput(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw requests per second, time to first token and time between tokens.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    plt = pyplot()
    figure, grid = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    axes = list(grid)
    full = [row for row in rows if row["arm"] == "full"]
    shared = [row for row in rows if row["arm"] != "full"]
    for number, loop in enumerate(dict.fromkeys(row["loop"] for row in shared)):
        chosen = sorted((row for row in shared if row["loop"] == loop), key=lambda row: row["concurrency"])
        colour, places = PALETTE[number], [row["concurrency"] for row in chosen]
        rates = [row["requests_per_s"] for row in chosen]
        axes[0].plot(places, rates, marker="o", color=colour, label=f"reuse, {loop} loop", linewidth=2)
        for one, name in ((axes[1], "ttft_s"), (axes[2], "itl_s")):
            for percentile, style in LINES.items():
                known = [(row["concurrency"], row[name][percentile]) for row in chosen if row[name][percentile]]
                if known:
                    one.plot(*zip(*known, strict=True), style, marker=".", color=colour)
    for row in full:
        for one, value in zip(axes, (row["requests_per_s"], row["ttft_s"]["p50"], row["itl_s"]["p50"]), strict=True):
            if value:
                one.axhline(value, color=COLOURS["full"], linewidth=1.2, label="full, one by one")
    counts = sorted({row["concurrency"] for row in rows})
    labels = ("requests per second", "time to first token, seconds", "time between tokens, seconds")
    for one, label in zip(axes, labels, strict=True):
        one.set_xscale("log", base=2)
        one.set_xticks(counts, [str(count) for count in counts])
        log_heights(plt, one)
        one.set_xlabel("requests under way")
        one.set_ylabel(label)
    for one in axes[1:]:
        one.set_title("solid p50, dashed p90, dash-dotted p99, dotted p99.9", fontsize=8)
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    save(plt, figure, axes, path)
