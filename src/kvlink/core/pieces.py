"""A long text cut into pieces that a retriever can return, at borders that stay where an edit is not.

Knows words and paragraphs; knows no tokens.
"""

import re

from blake3 import blake3

from kvlink.core.segments import cut_ids

SMALLEST, LARGEST = 100, 300
"""Words of a piece."""

_WORD = re.compile(r"[^\s。！？]{1,24}[。！？]?\s*|\S\s*|\s+")  # noqa: RUF001 (as they are written)
_ENDS = re.compile(r"[.!?:…。！？][\"'”’»)\]]{0,3}\s*$|\n\s*$")  # noqa: RUF001 (as they are written)


def split_text(text: str) -> list[str]:
    """Cut a text, best between paragraphs, else between sentences, else between words; joined it is the text again.

    A word of more than 24 characters counts as several. A text of at most `LARGEST` words is one piece.
    """
    words = _WORD.findall(text)
    ranks = [0, *(0 if "\n\n" in word else 1 if _ENDS.search(word) else 2 for word in words[:-1])][: len(words)]
    numbers = [_number(word.strip()) for word in words]
    pieces: list[str] = []
    start = 0
    for piece in cut_ids(numbers, ranks, smallest=SMALLEST, largest=LARGEST):
        pieces.append("".join(words[start : start + len(piece)]))
        start += len(piece)
    return pieces


def name_of_piece(parent: str, piece: str) -> str:
    """Return `parent#hash`, with the first 12 digits of the piece's BLAKE3: it stays as long as the piece does."""
    return f"{parent}#{blake3(piece.encode('utf-8', 'replace')).hexdigest()[:12]}"


def _number(word: str) -> int:
    return int.from_bytes(blake3(word.encode("utf-8", "replace")).digest(length=7), "little")
