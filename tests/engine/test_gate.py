"""What a model's gate has passed is taken by its readers, after a restart, too, and by no other model's."""

from dataclasses import replace
from pathlib import Path

import pytest
from engines import loaded, some_ids

from kvlink.core.errors import StoreUnusable
from kvlink.engine import gate
from kvlink.engine.gate import Verdict, keep_verdict, last_verdict, passed_codecs
from kvlink.store import DiskStore, MemoryStore

OURS, OTHER = "a" * 64, "b" * 64
PASSED = Verdict(passed=True, agreement=0.995, threshold=0.99, kl=0.001, rows=30, tokens=900, figures="c" * 16)
FAILED = replace(PASSED, passed=False, agreement=0.94)


def test_nothing_has_passed_before_anything_was_measured() -> None:
    store = MemoryStore(budget_bytes=1000)
    assert passed_codecs(store, OURS) == ()
    assert last_verdict(store, OURS, "int8") is None


def test_a_verdict_holds_for_its_model_and_codec_only() -> None:
    store = MemoryStore(budget_bytes=1000)
    keep_verdict(store, OURS, "int8", PASSED)
    assert (passed_codecs(store, OURS), passed_codecs(store, OTHER)) == (("int8",), ())


def test_what_has_passed_comes_back_with_the_most_exact_first() -> None:
    store = MemoryStore(budget_bytes=1000)
    for codec, verdict in (("int4", PASSED), ("int8", FAILED), ("half", PASSED)):
        keep_verdict(store, OURS, codec, verdict)
    assert passed_codecs(store, OURS) == ("half", "int4")


def test_verdicts_outlive_the_process(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        keep_verdict(store, OURS, "int8", PASSED)
    with DiskStore(tmp_path) as store:
        assert passed_codecs(store, OURS) == ("int8",)
        assert last_verdict(store, OURS, "int8") == PASSED


def test_the_last_verdict_counts_and_the_earlier_ones_stay() -> None:
    store = MemoryStore(budget_bytes=1000)
    for verdict in (PASSED, FAILED, FAILED, PASSED, FAILED):
        keep_verdict(store, OURS, "int8", verdict)
        assert last_verdict(store, OURS, "int8") == verdict
    assert passed_codecs(store, OURS) == ()
    kept = [store.setting(gate._key(OURS, "int8", number)) for number in range(5)]
    assert [value and value["passed"] for value in kept] == [True, False, True, False, None]


def test_codecs_that_give_other_numbers_have_to_pass_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(budget_bytes=1000)
    keep_verdict(store, OURS, "int8", PASSED)
    monkeypatch.setattr(gate, "GATE", gate.GATE + 1)
    assert passed_codecs(store, OURS) == ()


@pytest.mark.parametrize("value", [True, "passed", {"passed": "yes"}, {"passed": 1}, [1]], ids=str)
def test_what_is_no_verdict_lets_nothing_pass(value: object) -> None:
    store = MemoryStore(budget_bytes=1000)
    store.keep_setting(gate._key(OURS, "int8", 0), value)
    assert passed_codecs(store, OURS) == ()
    with pytest.raises(StoreUnusable, match="calibrate again"):
        last_verdict(store, OURS, "int8")


def test_an_engine_takes_what_its_models_gate_has_passed_and_nothing_else(tmp_path: Path) -> None:
    ids = some_ids(40)
    with loaded(store=tmp_path) as engine:
        digest = engine.loader.identity.model
        for codec, verdict in (("int8", PASSED), ("int4", FAILED)):
            keep_verdict(engine.loader.store, digest, codec, verdict)
        list(engine.loader.encode([ids]))
        name = engine.loader.name(ids)
        assert engine.loader.store.recompress(name, "raw", "int8")
        assert not engine.loader.has(ids)
    with loaded(store=tmp_path) as engine:
        with engine.loader.load([ids]) as (found,):
            assert (found.source, found.codec) == ("disk", "int8")
        with DiskStore(tmp_path) as disk:
            assert disk.recompress(name, "int8", "int4")
        assert not engine.loader.has(ids)
