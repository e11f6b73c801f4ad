"""How segments are grouped for encoding: each once, a batch full and with little padding."""

import pytest
from engines import TEXTS, engine_of, some_ids
from hypothesis import given
from hypothesis import strategies as st

from kvlink.engine.batches import BATCH_TOKENS, MAX_PADDING, batches
from tiny_models import largest

SEGMENTS = st.lists(st.integers(1, 60).map(lambda n: tuple(range(n))), max_size=40)


@given(segments=SEGMENTS, batch_tokens=st.integers(1, 500))
def test_every_segment_is_in_one_batch_once(segments: list[tuple[int, ...]], batch_tokens: int) -> None:
    found = [ids for batch in batches(segments, batch_tokens=batch_tokens) for ids in batch]
    assert sorted(found) == sorted(segments)


@given(segments=SEGMENTS, batch_tokens=st.integers(1, 500))
def test_no_batch_is_empty(segments: list[tuple[int, ...]], batch_tokens: int) -> None:
    assert all(batches(segments, batch_tokens=batch_tokens))


@given(segments=SEGMENTS, batch_tokens=st.integers(1, 500))
def test_a_batch_of_several_holds_no_more_tokens_than_allowed_padding_included(
    segments: list[tuple[int, ...]], batch_tokens: int
) -> None:
    for batch in batches(segments, batch_tokens=batch_tokens):
        assert len(batch) == 1 or len(batch) * max(map(len, batch)) <= batch_tokens


@given(segments=SEGMENTS, batch_tokens=st.integers(1, 500))
def test_a_batch_is_padded_by_no_more_than_its_share(segments: list[tuple[int, ...]], batch_tokens: int) -> None:
    for batch in batches(segments, batch_tokens=batch_tokens):
        padded = len(batch) * max(map(len, batch))
        assert padded - sum(map(len, batch)) <= MAX_PADDING * padded + 1e-9


@given(segments=SEGMENTS)
def test_segments_come_longest_first(segments: list[tuple[int, ...]]) -> None:
    found = [len(ids) for batch in batches(segments) for ids in batch]
    assert found == sorted(found, reverse=True)


def test_segments_of_one_length_fill_a_batch() -> None:
    segments = [(seed,) * (BATCH_TOKENS // 8) for seed in range(16)]
    assert [len(batch) for batch in batches(segments)] == [8, 8]


def test_no_segments_make_no_batches() -> None:
    assert batches([]) == []


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_padding_changes_no_entry(family: str) -> None:
    engine = engine_of(family)
    segments = [some_ids(length) for length in (40, 39, 37)]
    assert len(batches(segments)) == 1
    together = {loaded.entry.token_ids: loaded.entry for loaded in engine.loader.encode(segments)}
    for ids in segments:
        (alone,) = engine.runner.encode([ids], prefix=engine.loader.sink)
        assert largest(together[ids].keys - alone.keys) < 1e-10
        assert largest(together[ids].values - alone.values) < 1e-10


def test_loading_keeps_the_order_that_was_asked_for() -> None:
    engine = engine_of()
    segments = [some_ids(length) for length in (5, 40, 12, 5)]
    with engine.loader.load(segments) as loaded:
        assert [one.entry.token_ids for one in loaded] == segments


def test_a_mixture_of_stored_and_new_segments_keeps_its_order() -> None:
    engine = engine_of()
    engine.encode(TEXTS[1:2])
    answer = engine.generate(TEXTS, "why?", max_new_tokens=1)
    assert [row.source for row in answer.usage.documents] == ["encoded", "host", "encoded"]
