"""The figures of a report, each from rows of results alone; one that has nothing to show is None."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvlink.core.scores import paired_interval
from kvlink.evaluation.report.names import base_name, codecs, shares
from kvlink.evaluation.report.read import Overall, Results, overall
from kvlink.evaluation.report.style import PAGE, colour_of, head, legend, new_figure

METRICS = {"nll": "NLL of the right answer", "substring": "answers that hold a right one", "f1": "F1 of answers"}
"""Metrics that are drawn as differences from full, where they were taken."""

LEAST = 3
"""Rows of one gold position below which nothing is drawn."""


def pareto(results: Results) -> Any:
    """Draw quality against time to first token, over all tasks; what nothing beats in both is joined by a line."""
    found = [one for one in overall(results) if one.method != "block_mask"]
    if len(found) < 2:
        return None
    figure, axes = new_figure(5.2, columns=2)
    panels = (
        ("agreement", "agreement with full attention", 1),
        ("kl", "KL to full attention, nats per token", -1),
    )
    for one, (field, label, sign) in zip(axes, panels, strict=True):
        points = [(each.ttft, getattr(each, field), each) for each in found]
        front = _front(points, sign)
        one.plot(
            [x for x, _, _ in front], [y for _, y, _ in front], color=PAGE["soft"], linewidth=1, alpha=0.6, zorder=1
        )
        best = {each.method for _, _, each in front}
        for x, y, each in points:
            colour = colour_of(each.method, results.methods)
            face = colour if each.method in best else PAGE["paper"]
            one.plot(x, y, "o", color=colour, markerfacecolor=face, markeredgewidth=1.6, markersize=8, zorder=3)
        one.set_xscale("log")
        one.margins(x=0.2, y=0.12)
        ticks = [t for t in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2) if one.get_xlim()[0] <= t <= one.get_xlim()[1]]
        one.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
        one.set_xticks([], minor=True)
        one.set_xlabel("time to first token, of that of full attention")
        head(one, f"{label}  {'↑' if sign > 0 else '↓'}")
        if sign < 0:
            one.invert_yaxis()
        _name(one, [(x, y, each.method) for x, y, each in points])
    return figure


def _front(points: Sequence[tuple[float, float, Overall]], sign: int) -> list[tuple[float, float, Overall]]:
    """Return the points that no other one beats in time and quality, from the fastest on."""
    front: list[tuple[float, float, Overall]] = []
    for point in sorted(points, key=lambda point: (point[0], -sign * point[1])):
        if not front or sign * point[1] > sign * front[-1][1]:
            front.append(point)
    return front


def _name(axes: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Write names beside points, moved down where they would overlap a name or a point."""
    axes.figure.draw_without_rendering()
    to_pixels, back = axes.transData.transform, axes.transData.inverted().transform
    unit = axes.figure.dpi / 72
    places = [tuple(to_pixels((x, y))) for x, y, _ in points]
    taken = [(across - 5 * unit, across + 5 * unit, up) for across, up in places]
    for (x, y, name), (across, up) in sorted(zip(points, places, strict=True), key=lambda pair: -pair[1][1]):
        wide = len(name) * 4.4 * unit
        left = across + 9 * unit + wide > axes.bbox.x1
        begin = across - 9 * unit - wide if left else across + 9 * unit
        place = up
        while any(
            abs(place - other) < 10 * unit and begin < stop and start < begin + wide for start, stop, other in taken
        ):
            place -= 2 * unit
        taken.append((begin, begin + wide, place))
        line = {
            "arrowstyle": "-",
            "color": PAGE["soft"],
            "linewidth": 0.5,
            "relpos": (1 if left else 0, 0.5),
            "shrinkB": 4,
        }
        axes.annotate(
            name,
            (x, y),
            back((begin + wide if left else begin, place)),
            textcoords="data",
            ha="right" if left else "left",
            va="center",
            fontsize=7.5,
            color=PAGE["ink"],
            arrowprops=line if up - place > 5 * unit else None,
        )


def per_set(results: Results, metric: str) -> Any:
    """Draw for each set how far each method is from full, with 95 % intervals."""
    tasks = [
        task
        for task in results.tasks
        if any(metric in row["against_full"] for row in results.summary if row["task"] == task)
    ]
    methods = [name for name in results.methods if name not in ("full", "block_mask")]
    if not tasks or not methods:
        return None
    columns = 2 if len(tasks) in (2, 4) else min(3, len(tasks))
    lines = -(-len(tasks) // columns)
    height = lines * (0.6 + 0.21 * len(methods)) + 0.5
    figure, axes = new_figure(height, rows=lines, columns=columns, sharex=True, sharey=True)
    for one, task in zip(axes, tasks, strict=False):
        one.axvline(0, color=PAGE["soft"], linewidth=1)
        one.grid(visible=False, axis="y")
        for place, method in enumerate(methods):
            found = results.of(method).get(task, {}).get("against_full", {}).get(metric)
            if found is None:
                continue
            colour = colour_of(method, results.methods)
            one.barh(place, found["difference"], 0.62, color=colour, alpha=0.35)
            one.plot([found["low"], found["high"]], [place, place], color=colour, linewidth=2, solid_capstyle="round")
            one.plot(found["difference"], place, "o", color=colour, markersize=4.5)
        rows = max(row["n"] for row in results.summary if row["task"] == task)
        head(one, f"{task}  (n = {rows})")
        one.set_yticks(range(len(methods)), methods)
    for hidden, one in enumerate(axes[len(tasks) :], start=len(tasks)):
        one.set_visible(False)
        axes[hidden - columns].tick_params(labelbottom=True)
    axes[0].set_ylim(len(methods) - 0.4, -0.6)
    figure.supxlabel(
        f"{METRICS[metric]}: difference from full attention, 95 % interval", fontsize=9, color=PAGE["soft"]
    )
    return figure


def gold_position(results: Results, *, name: str = "nq") -> Any:
    """Draw the difference from full by the place of the gold document."""
    rows = [row for row in results.rows if base_name(row["task"]) == name and len(row.get("gold") or ()) == 1]
    scored = {(row["task"], row["id"], row["method"]): row for row in rows if "nll" in row and "error" not in row}
    places = sorted({row["gold"][0] for row in rows})
    methods = [method for method in results.methods if method not in ("full", "block_mask")]
    lines: list[tuple[str, list[tuple[int, Any]]]] = []
    for method in methods:
        points: list[tuple[int, Any]] = []
        for place in places:
            pairs = [
                (row["nll"], scored[task, which, "full"]["nll"])
                for (task, which, own), row in scored.items()
                if own == method and row["gold"][0] == place and (task, which, "full") in scored
            ]
            if len(pairs) >= LEAST:
                points.append((place, paired_interval([a for a, _ in pairs], [b for _, b in pairs])))
        if len(points) > 1:
            lines.append((method, points))
    if not lines:
        return None
    figure, (axes,) = new_figure(4.8)
    axes.axhline(0, color=PAGE["soft"], linewidth=1)
    handles: list[Any] = []
    shown = sorted({place for _, points in lines for place, _ in points})
    for number, (method, points) in enumerate(lines):
        colour, shift = colour_of(method, results.methods), (number - (len(lines) - 1) / 2) * 0.5 / len(lines)
        at = [shown.index(place) + shift for place, _ in points]
        axes.vlines(
            at, [i.low for _, i in points], [i.high for _, i in points], color=colour, alpha=0.45, linewidth=1.6
        )
        handles += axes.plot(at, [i.difference for _, i in points], "o-", color=colour, markersize=5, label=method)
    axes.set_xticks(range(len(shown)), [f"{place + 1}." for place in shown])
    axes.set_xlabel("place of the document that holds the answer")
    axes.set_ylabel("NLL, difference from full (95 % interval)")
    legend(figure, handles)
    return figure


def sweeps(results: Results) -> Any:
    """Draw what more links, fewer bytes and more computed tokens do to the distance from full."""
    by_method = {one.method: one for one in overall(results)}
    panels = [
        ("link tokens behind each document", _by_links(results, by_method)),
        ("bytes of entries, of those of raw", _by_codec(results, by_method)),
        ("tokens computed, of those of full", _by_share(results, by_method)),
    ]
    panels = [(label, lines) for label, lines in panels if lines]
    if not panels:
        return None
    figure, axes = new_figure(3.9, columns=max(2, len(panels)), sharey=True)
    for one in axes[len(panels) :]:
        one.set_visible(False)
    for one, (label, lines) in zip(axes, panels, strict=False):
        handles: list[Any] = []
        for colour, name, unsorted in lines:
            points = sorted(unsorted)
            xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
            handles += one.plot(xs, ys, "o-", color=colour, markersize=5, label=name)
            for x, y, text in points:
                one.annotate(
                    text, (x, y), (0, 6), textcoords="offset points", ha="center", fontsize=7.5, color=PAGE["ink"]
                )
        one.set_xlabel(label)
        one.margins(x=0.12, y=0.2)
        if len(handles) > 1 or lines[0][1]:
            one.legend(handles=handles, frameon=False, fontsize=7.5, labelcolor=PAGE["ink"])
    axes[0].set_ylabel("KL to full, nats per token")
    return figure


Line = tuple[str, str, list[tuple[float, float, str]]]
"""Colour, name, and points: x, y, what stands above."""


def _by_links(results: Results, by_method: Mapping[str, Overall]) -> list[Line]:
    links: dict[int, float] = {}
    for method, one in by_method.items():
        count = next((row["links"] for row in results.of(method).values() if "links" in row), None)
        if count is not None and method.startswith("kvlink"):
            links[count] = min(one.kl, links.get(count, one.kl))
    plain = by_method.get("concat_reencoded")
    if links and plain is not None:
        links.setdefault(0, plain.kl)
    points = [(float(count), kl, f"K = {count}") for count, kl in links.items()]
    return [(colour_of("kvlink", ["kvlink"]), "", points)] if len(points) > 1 else []


def _by_codec(results: Results, by_method: Mapping[str, Overall]) -> list[Line]:
    lines: list[Line] = []
    found = [one for one in codecs(results.methods) if one.method in by_method]
    for family in dict.fromkeys(one.family for one in found):
        own = [one for one in found if one.family == family]
        most = max(by_method[one.method].bytes_loaded for one in own)
        if most and len(own) > 1:
            points = [(by_method[one.method].bytes_loaded / most, by_method[one.method].kl, one.value) for one in own]
            lines.append((colour_of(own[0].method, results.methods), family, points))
    return lines


def _by_share(results: Results, by_method: Mapping[str, Overall]) -> list[Line]:
    lines: list[Line] = []
    found = [one for one in shares(results.methods) if one.method in by_method]
    for family in dict.fromkeys(one.family for one in found):
        own = [one for one in found if one.family == family]
        points = [(by_method[one.method].computed, by_method[one.method].kl, one.value) for one in own]
        lines.append((colour_of(own[0].method, results.methods), family, points))
    return lines
