"""Where a document may be cut, read from the text of its ids: at the end of a paragraph, a sentence, a token.

Knows how ids read; knows nothing of how long a segment may be.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import accumulate

_END = re.compile(
    r"(?P<mark>[.!?…。！？]?)[\"'”’»)\]」』）]{0,3}(?P<space>\s+)|[。！？][”’」』）]{0,3}"  # noqa: RUF001 (as they are written)
)
_UNFINISHED = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, so ids that it takes at most."""


class Rank(IntEnum):
    """How good a place is to cut at: lower is better."""

    PARAGRAPH = 0
    SENTENCE = 1
    TOKEN = 2
    CHARACTER = 3


class Borders:
    """Ranks the places between ids. Remembers how each id reads.

    Args:
        decode: Returns the text of ids.
        anchor: Ids of some text; an id is read behind it, since tokenizers drop a space at the beginning.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, anchor: tuple[int, ...]) -> None:
        self._decode = decode
        self._anchor = anchor
        self._known: dict[tuple[int, ...], str] = {}

    def ranks(self, ids: Sequence[int]) -> list[Rank]:
        """Return for each id the rank of the place before it.

        A paragraph ends with a blank line, or with a line that ends a sentence. A sentence ends behind its mark, if
        white space follows, or with any other line. `CHARACTER` is a place within one that takes several ids.
        """
        ranks, texts, unread = [Rank.TOKEN] * len(ids), list[str](), tuple[int, ...]()
        for place, token in enumerate(ids):
            if unread:
                ranks[place] = Rank.CHARACTER
            unread = (*unread, token)
            text = self._text(unread)
            if text.endswith(_UNFINISHED) and len(unread) < _LONGEST_CHARACTER:
                text = ""
            else:
                unread = ()
            texts.append(text)
        starts = list(accumulate(map(len, texts), initial=0))
        for end in _END.finditer("".join(texts)):
            space = end["space"] or ""
            lines = space.count("\n")
            if space and not lines and not end["mark"]:
                continue
            place = bisect_left(starts, end.end() - len(space) + space.rfind("\n") + 1)
            if place < len(ids) and starts[place] <= end.end():
                ranks[place] = Rank.PARAGRAPH if lines > 1 or (lines and end["mark"]) else Rank.SENTENCE
        return ranks

    def _text(self, ids: tuple[int, ...]) -> str:
        if ids not in self._known:
            before = len(self._decode(self._anchor))
            self._known[ids] = self._decode((*self._anchor, *ids))[before:]
        return self._known[ids]
