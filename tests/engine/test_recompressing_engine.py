"""An engine whose model's gate has passed codecs keeps more documents in a full store; any other changes nothing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engines import QUESTION, loaded, logits_by_reuse, name_of, shared_model
from libraries import edited, text_of

from kvlink import Engine
from kvlink.engine.gate import Verdict, keep_verdict
from kvlink.engine.library import Library
from kvlink.engine.rates import Rates
from kvlink.store import DiskStore, MemoryStore, Store, TieredStore
from kvlink.store.recompressing import RecompressingStats, RecompressingStore

TEXTS = [text_of(12, seed=seed) for seed in range(14)]
PASSED = Verdict(passed=True, agreement=0.995, threshold=0.99, kl=0.001, rows=30, tokens=900, figures="c" * 16)
"""What `store calibrate` keeps; what it says of a random model would be chance."""


@pytest.fixture(scope="module")
def digest() -> str:
    with loaded() as engine:
        return engine.loader.identity.model


@pytest.fixture(scope="module")
def size() -> int:
    """Bytes of the largest raw object of these texts."""
    with loaded() as engine:
        engine.encode(TEXTS)
        return max(engine.store.stat(name)["raw"].num_bytes for name in engine.store.names())


@pytest.fixture(params=["memory", "disk"])
def small(request: pytest.FixtureRequest, tmp_path: Path, size: int) -> Callable[[], Store]:
    """A constructor of stores with room for eight raw objects."""
    if request.param == "memory":
        return lambda: MemoryStore(budget_bytes=8 * size)
    return lambda: DiskStore(tmp_path / "store", budget_bytes=8 * size)


def passing(store: Store, digest: str, *codecs: str) -> Store:
    for codec in codecs:
        keep_verdict(store, digest, codec, PASSED)
    return store


def settled(store: Store) -> RecompressingStats:
    assert isinstance(store, RecompressingStore)
    store.settle()
    return store.stats()


def encode_in_turn(engine: Engine, *texts: str) -> None:
    for text in texts:
        engine.encode([text])
        if isinstance(engine.store, RecompressingStore):
            engine.store.settle()


def codecs(engine: Engine, *texts: str) -> list[list[str]]:
    return [list(engine.store.stat(name_of(engine, text))) for text in texts]


def test_a_small_store_keeps_all_documents_and_the_least_used_become_smaller(
    small: Callable[[], Store], digest: str
) -> None:
    with loaded(store=passing(small(), digest, "int8")) as engine:
        encode_in_turn(engine, *TEXTS)
        stats = settled(engine.store)
        assert (stats.evictions, stats.used_bytes <= stats.budget_bytes) == (0, True)
        found = codecs(engine, *TEXTS)
        number = found.count(["int8"])
        assert found == [["int8"]] * number + [["raw"]] * (len(TEXTS) - number)
        assert 0 < number < len(TEXTS)
        assert (stats.recompression.written, stats.recompression.failures) == ({"int8": number}, 0)


def test_what_was_recompressed_still_hits_and_the_usage_names_its_codec(
    small: Callable[[], Store], digest: str
) -> None:
    with loaded(store=passing(small(), digest, "int8")) as engine:
        encode_in_turn(engine, *TEXTS)
        held = codecs(engine, *TEXTS)
        for text, (codec,) in zip(TEXTS, held, strict=True):
            engine.loader.rates = Rates()  # otherwise a slow load has the next one encoded
            (row,) = engine.generate([text], QUESTION, max_new_tokens=1).usage.documents
            assert (row.source, row.codec) == (engine.store.source, codec)
        rows = engine.encode(TEXTS)
        assert [(row.codec, row.reason) for row in rows] == [(codec, "already in the store") for (codec,) in held]


def test_answers_from_recompressed_documents_are_nearly_those_from_raw_ones(
    small: Callable[[], Store], digest: str
) -> None:
    with loaded(store=passing(small(), digest, "int8")) as engine, loaded() as raw:
        encode_in_turn(engine, *TEXTS)
        assert codecs(engine, TEXTS[0], TEXTS[-1]) == [["int8"], ["raw"]]
        first, last, other = ([text] for text in (TEXTS[0], TEXTS[-1], TEXTS[1]))
        wanted = logits_by_reuse(raw, first)
        assert 0 < (logits_by_reuse(engine, first) - wanted).norm() / wanted.norm() < 0.03
        assert (logits_by_reuse(raw, other) - wanted).norm() / wanted.norm() > 0.1
        assert logits_by_reuse(engine, last).equal(logits_by_reuse(raw, last))


def test_without_a_verdict_nothing_is_recompressed_and_the_least_used_are_dropped(small: Callable[[], Store]) -> None:
    store = small()
    with loaded(store=store) as engine:
        assert engine.store is store
        encode_in_turn(engine, *TEXTS)
        assert engine.store.stats().evictions > 0
        assert {codec for found in codecs(engine, *TEXTS) for codec in found} == {"raw"}


def test_a_verdict_that_failed_or_is_of_another_model_changes_nothing(small: Callable[[], Store], digest: str) -> None:
    store = small()
    keep_verdict(store, "b" * 64, "int8", PASSED)
    keep_verdict(store, digest, "int4", replace(PASSED, passed=False))
    with loaded(store=store) as engine:
        assert engine.store is store


def test_it_can_be_switched_off(small: Callable[[], Store], digest: str) -> None:
    store = passing(small(), digest, "int8")
    with loaded(store=store, recompress=False) as engine:
        assert engine.store is store
        encode_in_turn(engine, *TEXTS)
        assert engine.store.stats().evictions > 0


def test_a_pruned_codec_that_passed_is_read_and_nothing_is_recompressed_into_it(digest: str) -> None:
    store = passing(MemoryStore(budget_bytes=2**24), digest, "pruned50")
    with loaded(store=store) as engine:
        assert engine.store is store


def test_all_codecs_that_passed_are_steps_in_their_order(digest: str, size: int) -> None:
    store, texts = MemoryStore(budget_bytes=8 * size), [text_of(12, seed=seed) for seed in range(46)]
    with loaded(store=passing(store, digest, "int4", "int8")) as engine:
        encode_in_turn(engine, *texts)
        found = [codec for (codec,) in codecs(engine, *texts)]
        assert found == sorted(found, key=["int4", "int8", "raw"].index)
        assert {"int4", "int8"} <= set(found)
        assert settled(engine.store).evictions == 0


def test_objects_of_another_model_are_left_alone(small: Callable[[], Store], digest: str) -> None:
    store = small()
    other = Engine.from_pretrained(shared_model(seed=1), tokenizer=loaded().prompter.tokenizer, store=store)
    other.encode(TEXTS[:4])
    theirs = store.names()
    with loaded(store=passing(store, digest, "int8")) as engine:
        encode_in_turn(engine, *TEXTS[4:9])
        assert set(settled(engine.store).recompression.written) == {"int8"}
        assert theirs < store.names()
        assert {codec for name in theirs for codec in store.stat(name)} == {"raw"}


def test_each_tier_that_fills_up_makes_room_for_itself(tmp_path: Path, digest: str, size: int) -> None:
    host, disk = MemoryStore(budget_bytes=8 * size), DiskStore(tmp_path, budget_bytes=2**30)
    tiers = TieredStore(host, passing(disk, digest, "int8"))
    # a shared engine on a CPU keeps no object in memory that a slower tier has
    with loaded(store=tiers, attention="assembled") as engine:
        assert engine.store is tiers
        engine.encode(TEXTS)
        assert {codec for text in TEXTS for codec in disk.stat(name_of(engine, text))} == {"raw"}
        for text in TEXTS:
            engine.generate([text], QUESTION, max_new_tokens=1)
            tiers._tiers[0].store.settle()
        written = [tier.stats.recompression.written for tier in tiers.stats().tiers]
        assert written[0]["int8"] > 0
        assert written[1] == {}
        assert (host.stats().evictions, len(host.names())) == (0, len(TEXTS))


def test_a_changed_document_is_rebuilt_from_raw_only(tmp_path: Path, digest: str, size: int) -> None:
    with (
        loaded(store=passing(MemoryStore(budget_bytes=8 * size), digest, "int8")) as engine,
        Library(tmp_path / "library", engine) as library,
    ):
        for number, text in enumerate(TEXTS):
            library.put(f"{number}", text)
            library.work()
            engine.store.settle()
        assert codecs(engine, TEXTS[0], TEXTS[-1]) == [["int8"], ["raw"]]
        for number in (0, len(TEXTS) - 1):
            library.put(f"{number}", edited(TEXTS[number], 0.9))
        first, last = sorted(library.work(), key=lambda worked: worked.id)
        assert (first.kept, "only int8 is kept" in first.reason) == (0, True)
        assert last.kept > 0
