"""Where everything stands in a prompt: spans, positions, link slots, groups and the reference mask.

    S | [label] D_1 L_1 | [label] D_2 L_2 | ... | T        token order = position order, links counted
    S | documents of turn 1 | T_1 A_1 N | documents of turn 2 | T_2 A_2 N | ... | documents of the last turn | T

In a conversation, documents stand first in the user's turn that brings them; an earlier turn goes on with its question,
its answer and what the chat template writes up to the next user's text. Only documents are not computed at request
time: whatever the number of turns, group 0 sees all before it.

A document is one or more segments. Behind its last segment stand K document links (level 0), behind each
other segment K segment links (level 1). Pure arithmetic: knows no ids, no text and no model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count, groupby
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Ids = tuple[int, ...]
Piece = tuple[Literal["ids"], Ids] | tuple[Literal["segment", "links"], int]
"""A part of a prompt: ids that a request brings, the index of a segment, or the level of a group of link tokens."""


class Kind(StrEnum):
    """What a span holds; `TAIL` is T, and all that stands behind the documents of an earlier turn."""

    SYSTEM = "system"
    LABEL = "label"
    SEGMENT = "segment"
    LINK = "link"
    TAIL = "tail"


@dataclass(frozen=True, slots=True)
class Span:
    """A run of positions `start <= p < stop`.

    Attributes:
        group: 0 sees everything before it; i > 0 sees only group i (the i-th segment of the prompt).
        document: Index of the document that the span belongs to, counted over all turns, or None.
        level: Level of the link tokens, or None when the span holds none.
    """

    kind: Kind
    start: int
    stop: int
    group: int = 0
    document: int | None = None
    level: int | None = None

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long the pieces of one turn are, in tokens.

    Attributes:
        documents: For each document the length of each of its segments.
        tail: All that stands behind the documents.
        labels: For each document the length of its label; empty when there are none.
    """

    documents: Sequence[Sequence[int]]
    tail: int
    labels: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """All spans of one prompt, in position order, without gaps."""

    spans: tuple[Span, ...]

    @classmethod
    def build(
        cls,
        *,
        system: int,
        documents: Sequence[Sequence[int]],
        tail: int,
        num_links: int = 0,
        labels: Sequence[int] | None = None,
        history: Sequence[Lengths] = (),
    ) -> "Layout":
        """Lay out a prompt.

        Args:
            system: Tokens of S; at least one.
            documents: For each document the number of tokens of each of its segments.
            tail: Tokens of T (question, end of turn, header of the answer); at least one.
            num_links: K, link tokens behind each segment; 0 for none.
            labels: For each document the number of label tokens before it, or None.
            history: Earlier turns of the conversation, first to last.

        Raises:
            ValueError: A run is empty, or labels and documents of a turn differ in number.
        """
        for turn in (turns := (*history, Lengths(documents, tail, labels or ()))):
            counts = (num_links, *turn.labels)
            if system < 1 or turn.tail < 1 or min(counts) < 0 or not all(d and min(d) > 0 for d in turn.documents):
                raise ValueError(
                    "S, T and every segment need at least one token, K and labels at least none; got "
                    f"S = {system}, T = {turn.tail}, K = {num_links}, "
                    f"documents = {[list(d) for d in turn.documents]}, labels = {list(turn.labels)}"
                )
        spans: list[Span] = []
        start = 0
        for kind, length, fields in _pieces(system, turns, num_links):
            if length:
                spans.append(Span(kind, start, start + length, **fields))
                start += length
        return cls(tuple(spans))

    def __len__(self) -> int:
        """Positions in the prompt, links counted."""
        return self.spans[-1].stop

    def of(self, *kinds: Kind) -> tuple[Span, ...]:
        """Return the spans of these kinds, in position order."""
        return tuple(span for span in self.spans if span.kind in kinds)

    @property
    def num_document_tokens(self) -> int:
        """Tokens that come from entries."""
        return sum(len(span) for span in self.of(Kind.SEGMENT))

    @property
    def num_link_tokens(self) -> int:
        """Link tokens in the prompt."""
        return sum(len(span) for span in self.of(Kind.LINK))

    @property
    def behind_documents(self) -> int | None:
        """First position behind the beginning of the first document, where a request-side adapter begins to act."""
        return next((span.start for span in self.of(Kind.SEGMENT)), None)

    def request_rows(self, *, after: int = 0) -> Int[Tensor, " rows"]:
        """Return the positions that are computed at request time (group 0), from position `after` on."""
        positions = torch.arange(len(self))
        return positions[(self.groups() == 0) & (positions >= after)]

    def groups(self) -> Int[Tensor, " tokens"]:
        """Return each position's group."""
        return torch.cat([torch.full((len(span),), span.group) for span in self.spans])

    def mask(self) -> Bool[Tensor, "tokens tokens"]:
        """Return who sees whom: True where the row may attend the column."""
        positions = torch.arange(len(self))
        return reference_mask(positions, self.groups(), positions, self.groups())


def _pieces(system: int, turns: Sequence[Lengths], num_links: int) -> Iterator[tuple[Kind, int, dict[str, int]]]:
    """Yield kind, length and fields of all that stands in a prompt, in position order, empty pieces counted."""
    yield Kind.SYSTEM, system, {}
    groups, indices = count(1), count()
    for turn in turns:
        for lengths, label in zip(turn.documents, turn.labels or [0] * len(turn.documents), strict=True):
            index = next(indices)
            yield Kind.LABEL, label, {"document": index}
            for number, length in enumerate(lengths, start=1):
                yield Kind.SEGMENT, length, {"group": next(groups), "document": index}
                yield Kind.LINK, num_links, {"document": index, "level": 0 if number == len(lengths) else 1}
        yield Kind.TAIL, turn.tail, {}


@dataclass(frozen=True, slots=True)
class Turn:
    """The ids of one turn of a conversation.

    Attributes:
        documents: For each document that the turn brings the ids of each of its segments.
        tail: All that stands behind them. In an earlier turn that is `T A N`: the question with the header of the
            answer, the answer as it was generated, and what leads to the next user's text.
        labels: For each document the ids of its label; empty when none are asked for.
    """

    documents: tuple[tuple[Ids, ...], ...]
    tail: Ids
    labels: tuple[Ids, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids of one prompt, piece by piece. Pieces are joined as ids, never as text.

    Attributes:
        system: Ids of S.
        documents: For each document of the last turn the ids of each of its segments.
        tail: Ids of T, of the last turn.
        labels: For each document of the last turn the ids of its label; empty when none are asked for.
        history: Earlier turns of the conversation, first to last.
    """

    system: Ids
    documents: tuple[tuple[Ids, ...], ...]
    tail: Ids
    labels: tuple[Ids, ...] = ()
    history: tuple[Turn, ...] = ()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns, the last one included."""
        return (*self.history, Turn(self.documents, self.tail, self.labels))

    @property
    def segments(self) -> tuple[Ids, ...]:
        """Ids of all segments of all turns, in order."""
        return tuple(segment for turn in self.turns for document in turn.documents for segment in document)

    @property
    def num_tokens(self) -> int:
        """Ids in the prompt; link tokens have none."""
        request_side = (run for turn in self.turns for run in (*turn.labels, turn.tail))
        return sum(map(len, (self.system, *self.segments, *request_side)))

    def layout(self, *, num_links: int = 0) -> Layout:
        """Lay the prompt out with `num_links` link tokens behind each segment."""
        *history, last = (
            Lengths([list(map(len, document)) for document in turn.documents], len(turn.tail), [*map(len, turn.labels)])
            for turn in self.turns
        )
        return Layout.build(
            system=len(self.system),
            documents=last.documents,
            tail=last.tail,
            num_links=num_links,
            labels=last.labels,
            history=history,
        )

    def ids(self, layout: Layout) -> Int[Tensor, " tokens"]:
        """Return the id at each position; `-1 - level` in the slots of link tokens, which have none."""
        left = {
            Kind.SYSTEM: iter((self.system,)),
            Kind.LABEL: iter(label for turn in self.turns for label in turn.labels if label),
            Kind.SEGMENT: iter(self.segments),
            Kind.TAIL: iter(turn.tail for turn in self.turns),
        }
        runs = (
            [-1 - (span.level or 0)] * len(span) if span.kind is Kind.LINK else next(left[span.kind])
            for span in layout.spans
        )
        return torch.tensor([token for run in runs for token in run], dtype=torch.long)

    def pieces(self, *, num_links: int = 0) -> tuple[Piece, ...]:
        """Spell the prompt as what decides its keys and values, in order; ids that adjoin are one piece."""
        layout = self.layout(num_links=num_links)
        ids, pieces = self.ids(layout).tolist(), list[Piece]()
        for span, run in groupby(layout.spans, lambda s: s if s.kind in (Kind.SEGMENT, Kind.LINK) else None):
            if span is None:
                request_side = tuple(run)
                pieces.append(("ids", tuple(ids[request_side[0].start : request_side[-1].stop])))
            elif span.kind is Kind.SEGMENT:
                pieces.append(("segment", span.group - 1))
            else:
                pieces.append(("links", span.level or 0))
        return tuple(pieces)


def reference_mask(
    row_positions: Int[Tensor, " rows"],
    row_groups: Int[Tensor, " rows"],
    column_positions: Int[Tensor, " columns"],
    column_groups: Int[Tensor, " columns"],
    *,
    window: int | None = None,
) -> Bool[Tensor, "rows columns"]:
    """Return the reference mask between rows and columns.

    A row attends a column that does not lie behind it, whose group is its own, or any group if the row's is 0;
    padding has group -1 and neither attends nor is attended. A sliding window counts positions, not columns:
    a row at p sees positions above p - window.
    """
    distance = row_positions[:, None] - column_positions[None, :]
    rows, columns = row_groups[:, None], column_groups[None, :]
    visible = (distance >= 0) & ((rows == 0) | (rows == columns)) & (rows >= 0) & (columns >= 0)
    return visible if window is None else visible & (distance < window)


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceOrder:
    """A prompt spelled out for one forward without any reuse: every document behind its own copy of the sink prefix.

    Attributes:
        source: For each row its position in the layout, or `-1 - j` for token j of a copy of the sink prefix.
        positions: Position ids, shifted by `len(sink)` when S is shorter than the sink prefix.
        groups: Groups; a copy is in the group of the segment behind it.
    """

    source: Int[Tensor, " rows"]
    positions: Int[Tensor, " rows"]
    groups: Int[Tensor, " rows"]

    @classmethod
    def of(cls, layout: Layout, sink: int) -> "ReferenceOrder":
        """Spell out `layout` for a sink prefix of `sink` tokens (0: none).

        The copies stand at the positions just before their segments and so overlap whatever stands there;
        nobody but their own segment sees them.
        """
        shift = sink if layout.spans[0].stop < sink else 0
        source, positions, groups = [], [], []
        for span in layout.spans:
            if span.kind is Kind.SEGMENT and sink:
                source.append(-1 - torch.arange(sink))
                positions.append(torch.arange(span.start - sink, span.start))
                groups.append(torch.full((sink,), span.group))
            source.append(torch.arange(span.start, span.stop))
            positions.append(torch.arange(span.start, span.stop))
            groups.append(torch.full((len(span),), span.group))
        return cls(torch.cat(source), torch.cat(positions) + shift, torch.cat(groups))

    def mask(self, *, window: int | None = None) -> Bool[Tensor, "rows rows"]:
        """Return who sees whom.

        Group 0 does not see copies, though they carry the segment's group: they are told apart by `source`.
        """
        visible = reference_mask(self.positions, self.groups, self.positions, self.groups, window=window)
        copies = (self.source < 0)[None, :] & (self.groups == 0)[:, None]
        return visible & ~copies
