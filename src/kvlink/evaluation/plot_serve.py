"""The figure of `bench serve`: rates and times to a first text of both arms, and the server's memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlink.evaluation.plot import PALETTE, pyplot, save


def plot_serve(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw requests per second by round, the distribution of times to the first text, and memory over requests.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    plt = pyplot()
    figure, grid = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    axes = list(grid)
    for row, colour in zip(rows[:2], (PALETTE[2], PALETTE[0]), strict=True):
        rates, times = row["samples_per_s"], sorted(row["samples_s"]["ttft"])
        label = "server, over HTTP" if row["arm"] == "server" else "engine alone"
        axes[0].plot(range(1, len(rates) + 1), rates, marker="o", color=colour, label=label, linewidth=2)
        axes[1].plot(
            times, [at / len(times) for at in range(1, len(times) + 1)], color=colour, label=label, linewidth=2
        )
    for row in rows[2:]:
        if row["arm"] == "soak":
            memory = [one / 1e6 for one in row["memory_bytes"]]
            places = [row["requests"] * at / max(1, len(memory) - 1) for at in range(len(memory))]
            axes[2].plot(places, memory, marker="o", color=PALETTE[0], linewidth=2)
    axes[0].set_xlabel("round")
    axes[0].set_ylabel("requests per second")
    axes[0].set_ylim(bottom=0)
    axes[1].set_xlabel("time to first text, seconds")
    axes[1].set_ylabel("share of requests")
    axes[2].set_xlabel("requests behind the rounds")
    axes[2].set_ylabel("memory of the server, MB")
    axes[2].set_ylim(bottom=0)
    for one in axes[:2]:
        one.legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=10)
    save(plt, figure, axes, path)
