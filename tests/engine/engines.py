"""Engines that answer in milliseconds: a tiny random model, a tokenizer of bytes, a store that a test names."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlink import Document, Engine
from kvlink.core.layout import Prompt
from kvlink.engine.build import open_store
from kvlink.engine.loader import Loader
from kvlink.engine.request import DocumentLike, as_documents
from kvlink.engine.stream import Stream
from kvlink.models.links import LinkTokens
from kvlink.store import Store
from tiny import byte_tokenizer
from tiny_models import tiny_model

TOKENIZER = byte_tokenizer()
VOCAB = len(TOKENIZER)  # so that every id that a model can answer with is some text
TEXTS = (
    "The office opens at seven.",
    "The hut lies at 2,100 m, below the pass.",
    "Bread is baked on Tuesdays.\nSalt is sold there, too.",
)
QUESTION = "When does the office open?"
NEW = 12
"""Tokens of an answer."""


@functools.cache
def shared_model(name: str = "llama", *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """Return a model that all tests share and none changes; in float64, so that equal answers are no luck."""
    return tiny_model(name, dtype=dtype, seed=seed, vocab_size=VOCAB)


def loaded(name: str = "llama", *, store: str | Path | Store | None = None, **options: Any) -> Engine:
    """Load an engine around a shared model as a user does; options are those of `Engine.from_pretrained`."""
    return Engine.from_pretrained(shared_model(name), tokenizer=TOKENIZER, store=store, **options)


@functools.cache
def _once(name: str, sink: str, context: int | None) -> Engine:
    return loaded(name, sink=sink, context=context)


def engine_of(
    name: str = "llama",
    *,
    store: str | Path | Store | None = None,
    sink: str = "header",
    context: int | None = None,
    num_links: int = 0,
) -> Engine:
    """Return an engine with a store of its own; model, probe and sink prefix are those of one that was loaded before.

    Args:
        num_links: K, random link tokens.
    """
    base = _once(name, sink, context)
    loader = Loader(runner=base.runner, store=open_store(store), identity=base.loader.identity, sink=base.loader.sink)
    return _engine(base, loader, num_links)


def with_links(engine: Engine, num_links: int) -> Engine:
    """Return a second engine on the same store, with random link tokens."""
    return _engine(engine, engine.loader, num_links)


def _engine(base: Engine, loader: Loader, num_links: int) -> Engine:
    return Engine(
        runner=base.runner,
        prompter=base.prompter,
        loader=loader,
        report=base.report,
        end_ids=base.prompter.end_ids,
        links=LinkTokens.random(base.runner.embedding, num_links=num_links) if num_links else None,
    )


def read(stream: Stream) -> list[str]:
    """Read a stream to its end and return its pieces."""
    return list(stream)


def prompt_of(
    engine: Engine,
    docs: Sequence[DocumentLike],
    question: str = QUESTION,
    *,
    system: str | None = None,
    labels: bool = False,
) -> Prompt:
    """Put a prompt together by hand."""
    prompter = engine.prompter
    return Prompt(
        prompter.system_ids(system),
        tuple((prompter.document_ids(document),) for document in as_documents(docs)),
        prompter.tail_ids(question),
        tuple(prompter.label_ids(number) for number in range(1, len(docs) + 1)) if labels else (),
    )


def full_logits(engine: Engine, prompt: Prompt) -> Tensor:
    """Return the last row of the base model's own forward over all ids of a prompt."""
    ids = prompt.ids(prompt.layout())[None]
    with torch.inference_mode():
        return engine.runner.model(ids).logits[0, -1]


def last_logits(engine: Engine, docs: Sequence[DocumentLike], question: str, *, reuse: bool = True) -> Tensor:
    """Return the logits from which the first token of an answer is taken."""
    request = engine.job(docs, question, max_new_tokens=1, reuse=reuse).request
    if engine.sessions is None:
        with engine._assembling.prefilled(request, room=1, labels=False, reuse=reuse) as prefilled:
            return prefilled.logits[-1].clone()
    session = engine.sessions.begin(request, room=1, reuse=reuse)
    engine.sessions.advance([(session, len(session.left))])
    engine.sessions.end(session)
    assert session.logits is not None
    return session.logits


def logits_by_reuse(engine: Engine, docs: Sequence[DocumentLike], question: str = QUESTION, **options: Any) -> Tensor:
    """Return the last row that stock transformers computes from an assembled prompt."""
    with torch.inference_mode():
        return engine.runner.model(**engine.assemble(docs, question, **options).inputs).logits[0, -1]


def objects_of(engine: Engine) -> dict[str, bytes]:
    """Return the bytes of every object in a store on disk, by file name."""
    root: Path = engine.store._folder.objects  # type: ignore[attr-defined]
    return {path.name: path.read_bytes() for path in root.rglob("*.safetensors")}


def name_of(engine: Engine, text: str) -> str:
    """Return the fingerprint of a text's entry."""
    return engine.loader.name(engine.prompter.document_ids(Document(text)))


def some_ids(count: int) -> tuple[int, ...]:
    """Return ids of a segment; none is a control id, and no two counts begin alike."""
    return tuple(3 + (count + 7 * place) % (VOCAB - 3) for place in range(count))
