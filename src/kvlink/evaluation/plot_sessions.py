"""Figures of requests about the same documents: a conversation turn by turn, and sessions that are open at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlink.evaluation.plot import PALETTE, pyplot, save

COLOURS = {"full": "#6b7280", "full+prefix_cache": PALETTE[1], "assembled": PALETTE[1], "shared": PALETTE[0]}
LABELS = {"full": "full prefill", "full+prefix_cache": "full, prefix cache", "shared": "documents shared"}


def plot_dialogue(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw how long each turn of a conversation takes; below, what became of the documents.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    for row in rows:
        numbers = [turn["turn"] for turn in row["turns"]]
        heights = [turn["response_s"] for turn in row["turns"]]
        label = f"{LABELS[row['arm']]}, mean {row['median_s']:.2f} s"
        axes.plot(numbers, heights, marker="o", color=COLOURS[row["arm"]], label=label, linewidth=2)
    turns = rows[0]["turns"]
    names = [f"{turn['turn']}\n{'' if turn['change'] == '-' else turn['change']}" for turn in turns]
    axes.set_xticks([turn["turn"] for turn in turns], names)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("turn, and what became of a document")
    axes.set_ylabel("seconds to the end of the answer")
    documents, tokens = rows[0]["documents"], rows[0]["tokens"]
    axes.set_title(f"{title}, {documents} documents of {tokens} tokens", fontsize=10)
    figure.legend(frameon=False, fontsize=9, ncols=len(rows), loc="outside lower center")
    save(plt, figure, [axes], path)


def plot_memory(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw what sessions on the same documents take while they are open at once.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    labels = {"shared": "documents shared", "assembled": "documents copied into each"}
    for arm, label in labels.items():
        chosen = [row for row in rows if row["arm"] == arm]
        sizes = [row["bytes"] / 2**30 for row in chosen]
        axes.plot([row["sessions"] for row in chosen], sizes, "o-", color=COLOURS[arm], label=label, linewidth=2)
        for row, size in zip(chosen, sizes, strict=True):
            at = row["sessions"], size
            axes.annotate(f"{size:.2f}", at, (0, 6), textcoords="offset points", ha="center", fontsize=8)
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_xlabel("sessions open at once")
    axes.set_ylabel("GiB")
    first = rows[0]
    axes.set_title(
        f"{title}, {first['documents']} documents of {first['tokens']} tokens, K = {first['links']}", fontsize=10
    )
    axes.legend(frameon=False, fontsize=9)
    save(plt, figure, [axes], path)
