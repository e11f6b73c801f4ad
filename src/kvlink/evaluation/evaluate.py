"""Quality beside speed: every method on the same rows and ids, scored against full attention.

Each row is finished with all methods before the next begins, and is written at once, so that a killed run goes on
where it stopped. `full` is always computed: its logits are what `kl` and `agreement` compare with.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvlink.core import scores
from kvlink.core.errors import InputError, KVLinkError
from kvlink.evaluation.case import Bench, Case, Ids
from kvlink.evaluation.methods import Method, method_named
from kvlink.evaluation.methods.full import Full
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

    A method that cannot carry the row has `error` in place of scores; the others go on. The time to first token is
    that of the scored forward, in which the few ids of the answer stand behind the prompt.
    """
    try:
        case = Case(bench, row, max_documents=limits.max_documents, max_tokens=limits.max_tokens)
    except KVLinkError as error:  # such as a blank question, or a text that this tokenizer cannot read
        return [{"task": task, "id": row.id, "method": name, "error": str(error)} for name in methods]
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
            "task": task,
            "id": row.id,
            "method": name,
            "documents": len(case.prompt.documents),
            "dropped": case.dropped,
            "prompt_tokens": case.prompt.num_tokens,
            "gold": list(row.gold) if row.gold is not None else None,
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
    return found


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
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise InputError("summaries are scored with rouge-score: pip install 'kvlink[evaluate]'") from error
    scorer: Any = RougeScorer(["rougeL"], use_stemmer=True)
    return max(float(scorer.score(answer, found)["rougeL"].fmeasure) for answer in answers)


METRICS = ("em", "f1", "substring", "rouge_l", "nll", "kl", "agreement")
"""Scores of a result row; each is a mean over rows, or None where it was not taken."""

COSTS = ("ttft_s", "tokens_computed", "bytes_loaded")
"""What a method costs; a mean over rows."""


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per task and method: means over rows, and paired intervals against `full` where it ran."""
    table: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        table.setdefault((row["task"], row["method"]), {})[row["id"]] = row
    found: list[dict[str, Any]] = []
    for (task, method), by_id in table.items():
        baseline = table.get((task, "full"), {})
        scored = [row for row in by_id.values() if "error" not in row]
        result: dict[str, Any] = {"task": task, "method": method, "n": len(scored)}
        errors = sorted({row["error"] for row in by_id.values() if "error" in row})
        if errors:
            result["errors"] = errors
        against: dict[str, dict[str, float]] = {}
        for metric in (*METRICS, *COSTS):
            values = {row["id"]: row[metric] for row in scored if row.get(metric) is not None}
            result[metric] = sum(values.values()) / len(values) if values else None
            pairs = [(v, baseline[k][metric]) for k, v in values.items() if baseline.get(k, {}).get(metric) is not None]
            if metric in METRICS and method != "full" and pairs:
                interval = scores.paired_interval([p[0] for p in pairs], [p[1] for p in pairs])
                against[metric] = {
                    "difference": interval.difference,
                    "low": interval.low,
                    "high": interval.high,
                }
        on_full = [row["on_full"] for row in scored if "on_full" in row]
        if on_full:
            result["on_full"] = {key: sum(o[key] for o in on_full) / len(on_full) for key in on_full[0]}
        result["against_full"] = against
        found.append(result)
    return found


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
    """Return what must be the same for results to stand in one file."""
    return {
        "model": model,
        "methods": list(methods),
        "max_documents": limits.max_documents,
        "max_tokens_context": limits.max_tokens,
        "generate": generate,
        "prompt_version": PROMPT_VERSION,
        "seed": seed,
    }
