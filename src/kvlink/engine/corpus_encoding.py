"""A corpus into the store: documents that it does not hold yet are encoded in batches, with requests in between."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from kvlink.core.document import Document
from kvlink.core.errors import InputError
from kvlink.engine.loaded import Ids, Loaded
from kvlink.engine.loader import Loader
from kvlink.engine.sources import share
from kvlink.engine.usage import DocumentUsage
from kvlink.store.codecs import CODECS


def encode_documents(
    documents: Sequence[Document],
    *,
    loader: Loader,
    segments: Callable[[Document], Sequence[Ids]],
    context: int,
    lock: AbstractContextManager[object],
    progress: Callable[[DocumentUsage], None] | None = None,
) -> list[DocumentUsage]:
    """Encode documents into the store; returns one row per document, in their order.

    Args:
        segments: Turns a document into the ids of its segments.
        context: Tokens above which a document is skipped.
        lock: Held while the model runs; let go between batches.
        progress: Called with each document as it is done.

    Raises:
        StoreFull, StoreUnusable: The store cannot take another entry; those before are kept.
    """
    rows: dict[int, DocumentUsage] = {}
    waiting: dict[Ids, list[int]] = {}
    partial: dict[int, tuple[DocumentUsage, set[Ids]]] = {}

    def done(index: int, row: DocumentUsage) -> None:
        rows[index] = row
        if progress:
            progress(row)

    for index, document in enumerate(documents):
        if document.is_blank:
            done(index, DocumentUsage(document.name, 0, "skipped", reason="blank"))
            continue
        try:
            parts = segments(document)
        except InputError as error:
            done(index, DocumentUsage(document.name, 0, "skipped", reason=str(error)))
            continue
        tokens = sum(map(len, parts))
        if tokens > context:
            reason = f"{tokens - context} tokens longer than the context"
            done(index, DocumentUsage(document.name, tokens, "skipped", reason=reason))
            continue
        codecs = {ids: loader.codec_of(ids) for ids in parts}
        if absent := [ids for ids in parts if codecs[ids] is None]:
            part = share(len(absent), len(parts))
            partial[index] = DocumentUsage(document.name, tokens, "encoded", reason=part), set(absent)
            for ids in dict.fromkeys(absent):
                waiting.setdefault(ids, []).append(index)
        else:
            worst = max(filter(None, codecs.values()), key=list(CODECS).index)
            done(index, DocumentUsage(document.name, tokens, loader.store.source, worst, "already in the store"))
    for loaded in _one_by_one(loader.encode(waiting, must_keep=True), lock):
        for index in waiting[loaded.entry.token_ids]:
            row, left = partial[index]
            left.remove(loaded.entry.token_ids)
            if not left:
                done(index, replace(row, reason=row.reason + loaded.reason))
    return [rows[index] for index in sorted(rows)]


def _one_by_one(made: Iterable[Loaded], lock: AbstractContextManager[object]) -> Generator[Loaded]:
    """Yield what is made, holding the lock only while it is being made."""
    left = iter(made)
    while True:
        with lock:
            found = next(left, None)
        if found is None:
            return
        yield found
