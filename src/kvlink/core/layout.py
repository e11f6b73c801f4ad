"""Where everything stands in a prompt: spans, positions, link slots, groups and the reference mask.

    S | [label] D_1 L_1 | [label] D_2 L_2 | ... | T        token order = position order, links counted

A document is one or more segments. Behind its last segment stand K document links (level 0), behind each
other segment K segment links (level 1). Pure arithmetic: knows no ids, no text and no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Kind(StrEnum):
    """What a span holds."""

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
        document: Index of the document that the span belongs to, or None.
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
    ) -> "Layout":
        """Lay out a prompt.

        Args:
            system: Tokens of S; at least one.
            documents: For each document the number of tokens of each of its segments.
            tail: Tokens of T (question, end of turn, header of the answer); at least one.
            num_links: K, link tokens behind each segment; 0 for none.
            labels: For each document the number of label tokens before it, or None.

        Raises:
            ValueError: A run is empty, or labels and documents differ in number.
        """
        counts = (num_links, *(labels or ()))
        if system < 1 or tail < 1 or min(counts) < 0 or not all(d and min(d) > 0 for d in documents):
            raise ValueError(
                f"S, T and every segment need at least one token, K and labels at least none; got S = {system}, "
                f"T = {tail}, K = {num_links}, documents = {[list(d) for d in documents]}, labels = {labels}"
            )
        spans: list[Span] = []

        def place(kind: Kind, length: int, **fields: int | None) -> None:
            start = spans[-1].stop if spans else 0
            if length:
                spans.append(Span(kind, start, start + length, **fields))  # pyright: ignore[reportArgumentType]

        place(Kind.SYSTEM, system)
        group = 0
        for index, (lengths, label) in enumerate(zip(documents, labels or [0] * len(documents), strict=True)):
            place(Kind.LABEL, label, document=index)
            for number, length in enumerate(lengths, start=1):
                group += 1
                place(Kind.SEGMENT, length, group=group, document=index)
                place(Kind.LINK, num_links, document=index, level=0 if number == len(lengths) else 1)
        place(Kind.TAIL, tail)
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


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids of one prompt, piece by piece. Pieces are joined as ids, never as text.

    Attributes:
        system: Ids of S.
        documents: For each document the ids of each of its segments.
        tail: Ids of T.
        labels: For each document the ids of its label; empty when none are asked for.
    """

    system: tuple[int, ...]
    documents: tuple[tuple[tuple[int, ...], ...], ...]
    tail: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...] = ()

    @property
    def segments(self) -> tuple[tuple[int, ...], ...]:
        """Ids of all segments, in order."""
        return tuple(segment for document in self.documents for segment in document)

    @property
    def num_tokens(self) -> int:
        """Ids in the prompt; link tokens have none."""
        return len(self.system) + len(self.tail) + sum(map(len, (*self.segments, *self.labels)))

    def layout(self, *, num_links: int = 0) -> Layout:
        """Lay the prompt out with `num_links` link tokens behind each segment."""
        return Layout.build(
            system=len(self.system),
            documents=[[len(segment) for segment in document] for document in self.documents],
            tail=len(self.tail),
            num_links=num_links,
            labels=[len(label) for label in self.labels] or None,
        )

    def ids(self, layout: Layout) -> Int[Tensor, " tokens"]:
        """Return the id at each position; `-1 - level` in the slots of link tokens, which have none."""
        segments, labels = iter(self.segments), iter(label for label in self.labels if label)
        runs: list[Sequence[int]] = []
        for span in layout.spans:
            match span.kind:
                case Kind.SYSTEM:
                    runs.append(self.system)
                case Kind.LABEL:
                    runs.append(next(labels))
                case Kind.SEGMENT:
                    runs.append(next(segments))
                case Kind.LINK:
                    runs.append([-1 - (span.level or 0)] * len(span))
                case Kind.TAIL:  # pragma: no branch
                    runs.append(self.tail)
        return torch.tensor([token for run in runs for token in run], dtype=torch.long)


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
