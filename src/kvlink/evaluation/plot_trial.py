"""The figure of `bench cluster`: hits and time to first token, real and simulated; hits before and after a loss."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlink.evaluation.plot import PALETTE, pyplot, save


def plot_trial(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw each policy and number of servers, and hits over time where a server was killed.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    plt = pyplot()
    runs, lost = [row for row in rows if "simulated" in row], [row for row in rows if "lost_at_s" in row]
    figure, grid = plt.subplots(1, 3 if lost else 2, figsize=(12 if lost else 8, 3.8), layout="constrained")
    axes = list(grid)
    policies = list(dict.fromkeys(row["policy"] for row in runs))
    places = {count: at for at, count in enumerate(sorted({row["nodes"] for row in runs}))}
    width = 0.8 / len(policies)
    for number, policy in enumerate(policies):
        chosen = [row for row in runs if row["policy"] == policy]
        at = [places[row["nodes"]] + (number - (len(policies) - 1) / 2) * width for row in chosen]
        for axis, of in zip(axes, (_hits, _p99), strict=False):
            axis.bar(at, [of(row["real"]) for row in chosen], width * 0.9, color=PALETTE[number], label=policy)
            axis.plot(at, [of(row["simulated"]) for row in chosen], "k_", markersize=12)
    for axis in axes[:2]:
        axis.set_xticks(list(places.values()), [f"{count} servers" for count in places])
    axes[0].set_ylim(0, 1)
    axes[0].set_ylabel("document tokens found on the device")
    axes[1].set_ylabel("time to first token, 99th percentile, ms")
    axes[1].set_yscale("log")
    axes[1].set_title("bars real, lines simulated", fontsize=8)
    for number, row in enumerate(lost):
        times = row["real"]["over_time"]
        seconds = [one["until_s"] - row["lost_at_s"] for one in times]
        label = f"{row['nodes']} servers"
        axes[2].plot(seconds, [one["hit_ratio"] for one in times], color=PALETTE[number], label=label, linewidth=2)
    if lost:
        axes[2].axvline(0, color="black", linewidth=0.8)
        axes[2].set_ylim(0, 1)
        axes[2].set_xlabel("seconds from the loss of one server")
        axes[2].legend(frameon=False, fontsize=8)
    axes[1].legend(frameon=False, fontsize=8, loc="upper left")
    figure.suptitle(title, fontsize=10)
    save(plt, figure, axes, path)


def _hits(found: Mapping[str, Any]) -> float:
    return found["hit_ratio"] or 0.0


def _p99(found: Mapping[str, Any]) -> float:
    return (found["ttft_s"]["p99"] or 0.0) * 1000
