"""What a chat template writes around texts: found by rendering it with markers in their place and cutting there.

    head | system | middle | user | tail | answer | after | user | tail          the template's literals, as ids

Only in these literals are control strings read as control ids. It never sees a text that a user wrote.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from kvlink.core.errors import InputError, ModelRefused

_SYSTEM, _USER, _ANSWER, _NEXT = "kvlinkSystemMarker", "kvlinkUserMarker", "kvlinkAnswerMarker", "kvlinkNextMarker"
_ONE_TURN = "ask one question at a time, or use another template"

# Templates that print today's date ask `strftime_now(format)` for it. A macro of that name, put in front of the
# template, shadows the clock: 26 July 2024, in whatever format. (A callable passed as a variable is not called.)
_ONE_DATE = (
    *(("%d", "26"), ("%e", "26"), ("%-d", "26"), ("%b", "Jul"), ("%B", "July"), ("%m", "07"), ("%-m", "7")),
    *(("%Y", "2024"), ("%y", "24"), ("%a", "Fri"), ("%A", "Friday")),
    *(("%H", "00"), ("%I", "12"), ("%M", "00"), ("%S", "00"), ("%p", "AM")),
)
_FROZEN_CLOCK = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f"|replace('{code}', '{text}')" for code, text in _ONE_DATE)
    + " }}{% endmacro %}{{ '' }}"
)


@dataclass(frozen=True, slots=True)
class Literals:
    """What a chat template writes around the texts of one system turn (if any) and one user turn, as ids.

    Attributes:
        head: Before the system text; without a system turn of its own, all that stands before the user's text.
        middle: Between system text and user text; empty without a system turn.
        tail: After the user's text, up to where the answer begins.
    """

    head: tuple[int, ...]
    middle: tuple[int, ...]
    tail: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """What a chat template writes around the answer of an earlier turn.

    Attributes:
        before: Text between `Literals.tail` and the answer. It is empty for most templates: what they write before an
            answer of old is what they write before one that is being generated. Where these two differ in any other
            way (a block of thoughts that is only opened for a new answer), the conversation stays as it was generated.
        after: Ids between the answer and the next user's text.
    """

    before: str
    after: tuple[int, ...]


class Template:
    """Renders and cuts the chat template of a tokenizer.

    Attributes:
        text: The template as the tokenizer has it.
    """

    def __init__(self, text: str, *, tokenizer: Any) -> None:
        self.text = text
        self._tokenizer = tokenizer
        self._of_day: tuple[date, dict[bool, Literals]] = (date.min, {})

    def literals(self, *, system: bool) -> Literals:
        """Return what stands around the texts of a first turn, rendered once for each day and shape.

        Raises:
            InputError: The template has no place for a system prompt.
            ModelRefused: It does not show the user's text exactly once.
        """
        today = date.today()
        day, shapes = self._of_day
        if day != today:
            self._of_day = (today, shapes := {})
        if system not in shapes:
            shapes[system] = self._cut(system=system, template=None)
        return shapes[system]

    def header(self) -> tuple[int, ...]:
        """Return what stands before the user's text, without a system prompt, on one constant date.

        Raises:
            ModelRefused: The template does not show the user's text exactly once.
        """
        return self._cut(system=False, template=_FROZEN_CLOCK + self.text).head

    @cached_property
    def answered(self) -> Answered:
        """What stands around the answer of an earlier turn.

        Raises:
            ModelRefused: The template does not show a question, its answer and the next question once each, in order.
        """
        turns = [_turn("user", _USER), _turn("assistant", _ANSWER), _turn("user", _NEXT)]
        try:
            text = self._render(turns, add_generation_prompt=True)
        except TemplateError as error:
            raise ModelRefused(f"the chat template cannot render a second turn ({error}): {_ONE_TURN}") from error
        _, rest = _halves(text, _USER, "the question of an earlier turn", _ONE_TURN)
        opening, rest = _halves(rest, _ANSWER, "the answer of an earlier turn, behind its question,", _ONE_TURN)
        after, _ = _halves(rest, _NEXT, "the next question, behind an answer,", _ONE_TURN)
        _, tail = _halves(self._render([_turn("user", _USER)], add_generation_prompt=True), _USER, "the user's text")
        before = opening.removeprefix(tail) if opening.startswith(tail) else ""
        return Answered(before, self.continued(after))

    def end_of_turn(self, control_ids: Iterable[int]) -> tuple[int, ...]:
        """Return the control id that the template puts behind an answer, if it does."""
        try:
            text = self._render([_turn("user", _USER), _turn("assistant", _ANSWER)], add_generation_prompt=False)
        except TemplateError:
            return ()
        first = self.continued(text.rpartition(_ANSWER)[2])[:1]
        return first if set(control_ids).issuperset(first) else ()

    def continued(self, literal: str) -> tuple[int, ...]:
        """Return the ids of a literal that continues a text: as after a character with which it does not merge.

        Read on its own it would get the space that some tokenizers put before a text.
        """
        for anchor in ("x", "\n", ".") if literal else ():
            prefix = self._open(anchor)
            ids = self._open(anchor + literal)
            if ids[: len(prefix)] == prefix:
                return ids[len(prefix) :]
        return self._open(literal)

    def _cut(self, *, system: bool, template: str | None) -> Literals:
        """Render the template with markers and cut it there."""
        turns = [_turn("user", _USER)]
        if system:
            turns.insert(0, _turn("system", _SYSTEM))
        try:
            text = self._render(turns, add_generation_prompt=True, template=template)
        except TemplateError as error:
            if system:
                raise InputError(
                    f"a system prompt was given, but this model's chat template refuses it ({error}): "
                    "write it into the question"
                ) from error
            raise ModelRefused(f"the chat template cannot render a single user turn: {error}") from error
        before, tail = _halves(text, _USER, "the user's text")
        if not system:
            return Literals(head=self._open(before), middle=(), tail=self.continued(tail))
        if _SYSTEM not in text:
            raise InputError("a system prompt was given, but this model's chat template drops it: ask without one")
        head, middle = _halves(before, _SYSTEM, "the system prompt, before the user's text,")
        return Literals(head=self._open(head), middle=self.continued(middle), tail=self.continued(tail))

    def _render(self, turns: list[dict[str, str]], *, add_generation_prompt: bool, template: str | None = None) -> str:
        return self._tokenizer.apply_chat_template(
            turns, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def _open(self, literal: str) -> tuple[int, ...]:
        """Return the ids of a literal at the very beginning, control strings recognised."""
        return tuple(self._tokenizer.encode(literal, add_special_tokens=False, split_special_tokens=False))


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _halves(text: str, marker: str, what: str, way_out: str = "use another one") -> tuple[str, str]:
    """Cut `text` at `marker`.

    Raises:
        ModelRefused: The marker does not stand in it exactly once.
    """
    parts = text.split(marker)
    if len(parts) != 2:
        raise ModelRefused(f"the chat template shows {what} {len(parts) - 1} times, once was expected: {way_out}")
    return parts[0], parts[1]
