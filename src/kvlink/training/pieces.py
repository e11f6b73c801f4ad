"""Texts in pieces: chunks of a long one, turns of a dialogue, passages joined; and how long a text is, by estimate."""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from kvlink.core.document import Document

Count = Callable[[str], int]
"""Tokens of a text."""

CHARACTERS = 4
"""Characters of a token of English, for estimates."""

_BORDERS = (re.compile(r"\n\s*\n"), re.compile(r"\n|(?<=[.!?])\s"), re.compile(r"\s"))
"""Where a text may be cut, best first: paragraphs, sentences, words."""

_TURN = re.compile(r"[^\s:][^:\n]{0,39}:\s")


def approximate_tokens(text: str) -> int:
    """Return about how many tokens a text has."""
    return -(-len(text) // CHARACTERS)


def chunked(document: Document, max_tokens: int, *, count: Count = approximate_tokens) -> tuple[Document, ...]:
    """Return a document in consecutive chunks, cut between paragraphs, else sentences, else words, else anywhere.

    Each has the document's title; white space at the cuts is lost, and nothing else.

    Args:
        max_tokens: Of a chunk's text.
    """
    texts = _cut(document.text, max_tokens, count, 0)
    if len(texts) < 2:
        return (document,)
    return tuple(
        Document(text, document.title, f"{document.name}#{number}" if document.name else "")
        for number, text in enumerate(texts, start=1)
    )


def _cut(text: str, max_tokens: int, count: Count, level: int) -> list[str]:
    """Return a text in parts that are short enough; parts that were cut themselves share none with their neighbours."""
    if count(text) <= max_tokens or len(text) < 2:
        return [text]
    if level == len(_BORDERS):
        half = len(text) // 2
        return [part for side in (text[:half], text[half:]) for part in _cut(side, max_tokens, count, level)]
    texts: list[str] = []
    whole = False
    for gap, part in _parts(text, level):
        inner = _cut(part, max_tokens, count, level + 1)
        if whole and count(longer := f"{texts[-1]}{gap}{part}") <= max_tokens:
            texts[-1] = longer
        else:
            texts += inner
            whole = len(inner) == 1
    return texts


def _parts(text: str, level: int) -> Iterator[tuple[str, str]]:
    """Yield what stands between the borders of a level, each part with the white space before it."""
    start, gap = 0, ""
    for border in [*_BORDERS[level].finditer(text), None]:
        part = text[start : border.start() if border else len(text)]
        if part.strip():
            yield gap, part
            gap = ""
        if border:
            gap += border[0]
            start = border.end()


def turns(document: Document, *, most: int) -> tuple[Document, ...]:
    """Return a dialogue's turns (`Name: words`) as documents, neighbours together where they would be more than `most`.

    Empty where the text is no dialogue: fewer than two turns, or lines before the first one.
    """
    spoken: list[str] = []
    for line in document.text.splitlines():
        if _TURN.match(line) or (spoken and not line.strip()):
            spoken.append(line)
        elif spoken:
            spoken[-1] += f"\n{line}"
        elif line.strip():
            return ()
    spoken = [turn for turn in spoken if turn.strip()]
    if len(spoken) < 2:
        return ()
    number = min(most, len(spoken))
    borders = [len(spoken) * at // number for at in range(number + 1)]
    return tuple(Document("\n".join(spoken[a:b]), document.title) for a, b in pairwise(borders))


def joined(texts: Sequence[str], title: str) -> Document:
    """Return consecutive passages as one document, blank lines between them."""
    return Document("\n\n".join(texts), title)
