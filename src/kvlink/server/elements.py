"""`<document id="..." title="...">text</document>` in what a user wrote: documents where no other field can bring them.

Text in an element is escaped as in XML (`&lt;`, `&gt;`, `&amp;`, `&quot;`, `&apos;`), and elements do not nest: whoever
writes them escapes what comes from others, so that no text becomes a document by itself.
"""

import re

from kvlink.server.protocol import InlineDocument, LibraryDocument
from kvlink.server.refusals import Refused

_TAG = re.compile(r"</?document(?=[\s/>])")
_ELEMENT = re.compile(r'<document((?:\s+[a-z]+="[^"<>]*")*)\s*(?:/>|>([^<]*)</document\s*>)')
_ATTRIBUTE = re.compile(r'\s+([a-z]+)="([^"<>]*)"')
_ENTITY = re.compile(r"&(?:([a-z]+);)?")
_CHARACTERS = {"lt": "<", "gt": ">", "amp": "&", "quot": '"', "apos": "'"}


def split_elements(text: str) -> tuple[str, list[LibraryDocument | InlineDocument]]:
    """Return a text without its elements, and the documents that they are.

    Raises:
        Refused: 400; an element is not closed, holds what is not escaped, or has another attribute.
    """
    rest: list[str] = []
    found: list[LibraryDocument | InlineDocument] = []
    at = 0
    while tag := _TAG.search(text, at):
        element = _ELEMENT.match(text, tag.start())
        if element is None:
            raise _refused("is not closed, holds another tag, or has attributes that are not in double quotes")
        rest.append(text[at : element.start()])
        found.append(_document(element[1], element[2]))
        at = element.end()
    rest.append(text[at:])
    return ("".join(rest).strip() if found else text), found


def _document(attributes: str, text: str | None) -> LibraryDocument | InlineDocument:
    given = _ATTRIBUTE.findall(attributes)
    if len({name for name, _ in given}) < len(given) or not {name for name, _ in given} <= {"id", "title"}:
        raise _refused("has attributes other than one id and one title")
    fields = {name: _unescaped(value) for name, value in given}
    if text is not None and text.strip():
        return InlineDocument(text=_unescaped(text).strip(), **fields)
    if set(fields) != {"id"} or not fields["id"]:
        raise _refused("has no text: write one, or an id of the library alone")
    return LibraryDocument(id=fields["id"])


def _unescaped(text: str) -> str:
    def character(found: re.Match[str]) -> str:
        if found[1] not in _CHARACTERS:
            raise _refused("holds an & that is not one of " + ", ".join(f"&{name};" for name in _CHARACTERS))
        return _CHARACTERS[found[1]]

    return _ENTITY.sub(character, text)


def _refused(what: str) -> Refused:
    return Refused(400, f"a <document> element {what}", code="invalid_document_element", param="messages")
