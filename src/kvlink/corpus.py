"""A folder of texts as documents, and the best of them for a question. Knows files; knows no models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlink.core.document import Document
from kvlink.core.errors import InputError

SUFFIXES = frozenset({".md", ".txt", ".rst", ".html", ".json", ".jsonl", ".csv", ".tex", ".org", ".adoc", ".markdown"})
"""Files that are read as text."""


def read_corpus(path: str | Path) -> list[Document]:
    """Read all text files below a folder (or one file) as documents, in path order; hidden ones are left out.

    A file has no title: its text stands as it is. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        InputError: There is nothing there to read.
    """
    root = Path(path)
    if root.is_file():
        return [_read(root, root.name)]
    if not root.is_dir():
        raise InputError(f"{root} is neither a folder nor a file")
    files = sorted(
        file
        for file in root.rglob("*")
        if file.is_file()
        and file.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(root).parts)
    )
    if not files:
        raise InputError(f"{root} holds no text files ({', '.join(sorted(SUFFIXES))})")
    return [_read(file, file.relative_to(root).as_posix()) for file in files]


def _read(file: Path, name: str) -> Document:
    try:
        return Document(file.read_text("utf-8", errors="replace"), name=name)
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); take it out, or make it readable") from error


def best_documents(documents: Sequence[Document], question: str, *, top: int) -> list[Document]:
    """Return the `top` documents that fit a question best by BM25, best first; equal ones in their order.

    Source: Robertson and Zaragoza 2009, in the implementation of bm25s (Lu 2024).
    """
    import bm25s

    if top >= len(documents) or top < 1:
        if top < 1:
            raise InputError(f"--top is {top}; ask for at least one document")
        return list(documents)
    texts = [f"{document.name}\n{document.text}" for document in documents]
    words, asked = (bm25s.tokenize(text, return_ids=False, show_progress=False) for text in (texts, [question]))
    if not any(words) or not asked[0]:
        return list(documents[:top])
    index: Any = bm25s.BM25()
    index.index(words, show_progress=False)
    scores: Any = index.get_scores(asked[0])
    return [documents[rank] for rank in sorted(range(len(documents)), key=lambda rank: -scores[rank])[:top]]
