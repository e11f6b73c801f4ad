"""Text becomes ids here, piece by piece: control ids come from the chat template alone, never from a user's text.

A prompt is `S | documents | T`, and in a conversation `S | documents | T A N | documents | T`, where A is an answer and
N leads to the next user's text. The template's literals are read with control strings recognised; every text that a
user can write is read as plain text; the pieces are joined as ids, so nothing that spans two of them can turn into a
control string. It knows no weights, no positions and no caches.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, cast

from blake3 import blake3
from tokenizers import Encoding, Tokenizer

from kvlink.core.document import Document, clean
from kvlink.core.errors import EmptyQuestion, InputError, ModelRefused, TextUnavailable
from kvlink.core.segments import LARGEST, SMALLEST, cut_ids
from kvlink.models.borders import Borders
from kvlink.models.plain_reader import plain_reader
from kvlink.models.template import Answered, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Sink = Literal["none", "bos", "header"]

LONGEST_TITLE = SMALLEST // 2
"""Ids of a title's line, up to which it is repeated in each segment of a long document."""

_UNKNOWN_CHARACTER = "\U000f0f0f"  # private use: no vocabulary holds it, no normalizer drops it


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
        text = templates.get("default") if isinstance(templates, dict) else templates
        self._template = None if text is None else Template(text, tokenizer=tokenizer)
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

        version = f"{text or ''}\0{type(tokenizer).__name__}"
        self.template_version = blake3(version.encode("utf-8", "replace")).hexdigest()
        self._borders = Borders(self.decode, anchor=tuple(self._read(".")[0]))
        self._header = (self._template.header() if self._template else ()) or self._opening()
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
        literals = self._template.literals(system=system is not None)
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
        return (*self._encode(question), *self._template.literals(system=False).tail)

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text as it stands; control strings in it are read as plain text."""
        return self._encode(clean(text))

    def answer_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of an answer as the model would write it: the text, then the end of the turn, if any."""
        ends = self._end_of_turn() or self.end_ids
        text = clean(text) if self._template is not None else f" {clean(text)}"
        return (*self._encode(text), *ends[:1])

    def next_turn_ids(self) -> tuple[int, ...]:
        """Return N: what leads from the end of an answer to the next user's text.

        Raises:
            ModelRefused: The chat template does not render conversations of several turns.
        """
        return self._answered().after[self._end() :]

    def answered_ids(self, answer_ids: Sequence[int]) -> tuple[int, ...]:
        """Return A N: an answer as it was generated, ended as the chat template ends it, up to the next user's text.

        Args:
            answer_ids: Ids as generated, with or without one that ended the answer. An end that is not the template's
                is replaced by it, and one that is missing is added: an answer may have been cut at its longest.

        Raises:
            ModelRefused: The chat template does not render conversations of several turns.
        """
        ids, after, end = tuple(answer_ids), self._answered().after, self._end()
        if end and ids[-end:] == after[:end]:
            return (*ids, *after[end:])
        return (*(ids[:-1] if ids and ids[-1] in self.end_ids else ids), *after)

    def turn_ids(self, question: str, answer_ids: Sequence[int]) -> tuple[int, ...]:
        """Return T A N: what stands behind the documents of an earlier turn, whose answer was generated.

        Raises:
            EmptyQuestion: The question is blank, or the tokenizer makes nothing of it.
            ModelRefused: The chat template does not render conversations of several turns.
        """
        return (*self.tail_ids(question), *self.answered_ids(answer_ids))

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """Return S, and for each turn what stands behind its documents: T A N of the earlier ones, T of the last.

        The answers' texts become ids again. Where these are the ids that were generated, so is the whole conversation:
        what was computed for it is known.

        Args:
            messages: Texts (`content`) and who wrote them (`role`): perhaps `system`, then `user` and `assistant` in
                turn, `user` last.

        Raises:
            EmptyQuestion: A question is blank, or the tokenizer makes nothing of it.
            InputError: The messages are in another order, or one of them is no text.
            ModelRefused: There are several turns, which the chat template does not render.
        """
        roles = [message.get("role") for message in messages]
        first = int(roles[:1] == ["system"])
        wanted = ["user", "assistant"] * (len(roles) // 2 + 1)
        if roles[first:] != wanted[: len(roles) - first] or roles[-1:] != ["user"]:
            raise InputError(
                f"the messages are by {', '.join(map(str, roles)) or 'nobody'}; expected are one by system or none, "
                "then user and assistant in turn, user last: join what one of them wrote in a row"
            )
        texts = [message.get("content") for message in messages]
        for role, text in zip(roles, texts, strict=True):
            if not isinstance(text, str):
                raise InputError(f"the content of a message by {role} is {type(text).__name__}: pass a text")
        system, spoken = (texts[0] if first else None), cast("list[str]", texts[first:])
        earlier = [
            (*self.tail_ids(question), *self._spoken(answer), *self._answered().after)
            for question, answer in zip(spoken[:-1:2], spoken[1::2], strict=True)
        ]
        return self.system_ids(system), [*earlier, self.tail_ids(spoken[-1])]

    def _spoken(self, answer: str) -> tuple[int, ...]:
        """Return the ids of an earlier answer's text, behind what the template writes before it.

        A space before the text belongs to its first word, as it was generated; it may have been taken off since.
        """
        text, before = clean(answer), self._answered().before
        if self._template is None or not before.strip():
            return self._encode(before + text.removeprefix(before))
        return (*self._template.continued(before), *self._encode(text))

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

    def _end_of_turn(self) -> tuple[int, ...]:
        """Return the control id that the template puts behind an answer, if it does."""
        return () if self._template is None else self._template.end_of_turn(self.control_ids)

    def _answered(self) -> Answered:
        """Return what stands around an earlier answer; without a template a space before it, a newline behind it."""
        return Answered(" ", self._encode("\n")) if self._template is None else self._template.answered

    def _end(self) -> int:
        """Return how many of the ids behind an earlier answer end it: those up to the first that ends answers."""
        return next((n for n, i in enumerate(self._answered().after, start=1) if i in self.end_ids), 0)
