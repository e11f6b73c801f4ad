"""A lookup over several documents, and a tiny model that was trained to do it by full attention alone.

    Ann has a lamp.  |  It is red.  |  Leo has a coin.  |  It is blue.        thing of Ann -> lamp, colour of Ann -> red

Things stand beside their owner. Whose a colour is, only the document before tells: read alone, it is nobody's.
The model (`scripts/train_lookup.py`) has two layers, too few to find that out from the question.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from kvlink.core.document import Document
from kvlink.core.layout import Prompt
from kvlink.core.scores import agreement, kl
from kvlink.models.assembler import Assembler
from kvlink.models.checkpoint import load
from kvlink.models.prompt import Prompter
from kvlink.models.runner import Runner
from kvlink.training.data import Row
from kvlink.training.example import Example, Question
from tiny_models import Spoil, reuse_logits

FOLDER = Path(__file__).parent / "fixtures" / "lookup"
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hal", "Ida", "Jon", "Kim", "Leo")
THINGS = ("lamp", "rope", "boat", "drum", "coin", "bell", "kite", "vase")
COLOURS = ("red", "blue", "green", "white", "black", "brown", "grey", "pink")


@dataclass(frozen=True, slots=True)
class Owner:
    """A name with what two documents say about it."""

    name: str
    thing: str
    colour: str

    @property
    def texts(self) -> tuple[str, str]:
        """The documents, which stand one behind the other."""
        return f"{self.name} has a {self.thing}.", f"It is {self.colour}."

    @property
    def questions(self) -> tuple[Question, Question]:
        """One that the first document answers alone, one that takes both."""
        return Question(f"thing of {self.name}", self.thing), Question(f"colour of {self.name}", self.colour)


def owners(draw: random.Random, count: int) -> list[Owner]:
    """Draw owners; no two share a name, a thing or a colour."""
    drawn = [draw.sample(some, count) for some in (NAMES, THINGS, COLOURS)]
    return [Owner(*three) for three in zip(*drawn, strict=True)]


def examples(count: int, *, seed: int) -> list[Example]:
    """Draw examples of 2 to 4 owners, 4 to 8 documents, each with two questions about one of the owners.

    Other seeds give other examples: there are 10^5 of two owners, 10^10 of four.
    """
    draw, made = random.Random(seed), []
    for number in range(count):
        some = owners(draw, draw.randint(2, 4))
        documents = tuple(Document(text) for owner in some for text in owner.texts)
        made.append(Example(f"{seed}-{number}", documents, draw.choice(some).questions, source="lookup"))
    return made


def rows(count: int, *, seed: int) -> list[Row]:
    """Return the same as rows, one per example in turn of its questions, worded as in every evaluation."""
    made: list[Row] = []
    for number, example in enumerate(examples(count, seed=seed)):
        asked = example.questions[number % 2]
        named = example.questions[0].text.removeprefix("thing of ")
        first = next(at for at, document in enumerate(example.documents) if document.text.startswith(named))
        gold = (first, first + 1)[: 1 + number % 2]
        made.append(Row(example.id, asked.text, example.documents, (asked.answer,), gold=gold))
    return made


@cache
def lookup_model() -> tuple[Runner, Prompter]:
    """Load the model, in float32, and what turns text into its ids; shared, so nobody changes them."""
    checkpoint = load(FOLDER, dtype=torch.float32, device="cpu")
    return Runner(checkpoint.model), Prompter(tokenizer=checkpoint.tokenizer, end_ids=checkpoint.end_ids)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How reuse answers, against full attention on the same ids; means over all questions.

    Attributes:
        full, alone, joint: Share of right answers by full attention; by reuse, of questions that one document
            answers, and of those that take two.
        kl, agreement: Over the answer's tokens, its end included.
    """

    full: float
    alone: float
    joint: float
    kl: float
    agreement: float

    @property
    def accuracy(self) -> float:
        """Share of right answers by reuse."""
        return (self.alone + self.joint) / 2


def outcome(assembler: Assembler, some: Sequence[Example], *, spoil: Spoil | None = None) -> Outcome:
    """Answer all questions by full attention and by reuse behind the sink prefix `header`.

    Args:
        assembler: Of `lookup_model`, with link tokens or without.
        some: Examples as `examples` draws them.
        spoil: What a negative control does to the assembled buffer.
    """
    _, prompter = lookup_model()
    plain, sink = Assembler(assembler.runner), prompter.sink_ids("header")
    found: list[list[float]] = []
    for example in some:
        system = prompter.system_ids(example.system)
        documents = tuple((prompter.document_ids(document),) for document in example.documents)
        entries = assembler.runner.encode([ids for (ids,) in documents], prefix=assembler.runner.prefix(sink))
        right: list[float] = []
        for question in example.questions:
            answer = prompter.answer_ids(question.answer)
            prompt = Prompt(system, documents, (*prompter.tail_ids(question.text), *answer[:-1]))
            cache, wanted = plain.prefill_plain(prompt, logits_to_keep=len(answer))
            plain.release(cache)
            logits = reuse_logits(assembler, prompt, entries=entries, spoil=spoil)[-len(answer) :]
            right += [float(one[0].argmax() == answer[0]) for one in (wanted, logits)]
            right += [kl(wanted, logits), agreement(wanted, logits)]
        found.append(right)
    full, alone, distance, same, full_joint, joint, distance_joint, same_joint = torch.tensor(found).mean(0).tolist()
    return Outcome(
        full=(full + full_joint) / 2,
        alone=alone,
        joint=joint,
        kl=(distance + distance_joint) / 2,
        agreement=(same + same_joint) / 2,
    )
