"""Figures drawn from result files: the same rows that the JSON holds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlink.core.errors import InputError
from kvlink.evaluation.results import require_writable

COLOURS = {"full": "#6b7280", "cold": "#d97706", "host": "#0891b2", "warm": "#4f46e5", "known_beginning": "#be185d"}

PALETTE = ("#4f46e5", "#d97706", "#0891b2", "#be185d", "#65a30d", "#7c3aed", "#475569")


def plot_ttft(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw time to first token over the prompt's length, with the largest K that was measured.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    plt = pyplot()
    rows = [row for row in rows if not row.get("scenario")]
    links = max(row["links"] for row in rows)
    reuse = "shared" if any(row["arm"] == "shared" for row in rows) else "assembled"
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    for arm, colour in COLOURS.items():
        chosen = [
            row
            for row in rows
            if (
                row["arm"] == "full"
                if arm == "full"
                else (row["arm"], row["state"], row["links"]) == (reuse, arm, links)
            )
        ]
        if not chosen:
            continue
        lengths = [row["documents"] * row["tokens"] for row in chosen]
        medians = [row["median_s"] for row in chosen]
        label = "full prefill" if arm == "full" else f"reuse, {arm.replace('_', ' ')}"
        axes.plot(lengths, medians, marker="o", color=colour, label=label, linewidth=2)
        axes.fill_between(
            lengths,
            [r["q1_s"] for r in chosen],
            [r["q3_s"] for r in chosen],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
        if arm in ("full", "warm"):
            for row, length, median in zip(chosen, lengths, medians, strict=True):
                text = f"{median:.1f} s" if arm == "full" else f"-{row['reduction']:.0%}"
                offset = (0, 8) if arm == "full" else (0, -14)
                axes.annotate(text, (length, median), offset, textcoords="offset points", ha="center", fontsize=8)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low * 0.8, high * 1.25)
    ticks = [
        tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low * 0.8 <= tick <= high * 1.25
    ]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.yaxis.set_minor_formatter(plt.NullFormatter())
    axes.set_xlabel("tokens in 10 documents" if rows[0]["documents"] == 10 else "tokens in documents")
    axes.set_ylabel("time to first token, seconds")
    axes.set_title(f"{title}, {links} link tokens behind each document", fontsize=10)
    axes.legend(frameon=False, fontsize=9)
    save(plt, figure, [axes], path)


def plot_prefetch(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw percentiles of time to first token under traffic, with and without loading ahead, for each network.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    plt = pyplot()
    networks = list(dict.fromkeys((row["network"]["bytes_per_s"], row["network"]["latency_s"]) for row in rows))
    figure, grid = plt.subplots(1, len(networks), figsize=(4.2 * len(networks), 3.6), layout="constrained")
    axes = [grid] if len(networks) == 1 else list(grid)
    labels = {"p50": "50", "p90": "90", "p99": "99", "p999": "99.9"}
    for one, (rate, latency) in zip(axes, networks, strict=True):
        chosen = [
            row for row in rows if (row["network"]["bytes_per_s"], row["network"]["latency_s"]) == (rate, latency)
        ]
        for number, row in enumerate(sorted(chosen, key=lambda row: row["prefetch"])):
            heights = [row["ttft_s"][name] * 1000 for name in labels]
            places = [at + (number - 0.5) * 0.38 for at in range(len(labels))]
            low, high = (limit * 1000 for limit in row["p999_interval_s"])
            label = "loaded ahead" if row["prefetch"] else "loaded when it is its turn"
            one.bar(places, heights, 0.36, color=PALETTE[1 - number], label=label)
            one.plot([places[-1]] * 2, [low, high], color="#111827", linewidth=1.2)
        one.set_xticks(range(len(labels)), labels.values())
        one.set_xlabel("percentile")
        one.set_title(f"{rate / 1e6:g} MB/s, {latency * 1000:g} ms each way", fontsize=10)
    axes[0].set_ylabel("time to first token, ms")
    axes[0].legend(frameon=False, fontsize=8)
    save(plt, figure, axes, path)


def plot_quality(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw, for each task, how far each method is from full attention: KL, and NLL of the right answer.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    plt = pyplot()
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    methods = [name for name in dict.fromkeys(row["method"] for row in rows) if name != "full"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 0.7 * len(tasks) + 1.8), sharey=True, layout="constrained")
    height = 0.8 / max(1, len(methods))
    by_pair = {(row["task"], row["method"]): row for row in rows if row["kl"] is not None}
    for number, method in enumerate(methods):
        colour = PALETTE[number % len(PALETTE)]
        chosen = [(at, by_pair[task, method]) for at, task in enumerate(tasks) if (task, method) in by_pair]
        places = [at + (number - (len(methods) - 1) / 2) * height for at, _ in chosen]
        left.barh(places, [row["kl"] for _, row in chosen], height * 0.9, color=colour, label=method)
        for place, (_, row) in zip(places, chosen, strict=True):
            nll = row["against_full"].get("nll")
            if nll is None:  # without `full` among the methods there is nothing to compare with
                continue
            right.plot([nll["low"], nll["high"]], [place, place], color=colour, linewidth=2)
            right.plot(nll["difference"], place, "o", color=colour, markersize=4)
    left.set_yticks(range(len(tasks)), tasks)
    left.invert_yaxis()
    left.set_xlabel("KL to full attention, nats per token (less is better)")
    right.set_xlabel("NLL of the right answer, difference from full (95 % interval)")
    right.axvline(0, color="#6b7280", linewidth=1)
    figure.suptitle(f"{title}: teacher-forced, the same rows and ids", fontsize=10)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    save(plt, figure, [left, right], path)


def require_plot(path: Path) -> None:
    """Find out before a long run whether a figure could be drawn and written in the end.

    Raises:
        InputError: matplotlib is not installed, does not know files of this name, or the place cannot be written.
    """
    known = pyplot().Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise InputError(f"the plot cannot be written to {path}: name it .svg or .png, not {path.suffix or 'without'}")
    require_writable(path, "the plot")


def pyplot() -> Any:
    """Return matplotlib's drawing interface, for files only and the same bytes each time.

    Raises:
        InputError: It is not installed.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise InputError("plots need matplotlib: pip install 'kvlink[plot]'") from error
    mpl.rcParams["svg.hashsalt"] = "kvlink"
    return plt


def log_heights(plt: Any, axes: Any) -> None:
    """Let heights stand on a logarithmic scale with plain numbers at it."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(plt.NullFormatter())


def save(plt: Any, figure: Any, axes: Sequence[Any], path: Path) -> None:
    """Give the axes the house's look and write the figure.

    Raises:
        InputError: The file cannot be written.
    """
    for one in axes:
        one.grid(visible=True, which="both", alpha=0.2)
        one.set_axisbelow(True)
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise InputError(f"the plot cannot be written to {path}: {error}") from error
    finally:
        plt.close(figure)
