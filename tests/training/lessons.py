"""What tests of training share: a tiny model and its tokenizer of bytes, lessons of random ids and of texts."""

import functools
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlink import Document
from kvlink.core.entry import CacheEntry
from kvlink.core.layout import Prompt
from kvlink.models.prompt import Prompter
from kvlink.models.runner import Runner
from kvlink.training.example import Example, Question
from kvlink.training.lesson import Branch, Ids, Lesson
from kvlink.training.student import Load
from kvlink.training.train import Base
from tiny import byte_tokenizer
from tiny_models import random_ids, tiny_model

TOKENIZER = byte_tokenizer()
PROMPTER = Prompter(tokenizer=TOKENIZER)
SINK = random_ids(4, seed=77)


@dataclass(frozen=True)
class Held:
    entry: CacheEntry


@functools.cache
def shared_runner(family: str = "llama", dtype: torch.dtype = torch.float64, spread: float = 0.3) -> Runner:
    """Return a frozen model that all tests share; none may change its weights."""
    model = tiny_model(family, dtype=dtype, vocab_size=320, initializer_range=spread)
    return Runner(model.requires_grad_(False))


def loading(runner: Runner, sink_ids: Ids = (), seen: list[Ids] | None = None) -> Load:
    """Return what loads entries: each is encoded once and kept; those that are asked for are noted in `seen`."""
    kept: dict[Ids, Held] = {}

    @contextmanager
    def load(segments: Sequence[Ids]) -> Generator[list[Held]]:
        for ids in segments:
            if ids not in kept:
                kept[ids] = Held(runner.encode([ids], prefix=runner.prefix(sink_ids))[0])
            if seen is not None:
                seen.append(ids)
        yield [kept[ids] for ids in segments]

    return load


def lesson_of(
    *,
    branches: Sequence[tuple[int, int]] = ((8, 3), (5, 1), (1, 6)),
    documents: Sequence[Sequence[int]] = ((20, 7), (11,), (1,), (17,)),
    seed: int = 0,
    name: str = "",
) -> Lesson:
    """Return random ids; by default a document of two segments, lengths around a window of 16, three questions."""
    seeds = iter(range(1000 * seed, 1000 * seed + 1000))

    def ids(count: int) -> Ids:
        return random_ids(count, seed=next(seeds))

    asked = tuple(Branch(ids(tail), ids(answer)) for tail, answer in branches)
    cut = tuple(tuple(ids(length) for length in document) for document in documents)
    return Lesson(name or f"random:{seed}", "random", Prompt(ids(6), cut, asked[0].tail), asked)


def short_lesson(seed: int, *, answer: int = 3) -> Lesson:
    """Return a lesson that costs little: two documents, one question."""
    return lesson_of(branches=[(4, answer)], documents=[(9,), (7,)], seed=seed)


def links_of(runner: Runner, num_links: int = 3, *, seed: int = 9) -> Tensor:
    """Return embeddings of two levels at the RMS of the embedding table, in the model's dtype."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, num_links, runner.embedding.embedding_dim, generator=generator, dtype=runner.dtype)
    return drawn * runner.embedding.weight.detach().square().mean().sqrt()


def example_of(number: int, *, questions: int = 1, documents: int = 2, **fields: Any) -> Example:
    """Return an example in texts."""
    texts = tuple(Document(f"Hut {number}.{at} lies at {100 * number + at} m.", f"Hut {at}") for at in range(documents))
    asked = tuple(Question(f"How high is {number}.{at}?", f"{100 * number + at} m") for at in range(questions))
    return Example(**{"id": f"e{number}", "documents": texts, "questions": asked, "source": "huts", **fields})


def base_of(runner: Runner, *, seen: list[Ids] | None = None) -> Base:
    """Return a model that links are trained for."""
    return Base(runner, PROMPTER, loading(runner, SINK, seen), "tiny", "ab" * 32, SINK)
