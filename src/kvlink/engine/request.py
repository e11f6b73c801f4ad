"""From what a caller hands over to the ids of a prompt: documents in any form, blanks, overflow.

Nothing is left out silently: each document that does not reach the prompt has a row that says why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvlink.core.document import Document
from kvlink.core.errors import ContextOverflow, EmptyQuestion, InputError
from kvlink.core.layout import Prompt, Turn
from kvlink.engine.usage import DocumentUsage
from kvlink.models.prompt import Prompter

type_of_document = "a text, a Document, or a mapping with `text` and perhaps `title`"

DocumentLike = str | Document | Mapping[str, str]
Overflow = Literal["error", "drop_last"]
Order = Literal["given", "reuse"]
"""Documents as they were given, or those first behind which most is known."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and what became of each document.

    Attributes:
        prompt: The ids.
        rows: One per document that was handed over; those in the prompt have the source `encoded` for now.
        kept: Indices into `rows` of the documents that are in the prompt.
        warnings: What was left out, in words.
    """

    prompt: Prompt
    rows: tuple[DocumentUsage, ...]
    kept: tuple[int, ...]
    warnings: tuple[str, ...]


def as_documents(given: Sequence[DocumentLike]) -> list[Document]:
    """Return what a caller gave as documents; one without a name is named by its number, counted from 1.

    Raises:
        InputError: It is a single document, or one of them is of no accepted form.
    """
    if isinstance(given, (str, bytes, Document, Mapping)):
        raise InputError("docs is one document; hand over a list of documents")
    return [_as_document(one, f"document {number}") for number, one in enumerate(given, start=1)]


def _as_document(given: Any, name: str) -> Document:
    match given:
        case Document(text=str(), title=str()):
            return given if given.name else Document(given.text, given.title, name)
        case str():
            return Document(given, name=name)
        case {"text": str(text)} if isinstance(title := given.get("title") or "", str):
            return Document(text, title, str(given.get("name") or given.get("id") or name))
        case _:
            raise InputError(f"{name} is {type(given).__name__}; hand over {type_of_document}")


def build_request(
    prompter: Prompter,
    documents: Sequence[DocumentLike],
    question: str,
    *,
    system: str | None,
    labels: bool,
    num_links: int,
    cut: bool = False,
    room: int,
    context: int,
    on_overflow: Overflow,
    history: Sequence[Turn] = (),
) -> Request:
    """Turn a request into ids that fit the context.

    Args:
        num_links: K.
        cut: Whether a long document becomes several segments.
        room: Tokens to keep free for the answer.
        context: Positions that the model accepts.
        on_overflow: `error`, or `drop_last` to leave out documents from the back until the rest fits.
        history: Earlier turns of the conversation, which are never left out.

    Raises:
        ContextOverflow: It does not fit; the message holds the number of tokens over, links counted.
        EmptyQuestion: There is no question.
        InputError: A document is of no accepted form, or `on_overflow` is neither.
    """
    if on_overflow not in ("error", "drop_last"):
        raise InputError(f"on_overflow is {on_overflow!r}; choose error or drop_last")
    system_ids, tail = prompter.system_ids(system), prompter.tail_ids(question)
    rows: list[DocumentUsage] = []
    kept: list[tuple[int, tuple[tuple[int, ...], ...]]] = []
    warnings: list[str] = []
    for document in as_documents(documents):
        if document.is_blank:
            rows.append(DocumentUsage(document.name, 0, "skipped", reason="blank"))
            warnings.append(f"{document.name} is blank and was skipped")
            continue
        segments = prompter.segments(document, cut=cut)
        kept.append((len(rows), segments))
        rows.append(DocumentUsage(document.name, sum(map(len, segments)), "encoded"))

    before = sum(len(turn.documents) for turn in history)

    def prompt() -> Prompt:
        numbers = range(before + 1, before + len(kept) + 1) if labels else ()
        tags = tuple(prompter.label_ids(number) for number in numbers)
        return Prompt(system_ids, tuple(segments for _, segments in kept), tail, tags, tuple(history))

    layout = prompt().layout(num_links=num_links)
    sizes = [0] * len(kept)
    for span in layout.spans:
        if span.document is not None and span.document >= before:
            sizes[span.document - before] += len(span)
    excess = len(layout) + room - context
    while excess > 0:
        if on_overflow == "error" or not kept:
            layout = prompt().layout(num_links=num_links)
            around = len(layout) - layout.num_document_tokens - layout.num_link_tokens
            raise ContextOverflow(
                f"the prompt has {before + len(kept)} documents of {layout.num_document_tokens} tokens, "
                f"{layout.num_link_tokens} link tokens, {around} tokens around them and "
                f"{room} for the answer: {excess} more than the context of {context}. "
                "Hand over fewer documents, ask for fewer new tokens, or pass on_overflow='drop_last'",
                over=excess,
                limit=context,
            )
        index, _ = kept.pop()
        rows[index] = replace(rows[index], source="dropped", reason=f"{excess} tokens over the context")
        warnings.append(f"{rows[index].name} was dropped: the prompt was {excess} tokens over the context of {context}")
        excess -= sizes.pop()
    return Request(prompt(), tuple(rows), tuple(index for index, _ in kept), tuple(warnings))


def plain_request(prompter: Prompter, text: str, *, room: int, context: int) -> Request:
    """Turn a text into ids as it stands: behind the model's beginning, without a chat template.

    Raises:
        ContextOverflow: It does not fit.
        EmptyQuestion: The tokenizer makes nothing of the text.
    """
    start, ids = prompter.sink_ids("bos"), prompter.plain_ids(text)
    if not ids:
        raise EmptyQuestion(f"the text {text[:20]!r} gives no token ids: pass some text to go on with")
    excess = len(start) + len(ids) + room - context
    if excess > 0:
        raise ContextOverflow(
            f"the text has {len(ids)} tokens, with {room} for the answer {excess} more than the context of {context}. "
            "Shorten it, or ask for fewer new tokens",
            over=excess,
            limit=context,
        )
    return Request(Prompt(start, (), ids), (), (), ())
