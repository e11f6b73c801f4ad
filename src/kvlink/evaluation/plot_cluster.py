"""The figure of `cluster simulate`: hits, time to first token and imbalance over the number of nodes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlink.evaluation.plot import PALETTE, log_heights, pyplot, save


def plot_cluster(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw each policy over the nodes; with one number of nodes, its hit ratio over time stands first.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    plt = pyplot()
    figure, grid = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    axes = list(grid)
    counts = sorted({row["cluster"]["nodes"] for row in rows})
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for number, policy in enumerate(policies):
        colour = PALETTE[number % len(PALETTE)]
        chosen = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["cluster"]["nodes"])
        places = [row["cluster"]["nodes"] for row in chosen]
        if len(counts) == 1:
            times = chosen[0]["over_time"]
            hits = [one["until_s"] for one in times], [one["hit_ratio"] for one in times]
        else:
            hits = places, [row["hit_ratio"] for row in chosen]
        axes[0].plot(*hits, marker=".", color=colour, label=policy, linewidth=2)
        for name, style in (("p50", ":"), ("p99", "-"), ("p999", "--")):
            heights = [row["ttft_s"][name] for row in chosen]
            label = policy if name == "p99" else None
            axes[1].plot(places, heights, style, marker=".", color=colour, label=label)
        axes[2].plot(places, [row["imbalance"] for row in chosen], marker=".", color=colour, label=policy, linewidth=2)
    for one in axes[1:] if len(counts) == 1 else axes:
        one.set_xscale("log")
        one.set_xticks(counts, [f"{count:,}" for count in counts], minor=False)
        one.xaxis.set_minor_formatter(plt.NullFormatter())
        one.set_xlabel("nodes")
    if len(counts) == 1:
        axes[0].set_xlabel("seconds")
    axes[0].set_ylim(0, 1)
    axes[0].set_ylabel("document tokens found")
    log_heights(plt, axes[1])
    axes[1].set_ylabel("time to first token, s")
    axes[1].set_title("dotted p50, solid p99, dashed p99.9", fontsize=8)
    axes[2].set_ylabel("busiest node's work over the mean")
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    save(plt, figure, axes, path)
