"""Benches that score in milliseconds: a tiny random model, a tokenizer of bytes, rows that a test writes itself."""

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvlink import Document
from kvlink.evaluation.case import Bench
from kvlink.evaluation.evaluate import Limits, evaluate
from kvlink.models.prompt import Prompter
from kvlink.models.runner import Runner
from kvlink.training.data import SYSTEM, Row
from tiny import CHATML, byte_tokenizer
from tiny_models import tiny_model

METHODS = ("full", "block_mask", "concat_local", "concat_reencoded")
CONTEXT = 2048
TEXTS = (
    "The office opens at seven. Anna has the key.",
    "The hut lies at 2,100 m.",
    "Bread is baked on Tuesdays.\nSalt is sold there, too.",
)
TIMES = {"ttft_s"}

WINDOW = 150
"""Positions that `qwen2` sees in one of its layers: T and a part of the documents."""

SAME_HEADER = CHATML.replace("You are a helpful AI assistant named SmolLM, trained by Hugging Face", SYSTEM)
"""A template whose own system prompt is that of question answering: S is then the sink prefix `header`."""


@functools.cache
def _runner(name: str, dtype: torch.dtype, layers: int) -> Runner:
    options = {"sliding_window": WINDOW} if name == "qwen2" else {}
    size = len(byte_tokenizer())
    return Runner(tiny_model(name, dtype=dtype, vocab_size=size, num_hidden_layers=layers, **options))


def bench_of(
    name: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    template: str = CHATML,
    context: int = CONTEXT,
    layers: int = 2,
) -> Bench:
    """Return a new bench around a model that all tests share."""
    return Bench(_runner(name, dtype, layers), Prompter(tokenizer=byte_tokenizer(template)), context)


def row_of(
    texts: Sequence[str] = TEXTS,
    *,
    answers: Sequence[str] = ("at seven", "seven"),
    gold: Sequence[int] | None = (0,),
    task: str = "qa",
    name: str = "r0",
    question: str = "When does the office open?",
) -> Row:
    """Return a row; by default with three documents of different lengths."""
    documents = tuple(Document(text, f"Paper {at}", f"document {at}") for at, text in enumerate(texts))
    return Row(name, question, documents, tuple(answers), task, None if gold is None else tuple(gold))


def rows_of(count: int) -> list[Row]:
    """Return rows that differ."""
    return [row_of([f"Number {n}. {text}" for text in TEXTS], name=f"r{n}") for n in range(count)]


def results_of(
    rows: Sequence[Row],
    methods: Sequence[str] = METHODS,
    *,
    bench: Bench | None = None,
    limits: Limits | None = None,
    generate: bool = False,
) -> list[dict[str, Any]]:
    """Return one result per row and method, of a task named `t`."""
    found = evaluate(bench or bench_of(), {"t": list(rows)}, methods, limits=limits or Limits(), generate=generate)
    return [result for results in found for result in results]


def without_times(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return results without what no two runs share."""
    return [{key: value for key, value in result.items() if key not in TIMES} for result in results]


def given_row(number: int = 0, documents: int = 3, **fields: Any) -> dict[str, Any]:
    """Return a row in its JSON form."""
    return {
        "id": f"r{number}",
        "question": f"Which is number {number}?",
        "documents": [{"title": f"T{at}", "text": f"Text {at} of {number}."} for at in range(documents)],
        "answers": [f"answer {number}"],
        "task": "qa",
        **fields,
    }


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write rows as JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


SUMMARY = row_of(
    answers=["The office opens at seven.", "Seven."], task="summarization", question="Sum it up.", gold=None
)
BLANK = row_of(task="summarization", question=" ", name="blank", gold=None)
"""A row that gives no prompt."""

DISTANCES = {"nll", "kl", "agreement"}
COSTS = {"ttft_s", "tokens_computed", "bytes_loaded"}


def by_method(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return results, or rows of a summary, by their method."""
    return {result["method"]: result for result in results}
