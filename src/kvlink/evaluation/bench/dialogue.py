"""A conversation about documents that change: what a turn takes by known beginnings, in full, with a prefix cache.

Documents stand in the turn that brings them. In every other turn one joins (in this turn), leaves the turn that brought
it, or moves to another place in the first turn. Every arm writes the same answers, token for token, so all compute the
same prompts; the arms in full are given their ids ready-made.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from statistics import fmean
from time import perf_counter
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor

from kvlink.core.document import Document
from kvlink.core.errors import InputError
from kvlink.core.layout import Prompt, Turn
from kvlink.engine.build import sessions_of
from kvlink.engine.engine import Engine
from kvlink.engine.loader import Ids
from kvlink.engine.request import Request
from kvlink.engine.session import Session, Sessions
from kvlink.engine.stream import greedy
from kvlink.evaluation.bench.prefix_cache import PrefixCache
from kvlink.evaluation.bench.reuse import loader_over
from kvlink.evaluation.bench.texts import TEXT, document_of, question_of
from kvlink.evaluation.timing import Samples
from kvlink.models.links import LinkTokens
from kvlink.models.prompt import Prompter
from kvlink.store.base import Store
from kvlink.store.memory import MemoryStore

Change = Literal["-", "join", "leave", "move"]
CHANGES: tuple[Change, ...] = ("join", "leave", "move")
ARMS = ("full", "full+prefix_cache", "shared")

QUESTION_TOKENS = 30
"""Tokens of each question."""

MEMORY_BYTES = 8 << 30
"""Budget of the store that the documents lie in."""


@dataclass(frozen=True, slots=True)
class Step:
    """One turn as it is asked.

    Attributes:
        change: What became of the documents.
        documents: For each turn up to this one its documents.
        question: The question of this turn.
    """

    change: Change
    documents: tuple[tuple[int, ...], ...]
    question: str


@dataclass(frozen=True, slots=True)
class Script:
    """A whole conversation: its documents, its turns, and the answers as ids."""

    texts: tuple[Document, ...]
    steps: tuple[Step, ...]
    answers: tuple[Ids, ...]

    @classmethod
    def write(
        cls, prompter: Prompter, *, documents: int, tokens: int, turns: int, answer: int, seed: int = 0
    ) -> "Script":
        """Make a conversation up.

        Args:
            documents: Documents of the first turn, at least two.
            tokens: Tokens of each document.
            answer: Tokens of each answer.
        """
        chooser = random.Random(seed)  # noqa: S311
        changes = cycle(CHANGES)
        places: list[list[int]] = [list(range(documents))]
        steps: list[Step] = []
        count = documents
        for number in range(turns):
            change: Change = next(changes) if number % 2 else "-"
            if change != "-" and len(places[0]) < 2:
                change = "join"  # too few are left to leave or to move
            if number:
                places.append([])
            if change == "join":
                places[-1].append(count)
                count += 1
            elif change == "leave":
                places[0].remove(chooser.choice(places[0]))
            elif change == "move":
                moved = chooser.choice(places[0][1:])
                places[0].remove(moved)
                places[0].insert(0, moved)
            question = question_of(prompter, QUESTION_TOKENS, skip=number)
            steps.append(Step(change, tuple(map(tuple, places)), question))
        texts = tuple(document_of(prompter, tokens, seed=seed + number) for number in range(count))
        words = prompter.plain_ids(TEXT) * (1 + answer)
        answers = tuple(words[number : number + answer] for number in range(turns))
        return cls(texts, tuple(steps), answers)

    def prompt(self, number: int, prompter: Prompter) -> Prompt:
        """Return the prompt of a turn: documents and the new question become ids, earlier turns' texts are ids."""
        step = self.steps[number]
        ids = {at: prompter.document_ids(self.texts[at]) for turn in step.documents for at in turn}
        *before, last = (tuple((ids[at],) for at in turn) for turn in step.documents)
        history = tuple(Turn(one, self._tail(at, prompter)) for at, one in enumerate(before))
        return Prompt(prompter.system_ids(None), last, prompter.tail_ids(step.question), history=history)

    def _tail(self, number: int, prompter: Prompter) -> Ids:
        return prompter.turn_ids(self.steps[number].question, self.answers[number])


@dataclass(slots=True)
class Asked:
    """What one turn took."""

    ttft_s: float
    response_s: float
    computed: int


class Arm(Protocol):
    """One way to hold the conversation."""

    def begin(self) -> None:
        """Forget the last one."""
        ...

    def ask(self, number: int) -> Asked:
        """Take a turn: the prompt, and the answer's tokens."""
        ...


class InFull:
    """Full attention: nothing is known from one turn to the next, or what stands before the first difference."""

    def __init__(self, engine: Engine, script: Script, *, keeps: bool) -> None:
        prompts = [script.prompt(number, engine.prompter) for number in range(len(script.steps))]
        self._ids = [prompt.ids(prompt.layout()).tolist() for prompt in prompts]
        self._answers = script.answers
        longest = max(len(ids) + len(answer) for ids, answer in zip(self._ids, self._answers, strict=True))
        self._cache = PrefixCache(engine.runner, capacity=longest)
        self._keeps = keeps

    def begin(self) -> None:
        """Forget the last conversation."""
        self._cache.forget()

    def ask(self, number: int) -> Asked:
        """Take a turn."""
        if not self._keeps:
            self._cache.forget()
        start = perf_counter()
        greedy(self._cache.prefill(self._ids[number]))
        ttft_s = perf_counter() - start
        for token in self._answers[number][:-1]:
            greedy(self._cache.append(token))
        return Asked(ttft_s, perf_counter() - start, self._cache.computed)


class Shared:
    """Documents where they lie, all of them resident, and known beginnings."""

    def __init__(self, engine: Engine, script: Script, *, store: Store, links: LinkTokens | None) -> None:
        self._script, self._prompter = script, engine.prompter
        self._sessions: Sessions = sessions_of(loader_over(engine, store), links=links, bundle="random")
        self._ids = [engine.prompter.document_ids(text) for text in script.texts]
        self.begin()

    def begin(self) -> None:
        """Forget the last conversation, and have the documents resident."""
        self._sessions.residency.hold(self._ids).release()
        self._sessions.beginnings.clear()

    def ask(self, number: int) -> Asked:
        """Take a turn, from its text to the end of the answer, what is kept for the next turn included."""
        answer = self._script.answers[number]
        start = perf_counter()
        request = Request(self._script.prompt(number, self._prompter), (), (), ())
        session = self._sessions.begin(request, room=len(answer))
        try:
            computed = len(session.left)
            self._sessions.advance([(session, computed)])
            greedy(_logits(session))
            ttft_s = perf_counter() - start
            for token in answer[:-1]:
                session.append(token, self._sessions.runner)
                self._sessions.advance([(session, 1)])
                greedy(_logits(session))
        finally:
            self._sessions.end(session)
        return Asked(ttft_s, perf_counter() - start, computed)


@dataclass(slots=True)
class Told:
    """All that was measured of one arm: for each turn its repeats."""

    turns: list[list[Asked]] = field(default_factory=list[list[Asked]])


def bench_dialogue(
    engine: Engine,
    *,
    documents: int,
    tokens: int,
    turns: int = 10,
    answer: int = 16,
    links: int = 6,
    repeats: int = 7,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Return one row per arm: seconds are the mean of a conversation's turns, the answer included; `ttft` without it.

    Args:
        engine: Gives the model; its store is not used.
        documents: Documents of the first turn.
        tokens: Tokens of each document.
        answer: Tokens of each answer.
        links: K, random link tokens.
        repeats: Counted conversations of each arm; arms take turns, turn by turn.
        progress: Called after each turn of each arm.

    Raises:
        InputError: The model's documents cannot be shared, or the conversation does not fit its context.
    """
    if engine.sessions is None:
        raise InputError("the documents of this model are copied into each prompt: no beginning but S is known")
    script = Script.write(engine.prompter, documents=documents, tokens=tokens, turns=turns, answer=answer, seed=seed)
    _require_room(engine, script, links, answer)
    tokens_of = LinkTokens.random(engine.runner.embedding, num_links=links) if links else None
    with MemoryStore(budget_bytes=MEMORY_BYTES) as store:
        arms: dict[str, Arm] = {
            "full": InFull(engine, script, keeps=False),
            "full+prefix_cache": InFull(engine, script, keeps=True),
            "shared": Shared(engine, script, store=store, links=tokens_of),
        }
        told = {name: Told([[] for _ in script.steps]) for name in arms}
        for round_ in range(1 + repeats):
            for arm in arms.values():
                arm.begin()
            for number in range(turns):
                for name, arm in arms.items():
                    asked = arm.ask(number)
                    if round_:
                        told[name].turns[number].append(asked)
                    progress()
    fields = {"documents": documents, "tokens": tokens, "answer_tokens": answer}
    rows = [
        _row(name, {**fields, "links": links if name == "shared" else 0}, one, script) for name, one in told.items()
    ]
    for row in rows:
        for rival, name in zip(rows, ("reduction", "reduction_to_prefix_cache"), strict=False):
            row[name] = 1 - row["median_s"] / rival["median_s"]
    return rows


def runs_of(turns: int, repeats: int) -> int:
    """Return how often `progress` is called."""
    return len(ARMS) * turns * (1 + repeats)


def _require_room(engine: Engine, script: Script, links: int, answer: int) -> None:
    prompts = [script.prompt(number, engine.prompter) for number in range(len(script.steps))]
    longest = max(len(prompt.layout(num_links=links)) for prompt in prompts) + answer
    if longest > engine.report.context:
        raise InputError(
            f"the conversation grows to {longest} tokens, the model takes {engine.report.context}: "
            "ask for fewer documents, shorter ones, or fewer turns"
        )


def _row(arm: str, fields: dict[str, Any], told: Told, script: Script) -> dict[str, Any]:
    """Return the row of one arm."""
    rounds = list(zip(*told.turns, strict=True))
    whole = Samples([fmean(asked.response_s for asked in round_) for round_ in rounds])
    first = Samples([fmean(asked.ttft_s for asked in round_) for round_ in rounds])
    each = [
        {
            "turn": number,
            "change": step.change,
            "computed_tokens": asked[0].computed,
            "ttft_s": float(np.median([one.ttft_s for one in asked])),
            "response_s": float(np.median([one.response_s for one in asked])),
        }
        for number, (step, asked) in enumerate(zip(script.steps, told.turns, strict=True), start=1)
    ]
    ttft = first.to_json()
    del ttft["split_s"]
    state = "-" if arm == "full" else "known_beginning"
    return {"arm": arm, "state": state, **fields, **whole.to_json(), "ttft": ttft, "turns": each}


def _logits(session: Session) -> Tensor:
    assert session.logits is not None, "all its rows are computed"
    return session.logits
