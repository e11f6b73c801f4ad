"""Spans, links, groups and masks, against the rule of the method written a second time with plain loops."""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvlink.core.layout import Kind, Layout, Lengths, Prompt, ReferenceOrder, Turn, reference_mask

claim = settings(derandomize=True, deadline=None)


class Parts(NamedTuple):
    """What a layout is built from."""

    system: int
    documents: list[list[int]]
    tail: int
    num_links: int = 0
    labels: list[int] | None = None
    history: list[Lengths] = []  # noqa: RUF012 (never changed)

    @property
    def turns(self) -> list[Lengths]:
        return [*self.history, Lengths(self.documents, self.tail, self.labels or [])]

    @property
    def all_documents(self) -> list[list[int]]:
        return [document for turn in self.turns for document in turn.documents]

    @property
    def layout(self) -> Layout:
        return Layout.build(**self._asdict())


@st.composite
def some_turn(draw: st.DrawFn, *, min_documents: int = 0, max_documents: int = 4) -> Lengths:
    segments = st.lists(st.integers(1, 4), min_size=1, max_size=3)
    documents = draw(st.lists(segments, min_size=min_documents, max_size=max_documents))
    labels = st.just([]) | st.lists(st.integers(0, 2), min_size=len(documents), max_size=len(documents))
    return Lengths(documents, draw(st.integers(1, 3)), draw(labels))


@st.composite
def some_parts(draw: st.DrawFn, *, min_documents: int = 0, max_links: int = 3, max_history: int = 2) -> Parts:
    *history, last = (
        *draw(st.lists(some_turn(max_documents=2), max_size=max_history)),
        draw(some_turn(min_documents=min_documents)),
    )
    return Parts(
        system=draw(st.integers(1, 4)),
        documents=last.documents,
        tail=last.tail,
        num_links=draw(st.integers(0, max_links)),
        labels=last.labels or None,
        history=history,
    )


class Token(NamedTuple):
    """One position of a prompt, spelled out by hand."""

    kind: str
    group: int = 0
    document: int | None = None
    level: int | None = None


def spelled(parts: Parts) -> list[Token]:
    tokens = [Token("system")] * parts.system
    group = 0
    document = 0
    for turn in parts.turns:
        for lengths, label in zip(turn.documents, turn.labels or [0] * len(turn.documents), strict=True):
            tokens += [Token("label", document=document)] * label
            for number, length in enumerate(lengths):
                group += 1
                tokens += [Token("segment", group, document)] * length
                level = 0 if number == len(lengths) - 1 else 1
                tokens += [Token("link", document=document, level=level)] * parts.num_links
            document += 1
        tokens += [Token("tail")] * turn.tail
    return tokens


def table(size: int, rule) -> torch.Tensor:
    return torch.tensor([[bool(rule(row, column)) for column in range(size)] for row in range(size)])


# Spans


@claim
@given(some_parts())
def test_spans_tile_the_prompt_from_zero_to_its_length_without_gaps(parts):
    layout = parts.layout
    assert layout.spans[0].start == 0
    assert all(left.stop == right.start for left, right in pairwise(layout.spans))
    assert all(len(span) == span.stop - span.start > 0 for span in layout.spans)
    assert len(layout) == layout.spans[-1].stop == sum(len(span) for span in layout.spans)


@claim
@given(some_parts())
def test_every_position_holds_what_the_prompt_spelled_by_hand_holds(parts):
    layout = parts.layout
    held = [Token(s.kind, s.group, s.document, s.level) for s in layout.spans for _ in range(len(s))]
    assert held == spelled(parts)
    assert layout.groups().tolist() == [token.group for token in held]


@claim
@given(some_parts(min_documents=2, max_history=0))
def test_the_next_document_starts_k_positions_behind_the_start_of_the_links(parts):
    layout = parts._replace(labels=None).layout
    segments = layout.of(Kind.SEGMENT)
    assert segments[0].start == len(layout.spans[0]) == parts.system
    for left, right in pairwise(segments):
        start_of_links = left.start + len(left)
        assert right.start == start_of_links + parts.num_links
    assert layout.of(Kind.TAIL)[0].start == segments[-1].stop + parts.num_links


@claim
@given(some_parts(min_documents=1, max_links=4))
def test_links_of_level_0_end_each_document_and_links_of_level_1_each_other_segment(parts):
    layout = parts.layout
    for document, lengths in enumerate(parts.all_documents):
        levels = [span.level for span in layout.of(Kind.LINK) if span.document == document]
        assert levels == ([1] * (len(lengths) - 1) + [0] if parts.num_links else [])
    assert all(len(span) == parts.num_links and span.group == 0 for span in layout.of(Kind.LINK))
    assert layout.num_link_tokens == parts.num_links * sum(map(len, parts.all_documents))


@claim
@given(some_parts(min_documents=1))
def test_a_label_stands_right_before_its_document_and_an_empty_one_takes_no_span(parts):
    layout = parts.layout
    lengths = [n for turn in parts.turns for n in turn.labels or [0] * len(turn.documents)]
    labels = {span.document: span for span in layout.of(Kind.LABEL)}
    assert {document: len(span) for document, span in labels.items()} == {i: n for i, n in enumerate(lengths) if n}
    for document, span in labels.items():
        first = next(s for s in layout.of(Kind.SEGMENT) if s.document == document)
        assert span.stop == first.start
        assert span.group == 0


@claim
@given(some_parts())
def test_segments_are_numbered_from_1_and_all_else_is_group_0(parts):
    layout = parts.layout
    segments = layout.of(Kind.SEGMENT)
    assert [span.group for span in segments] == list(range(1, len(segments) + 1))
    assert {span.group for span in layout.spans if span.kind is not Kind.SEGMENT} == {0}
    assert layout.num_document_tokens == sum(map(sum, parts.all_documents))


@claim
@given(some_parts(), st.integers(0, 60))
def test_request_rows_are_the_positions_of_group_0_from_after_on(parts, after):
    computed = [p for p, token in enumerate(spelled(parts)) if token.group == 0]
    layout = parts.layout
    assert layout.request_rows().tolist() == computed
    assert layout.request_rows(after=after).tolist() == [p for p in computed if p >= after]


def test_of_returns_spans_of_several_kinds_in_position_order():
    layout = Parts(2, [[3], [1, 1]], 1, num_links=1, labels=[0, 2]).layout
    kinds = [span.kind for span in layout.of(Kind.TAIL, Kind.LABEL, Kind.SYSTEM)]
    assert kinds == [Kind.SYSTEM, Kind.LABEL, Kind.TAIL]


@pytest.mark.parametrize(
    "change",
    [
        {"system": 0},
        {"tail": 0},
        {"tail": -1},
        {"num_links": -1},
        {"documents": [[2], []]},
        {"documents": [[2], [1, 0]]},
        {"documents": [[2], [-1]]},
        {"labels": [1]},
        {"labels": [1, 1, 1]},
        {"labels": [1, -1]},
        {"history": [Lengths([[2]], 1), Lengths([], 0)]},
        {"history": [Lengths([[2], []], 1)]},
        {"history": [Lengths([[2]], 1, [1, 1])]},
    ],
)
def test_an_empty_run_or_a_label_too_many_is_refused(change):
    parts = Parts(system=1, documents=[[2], [1, 3]], tail=1, num_links=2, labels=[1, 0])
    assert len(parts.layout) == 1 + 1 + 2 + 2 + 1 + 2 + 3 + 2 + 1
    with pytest.raises(ValueError, match=r"at least one token|zip\(\)"):
        _ = parts._replace(**change).layout


def test_a_refusal_shows_every_figure_that_was_asked_for():
    with pytest.raises(ValueError, match=r"S = 3, T = 0, K = 5, documents = \[\[7, 8\]\], labels = \[4\]"):
        Layout.build(system=3, documents=[(7, 8)], tail=0, num_links=5, labels=[4])


# The mask


def test_the_mask_is_the_drawing_of_the_method_letter_by_letter():
    drawing = """
        x
        x x
        . . x
        . . x x
        x x x x x
        x x x x x x
        . . . . . . x
        . . . . . . x x
        x x x x x x x x x
        x x x x x x x x x x
        x x x x x x x x x x x
    """
    mask = Layout.build(system=2, documents=[[2], [2]], tail=1, num_links=2).mask()
    drawn = [" ".join(".x"[int(seen)] for seen in row[: number + 1]) for number, row in enumerate(mask)]
    assert drawn == [line.strip() for line in drawing.strip().splitlines()]
    assert not mask.triu(1).any()


@claim
@given(some_parts())
def test_the_mask_is_the_rule_of_the_method_applied_pair_by_pair(parts):
    tokens = spelled(parts)

    def rule(row: int, column: int) -> bool:
        if column > row:
            return False
        return tokens[row].group == 0 or tokens[row].group == tokens[column].group

    assert torch.equal(parts.layout.mask(), table(len(tokens), rule))


@claim
@given(some_parts())
def test_a_request_side_row_sees_every_position_up_to_its_own(parts):
    layout = parts.layout
    mask = layout.mask()
    for row in layout.request_rows().tolist():
        assert mask[row].tolist() == [column <= row for column in range(len(layout))]


@claim
@given(some_parts(min_documents=1))
def test_a_segment_sees_its_own_beginning_and_nothing_else(parts):
    layout = parts.layout
    mask = layout.mask()
    for span in layout.of(Kind.SEGMENT):
        for row in range(span.start, span.stop):
            assert mask[row].nonzero().flatten().tolist() == list(range(span.start, row + 1))


@claim
@given(some_parts(min_documents=1))
def test_causality_alone_is_not_the_mask_as_soon_as_there_is_a_document(parts):
    layout = parts.layout
    causal = torch.ones(len(layout), len(layout), dtype=torch.bool).tril()
    assert not torch.equal(layout.mask(), causal)
    assert not (layout.mask() & ~causal).any()


@claim
@given(st.data())
def test_padding_neither_attends_nor_is_attended_wherever_it_stands(data):
    groups = data.draw(st.lists(st.integers(-1, 3), min_size=1, max_size=12))
    size = len(groups)
    positions = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    rows, ranks = torch.tensor(groups), torch.tensor(positions)
    mask = reference_mask(ranks, rows, ranks, rows)

    def rule(row: int, column: int) -> bool:
        if groups[row] == -1 or groups[column] == -1 or positions[column] > positions[row]:
            return False
        return groups[row] == 0 or groups[row] == groups[column]

    assert torch.equal(mask, table(size, rule))
    assert not mask[rows == -1].any()
    assert not mask[:, rows == -1].any()


@claim
@given(some_parts(), st.integers(1, 12))
def test_a_window_takes_away_what_lies_that_many_positions_back(parts, window):
    layout = parts.layout
    positions, groups = torch.arange(len(layout)), layout.groups()
    windowed = reference_mask(positions, groups, positions, groups, window=window)
    near = table(len(layout), lambda row, column: row - column < window)
    assert torch.equal(windowed, layout.mask() & near)


def test_a_window_counts_positions_and_not_columns():
    rows, columns = torch.tensor([10]), torch.tensor([0, 8, 9, 10, 11])
    mask = reference_mask(rows, torch.tensor([0]), columns, torch.zeros(5, dtype=torch.long), window=2)
    assert mask.tolist() == [[False, False, True, True, False]]


# The reference order


class Row(NamedTuple):
    """One row of a forward without reuse, spelled out by hand."""

    source: int
    position: int
    group: int


def spelled_out(parts: Parts, sink: int) -> list[Row]:
    shift = sink if parts.system < sink else 0
    tokens, rows = spelled(parts), []
    for position, token in enumerate(tokens):
        if token.kind == "segment" and tokens[position - 1].group != token.group:
            rows += [Row(-1 - j, shift + position - sink + j, token.group) for j in range(sink)]
        rows.append(Row(position, shift + position, token.group))
    return rows


@claim
@given(some_parts(), st.integers(0, 6))
def test_each_segment_stands_behind_its_own_copy_of_the_sink_prefix(parts, sink):
    order = ReferenceOrder.of(parts.layout, sink)
    spelt = spelled_out(parts, sink)
    assert order.source.tolist() == [row.source for row in spelt]
    assert order.positions.tolist() == [row.position for row in spelt]
    assert order.groups.tolist() == [row.group for row in spelt]


@claim
@given(some_parts(min_documents=1), st.integers(1, 6))
def test_copies_stand_at_the_positions_just_before_their_segment(parts, sink):
    layout = parts.layout
    order = ReferenceOrder.of(layout, sink)
    shift = sink if sink > parts.system else 0
    for span in layout.of(Kind.SEGMENT):
        copy = (order.source < 0) & (order.groups == span.group)
        assert order.source[copy].tolist() == [-1 - j for j in range(sink)]
        assert order.positions[copy].tolist() == [shift + p for p in range(span.start - sink, span.start)]


@claim
@given(some_parts(), st.integers(0, 6))
def test_all_positions_shift_by_the_sink_only_where_s_is_shorter_and_none_is_negative(parts, sink):
    order = ReferenceOrder.of(parts.layout, sink)
    own = order.source >= 0
    shifts = set((order.positions - order.source)[own].tolist())
    assert shifts == {sink if parts.system < sink else 0}
    assert order.positions.min() >= 0
    assert order.source[own].tolist() == list(range(len(parts.layout)))


@claim
@given(some_parts(), st.integers(0, 5), st.none() | st.integers(1, 12))
def test_the_mask_of_the_reference_order_is_the_rule_applied_pair_by_pair(parts, sink, window):
    rows = spelled_out(parts, sink)

    def rule(at: int, of: int) -> bool:
        row, column = rows[at], rows[of]
        if column.position > row.position or (window and row.position - column.position >= window):
            return False
        return column.source >= 0 if row.group == 0 else row.group == column.group

    assert torch.equal(ReferenceOrder.of(parts.layout, sink).mask(window=window), table(len(rows), rule))


@claim
@given(some_parts(min_documents=1), st.integers(1, 5))
def test_group_0_sees_no_copy_and_a_copy_sees_only_itself(parts, sink):
    order = ReferenceOrder.of(parts.layout, sink)
    mask, copy = order.mask(), order.source < 0
    assert not mask[order.groups == 0][:, copy].any()
    assert not mask[copy][:, ~copy].any()
    for row in copy.nonzero().flatten().tolist():
        seen = mask[row].nonzero().flatten()
        assert order.groups[seen].unique().tolist() == [order.groups[row]]
        assert order.source[seen].tolist() == list(range(-1, order.source[row] - 1, -1))


@claim
@given(some_parts(), st.integers(0, 5))
def test_without_its_copies_the_reference_order_has_the_mask_of_the_layout(parts, sink):
    order = ReferenceOrder.of(parts.layout, sink)
    own = order.source >= 0
    assert torch.equal(order.mask()[own][:, own], parts.layout.mask())


@claim
@given(some_parts(min_documents=1))
def test_one_document_behind_a_copy_of_s_sees_every_position_as_in_a_full_prefill(parts):
    document = sum(parts.documents[0])
    order = ReferenceOrder.of(Layout.build(system=parts.system, documents=[[document]], tail=parts.tail), parts.system)
    for row, seen in zip(order.positions.tolist(), order.mask(), strict=True):
        assert order.positions[seen].tolist() == list(range(row + 1))


# Ids


@st.composite
def some_prompts(draw: st.DrawFn) -> Prompt:
    parts = draw(some_parts())
    counter = iter(range(10_000))

    def fresh(length: int) -> tuple[int, ...]:
        return tuple(next(counter) for _ in range(length))

    *history, last = (
        Turn(
            documents=tuple(tuple(fresh(length) for length in lengths) for lengths in turn.documents),
            tail=fresh(turn.tail),
            labels=tuple(fresh(length) for length in turn.labels),
        )
        for turn in parts.turns
    )
    return Prompt(
        system=fresh(parts.system),
        documents=last.documents,
        tail=last.tail,
        labels=last.labels,
        history=tuple(history),
    )


@claim
@given(some_prompts(), st.integers(0, 3))
def test_ids_stand_where_the_layout_says_and_links_have_none(prompt, num_links):
    expected: list[int] = [*prompt.system]
    for turn in (*prompt.history, Turn(prompt.documents, prompt.tail, prompt.labels)):
        for number, document in enumerate(turn.documents):
            if turn.labels:
                expected += turn.labels[number]
            for segment in document[:-1]:
                expected += [*segment, *[-2] * num_links]
            expected += [*document[-1], *[-1] * num_links]
        expected += turn.tail
    layout = prompt.layout(num_links=num_links)
    ids = prompt.ids(layout)
    assert ids.dtype == torch.long
    assert ids.tolist() == expected
    assert len(ids) == len(layout)


@claim
@given(some_prompts(), st.integers(0, 3))
def test_a_prompt_and_its_layout_agree_on_every_count(prompt, num_links):
    layout = prompt.layout(num_links=num_links)
    assert prompt.num_tokens == len(layout) - layout.num_link_tokens
    assert layout.num_document_tokens == sum(map(len, prompt.segments))
    assert [len(span) for span in layout.of(Kind.SEGMENT)] == [len(segment) for segment in prompt.segments]
    assert layout.num_link_tokens == num_links * len(prompt.segments)


@claim
@given(some_prompts())
def test_segments_of_a_prompt_are_found_again_at_their_spans(prompt):
    assume(prompt.segments)
    layout = prompt.layout(num_links=2)
    ids = prompt.ids(layout)
    found = tuple(tuple(ids[span.start : span.stop].tolist()) for span in layout.of(Kind.SEGMENT))
    assert found == prompt.segments


def test_labels_for_some_documents_only_are_refused():
    prompt = Prompt(system=(1,), documents=(((2,),), ((3,),)), tail=(4,), labels=((5,),))
    with pytest.raises(ValueError, match="zip"):
        prompt.layout()


@claim
@given(some_prompts(), st.integers(0, 3))
def test_pieces_spell_the_prompt_and_join_ids_that_adjoin(prompt, num_links):
    pieces = prompt.pieces(num_links=num_links)
    spelt: list[int] = []
    for kind, value in pieces:
        spelt += {
            "ids": lambda value=value: value,
            "segment": lambda value=value: prompt.segments[value],
            "links": lambda value=value: [-1 - value] * num_links,
        }[kind]()
    assert spelt == prompt.ids(prompt.layout(num_links=num_links)).tolist()
    assert [value for kind, value in pieces if kind == "segment"] == list(range(len(prompt.segments)))
    assert sum(kind == "links" for kind, _ in pieces) == (len(prompt.segments) if num_links else 0)
    assert not any(left[0] == right[0] == "ids" for left, right in pairwise(pieces))


def test_pieces_of_a_conversation_read_as_its_drawing():
    prompt = Prompt((1, 2), (((7,), (8, 9)),), (3,), ((4,),), history=(Turn((), (5, 6)), Turn((((0,),),), (7, 7))))
    assert prompt.pieces(num_links=2) == (
        ("ids", (1, 2, 5, 6)),
        ("segment", 0),
        ("links", 0),
        ("ids", (7, 7, 4)),
        ("segment", 1),
        ("links", 1),
        ("segment", 2),
        ("links", 0),
        ("ids", (3,)),
    )


def test_a_longer_conversation_begins_with_the_pieces_of_the_shorter_one():
    """What a next turn has in common with the one before it, up to the ids that are new."""
    first = Prompt((1,), (((7, 8),),), (2, 3), ((9,),))
    second = Prompt((1,), (((5,),),), (4,), history=(Turn(first.documents, (2, 3, 60, 61), first.labels),))
    *known, (kind, tail) = first.pieces(num_links=1)
    *_, (_, longer) = second.pieces(num_links=1)[: len(known) + 1]
    assert second.pieces(num_links=1)[: len(known)] == tuple(known)
    assert (kind, longer[: len(tail)]) == ("ids", tail)
