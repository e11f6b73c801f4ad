"""Quality beside speed: every method on the same rows and ids, scored against full attention.

Each row is finished with all methods before the next begins, and is written at once, so that a killed run goes on
where it stopped. `full` is always computed: its logits are what `kl` and `agreement` compare with.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvlink.core import scores
from kvlink.core.errors import InputError, KVLinkError
from kvlink.evaluation.case import Bench, Case, Ids
from kvlink.evaluation.methods import Method, method_named
from kvlink.evaluation.methods.full import Full
from kvlink.evaluation.results import finite
from kvlink.training.data import PROMPT_VERSION, Row

NEW_TOKENS = {"qa": 32, "summarization": 96}
"""Longest generated answer by task."""

ON_FULL_TOKENS = 32
"""Tokens of full attention's own continuation that are scored."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a row may be; what exceeds it loses documents from the back, never gold ones."""

    max_documents: int | None = None
    max_tokens: int | None = None


def evaluate_row(
    bench: Bench, task: str, row: Row, methods: dict[str, Method], *, limits: Limits, generate: bool
) -> list[dict[str, Any]]:
    """Return one result per method, in their order.

    A method that cannot carry the row has `error` in place of scores; the others go on. Scores that are no finite
    numbers are None, with an `error`, too. The time to first token is that of the scored forward, in which the few ids
    of the answer stand behind the prompt.
    """
    about = {"task": task, "id": row.id, "digest": row.digest}
    try:
        case = Case(bench, row, max_documents=limits.max_documents, max_tokens=limits.max_tokens)
    except KVLinkError as error:  # such as a blank question, or a text that this tokenizer cannot read
        return [{**about, "method": name, "error": str(error)} for name in methods]
    over = case.prompt.num_tokens + len(case.scored) - bench.context
    limit = min(NEW_TOKENS[row.task], bench.context - case.prompt.num_tokens)
    found: list[dict[str, Any]] = []
    scored, own, on_own = None, (), None
    if over <= 0:
        full = Full()
        scored = _timed(case, full, case.scored) if case.scored else None
        own = full.generate(case, limit=limit, end_ids=bench.prompter.end_ids) if generate and limit > 0 else ()
        on_own = full.score(case, own[:ON_FULL_TOKENS]) if own else None
        bench.release(on_own.cache if on_own else None)
    for name, method in methods.items():
        result: dict[str, Any] = {
            **about,
            "method": name,
            "documents": len(case.prompt.documents),
            "dropped": case.dropped,
            "prompt_tokens": case.prompt.num_tokens,
            "gold": case.gold,
            **({"over_limit": case.over_limit} if case.over_limit else {}),
        }
        found.append(result)
        if over > 0:
            result["error"] = f"{over} tokens over the context of {bench.context}, though only gold documents are left"
            continue
        try:
            if scored:
                here = scored if isinstance(method, Full) else _timed(case, method, case.scored)
                result |= _teacher_forced(case, scored.logits, here)
            if own and on_own:
                if isinstance(method, Full):
                    result |= _answered(case, own)
                elif method.generates:
                    result |= _answered(case, method.generate(case, limit=limit, end_ids=bench.prompter.end_ids))
                other = on_own if isinstance(method, Full) else method.score(case, own[:ON_FULL_TOKENS])
                bench.release(other.cache)
                result["on_full"] = _distances(on_own.logits, other.logits, own[:ON_FULL_TOKENS])
        except (KVLinkError, NotImplementedError) as error:  # the latter from a method of another package
            result["error"] = str(error)
        result |= method.facts
        if wrong := _not_finite(result):
            result |= finite(result)
            result["error"] = f"{', '.join(wrong)}: no finite number; in float32 the model may not overflow (--dtype)"
    return found


def _not_finite(result: Mapping[str, Any]) -> list[str]:
    """Return the names of scores that JSON cannot hold, those on full attention's own answer included."""
    every = {**result, **{f"on_full.{name}": value for name, value in result.get("on_full", {}).items()}}
    return [name for name, value in every.items() if isinstance(value, float) and not math.isfinite(value)]


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Logits of a continuation, and what they cost."""

    logits: torch.Tensor
    seconds: float
    tokens_computed: int
    bytes_loaded: int


def _timed(case: Case, method: Method, continuation: Ids) -> Scored:
    """Score a continuation with everything at hand that a warm cache would hold."""
    method.prepare(case)
    start = time.perf_counter()
    prefilled = method.score(case, continuation)
    case.bench.runner.synchronize()
    seconds = time.perf_counter() - start + case.tokenise_s
    case.bench.release(prefilled.cache)
    return Scored(prefilled.logits, seconds, prefilled.tokens_computed, prefilled.bytes_loaded)


def _teacher_forced(case: Case, reference: torch.Tensor, here: Scored) -> dict[str, Any]:
    return {
        **_distances(reference, here.logits, case.scored),
        "ttft_s": here.seconds,
        "tokens_computed": here.tokens_computed,
        "bytes_loaded": here.bytes_loaded,
    }


def _distances(reference: torch.Tensor, logits: torch.Tensor, ids: Ids) -> dict[str, float]:
    return {
        "nll": scores.nll(logits, torch.tensor(ids, device=logits.device)),
        "kl": scores.kl(reference, logits),
        "agreement": scores.agreement(reference, logits),
    }


def _answered(case: Case, ids: Ids) -> dict[str, Any]:
    """Score a generated answer against the right ones."""
    row, text = case.row, case.bench.prompter.decode(ids).strip()
    result: dict[str, Any] = {"answer": text}
    if row.answers:
        result |= {
            "em": scores.exact_match(text, row.answers),
            "f1": scores.f1(text, row.answers),
            "substring": scores.substring(text, row.answers),
        }
        if row.task == "summarization":
            result["rouge_l"] = rouge_l(text, row.answers)
    return result


def rouge_l(found: str, answers: Sequence[str]) -> float:
    """Return the best ROUGE-L F-measure over the answers (rouge-score, with stemming).

    Raises:
        InputError: rouge-score is not installed.
    """
    scorer = rouge_scorer()
    return max(float(scorer.score(answer, found)["rougeL"].fmeasure) for answer in answers)


def rouge_scorer() -> Any:
    """Return what scores summaries.

    Raises:
        InputError: rouge-score is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise InputError("summaries are scored with rouge-score: pip install 'kvlink[evaluate]'") from error
    return RougeScorer(["rougeL"], use_stemmer=True)


METRICS = ("em", "f1", "substring", "rouge_l", "nll", "kl", "agreement")
"""Scores of a result row; each is a mean over rows, or None where it was not taken."""

COSTS = ("ttft_s", "tokens_computed", "bytes_loaded")
"""What a method costs; a mean over rows."""


FACTS = ("links", "lora_rank", "header", "trailer")
"""What methods say of themselves besides their names."""


def asked_for(results: Sequence[dict[str, Any]], tasks: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """Return the results of these rows, task by task: a file may hold those of an earlier, larger run, too."""
    ids = {task: {row.id for row in rows} for task, rows in tasks.items()}
    return [result for task in tasks for result in results if result["task"] == task and result["id"] in ids[task]]


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per task and method: means over rows, and paired intervals against `full` where it ran.

    `rows` counts all, `n` those that were scored, `over_limit` those that exceed what was asked for.
    """
    table: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        table.setdefault((row["task"], row["method"]), {})[row["id"]] = row
    return [_summary(task, method, by_id, table.get((task, "full"), {})) for (task, method), by_id in table.items()]


def _summary(
    task: str, method: str, by_id: Mapping[str, dict[str, Any]], full: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    fair = {name: row for name, row in by_id.items() if "error" not in row}
    result: dict[str, Any] = {"task": task, "method": method, "n": sum("nll" in row for row in fair.values())}
    result["rows"] = len(by_id)
    if errors := sorted({row["error"] for row in by_id.values() if "error" in row}):
        result["errors"] = errors
    if over := sum("over_limit" in row for row in by_id.values()):
        result["over_limit"] = over
    result |= _facts(list(by_id.values()))
    against: dict[str, dict[str, float]] = {}
    for metric in (*METRICS, *COSTS):
        values = {name: row[metric] for name, row in fair.items() if metric in row}
        result[metric] = sum(values.values()) / len(values) if values else None
        baseline = {name: row[metric] for name, row in full.items() if "error" not in row and metric in row}
        both = [name for name in values if name in baseline]
        if metric in METRICS and method != "full" and both:
            interval = scores.paired_interval([values[name] for name in both], [baseline[name] for name in both])
            against[metric] = asdict(interval)
    on_full = [row["on_full"] for row in fair.values() if "on_full" in row]
    if on_full:
        result["on_full"] = {key: sum(one[key] for one in on_full) / len(on_full) for key in on_full[0]}
    result["against_full"] = against
    return result


def _facts(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a method said of itself, the same in all rows."""
    found = {name: [row[name] for row in rows if name in row] for name in FACTS}
    return {name: values[0] for name, values in found.items() if values and len(set(values)) == 1}


def require_scored(summary: Sequence[dict[str, Any]]) -> None:
    """Make sure that each task has at least one row that some method could be scored on.

    Raises:
        InputError: A task has none; the message says why.
    """
    reasons: list[str] = []
    for task in dict.fromkeys(row["task"] for row in summary):
        own = [row for row in summary if row["task"] == task]
        if not any(row["n"] or "on_full" in row for row in own):
            errors = dict.fromkeys(error for row in own for error in row.get("errors", []))
            reasons.append(f"{task}: {'; '.join(errors) or 'no row has an answer, see --generate'}")
    if reasons:
        raise InputError(f"nothing could be scored on {' | '.join(reasons)}")


def evaluate(
    bench: Bench,
    tasks: dict[str, list[Row]],
    methods: Sequence[str],
    *,
    limits: Limits,
    generate: bool = False,
    done: Callable[[str, str], bool] = lambda task, row: False,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the results of one row after another.

    Args:
        tasks: Rows by task.
        methods: As they were asked for; each is built once.
        done: Whether a row (task, id) needs no computing any more.
    """
    built = {name: method_named(name) for name in methods}
    for task, rows in tasks.items():
        for row in rows:
            if not done(task, row.id):
                yield evaluate_row(bench, task, row, built, limits=limits, generate=generate)


def settings_of(
    *, model: dict[str, str], methods: Sequence[str], limits: Limits, generate: bool, seed: int
) -> dict[str, Any]:
    """Return what must be the same for results to stand in one file; which rows they are of may differ."""
    return {
        "model": model,
        "methods": list(methods),
        "max_documents": limits.max_documents,
        "max_tokens_context": limits.max_tokens,
        "generate": generate,
        "prompt_version": PROMPT_VERSION,
        "seed": seed,
    }
