"""Results as a run writes them, made by a formula: many methods, sets and gold positions without any model."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlink.evaluation.evaluate import summarise
from kvlink.evaluation.results import write_results
from kvlink.evaluation.tasks import task_rows

MODEL = {"name": "tiny", "digest": "ab" * 32}
COSTS = {  # distance from full, time, tokens computed, bytes as shares
    "full": (0.0, 1.0, 1.0, 0.0),
    "concat_reencoded(sink=none)": (0.55, 0.05, 0.02, 1.0),
    "concat_reencoded": (0.33, 0.052, 0.02, 1.0),
    "kvlink": (0.10, 0.075, 0.05, 1.0),
    "kvlink(bundle=four)": (0.13, 0.07, 0.04, 1.0),
    "int8(kvlink)": (0.101, 0.08, 0.05, 0.26),
    "int4(kvlink)": (0.115, 0.085, 0.05, 0.16),
    "prune(50, kvlink)": (0.19, 0.08, 0.05, 0.5),
    "cacheblend(r=0.15)": (0.24, 0.3, 0.2, 1.0),
    "cacheblend(r=0.3)": (0.18, 0.45, 0.35, 1.0),
    "epic": (0.26, 0.2, 0.12, 1.0),
    "a3": (0.25, 0.28, 0.17, 1.0),
    "random": (0.29, 0.26, 0.17, 1.0),
    "ape": (0.3, 0.06, 0.02, 1.0),
}
LINKS = {"kvlink": 6, "kvlink(bundle=four)": 4, "int8(kvlink)": 6, "int4(kvlink)": 6, "prune(50, kvlink)": 6}
TASKS = ("nq", "hotpotqa", "musique", "hops(documents=3,tokens=5)")


def rows_of(
    methods: Sequence[str] = tuple(COSTS), tasks: Sequence[str] = TASKS, *, count: int = 12, answers: bool = True
) -> list[dict[str, Any]]:
    """Return one result per task, row and method."""
    found: list[dict[str, Any]] = []
    for task in tasks:
        known = task_rows(task, data=None, limit=count) if task.startswith("hops") else None
        for number in range(count):
            draw = random.Random(f"{task} {number}")
            base, hard = 2 + draw.random(), 0.5 + draw.random()
            about = {
                "task": task,
                "id": known[number].id if known else f"{task}-{number}",
                "digest": known[number].digest if known else "0" * 16,
                "gold": [(0, 4, 9)[number % 3]] if task == "nq" else [0, 1],
            }
            for method in methods:
                kl, time, computed, size = COSTS[method]
                kl *= hard
                row = {
                    **about,
                    "method": method,
                    "nll": base + kl * (1.5 * draw.random() if kl else 0),
                    "kl": kl,
                    "agreement": max(0.0, 1 - 0.5 * kl),
                    "ttft_s": 2.0 * time,
                    "tokens_computed": int(1500 * computed),
                    "bytes_loaded": int(5e7 * size),
                }
                if method in LINKS:
                    row["links"] = LINKS[method]
                if answers:
                    right = float(draw.random() > 0.4 + kl)
                    row |= {"answer": f"Answer of {method}", "em": right, "f1": right, "substring": right}
                found.append(row)
    return found


def write_files(folder: Path, rows: Sequence[dict[str, Any]], **settings: Any) -> list[Path]:
    """Write the two files that a run leaves; returns results, then rows."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = {"model": MODEL, "seed": 0, **settings}
    summary = summarise(list(rows))
    write_results(folder / "results.json", "evaluate", summary, model=MODEL, seed=0, settings=asked)
    lines = [{"schema": 1, "settings": asked}, *rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return [folder / "results.json", folder / "rows.jsonl"]
