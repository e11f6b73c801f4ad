"""Made-up documents of an exact number of tokens, so that benchmarks need no data."""

import random

from kvlink.core.document import Document
from kvlink.core.errors import InputError
from kvlink.models.prompt import Prompter

TEXT = (
    "the station on the ridge sends wind snow and air pressure to the valley every hour while the crew waits for "
    "news from the pass and the lamp in the old barn burns until the road is open again and the post can go down"
)
"""Where the words come from."""


def document_of(prompter: Prompter, tokens: int, *, seed: int, name: str = "") -> Document:
    """Return a document that has exactly `tokens` tokens.

    Raises:
        InputError: There is none of this length with this tokenizer.
    """
    generator = random.Random(seed)  # noqa: S311
    words = generator.choices(TEXT.split(), k=tokens)
    low, high = 1, tokens
    while low <= high:
        middle = (low + high) // 2
        document = Document(" ".join(words[:middle]), name=name or f"made-up {seed}")
        length = len(prompter.document_ids(document))
        if length == tokens:
            return document
        low, high = (middle + 1, high) if length < tokens else (low, middle - 1)
    text = " ".join(words[:low])  # the last word is several tokens: cut it
    for stop in range(len(" ".join(words[:high])) + 1, len(text)):
        document = Document(text[:stop], name=name or f"made-up {seed}")
        if len(prompter.document_ids(document)) == tokens:
            return document
    raise InputError(f"no made-up document has exactly {tokens} tokens with this tokenizer; try another number")


def question_of(prompter: Prompter, tokens: int, *, skip: int = 0) -> str:
    """Return a question whose own ids (without the end of the turn) are about `tokens`.

    Args:
        skip: Begin so many words later.
    """
    words = (TEXT.split() * (tokens + skip))[skip : skip + tokens]
    around = len(prompter.tail_ids(words[0])) - 1
    while len(words) > 1 and len(prompter.tail_ids(" ".join(words))) - around > tokens:
        words.pop()
    return " ".join(words)


def other_question(prompter: Prompter, question: str, tokens: int) -> str:
    """Return another question of as many ids, or nearly, whose first id is another: no beginning of it is known."""
    ids = prompter.tail_ids(question)
    others = [question_of(prompter, tokens, skip=skip) for skip in range(1, len(TEXT.split()))]
    apart = [other for other in others if prompter.tail_ids(other)[0] != ids[0]]
    return min(apart, key=lambda other: abs(len(prompter.tail_ids(other)) - len(ids)))
