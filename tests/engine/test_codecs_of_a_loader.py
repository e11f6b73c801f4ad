"""A loader writes the codec that it was told, takes what it was told, and never loses an entry over it."""

import pytest
import torch
from engines import engine_of, some_ids

from kvlink.engine.loader import Loader
from kvlink.models.runner import Runner
from kvlink.store import MemoryStore, Store

IDS = [some_ids(40), some_ids(33)]
LOSSY = ("half", "int8", "int4")


@pytest.fixture
def store() -> Store:
    return MemoryStore(budget_bytes=1 << 30)


def loader_of(store: Store, **options: object) -> Loader:
    base = engine_of()
    return Loader(runner=base.runner, store=store, identity=base.loader.identity, sink=base.loader.sink, **options)


def codecs_in(store: Store) -> list[list[str]]:
    return sorted(list(store.stat(name)) for name in store.names())


@pytest.mark.parametrize("codec", ["raw", *LOSSY])
def test_entries_are_written_in_the_codec_that_was_named_and_read_again(store: Store, codec: str) -> None:
    loader = loader_of(store, codec=codec)
    with loader.load(IDS) as fresh:
        assert [(one.source, one.codec) for one in fresh] == [("encoded", None)] * 2
    assert codecs_in(store) == [[codec]] * 2
    with loader.load(IDS) as read:
        assert [(one.source, one.codec) for one in read] == [("host", codec)] * 2
        for before, after in zip(fresh, read, strict=True):
            assert after.entry.keys.dtype == before.entry.keys.dtype
            off = (after.entry.keys - before.entry.keys).norm() / before.entry.keys.norm()
            assert (off == 0) == (codec == "raw")
            assert off < 0.1


def test_raw_is_written_and_nothing_else_is_taken_unless_a_codec_is_named(store: Store) -> None:
    list(loader_of(store, codec="int8").encode(IDS))
    loader = loader_of(store)
    assert not any(loader.has(ids) for ids in IDS)
    with loader.load(IDS) as loaded:
        assert {one.source for one in loaded} == {"encoded"}
    assert codecs_in(store) == [["raw", "int8"]] * 2


def test_what_is_exact_is_preferred(store: Store) -> None:
    for codec in ("int4", "raw"):
        list(loader_of(store, codec=codec).encode(IDS))
    with loader_of(store, codec="int4").load(IDS) as loaded:
        assert {one.codec for one in loaded} == {"raw"}


def test_the_order_of_what_is_accepted_decides(store: Store) -> None:
    for codec in ("int4", "int8", "raw"):
        list(loader_of(store, codec=codec).encode(IDS))
    with loader_of(store, codec="int4", accept=["half", "int4", "raw"]).load(IDS) as loaded:
        assert {one.codec for one in loaded} == {"int4"}


@pytest.mark.parametrize("codec", LOSSY)
def test_an_entry_that_has_no_place_in_a_codec_is_written_raw(
    store: Store, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(store, codec=codec)
    encode = Runner.encode

    def overflowing(self: Runner, *arguments: object, **options: object) -> object:
        made = encode(self, *arguments, **options)
        made[0].values[0, 0, 0, 0] = torch.inf
        return made

    monkeypatch.setattr(Runner, "encode", overflowing)
    list(loader.encode(IDS[:1]))
    assert codecs_in(store) == [["raw"]]
    with loader.load(IDS[:1]) as loaded:
        assert (loaded[0].source, loaded[0].codec) == ("host", "raw")
        assert loaded[0].entry.values[0, 0, 0, 0] == torch.inf


def test_what_would_be_written_must_be_accepted(store: Store) -> None:
    with pytest.raises(ValueError, match="written as int4 and read as raw, int8; accept int4, too"):
        loader_of(store, codec="int4", accept=["raw", "int8"])


@pytest.mark.parametrize("options", [{"codec": "zip"}, {"accept": ["raw", "zip"]}, {"accept": "raw"}])
def test_an_unknown_codec_is_refused_at_once(store: Store, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="there is no codec"):
        loader_of(store, **options)
