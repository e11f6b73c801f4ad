"""Text becomes ids here, piece by piece: control ids come from the chat template alone, never from a user's text.

A prompt is `S | documents | T`. S and T are found by rendering the chat template with a marker where the user's text
goes and cutting there. The template's literals are read with control strings recognised; every text that a user can
write is read as plain text; the pieces are joined as ids, so nothing that spans two of them can turn into a control
string. It knows no weights, no positions and no caches.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from blake3 import blake3
from jinja2 import TemplateError
from tokenizers import Encoding, Tokenizer

from kvlink.core.document import Document, clean
from kvlink.core.errors import EmptyQuestion, InputError, ModelRefused, TextUnavailable
from kvlink.core.segments import LARGEST, SMALLEST, cut_ids
from kvlink.models.borders import Borders
from kvlink.models.plain_reader import plain_reader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Sink = Literal["none", "bos", "header"]

LONGEST_TITLE = SMALLEST // 2
"""Ids of a title's line, up to which it is repeated in each segment of a long document."""

_SYSTEM, _USER, _ANSWER = "kvlinkSystemMarker", "kvlinkUserMarker", "kvlinkAnswerMarker"
_UNKNOWN_CHARACTER = "\U000f0f0f"  # private use: no vocabulary holds it, no normalizer drops it

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
class _Literals:
    """What a chat template writes around the texts of one system turn (if any) and one user turn, as ids.

    Attributes:
        head: Before the system text; without a system turn of its own, all that stands before the user's text.
        middle: Between system text and user text; empty without a system turn.
        tail: After the user's text, up to where the answer begins.
    """

    head: tuple[int, ...]
    middle: tuple[int, ...]
    tail: tuple[int, ...]


class Prompter:
    """Turns system prompt, documents, labels and question into ids, and the answer's ids into text.

    Attributes:
        control_ids: Ids of all added tokens, special or not, that are more than white space. No text from a user
            yields one of them. The id of characters that the vocabulary lacks is not among them.
        end_ids: Ids that end an answer: those given, the tokenizer's end of sequence, the template's end of turn.
        template_version: BLAKE3 (hex) of the chat template and the tokenizer's class; provenance, not identity.
    """

    def __init__(self, *, tokenizer: "PreTrainedTokenizerBase | None", end_ids: Iterable[int] = ()) -> None:
        """Prepare `tokenizer` for text.

        Args:
            tokenizer: A transformers tokenizer; its chat template, when it has one, is used as it is.
            end_ids: Further ids that end an answer, as the generation config names them.

        Raises:
            TextUnavailable: There is no tokenizer, or none of the `tokenizers` library behind it.
            ModelRefused: The chat template does not show the user's text exactly once.
        """
        if tokenizer is None:
            raise TextUnavailable("text was given, but the model has no tokenizer: pass token ids, or add its files")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise TextUnavailable(
                f"text needs a tokenizer of the `tokenizers` library, found {type(tokenizer).__name__}: "
                "pass token ids, or convert it to tokenizer.json"
            )
        self._tokenizer: Any = tokenizer
        templates: str | dict[str, str] | None = self._tokenizer.chat_template
        self._template = templates.get("default") if isinstance(templates, dict) else templates
        self._bos: int | None = self._tokenizer.bos_token_id
        own = (*end_ids, self._tokenizer.eos_token_id)

        added = backend.get_added_tokens_decoder()
        spaces = {i: token for i, token in added.items() if not token.content.replace("▁", " ").strip()}
        self._plain, self._renamed = plain_reader(backend, spaces)
        control = frozenset(added.keys() - spaces.keys())
        # What stands for every unknown character is within anyone's reach, so it controls nothing, unless it also
        # begins or ends something.
        unknown = control.intersection(self._read(_UNKNOWN_CHARACTER)[0])
        self.control_ids = control - unknown.difference((*own, self._bos, self._tokenizer.pad_token_id))

        text = f"{self._template or ''}\0{type(tokenizer).__name__}"
        self.template_version = blake3(text.encode("utf-8", "replace")).hexdigest()
        self._borders = Borders(self.decode, anchor=tuple(self._read(".")[0]))
        self._of_day: tuple[date, dict[bool, _Literals]] = (date.min, {})
        self._header: tuple[int, ...] = ()
        if self._template is not None:
            self._header = self._cut(system=False, template=_FROZEN_CLOCK + self._template).head
        self._header = self._header or self._opening()
        self.end_ids = tuple(sorted({i for i in (*own, *self._end_of_turn()) if i is not None}))

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, as it was handed over."""
        return self._tokenizer

    def system_ids(self, system: str | None = None) -> tuple[int, ...]:
        """Return S: all ids before the user's text, today's date included where the template prints it.

        Raises:
            InputError: The chat template has no place for a system prompt.
        """
        if self._template is None:
            text = "" if system is None or not clean(system).strip() else f"{clean(system)}\n\n"
            return (*self._opening(), *self._encode(text))
        literals = self._literals(system=system is not None)
        text = () if system is None else self._encode(clean(system))
        return (*literals.head, *text, *literals.middle) or self._opening()

    def document_ids(self, document: Document) -> tuple[int, ...]:
        """Return the ids of `document.render()`.

        Raises:
            InputError: The tokenizer makes nothing of the document's text.
        """
        ids = self._encode(document.render())
        if not ids:
            raise InputError(f"document {document.name!r} gives no token ids: leave it out")
        return ids

    def segments(self, document: Document, *, cut: bool) -> tuple[tuple[int, ...], ...]:
        """Return the ids of each segment of a document.

        Args:
            cut: Whether a document of more than `LARGEST` ids becomes several segments. Each of them begins with the
                title's line. Without it, and up to that length, the only segment is `document_ids(document)`.
        """
        ids = self.document_ids(document)
        if not cut or len(ids) <= LARGEST:
            return (ids,)
        text = Document(document.text).render()
        title, rest = self._encode(document.render().removesuffix(text)), self._encode(text)
        if len(title) > LONGEST_TITLE:
            title, rest = (), ids
        room = {"smallest": SMALLEST - len(title), "largest": LARGEST - len(title)}
        return tuple(title + segment for segment in cut_ids(rest, self._borders.ranks(rest), **room))

    def label_ids(self, number: int) -> tuple[int, ...]:
        """Return the ids of the label `[number] ` that stands before a document so that it can be cited."""
        return self._encode(f"[{number}] ")

    def tail_ids(self, question: str) -> tuple[int, ...]:
        """Return T: the question, the end of its turn, the header of the answer.

        Raises:
            EmptyQuestion: The question is blank, or the tokenizer makes nothing of it.
        """
        question = clean(question)
        if not question.strip() or not self._encode(question):
            raise EmptyQuestion(f"the question {question[:20]!r} is blank or gives no token ids: ask something")
        if self._template is None:
            return self._encode(f"\nQuestion: {question}\nAnswer:")
        return (*self._encode(question), *self._literals(system=False).tail)

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text as it stands; control strings in it are read as plain text."""
        return self._encode(clean(text))

    def answer_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of an answer as the model would write it: the text, then the end of the turn, if any."""
        ends = self._end_of_turn() or self.end_ids
        text = clean(text) if self._template is not None else f" {clean(text)}"
        return (*self._encode(text), *ends[:1])

    def sink_ids(self, kind: Sink) -> tuple[int, ...]:
        """Return the ids that stand before a document while it is encoded alone; the same on every day.

        Args:
            kind: `header`: S of a request without a system prompt, rendered on one constant date; `bos`: the
                beginning of sequence, or the first id of `header` where the tokenizer has none; `none`.
        """
        if kind not in ("none", "bos", "header"):
            raise InputError(f"sink prefix {kind!r} is unknown: choose header, bos or none")
        if kind == "bos":
            return (self._header[0] if self._bos is None else self._bos,)
        return self._header if kind == "header" else ()

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, control ids left out."""
        kept = [i for i in ids if i not in self.control_ids]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a user's text; strings that would be control ids are read in two halves.

        A vocabulary may hold control strings as ordinary entries, so leaving out the added tokens is not enough.

        Raises:
            InputError: A single character would become a control id.
        """
        ids, encoding = self._read(text)
        if self.control_ids.isdisjoint(ids):
            return tuple(ids)
        hits = [(i, *span) for i, span in zip(ids, encoding.offsets, strict=True) if i in self.control_ids]
        for i, start, end in hits:
            if end - start < 2:
                raise InputError(
                    f"the text holds {text[start:end]!r}, which this tokenizer reads as control token {i} "
                    f"({self._tokenizer.convert_ids_to_tokens(i)!r}): remove it"
                )
        cuts = sorted({(start + end) // 2 for _, start, end in hits})
        return tuple(i for start, end in pairwise((0, *cuts, len(text))) for i in self._encode(text[start:end]))

    def _read(self, text: str) -> tuple[list[int], Encoding]:
        """Return the ids of `text` as the vocabulary gives them, and the encoding that knows their spans."""
        encoding = self._plain.encode(text, add_special_tokens=False)
        ids = encoding.ids
        if self._renamed:
            ids = [self._renamed.get(i, i) for i in ids]
        return ids, encoding

    def _opening(self) -> tuple[int, ...]:
        """Return S of a model without a chat template: its beginning of sequence, else a newline."""
        opening = self._encode("\n") if self._bos is None else (self._bos,)
        if not opening:
            raise ModelRefused("neither a chat template, nor a BOS token, nor a token for a newline: nothing can open")
        return opening

    def _literals(self, *, system: bool) -> _Literals:
        """Return the template's literals, rendered once for each day and shape."""
        today = date.today()
        day, shapes = self._of_day
        if day != today:
            self._of_day = (today, shapes := {})
        if system not in shapes:
            shapes[system] = self._cut(system=system, template=None)
        return shapes[system]

    def _cut(self, *, system: bool, template: str | None) -> _Literals:
        """Render the template with markers and cut it there."""
        turns = [{"role": "user", "content": _USER}]
        if system:
            turns.insert(0, {"role": "system", "content": _SYSTEM})
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
            return _Literals(head=self._open(before), middle=(), tail=self._continue(tail))
        if _SYSTEM not in text:
            raise InputError("a system prompt was given, but this model's chat template drops it: ask without one")
        head, middle = _halves(before, _SYSTEM, "the system prompt, before the user's text,")
        return _Literals(head=self._open(head), middle=self._continue(middle), tail=self._continue(tail))

    def _end_of_turn(self) -> tuple[int, ...]:
        """Return the control id that the template puts behind an answer, if it does."""
        if self._template is None:
            return ()
        turns = [{"role": "user", "content": _USER}, {"role": "assistant", "content": _ANSWER}]
        try:
            text = self._render(turns, add_generation_prompt=False, template=None)
        except TemplateError:
            return ()
        first = self._continue(text.rpartition(_ANSWER)[2])[:1]
        return first if self.control_ids.issuperset(first) else ()

    def _render(self, turns: list[dict[str, str]], *, add_generation_prompt: bool, template: str | None) -> str:
        return self._tokenizer.apply_chat_template(
            turns, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def _open(self, literal: str) -> tuple[int, ...]:
        """Return the ids of a literal at the very beginning, control strings recognised."""
        return tuple(self._tokenizer.encode(literal, add_special_tokens=False, split_special_tokens=False))

    def _continue(self, literal: str) -> tuple[int, ...]:
        """Return the ids of a literal that continues a text: as after a character with which it does not merge.

        Read on its own it would get the space that some tokenizers put before a text.
        """
        for anchor in ("x", "\n", ".") if literal else ():
            prefix = self._open(anchor)
            ids = self._open(anchor + literal)
            if ids[: len(prefix)] == prefix:
                return ids[len(prefix) :]
        return self._open(literal)


def _halves(text: str, marker: str, what: str) -> tuple[str, str]:
    """Cut `text` at `marker`.

    Raises:
        ModelRefused: The marker does not stand in it exactly once.
    """
    parts = text.split(marker)
    if len(parts) != 2:
        raise ModelRefused(f"the chat template shows {what} {len(parts) - 1} times, once was expected: use another one")
    return parts[0], parts[1]
