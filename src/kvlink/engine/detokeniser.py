"""Ids become text one by one: no half character and no part of a stop string is ever shown, and nothing is shown twice.

Only the last few ids are decoded with each new one, so a token costs the same wherever in an answer it stands. Knows
no tokenizer, only a function from ids to text.
"""

from collections.abc import Callable, Iterable

_HALF = "\ufffd"
"""What decoders write for bytes that are no character, or not yet."""

_PATIENCE = 8
"""Ids to wait for the rest of a character; four bytes are the longest."""


class Detokeniser:
    """Turns the ids of one answer into pieces of text that may be shown.

    All pieces and `finish()` joined are the text of all ids, cut before the first stop string.

    Args:
        to_text: Text of a run of ids. Text of earlier ids stays as it is when others follow, but for half characters;
            what only the beginning of a run loses (a space, in most tokenizers) depends on its first id alone.
        stop: Strings that end the answer and are not part of it; empty ones stop nothing.

    Attributes:
        stopped: Whether a stop string has ended the answer; nothing is shown from then on.
    """

    def __init__(self, to_text: Callable[[list[int]], str], stop: Iterable[str] = ()) -> None:
        self._to_text = to_text
        self._stop = tuple(string for string in stop if string)
        self._before: list[int] = []  # whose text is out; decoded only so that what follows is no beginning
        self._before_text = ""
        self._ids: list[int] = []  # whose text is not out, or not all of it
        self._taken = 0  # characters of their text that are out
        self._text = ""  # out of the window, not shown: perhaps the beginning of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """Take the next id and return what may be shown now.

        Ids without text change nothing: control ids, if `to_text` leaves them out, and those below zero, which stand
        for link tokens and labels.
        """
        if self.stopped or token < 0 or not self._to_text([token, token]):  # twice: one space may be lost
            return ""
        self._ids.append(token)
        text = self._window()
        whole = text.rstrip(_HALF)
        if len(whole) > self._taken:
            self._text += whole[self._taken :]
            self._taken = len(whole)
        if text and whole == text:
            self._advance(len(self._ids))
        elif len(self._ids) > _PATIENCE:
            self._give_up(text)
        return self._show(len(self._text) - self._begun())

    def finish(self) -> str:
        """Return what was held back, now that no id follows; half a character is shown as a replacement."""
        if not self.stopped:
            self._text += self._window()[self._taken :]
            self._ids, self._taken = [], 0
        return self._show(len(self._text))

    def _window(self) -> str:
        """Return the text of the ids that are not out."""
        text = self._to_text(self._before + self._ids)
        if text.startswith(self._before_text):
            return text[len(self._before_text) :]
        return self._to_text(self._ids)  # bytes that are no character undid the one before them

    def _give_up(self, text: str) -> None:
        """Move the window behind bytes that are no character, as far as no character may still become whole."""
        for n in range(len(self._ids) - 1, len(self._ids) - 5, -1):
            rest = self._to_text(self._ids[n:])
            if rest and self._to_text(self._before + self._ids[:n]) + rest == self._before_text + text:
                self._text += text[self._taken : len(text) - len(rest)]
                self._advance(n)
                return

    def _advance(self, n: int) -> None:
        self._before, self._ids = self._ids[:n], self._ids[n:]
        self._before_text = self._to_text(self._before)
        self._taken = 0

    def _show(self, n: int) -> str:
        """Return the first `n` characters, or those before the first stop string."""
        cut = min((at for string in self._stop if (at := self._text.find(string)) >= 0), default=None)
        if cut is not None:
            self.stopped = True
            shown, self._text = self._text[:cut], ""
        else:
            shown, self._text = self._text[:n], self._text[n:]
        return shown

    def _begun(self) -> int:
        """Return how many last characters may be the beginning of a stop string."""
        begun = (n for string in self._stop for n in range(1, len(string)) if self._text.endswith(string[:n]))
        return max(begun, default=0)
