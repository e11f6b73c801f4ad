"""Self-study: from documents and nothing else to examples, with the model's own questions and answers.

Questions are written about one excerpt at a time, answers by full attention to a whole set of documents: what link
tokens have to bring back is what the model says when it sees everything.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from blake3 import blake3

from kvlink.core.document import Document
from kvlink.core.errors import ContextOverflow, InputError
from kvlink.training.asking import (
    PROMPTS_VERSION,
    WRITE_TOKENS,
    Excerpt,
    clean_questions,
    excerpts,
    instructions,
)
from kvlink.training.compose import Source, seeded
from kvlink.training.data import PROMPT_VERSION, QUESTION, SYSTEM
from kvlink.training.example import Example, Question
from kvlink.training.example_file import ExampleFile
from kvlink.training.pieces import Count, approximate_tokens, chunked

BY_RULE = 0.25
"""Share of the questions that are instructions, such as to summarize, where the model's own would do."""

TRIES = 3
"""Excerpts that are tried for one question before it is made by rule."""


@runtime_checkable
class Generate(Protocol):
    """Answers a question about documents by full attention, greedily: the same answer each time."""

    def __call__(self, documents: Sequence[Document], question: str, /, *, max_new_tokens: int) -> str:
        """Return the answer's text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is asked for.

    Attributes:
        fewest, most: Bounds of the number of documents of a set.
        fewest_questions, most_questions: Bounds of the number of questions about it.
        max_tokens: Of a set's documents together.
        piece_tokens: A longer document is cut into pieces, each a document.
        answer_tokens: Longest answer.
        system: The examples' system prompt; `generate` is expected to use the same.
        count: Tokens of a text.
    """

    fewest: int = 1
    most: int = 10
    fewest_questions: int = 2
    most_questions: int = 4
    max_tokens: int = 2048
    piece_tokens: int = 1024
    answer_tokens: int = 48
    system: str | None = SYSTEM
    count: Count = approximate_tokens

    def __post_init__(self) -> None:
        if not (1 <= self.fewest <= self.most and 1 <= self.fewest_questions <= self.most_questions):
            raise InputError(
                f"{self.fewest} to {self.most} documents and {self.fewest_questions} to {self.most_questions} "
                "questions are asked for; each bound is 1 or more, and the second no less than the first"
            )
        if not 1 <= self.piece_tokens <= self.max_tokens or self.answer_tokens < 1:
            raise InputError(
                f"a piece has up to {self.piece_tokens} tokens, a set {self.max_tokens}, an answer "
                f"{self.answer_tokens}; each is 1 or more, and a set holds a piece"
            )


PLAIN = Study()
"""One to ten documents, two to four questions."""


def self_study(
    documents: Sequence[Document],
    generate: Generate,
    *,
    number: int,
    study: Study = PLAIN,
    name: str = "self-study",
    seed: int = 0,
    file: ExampleFile | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Source:
    """Let a model ask and answer about sets of documents.

    Sets are dealt from the documents in turn, so that each occurs about as often as any other; blank documents and
    copies are left out, long ones are cut. The same documents, seed and model give the same examples, and a smaller
    number their beginning.

    Args:
        number: Examples.
        name: Of the source; stands in ids and in the card of the bundle.
        file: What is there already is not made again; what is made is appended at once.
        progress: Told how many examples are done, of how many.

    Raises:
        InputError: No document holds text, or no set got an answer.
    """
    pieces, left_out = _pieces(documents, study)
    if not pieces:
        raise InputError(f"none of {len(documents)} documents holds any text to learn from; give a folder of texts")
    there = {example.id: example for example in file.examples} if file else {}
    writer = _Writer(generate, study.count, seed)
    examples: list[Example] = []
    for done, planned in enumerate(_planned(pieces, study, number, name, seed), start=1):
        example = there.get(planned.id) or _example(planned, generate, writer, study, name)
        if isinstance(example, Example):
            examples.append(example)
            if file and example.id not in there:
                file.append(example)
        else:
            left_out[example] += 1
        progress(done, number)
    if number and not examples:
        raise InputError(f"none of {number} sets of documents became an example: {dict(left_out)}")
    return Source(name, tuple(examples), left_out)


def study_settings(
    documents: Sequence[Document], *, model: str, study: Study = PLAIN, seed: int = 0
) -> Mapping[str, Any]:
    """Return what decides the examples of a run but their number: the settings of its `ExampleFile`.

    Args:
        model: The model's digest.
    """
    content = blake3()
    for document in documents:
        content.update(blake3(document.render().encode()).digest())
    shape = {name: getattr(study, name) for name in Study.__slots__ if name != "count"}
    return {
        "prompts": [PROMPT_VERSION, PROMPTS_VERSION],
        "model": model,
        "documents": content.hexdigest(length=16),
        "seed": seed,
        **shape,
    }


@dataclass(frozen=True, slots=True)
class _Planned:
    """A set before anything is asked.

    Attributes:
        targets: For each question the position of its document, and how often that was asked about before.
        by_rule: For each question whether it is an instruction.
    """

    id: str
    documents: tuple[Document, ...]
    targets: tuple[tuple[int, int], ...]
    by_rule: tuple[bool, ...]


class _Writer:
    """Has questions written about excerpts, each excerpt once."""

    def __init__(self, generate: Generate, count: Count, seed: int) -> None:
        self._generate, self._count, self._seed = generate, count, seed
        self._excerpts: dict[Document, list[Excerpt]] = {}
        self._written: dict[Excerpt, list[str]] = {}

    def question(self, document: Document, use: int) -> str:
        """Return a question about a document that was asked about `use` times before, or an empty text."""
        if document not in self._excerpts:
            found = excerpts(document, count=self._count)
            seeded(self._seed, "excerpts", document.text).shuffle(found)
            self._excerpts[document] = found
        found = self._excerpts[document]
        for attempt in range(min(TRIES, len(found))):
            questions = self._about(found[(use + attempt) % len(found)])
            if questions:
                return questions[(use // len(found)) % len(questions)]
        return ""

    def _about(self, excerpt: Excerpt) -> list[str]:
        if excerpt not in self._written:
            self._written[excerpt] = []
            for prompt in excerpt.prompts:
                written = self._generate([Document(excerpt.text)], prompt, max_new_tokens=WRITE_TOKENS)
                if found := clean_questions(written, f"{excerpt.heading} {excerpt.text}"):
                    self._written[excerpt] = found
                    break
        return self._written[excerpt]


def _pieces(documents: Sequence[Document], study: Study) -> tuple[list[Document], Counter[str]]:
    """Return the documents that sets are made of, and what became of the others."""
    left_out = Counter[str]()
    pieces: dict[str, Document] = {}
    for document in documents:
        if document.is_blank:
            left_out["blank documents"] += 1
            continue
        parts = chunked(document, study.piece_tokens, count=study.count)
        left_out["documents cut into pieces"] += len(parts) > 1
        for part in parts:
            left_out["copies of a document"] += part.render() in pieces
            pieces.setdefault(part.render(), part)
    return list(pieces.values()), +left_out


def _planned(pieces: Sequence[Document], study: Study, number: int, name: str, seed: int) -> Iterator[_Planned]:
    """Yield sets with what is to be asked; the model has no say in it, so that a run can go on where it was."""
    deal = seeded(seed, name)
    deck: list[int] = []
    uses = Counter[int]()
    for index in range(number):
        size, tokens = min(deal.randint(study.fewest, study.most), len(pieces)), 0
        chosen: list[int] = []
        while len(chosen) < size:
            place = next((place for place, at in enumerate(deck) if at not in chosen), None)
            if place is None:
                deck += deal.sample(range(len(pieces)), len(pieces))
                continue
            tokens += study.count(pieces[deck[place]].render())
            if chosen and tokens > study.max_tokens:
                break
            chosen.append(deck.pop(place))
        yield _asked(f"{name}:{seed}:{index}", [(at, pieces[at]) for at in chosen], uses, study, deal)


def _asked(
    example_id: str, chosen: Sequence[tuple[int, Document]], uses: Counter[int], study: Study, deal: random.Random
) -> _Planned:
    order = deal.sample(range(len(chosen)), len(chosen))
    targets: list[tuple[int, int]] = []
    for turn in range(deal.randint(study.fewest_questions, study.most_questions)):
        place = order[turn % len(order)]
        piece = chosen[place][0]
        targets.append((place, uses[piece]))
        uses[piece] += 1
    by_rule = tuple(deal.random() < BY_RULE for _ in targets)
    return _Planned(example_id, tuple(document for _, document in chosen), tuple(targets), by_rule)


def _example(planned: _Planned, generate: Generate, writer: _Writer, study: Study, name: str) -> Example | str:
    """Return the example of a set, or why there is none."""
    asked: dict[str, str] = {}
    try:
        for (place, use), by_rule in zip(planned.targets, planned.by_rule, strict=True):
            document = planned.documents[place]
            own = "" if by_rule else writer.question(document, use)
            rules = instructions(document)
            texts = [QUESTION.format(question=own)] if own else []
            texts += [rules[(use + more) % len(rules)] for more in range(len(rules))]
            text = next((text for text in texts if text not in asked), "")
            if text:
                asked[text] = generate(planned.documents, text, max_new_tokens=study.answer_tokens).strip()
    except ContextOverflow:
        return "sets longer than the context"
    questions = tuple(Question(text, answer) for text, answer in asked.items() if answer)
    if not questions:
        return "sets without an answer"
    return Example(planned.id, planned.documents, questions, study.system, name)
