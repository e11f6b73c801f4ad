"""What can be asked about a document: by a model, excerpt by excerpt, and by rule where no model's question is left.

Knows no model: it gives the prompt and cleans what comes back. Small models write poor questions; a question is kept
if most of its words that carry meaning stand in the excerpt.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvlink.core.document import Document
from kvlink.training.pieces import Count, approximate_tokens, chunked

PROMPTS_VERSION = 1
"""Changes whenever a text below changes; stands in the settings of a file of examples."""

WRITE = "Write three short questions that this text answers."
"""Asked about one excerpt."""

WRITE_ABOUT = "Write three short questions about {topic}."
"""Asked next, where nothing of use was written."""

WRITE_TOKENS = 48
"""Tokens of three short questions."""

ABOUT_ONE = (
    "What is “{subject}” about?",
    "Summarize “{subject}” in two sentences.",
    "List the names that occur in “{subject}”.",
    "Which numbers and dates are given in “{subject}”?",
)
"""By rule, about one document that has a title or a heading."""

ABOUT_TOPIC = "What does “{subject}” say about {topic}?"
"""By rule, about a heading or a name in such a document."""

ABOUT_ALL = (
    "What are the documents about?",
    "Summarize the documents in two sentences.",
    "List the names that occur in the documents.",
    "Which numbers and dates are given in the documents?",
)
"""By rule, where the document has neither."""

TOPIC_OF_ALL = "What do the documents say about {topic}?"
"""By rule, about a name, where the document has neither."""

EXCERPT_TOKENS = 200
"""Longest excerpt that a question is written about."""

SHORTEST = 60
"""Characters below which a paragraph says too little to be asked about alone."""

_HEADING = re.compile(r"#{1,6}\s+(?P<words>.+?)\s*#*$")
_THING = re.compile(
    r"\b[Tt]he ((?:[a-z-]+ ){0,2}?[a-z-]{3,})(?=[,.;:]| (?:is|are|was|were|has|have|had|may|can|must|will|of|in|on|at|"
    r"to|for|and|from|with|by|that|which|who|when)\b)"
)
"""A thing that a text speaks of, as English does."""

_NAME = re.compile(r"(?<=[\w,;:] )[A-Z][\w'-]+(?: (?:[A-Z][\w'-]*|\d+)(?![\w'-]))*")
_MARKER = re.compile(r"^\s*(?:[-*•]|\(?\d{1,2}[.):]|(?:q|question)\s*\d*\s*[:.)])\s*", re.IGNORECASE)
_WORD = re.compile(r"\w+")
_EMPTY = frozenset(
    _WORD.findall(
        "a about according an and any are as at author be been by can could did do does document documents for from "
        "give given had has have he her his how if in is it its kind main many may mean meaning means much must name "
        "names of on or paragraph people person purpose reason s sentence she should some text than that the their "
        "them there these they thing this those to type used user was we were what when where which who whom whose why "
        "will with would you your"
    )
)
"""Words that say nothing about what a question is about."""

_META = frozenset(("answer", "answers", "question", "questions"))
"""Words of a model that talks about its task, unless they stand in the excerpt, too."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A part of a document that is short enough to be asked about.

    Attributes:
        heading: What stands above it, or the document's title, or nothing.
    """

    text: str
    heading: str

    @property
    def prompts(self) -> tuple[str, ...]:
        """What a model is asked, in turn, until it has written a question of use."""
        things = Counter(f"the {thing}" for thing in _THING.findall(self.text)).most_common(1)
        topics = [thing for thing, _ in things] or names(self.text) or [self.heading]
        return (WRITE, WRITE_ABOUT.format(topic=topics[0])) if topics[0] else (WRITE,)


def subject(document: Document) -> str:
    """Return what a reader would call a document: its title, else a heading in its first line, else nothing."""
    first = next((line for line in document.text.splitlines() if line.strip()), "")
    return document.title.strip() or _heading(first)


def excerpts(document: Document, *, count: Count = approximate_tokens) -> list[Excerpt]:
    """Return the paragraphs of a document, short ones together and long ones in parts."""
    whole = subject(document)
    return [
        Excerpt(part.text, heading or whole)
        for heading, paragraph in _paragraphs(document.text)
        for part in chunked(Document(paragraph), EXCERPT_TOKENS, count=count)
    ]


def names(text: str) -> list[str]:
    """Return the names in a text, most frequent first: capital letters inside a sentence; headings do not count."""
    lines = "\n".join(line for line in text.splitlines() if not _heading(line))
    return [name for name, _ in Counter(_NAME.findall(lines)).most_common()]


def topics(document: Document) -> list[str]:
    """Return headings below the first, then names."""
    headings = [heading for line in document.text.splitlines() if (heading := _heading(line))]
    return list(dict.fromkeys(one for one in [*headings, *names(document.text)[:8]] if one != subject(document)))


def instructions(document: Document) -> list[str]:
    """Return what can be asked by rule, the same for the same document; there is always something."""
    whole = subject(document)
    if not whole:
        return [*ABOUT_ALL, *(TOPIC_OF_ALL.format(topic=topic) for topic in topics(document))]
    return [
        *(text.format(subject=whole) for text in ABOUT_ONE),
        *(ABOUT_TOPIC.format(subject=whole, topic=topic) for topic in topics(document)),
    ]


def clean_questions(written: str, about: str) -> list[str]:
    """Return the questions in what a model wrote, without those that ask nothing or something else.

    Kept is a line up to its question mark that is no fragment and has two words or more that carry a meaning, most of
    which stand in `about`. Each is there once.
    """
    there = set(_WORD.findall(about.lower()))
    known = {_stem(word) for word in there}
    kept: dict[str, str] = {}
    for line in written.splitlines():
        question, mark, _ = _MARKER.sub("", line).strip(" \t\"'“”*_").partition("?")
        question = " ".join(question.split())
        words = _WORD.findall(question.lower())
        if not mark or not 4 <= len(words) <= 30 or _META.intersection(words) - there:
            continue
        telling = {_stem(word) for word in words if word not in _EMPTY}
        if len(telling & known) > max(1, len(telling) // 2):
            kept.setdefault(" ".join(words), f"{question[0].upper()}{question[1:]}?")
    return list(kept.values())


def _stem(word: str) -> str:
    """Return what forms of a word have in common, roughly."""
    return word[:5] if len(word) > 5 else word.removesuffix("s")


def _heading(line: str) -> str:
    match = _HEADING.match(line.strip())
    return match["words"] if match else ""


def _paragraphs(text: str) -> Iterator[tuple[str, str]]:
    """Yield paragraphs with the heading above them; one that is too short goes with the next below that heading."""
    heading, waiting = "", ""
    for block in re.split(r"\n\s*\n", text):
        lines: list[str] = []
        for line in block.splitlines():
            if found := _heading(line):
                if body := "\n".join(filter(None, [waiting, *lines])).strip():
                    yield heading, body
                heading, waiting, lines = found, "", []
            else:
                lines.append(line)
        waiting = "\n".join(filter(None, [waiting, *lines])).strip()
        if len(waiting) >= SHORTEST:
            yield heading, waiting
            waiting = ""
    if waiting:
        yield heading, waiting
