"""Seconds per token of an answer: documents read where they lie, copied into the prompt, and by stock transformers.

`stock` continues the very same prompt with the model's own forward and the cache that transformers made for it.
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvlink.core.errors import InputError
from kvlink.engine.build import sessions_of
from kvlink.engine.engine import Engine
from kvlink.engine.loader import Loader
from kvlink.engine.request import build_request
from kvlink.engine.stream import greedy
from kvlink.evaluation.bench.reuse import loader_over
from kvlink.evaluation.bench.texts import document_of, question_of
from kvlink.evaluation.timing import Arm, alternate
from kvlink.models.assembler import Assembler
from kvlink.models.links import LinkTokens
from kvlink.store.memory import MemoryStore

QUESTION_TOKENS = 30
"""Tokens of the question."""

MEMORY_BYTES = 8 << 30
"""Budget of the store that the documents lie in."""


def bench_decode(
    engine: Engine,
    *,
    documents: int,
    tokens: Sequence[int],
    links: int = 6,
    answer: int = 16,
    repeats: int = 7,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Return one row per number of tokens and arm; seconds are those of one token.

    Args:
        engine: Gives the model; its store is not used.
        links: K, random link tokens.
        answer: Tokens that each measurement decodes, always the same ones.
        progress: Called after each run.

    Raises:
        InputError: The model's documents cannot be shared.
    """
    if engine.sessions is None:
        raise InputError("the documents of this model are copied into each prompt: there is nothing to share")
    rows: list[dict[str, Any]] = []
    for length in tokens:
        with MemoryStore(budget_bytes=MEMORY_BYTES) as store:
            arms = _arms(engine, loader_over(engine, store), documents, length, links, answer, seed)
            samples = alternate(arms, repeats=repeats, progress=progress)
        stock = samples["stock"].median
        for arm, sample in samples.items():
            fields = {"documents": documents, "tokens": length, "arm": arm, "links": links, "answer_tokens": answer}
            figures = {"decode_s": sample.median, "ratio": sample.median / stock}
            rows.append({**fields, **sample.to_json(), **figures})
    return rows


def _arms(
    engine: Engine, loader: Loader, documents: int, length: int, links: int, answer: int, seed: int
) -> dict[str, Arm]:
    """Return arms that decode the same answer behind one prompt, again and again."""
    prompter, runner = engine.prompter, engine.runner
    texts = [document_of(prompter, length, seed=seed + number) for number in range(documents)]
    question = question_of(prompter, QUESTION_TOKENS)
    ids = (prompter.tail_ids(question) * answer)[:answer]
    tokens = LinkTokens.random(runner.embedding, num_links=links) if links else None
    sessions = sessions_of(loader, links=tokens, bundle="random")
    request = build_request(
        prompter,
        texts,
        question,
        system=None,
        labels=False,
        num_links=links,
        room=answer,
        context=engine.report.context,
        on_overflow="error",
    )
    session = sessions.begin(request, room=answer)
    sessions.advance([(session, len(session.left))])
    computed = session.own.length

    def shared(token: int) -> Tensor:
        session.append(token, runner)
        sessions.advance([(session, 1)])
        assert session.logits is not None, "all its rows are computed"
        return session.logits

    def rewind() -> None:
        session.own.length = computed
        session.ids.clear()

    prompt, layout = request.prompt, request.prompt.layout(num_links=links)
    prefix = runner.prefix(prompt.system)
    assert prefix is not None, "S is never empty"
    assembler = Assembler(runner, links=tokens)
    with loader.load(prompt.segments) as loaded:
        entries = [one.entry for one in loaded]
        slots = assembler.assemble(layout, prefix=prefix, entries=entries, room=answer)
    assembler.prefill(slots, prompt, layout)
    stock: dict[str, Any] = {}

    def stocked() -> None:
        slots.length = len(layout)
        stock["cache"] = assembler.hand_over(slots)

    def by_model(token: int) -> Tensor:
        with torch.inference_mode():
            place = torch.tensor([[stock["cache"].get_seq_length()]], device=runner.device)
            row = torch.tensor([[token]], device=runner.device)
            return runner.forward(cache=stock["cache"], input_ids=row, position_ids=place)[0, -1]

    def assembled(token: int) -> Tensor:
        return runner.decode(slots, token)

    def copied() -> None:
        slots.length = len(layout)

    def arm(prepare: Callable[[], None], decode: Callable[[int], Tensor]) -> Arm:
        def run() -> tuple[float, Mapping[str, float]]:
            prepare()
            start = perf_counter()
            for token in ids:
                greedy(decode(token))
            return (perf_counter() - start) / answer, {}

        return run

    return {"stock": arm(stocked, by_model), "assembled": arm(copied, assembled), "shared": arm(rewind, shared)}
