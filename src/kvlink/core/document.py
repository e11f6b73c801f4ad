"""A document as its owner hands it over: a title and a text, nothing about models."""

from dataclasses import dataclass

BOM = "\ufeff"


@dataclass(frozen=True, slots=True)
class Document:
    """One text that is encoded once and reused.

    Attributes:
        text: The text as its owner wrote it.
        title: Shown to the model above the text; empty when there is none.
        name: What reports call the document (a path, an id); never part of its identity.
    """

    text: str
    title: str = ""
    name: str = ""

    @property
    def is_blank(self) -> bool:
        """Whether there is nothing in it that a reader could read."""
        return not clean(self.text).strip()

    def render(self) -> str:
        """Return what the model reads, the same at every rank: the title's line if any, the text, an empty line."""
        title = clean(self.title)
        head = f"{title}\n" if title else ""
        return f"{head}{clean(self.text)}\n\n"


def clean(text: str) -> str:
    """Return `text` without a leading byte-order mark and with lone surrogates as U+FFFD.

    Tokenizers refuse lone surrogates, and a mark at the beginning is an artefact of a file, not of its text.
    Everything else, NUL included, stays.
    """
    if not text.isascii():
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text.removeprefix(BOM)
