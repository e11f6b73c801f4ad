"""Articles in passages as examples: several questions about one set of passages, and about one long document.

Each question is asked once. Documents are gold passages, neighbours from the same article, which are the harder to tell
apart, and strangers from other articles.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvlink.core.document import Document
from kvlink.core.errors import InputError
from kvlink.training.compose import PLAIN, Composition, DocumentSet, Source, filled, seeded
from kvlink.training.data import QUESTION, SYSTEM
from kvlink.training.example import Example, Question
from kvlink.training.pieces import joined
from kvlink.training.squad import Passage

Article = Sequence[Passage]

GOLD = 3
"""Passages at most that the questions of one example are about."""


class _Asked:
    """Questions that were not asked yet, by passage, in an order that is drawn."""

    def __init__(self, articles: Sequence[Article], draw: random.Random) -> None:
        self._left = {
            passage: draw.sample(passage.asked, len(passage.asked)) for article in articles for passage in article
        }

    def about(self, passages: Sequence[Passage]) -> int:
        """Return how many are left about some passages."""
        return sum(len(self._left[passage]) for passage in set(passages))

    def take(self, passages: Sequence[Passage], number: int) -> tuple[Question, ...]:
        """Take up to `number`, from the passages in turn."""
        taken: list[Question] = []
        while len(taken) < number and self.about(passages):
            for passage in passages:
                if self._left[passage] and len(taken) < number:
                    question, answer = self._left[passage].pop()
                    taken.append(Question(QUESTION.format(question=question), answer))
        return tuple(taken)


def question_sets(
    articles: Sequence[Article],
    *,
    name: str,
    questions: int = 4,
    composition: Composition = PLAIN,
    limit: int | None = None,
    seed: int = 0,
) -> Source:
    """Return examples of up to `questions` questions about one to three passages of an article, among distractors.

    Without a limit all questions are asked; a smaller limit gives the beginning of a larger one.

    Args:
        name: Of the source; stands in ids and in the card of the bundle.
        composition: Number of documents, order and budget.

    Raises:
        InputError: There is no passage, or no question about one.
    """
    articles = [article for article in articles if article]
    asked = _Asked(articles, seeded(seed, name))
    _require(articles, asked)
    examples: list[Example] = []
    short = 0
    groups = _groups(articles, asked, seeded(seed, name, "groups"), min(GOLD, composition.most))
    for number, (article, gold) in enumerate(groups):
        if limit is not None and len(examples) >= limit:
            break
        draw = seeded(seed, name, number)
        taken = asked.take(gold, questions)
        given = DocumentSet(tuple(_document(passage) for passage in gold), tuple(range(len(gold))))
        wanted = replace(composition, distractors=True).number(given, draw)
        near = len(gold) + draw.randint(0, max(0, wanted - len(gold)))
        given = filled(given, near, [_document(passage) for passage in article], draw)
        given = filled(given, wanted, _strangers(articles, article, 2 * wanted, draw), draw)
        given = composition.ordered(given, draw)
        if composition.refused(given):
            short += len(taken)
        else:
            system = composition.system(SYSTEM, draw)
            examples.append(Example(f"{name}:{seed}:{number}", given.documents, taken, system, name))
    left_out = {"questions whose passages are beyond the bounds": short} if short else {}
    return Source(name, tuple(examples), left_out)


def long_examples(
    articles: Sequence[Article],
    *,
    name: str,
    more_than: int = 1024,
    at_most: int = 2560,
    questions: int = 4,
    composition: Composition = PLAIN,
    limit: int | None = None,
    seed: int = 0,
) -> Source:
    """Return examples with one long document, which holds the answers, among short ones of other articles.

    The long document is consecutive passages of one article with blank lines between them. Each example has another
    stretch of an article, until there are no questions left; a smaller limit gives the beginning of a larger one.

    Args:
        more_than, at_most: Bounds of the long document, in tokens as the composition counts them.
        composition: Number of documents, the long one counted, order and budget. What is over the budget is left out
            among the short ones.

    Raises:
        InputError: There is no passage, or no question about one, or the bounds contradict each other or the budget.
    """
    if not 0 <= more_than < at_most <= composition.max_tokens:
        raise InputError(
            f"a long document has {more_than} to {at_most} tokens and an example {composition.max_tokens}; each has to "
            "be more than the one before"
        )
    articles = [article for article in articles if article]
    asked = _Asked(articles, seeded(seed, name))
    _require(articles, asked)
    examples: list[Example] = []
    composition = replace(composition, distractors=True)
    stretches = _stretches(articles, asked, seeded(seed, name, "stretches"), composition, more_than, at_most)
    for number, (article, passages) in enumerate(stretches):
        if limit is not None and len(examples) >= limit:
            break
        draw = seeded(seed, name, number)
        taken = asked.take(draw.sample(passages, len(passages)), questions)
        given = DocumentSet((_joined(passages),), (0,))
        wanted = composition.number(given, draw)
        given = filled(given, wanted, _strangers(articles, article, 2 * wanted, draw), draw)
        given = composition.ordered(given, draw)
        if not composition.refused(given):
            system = composition.system(SYSTEM, draw)
            examples.append(Example(f"{name}:{seed}:{number}", given.documents, taken, system, name))
    too_short = sum(composition.count(_joined(article).text) <= more_than for article in articles)
    return Source(name, tuple(examples), {f"articles of {more_than} tokens or fewer": too_short} if too_short else {})


def _require(articles: Sequence[Article], asked: _Asked) -> None:
    passages = [passage for article in articles for passage in article]
    if not asked.about(passages):
        raise InputError(
            f"{len(passages)} passages and no question about any of them; give passages and the questions that have "
            "their `pid`"
        )


def _groups(
    articles: Sequence[Article], asked: _Asked, draw: random.Random, most: int
) -> Iterator[tuple[Article, Sequence[Passage]]]:
    """Yield up to `most` passages of an article that something is left to ask about, all before any comes again."""
    while True:
        groups: list[tuple[Article, Sequence[Passage]]] = []
        for article in articles:
            left = list(dict.fromkeys(passage for passage in article if asked.about([passage])))
            draw.shuffle(left)
            while left:
                size = draw.randint(1, most)
                groups.append((article, left[:size]))
                left = left[size:]
        if not groups:
            return
        draw.shuffle(groups)
        yield from groups


def _stretches(
    articles: Sequence[Article],
    asked: _Asked,
    draw: random.Random,
    composition: Composition,
    more_than: int,
    at_most: int,
) -> Iterator[tuple[Article, Sequence[Passage]]]:
    """Yield consecutive passages whose joined text is within the bounds and about which something is left to ask."""
    sizes = {passage: composition.count(f"{passage.text}\n\n") for article in articles for passage in article}
    while True:
        found: list[tuple[Article, Sequence[Passage]]] = []
        for article in articles:
            first = draw.randrange(min(len(article), GOLD))
            while first < len(article):
                wanted = draw.randint(more_than + 1, at_most)
                last = first + 1
                size = sizes[article[first]]
                while last < len(article) and (size <= more_than or size + sizes[article[last]] <= wanted):
                    size += sizes[article[last]]
                    last += 1
                size = composition.count(_joined(article[first:last]).text)
                if more_than < size <= at_most and asked.about(article[first:last]):
                    found.append((article, article[first:last]))
                first = last
        if not found:
            return
        draw.shuffle(found)
        yield from (pair for pair in found if asked.about(pair[1]))


def _strangers(articles: Sequence[Article], own: Article, number: int, draw: random.Random) -> list[Document]:
    others = [article for article in articles if article is not own]
    return [_document(draw.choice(draw.choice(others))) for _ in range(number)] if others else []


def _document(passage: Passage) -> Document:
    return Document(passage.text, passage.title)


def _joined(passages: Sequence[Passage]) -> Document:
    return joined([passage.text for passage in passages], passages[0].title)
