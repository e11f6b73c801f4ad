"""From documents, and which of them hold the answers, to examples: chosen, filled up, cut, shuffled, within a budget.

Whatever is drawn is drawn from a generator that is handed over, seeded by a seed and an id: an example does not depend
on those before it. Knows rows and no tokenizer: lengths are estimated unless `count` is given.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from kvlink.core.document import Document
from kvlink.core.errors import InputError
from kvlink.training.data import Row
from kvlink.training.example import Example, Question
from kvlink.training.pieces import Count, approximate_tokens, chunked, turns


@dataclass(frozen=True, slots=True)
class Source:
    """The examples of one source.

    Attributes:
        left_out: What did not become an example, by reason.
    """

    name: str
    examples: tuple[Example, ...]
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class DocumentSet:
    """Documents in their order.

    Attributes:
        gold: Positions, ascending, of the documents that hold an answer: none of them is ever taken out.
    """

    documents: tuple[Document, ...]
    gold: tuple[int, ...]

    def picked(self, places: Sequence[int]) -> "DocumentSet":
        """Return the documents at `places`, in that order."""
        gold = set(self.gold)
        return DocumentSet(
            tuple(self.documents[at] for at in places), tuple(now for now, at in enumerate(places) if at in gold)
        )


def set_of_row(row: Row) -> DocumentSet:
    """Return a row's documents without the blank ones; all are gold if the row does not say which are."""
    gold = range(len(row.documents)) if row.gold is None else sorted(set(row.gold))
    given = DocumentSet(row.documents, tuple(gold))
    return given.picked([at for at, document in enumerate(row.documents) if not document.is_blank])


def shuffled(given: DocumentSet, draw: random.Random) -> DocumentSet:
    """Return the documents in an order that is drawn."""
    return given.picked(draw.sample(range(len(given.documents)), len(given.documents)))


def thinned(given: DocumentSet, number: int, draw: random.Random) -> DocumentSet:
    """Return `number` of the documents, in their order: the gold ones, were they more, and others that are drawn."""
    others = [at for at in range(len(given.documents)) if at not in given.gold]
    free = max(0, min(number - len(given.gold), len(others)))
    return given.picked(sorted([*given.gold, *draw.sample(others, free)]))


def within(given: DocumentSet, max_tokens: int, count: Count) -> DocumentSet:
    """Return the documents without those behind which, from the back and never gold, are too many for the budget."""
    sizes = [count(document.render()) for document in given.documents]
    kept = list(range(len(sizes)))
    for at in reversed(range(len(sizes))):
        if sum(sizes[place] for place in kept) <= max_tokens:
            break
        if at not in given.gold:
            kept.remove(at)
    return given.picked(kept)


def filled(given: DocumentSet, number: int, pool: Sequence[Document], draw: random.Random) -> DocumentSet:
    """Return the documents and, behind them, others from the pool until there are `number`; no text stands twice."""
    texts = {document.text for document in given.documents}
    missing = max(0, number - len(given.documents))
    more: list[Document] = []
    for document in draw.sample(pool, min(len(pool), 2 * (missing + len(texts)))) if missing else ():
        if len(more) < missing and document.text not in texts and not document.is_blank:
            more.append(document)
            texts.add(document.text)
    return DocumentSet((*given.documents, *more), given.gold)


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """How the documents of an example are put together.

    Attributes:
        fewest, most: Bounds of the number of documents, which is drawn; never below that of the gold ones. An example
            with fewer than that, and no distractors to be had, keeps what it has.
        max_tokens: Of all documents together.
        shuffle: Whether their order is drawn. A summary's documents keep theirs.
        distractors: Whether documents of other examples fill up to the number that was drawn.
        chunk_tokens: A summary's documents are cut into chunks of up to that many tokens, each a document (longer
            ones where they would be more than `most`); None leaves them whole.
        dialogue_turns: Whether the turns of a dialogue are documents instead.
        no_system: Share of examples without a system prompt, so that links do not learn one beginning by heart.
        count: Tokens of a text.
    """

    fewest: int = 1
    most: int = 20
    max_tokens: int = 3072
    shuffle: bool = True
    distractors: bool = False
    chunk_tokens: int | None = 256
    dialogue_turns: bool = False
    no_system: float = 0.15
    count: Count = approximate_tokens

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.most:
            raise InputError(f"{self.fewest} to {self.most} documents are asked for; fewest is 1 or more, most no less")
        if self.max_tokens < 1 or (self.chunk_tokens is not None and self.chunk_tokens < 1):
            raise InputError(f"max_tokens is {self.max_tokens}, chunk_tokens {self.chunk_tokens}; both are 1 or more")
        if not 0 <= self.no_system <= 1:
            raise InputError(f"no_system is {self.no_system}; it is a share between 0 and 1")

    def number(self, given: DocumentSet, draw: random.Random) -> int:
        """Return how many documents are wanted: between the bounds, no fewer than gold ones, and no more than are."""
        most = self.most if self.distractors else min(self.most, len(given.documents))
        fewest = max(min(self.fewest, most), len(given.gold))
        return draw.randint(fewest, max(fewest, most))

    def composed(self, given: DocumentSet, draw: random.Random, pool: Sequence[Document] = ()) -> DocumentSet:
        """Return as many documents as are drawn, filled up from the pool if distractors are wanted, then ordered."""
        number = self.number(given, draw)
        chosen = thinned(given, number, draw)
        return self.ordered(filled(chosen, number, pool, draw) if self.distractors else chosen, draw)

    def ordered(self, given: DocumentSet, draw: random.Random) -> DocumentSet:
        """Return the documents shuffled if that is wanted, and within the budget as far as gold ones allow."""
        return within(shuffled(given, draw) if self.shuffle else given, self.max_tokens, self.count)

    def cut(self, given: DocumentSet) -> DocumentSet:
        """Return a summary's documents in chunks, or a dialogue's turns; each of them is gold."""
        parts: list[Document] = []
        single = len(given.documents) == 1 and self.dialogue_turns
        spoken = turns(given.documents[0], most=self.most) if single else ()
        if spoken or self.chunk_tokens is None:
            parts = list(spoken or given.documents)
        else:
            size = self.chunk_tokens
            while len(parts := self._chunks(given, size)) > max(self.most, len(given.documents)):
                size += max(1, size // 4)
        return DocumentSet(tuple(parts), tuple(range(len(parts))))

    def _chunks(self, given: DocumentSet, size: int) -> list[Document]:
        return [part for document in given.documents for part in chunked(document, size, count=self.count)]

    def refused(self, given: DocumentSet) -> str:
        """Return why no example can be made of these documents, or an empty text."""
        if not given.documents:
            return "no documents with text"
        if len(given.documents) > self.most:
            return f"more than {self.most} documents that have to stay"
        if sum(self.count(document.render()) for document in given.documents) > self.max_tokens:
            return f"more than {self.max_tokens} tokens that have to stay"
        return ""

    def system(self, asked: str, draw: random.Random) -> str | None:
        """Return the system prompt, or None for some examples."""
        return None if draw.random() < self.no_system else asked


PLAIN = Composition()
"""One to twenty of the documents that an example has, shuffled."""


def row_examples(
    rows: Iterable[Row],
    *,
    name: str,
    composition: Composition = PLAIN,
    limit: int | None = None,
    seed: int = 0,
) -> Source:
    """Return one example per row that has an answer, in an order that is drawn: a smaller limit gives its beginning.

    Distractors come from the other rows. Hold examples out before (see `part`), or none will be apart.

    Args:
        name: Of the source; stands in ids and in the card of the bundle.
        limit: Examples at most.
        seed: Decides, with a row's id, all that is drawn for it.
    """
    left_out = Counter[str]()
    given: dict[str, Row] = {}
    for row in rows:
        left_out["ids that come again"] += row.id in given
        given.setdefault(row.id, row)
    ranked = sorted(given.values(), key=lambda row: rank(seed, row.id))
    pool = [document for row in ranked for document in row.documents] if composition.distractors else []
    examples: list[Example] = []
    for row in ranked:
        if limit is not None and len(examples) >= limit:
            break
        made = _of_row(row, f"{name}:{row.id}", name, composition, pool, seeded(seed, name, row.id))
        if isinstance(made, Example):
            examples.append(made)
        else:
            left_out[made] += 1
    return Source(name, tuple(examples), +left_out)


def _of_row(
    row: Row, example_id: str, name: str, composition: Composition, pool: Sequence[Document], draw: random.Random
) -> Example | str:
    """Return the example of a row, or why there is none."""
    if not row.answers or not row.answers[0].strip():
        return "no answer"
    given = set_of_row(row)
    if not given.documents:
        return "no documents with text"
    given = composition.cut(given) if row.task == "summarization" else composition.composed(given, draw, pool)
    if reason := composition.refused(given):
        return reason
    system = composition.system(row.system, draw)
    return Example(example_id, given.documents, (Question(row.text, row.answers[0]),), system, name)


def seeded(seed: int, *names: object) -> random.Random:
    """Return a generator of its own for one thing, whatever was drawn for others."""
    return random.Random(_bytes(":".join(map(str, (seed, *names)))))  # noqa: S311 (a draw, no secret)


def rank(seed: int, name: str) -> bytes:
    """Return what orders things by chance and the same way on every machine."""
    return blake3(_bytes(f"{seed}:{name}")).digest()


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
