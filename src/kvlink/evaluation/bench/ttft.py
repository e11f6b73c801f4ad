"""Time to first token by reuse against full prefill: from the request's text to the first token on the host.

The states of reuse are those of `evaluation.bench.reuse`. Rivals are given their ids ready-made, and so timed at their
best: `full` computes all of them and keeps no cache; `full+prefix_cache` computes what is behind the longest common
beginning with the prompt before. `llama.cpp` and `llama.cpp+prompt_cache` are the same two in another engine.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from kvlink.core.document import Document
from kvlink.core.layout import Prompt
from kvlink.engine.engine import Engine
from kvlink.engine.stream import greedy
from kvlink.evaluation.bench.limit import limit_arm
from kvlink.evaluation.bench.llama_cpp import LlamaCpp
from kvlink.evaluation.bench.prefix_cache import PrefixCache, Snapshot
from kvlink.evaluation.bench.reuse import Case, Reuse, Work, read_case
from kvlink.evaluation.bench.texts import document_of, other_question, question_of
from kvlink.evaluation.bench.watched import Watch, WatchedLoader
from kvlink.evaluation.timing import alternate
from kvlink.store.disk import DiskStore
from kvlink.store.memory import MemoryStore

QUESTION_TOKENS = 30
"""Tokens of the question."""

MEMORY_BYTES = 8 << 30
"""Budget of the store behind the state `host`."""

SCENARIOS = ("repeat", "first_dropped", "first_exchanged", "one_before")
"""What became of the documents since the prompt before: nothing; the first is gone; another stands in its place, or
before them all."""

Progress = Callable[[], None]


def bench_ttft(
    engine: Engine,
    *,
    documents: int,
    tokens: Sequence[int],
    links: Sequence[int] = (0, 6),
    scenario_tokens: int | None = None,
    repeats: int = 7,
    seed: int = 0,
    gguf: Path | None = None,
    progress: Progress = lambda: None,
) -> list[dict[str, Any]]:
    """Return one row per number of tokens, arm, state and K, and one per scenario, arm and K.

    Args:
        engine: Gives the model; its store is not used. What it cannot share has rows of the other arms alone.
        documents: Documents in each prompt.
        tokens: Tokens of each document; one comparison for each number.
        links: Numbers of link tokens; random embeddings, since only their cost is measured.
        scenario_tokens: Tokens of each document in the scenarios; None leaves them out.
        repeats: Counted rounds.
        gguf: A file with the same vocabulary for the arms of llama.cpp; None leaves them out.
        progress: Called after each run.

    Raises:
        InputError: llama.cpp is not installed, or cannot read the file.
    """
    rows: list[dict[str, Any]] = []
    for length in tokens:
        with _work(engine, documents, length, seed) as work:
            cases = _states(work, links) + _llama_cases(work, gguf)
            rows += _measured(cases, {"documents": documents, "tokens": length}, repeats, progress)
    if scenario_tokens is not None and engine.sessions is not None:
        with _work(engine, documents + 1, scenario_tokens, seed) as work:
            cases = _scenarios(work, links)
            rows += _measured(cases, {"tokens": scenario_tokens}, repeats, progress)
    return rows


def runs_of(
    engine: Engine,
    tokens: Sequence[int],
    links: Sequence[int],
    repeats: int,
    *,
    scenarios: bool = True,
    llama: bool = False,
) -> int:
    """Return how often `progress` is called."""
    shares = engine.sessions is not None
    states = len(tokens) * (2 + 3 * len(links) + shares * (1 + 6 * len(links)) + 2 * llama)
    changed = 3 + len(SCENARIOS) * (1 + 2 * len(links)) if shares and scenarios else 0
    return (states + changed) * (1 + repeats)


@contextmanager
def _work(engine: Engine, documents: int, length: int, seed: int) -> Generator[Work]:
    """Make documents of one length and encode them into a store on the disk and one in memory."""
    prompter = engine.prompter
    question = question_of(prompter, QUESTION_TOKENS)
    with (
        TemporaryDirectory(prefix="kvlink-bench-") as folder,
        DiskStore(folder) as disk,
        MemoryStore(budget_bytes=MEMORY_BYTES) as host,
    ):
        work = Work(
            base=engine,
            texts=[document_of(prompter, length, seed=seed + number) for number in range(documents)],
            question=question,
            other=other_question(prompter, question, QUESTION_TOKENS),
            disk=disk,
            host=host,
            folder=Path(folder),
        )
        work.fill()
        yield work


def _states(work: Work, links: Sequence[int]) -> list[Case]:
    """Return the rows to be of one length: all on one model, one set of documents, one question."""
    prompt = work.prompt()
    cases = [full_case(work, prompt), read_case(work)]
    with work.loader(WatchedLoader, work.host, Watch()).load(work.ids) as held:
        entries = list(held)
    for count in links:
        cases.append(Reuse(work, "assembled", store=work.disk, links=count).case("cold"))
        cases.append(Reuse(work, "assembled", store=work.host, links=count).case("host"))
        cases.append(Reuse(work, "assembled", store=work.host, links=count, held=entries).case("warm"))
    if work.base.sessions is None:
        return cases
    cases.append(_prefix_case(work, prompt, _known(work, prompt, rows=len(prompt.ids(prompt.layout())))))
    for count in links:
        cases.append(Reuse(work, "shared", store=work.disk, links=count).case("cold"))
        cases.append(Reuse(work, "shared", store=work.host, links=count).case("host"))
        warm = Reuse(work, "shared", store=work.host, links=count)
        cases += [warm.case("warm"), warm.case("known_beginning")]
        cases += [limit_case(work, prompt, count, state=state) for state in ("warm", "known_beginning")]
    return cases


def _scenarios(work: Work, links: Sequence[int]) -> list[Case]:
    """Return the rows to be of documents that changed since the prompt before; the last one was not in it."""
    *before, other = work.texts
    after: dict[str, list[Document]] = {
        "repeat": before,
        "first_dropped": before[1:],
        "first_exchanged": [other, *before[1:]],
        "one_before": [other, *before],
    }
    prompts = {name: work.prompt(texts) for name, texts in after.items()}
    longest = max(prompt.num_tokens for prompt in prompts.values())
    cache = _known(work, prompts["repeat"], rows=longest)
    cases = [  # the exchanged prompt is as long as the repeated one
        full_case(work, prompts[name], scenario=name, documents=len(after[name]))
        for name in ("repeat", "first_dropped", "one_before")
    ]
    for name, prompt in prompts.items():
        cases.append(_prefix_case(work, prompt, cache, scenario=name, documents=len(after[name])))
    for count in links:
        reuse = Reuse(work, "shared", store=work.host, links=count)
        for name, texts in after.items():
            fields = {"scenario": name, "documents": len(texts)}
            cases.append(_changed_case(reuse, before, texts, fields))
            state = "known_beginning" if name == "repeat" else "warm"
            cases.append(limit_case(work, prompts[name], count, state=state, **fields))
    return cases


def full_case(work: Work, prompt: Prompt, **fields: Any) -> Case:
    """Return the row to be of one causal forward over all ids, input tensor ready, no cache kept."""
    runner = work.base.runner
    tensor = prompt.ids(prompt.layout())[None].to(runner.device)

    def run() -> None:
        with torch.inference_mode():
            greedy(runner.forward(cache=None, input_ids=tensor)[0, -1])

    return Case({"arm": "full", "state": "-", "links": 0, **fields}, run, {"computed_tokens": tensor.shape[1]})


def limit_case(work: Work, prompt: Prompt, count: int, *, state: str, **fields: Any) -> Case:
    """Return the row to be of the arithmetic limit of a request; in both states S is known."""
    known = len(prompt.system) + (count * len(prompt.documents) if state == "known_beginning" else 0)
    arm = limit_arm(work.base.runner, prompt, links=work.links(count), known=known)
    return Case({"arm": "limit", "state": state, "links": count, **fields}, arm)


def _known(work: Work, prompt: Prompt, *, rows: int) -> tuple[PrefixCache, Snapshot]:
    """Return a prefix cache that has just seen the same documents with another question."""
    before = Prompt(prompt.system, prompt.documents, work.base.prompter.tail_ids(work.other))
    cache = PrefixCache(work.base.runner, capacity=max(rows, before.num_tokens))
    cache.prefill(before.ids(before.layout()).tolist())
    return cache, cache.snapshot()


def _prefix_case(work: Work, prompt: Prompt, known: tuple[PrefixCache, Snapshot], **fields: Any) -> Case:
    """Return the row to be of full attention behind the longest common beginning."""
    cache, before = known
    ids = prompt.ids(prompt.layout()).tolist()
    case = Case({"arm": "full+prefix_cache", "state": "known_beginning", "links": 0, **fields}, run=lambda: None)

    def run() -> tuple[float, Mapping[str, float]]:
        cache.restore(before)
        start = perf_counter()
        greedy(cache.prefill(ids))
        seconds = perf_counter() - start
        case.facts["computed_tokens"] = cache.computed
        return seconds, {}

    case.run = run
    return case


def _llama_cases(work: Work, gguf: Path | None) -> list[Case]:
    """Return the rows to be of llama.cpp that knows nothing, and that has just been asked another question."""
    if gguf is None:
        return []
    prompt = work.prompt()
    ids = prompt.ids(prompt.layout()).tolist()
    before = [*ids[: -len(prompt.tail)], *work.base.prompter.tail_ids(work.other)]
    llama = LlamaCpp(gguf, capacity=max(len(ids), len(before)))

    def case(arm: str, state: str, prepare: Callable[[], object]) -> Case:
        case = Case({"arm": arm, "state": state, "links": 0}, run=lambda: None)

        def run() -> tuple[float, Mapping[str, float]]:
            prepare()
            start = perf_counter()
            llama.first_token(ids)
            seconds = perf_counter() - start
            case.facts["computed_tokens"] = llama.computed
            return seconds, {}

        case.run = run
        return case

    return [
        case("llama.cpp", "-", llama.forget),
        case("llama.cpp+prompt_cache", "known_beginning", lambda: llama.first_token(before)),
    ]


def _changed_case(reuse: Reuse, before: list[Document], texts: list[Document], fields: Mapping[str, Any]) -> Case:
    """Return the row to be of documents behind those of another prompt; all of them are resident."""
    state, links = "known_beginning", reuse.engine.num_links
    case = Case({"arm": "shared", "state": state, "links": links, **fields}, run=lambda: None)

    def run() -> tuple[float, Mapping[str, float]]:
        reuse.ask_before(before)
        return reuse.timed(case, texts)

    case.run = run
    return case


def _measured(
    cases: Sequence[Case], fields: Mapping[str, Any], repeats: int, progress: Progress
) -> list[dict[str, Any]]:
    """Run the cases in turn and return their rows, each held to the full prefill and to the limit of its kind."""
    arms = {str(number): case.run for number, case in enumerate(cases)}
    samples = list(alternate(arms, repeats=repeats, progress=progress).values())
    rows: list[dict[str, Any]] = [
        {"scenario": None, **fields, **case.fields, **one.to_json()} for case, one in zip(cases, samples, strict=True)
    ]
    full = {row["documents"]: row["median_s"] for row in rows if row["arm"] == "full"}
    limits = {_kind(row): row["median_s"] for row in rows if row["arm"] == "limit"}
    for row, case in zip(rows, cases, strict=True):
        row.update(case.facts)
        row["reduction"] = 1 - row["median_s"] / full[row["documents"]] if row["arm"] not in ("read", "limit") else None
        limit = limits[_kind(row)] if row["arm"] == "shared" else None
        row["limit_s"], row["over_limit"] = limit, limit and row["median_s"] / limit
    _hold_to_reading(rows)
    return rows


def _hold_to_reading(rows: Sequence[dict[str, Any]]) -> None:
    """Tell cold rows what was read, how fast that is at best, and how often that time they take beyond warm ones."""
    warm = {(row["arm"], row["links"]): row["median_s"] for row in rows if row["state"] == "warm"}
    for read in (row for row in rows if row["arm"] == "read"):
        for row in (row for row in rows if row["state"] == "cold"):
            row.update(bytes=read["bytes"], read_digest_rate=read["bytes"] / read["median_s"])
            if row["arm"] != "read":
                row["over_read"] = (row["median_s"] - warm[row["arm"], row["links"]]) / read["median_s"]


def _kind(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return which limit a row is held to: S alone is known, or the links, too."""
    known = row["scenario"] == "repeat" if row["scenario"] else row["state"] == "known_beginning"
    return row["scenario"], known, row["links"]
