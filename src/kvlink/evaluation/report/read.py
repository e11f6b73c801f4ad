"""Results as a page needs them: summaries from `--json` files, single rows from `rows.jsonl`. Knows no drawing."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from kvlink.core.errors import InputError
from kvlink.evaluation.evaluate import summarise
from kvlink.evaluation.results import SCHEMA

YARDSTICKS = ("full", "block_mask")
"""Methods that reuse nothing."""

SAME = 1.1
"""Times whose ratio is no greater are the same, as far as a mean over rows on a busy machine can tell."""


@dataclass(frozen=True, slots=True)
class Results:
    """What one model scored.

    Attributes:
        model: Its name and digest.
        summary: One row per task and method.
        rows: One row per task, row and method; empty where no `rows.jsonl` was given.
        machine, versions: What the figures were measured on; empty if only rows were given.
        settings: Of the first file.
    """

    model: Mapping[str, Any]
    summary: Sequence[Mapping[str, Any]]
    rows: Sequence[Mapping[str, Any]] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks of which something was scored."""
        return list(dict.fromkeys(row["task"] for row in self.summary if row["n"]))

    @property
    def methods(self) -> list[str]:
        """Names of the methods that were scored on some task."""
        return list(dict.fromkeys(row["method"] for row in self.summary if row["n"]))

    def of(self, method: str) -> dict[str, Mapping[str, Any]]:
        """Return a method's rows of the summary by task, those without scores left out."""
        return {row["task"]: row for row in self.summary if row["method"] == method and row["n"]}


@dataclass(frozen=True, slots=True)
class Overall:
    """A method over all tasks on which it and `full` were scored: means over tasks, each as heavy as any other.

    Attributes:
        nll: Difference from full.
        ttft: Time to first token as a share of that of full.
        computed: Tokens computed as a share of those of full.
        substring: Share of answers that hold a right one, or None without answers.
    """

    method: str
    tasks: int
    kl: float
    agreement: float
    nll: float
    ttft: float
    computed: float
    bytes_loaded: float
    substring: float | None = None


def overall(results: Results) -> list[Overall]:
    """Return the methods over all tasks, in their order; one that was scored on fewer tasks than `full` is left out."""
    full = results.of("full")
    found: list[Overall] = []
    for method in results.methods:
        own = {task: row for task, row in results.of(method).items() if task in full}
        if not own or len(own) < len(full):
            continue
        pairs = [(row, full[task]) for task, row in own.items()]
        texts = [row["substring"] for row, _ in pairs]
        found.append(
            Overall(
                method,
                len(pairs),
                mean(row["kl"] for row, _ in pairs),
                mean(row["agreement"] for row, _ in pairs),
                mean(row["nll"] - base["nll"] for row, base in pairs),
                mean(row["ttft_s"] / base["ttft_s"] for row, base in pairs),
                mean(row["tokens_computed"] / base["tokens_computed"] for row, base in pairs),
                mean(row["bytes_loaded"] for row, _ in pairs),
                mean(texts) if all(text is not None for text in texts) else None,
            )
        )
    return found


def own_and_rival(found: Sequence[Overall]) -> tuple[Overall | None, Overall | None]:
    """Return our method, and the best rival that is no slower, but for noise: by KL over all tasks.

    Ours is `kvlink`, as an engine answers, else the best that it was scored as; what wraps it is no rival, and
    neither is `concat_reencoded`, which is ours without link tokens.
    """
    ours = [one for one in found if "kvlink" in one.method]
    usual = [one for one in ours if one.method == "kvlink"]
    own = min(usual or ours, key=lambda one: one.kl, default=None)
    others = [
        one
        for one in found
        if one not in ours and one.method not in YARDSTICKS and "concat_reencoded" not in one.method
    ]
    near = [one for one in others if own and one.ttft <= SAME * own.ttft]
    return own, min(near, key=lambda one: one.kl, default=None)


def read_results(paths: Sequence[Path]) -> Results:
    """Read files of results, of rows, or folders with either.

    Raises:
        InputError: A file is none of `kvlink evaluate`, of another schema, or of other rows or another model than the
            files before it.
    """
    files = [file for path in paths for file in _files(path)]
    if not files:
        raise InputError("no file of results is named: give what `kvlink evaluate --json` or --out wrote")
    heads: list[Mapping[str, Any]] = []
    summary: dict[tuple[str, str], Mapping[str, Any]] = {}
    rows: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for file in files:
        head, own, single = _read(file)
        model = head.get("model") or head.get("settings", {}).get("model") or {}
        for row in single:
            rows[row["task"], row["id"], row["method"]] = row
        for row in own:
            same = summary.get((row["task"], "full"))
            if row["method"] == "full" and same is not None and (same["n"], same["nll"]) != (row["n"], row["nll"]):
                raise InputError(f"{file} scored other rows of {row['task']} than a file before it; give them apart")
            summary[row["task"], row["method"]] = row
        heads.append({**head, "model": model})
    digests = {head["model"].get("digest"): head["model"].get("name") for head in heads}
    if len(digests) > 1:
        raise InputError(
            f"the files are of {len(digests)} models ({', '.join(map(str, digests.values()))}); one a page"
        )
    single = list(rows.values())
    for row in summarise([dict(row) for row in single]):
        summary.setdefault((row["task"], row["method"]), row)
    first = next((head for head in heads if head.get("machine")), heads[0])
    return Results(
        first["model"],
        list(summary.values()),
        single,
        first.get("machine", {}),
        first.get("versions", {}),
        first.get("settings", {}),
    )


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = [file for file in sorted(path.glob("*.json*")) if file.suffix in (".json", ".jsonl")]
    if not found:
        raise InputError(f"{path} holds no .json or .jsonl file of results")
    return found


def _read(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a file's head, its summary and its single rows."""
    try:
        text = file.read_text("utf-8")
        if file.suffix == ".jsonl":  # behind the last line's end may stand what a kill cut short
            head, *single = [json.loads(line) for line in text.split("\n")[:-1]]
            results: list[dict[str, Any]] = []
        else:
            head, single = json.loads(text), []
            results = head.get("results", [])
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{file} cannot be read as results of `kvlink evaluate`: {error}") from error
    if not isinstance(head, dict) or "schema" not in head:
        raise InputError(f"{file} is no file of results: give what `kvlink evaluate --json` or --out wrote")
    if head["schema"] != SCHEMA:
        raise InputError(
            f"{file} has schema {head['schema']}, this version reads {SCHEMA}: run `kvlink evaluate` again, or draw it "
            "with the version that wrote it"
        )
    if file.suffix == ".json" and head.get("command") not in ("evaluate", "doctor"):
        raise InputError(f"{file} is of `kvlink {head.get('command')}`; a report is made of results of evaluate")
    needed = {"task", "method", "n", "nll", "kl", "agreement", "ttft_s"}
    if wrong := [row for row in results if not needed <= {*row}]:
        raise InputError(f"{file} has a row without {', '.join(sorted(needed - {*wrong[0]}))}")
    return head, results, single
