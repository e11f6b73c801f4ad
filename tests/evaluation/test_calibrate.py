"""The gate lets through what answers as raw does, and nothing that was made worse."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from benches import bench_of, row_of, rows_of

from kvlink import InputError
from kvlink.core import scores
from kvlink.core.entry import CacheEntry
from kvlink.evaluation.calibrate import THRESHOLDS, Calibration, calibrate
from kvlink.evaluation.case import Case
from kvlink.evaluation.methods import method_named
from kvlink.store.codecs.quantised import Int8

ROWS = rows_of(3)


@pytest.fixture(scope="module")
def found() -> dict[str, Calibration]:
    return {one.codec: one for one in calibrate(bench_of(), ROWS)}


def test_each_codec_has_figures_and_their_number(found: dict[str, Calibration]) -> None:
    assert list(found) == list(THRESHOLDS)
    for codec, one in found.items():
        assert one.verdict is not None
        assert one.verdict.rows == 3
        assert 3 <= one.verdict.tokens <= 96
        assert one.verdict.threshold == THRESHOLDS[codec]
        assert one.errors == ()


def test_the_smaller_the_codec_the_larger_its_distance(found: dict[str, Calibration]) -> None:
    half, int8, int4 = found.values()
    assert 0 <= half.verdict.kl < int8.verdict.kl < int4.verdict.kl
    assert 0.5 == half.size > int8.size > int4.size


def test_figures_are_those_of_the_methods_on_raws_own_continuation(found: dict[str, Calibration]) -> None:
    bench, kl, same = bench_of(), [], []
    for row in ROWS:
        case = Case(bench, row)
        raw, other = method_named("concat_reencoded"), method_named("concat_reencoded(codec=int4)")
        own = raw.generate(case, limit=32, end_ids=bench.prompter.end_ids)
        wanted, here = (method.score(case, own).logits for method in (raw, other))
        kl.append(scores.kl(wanted, here))
        same.append(scores.agreement(wanted, here))
    verdict = found["int4"].verdict
    assert verdict.kl == pytest.approx(sum(kl) / 3)
    assert verdict.agreement == pytest.approx(sum(same) / 3)
    assert found["int4"].lost.difference == pytest.approx(verdict.agreement - 1)
    assert found["int4"].lost.low <= found["int4"].lost.difference <= found["int4"].lost.high


def test_a_codec_that_was_made_worse_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calibrate(bench_of(), ROWS, thresholds={"int8": 0.9})[0].passed
    unpack = Int8.unpack

    def worse(self: Int8, tensors: Mapping[str, torch.Tensor], **given: Any) -> CacheEntry:
        read = unpack(self, tensors, **given)
        return CacheEntry(read.keys.flip(2), read.values * -3, read.token_ids)

    monkeypatch.setattr(Int8, "unpack", worse)
    (one,) = calibrate(bench_of(), ROWS, thresholds={"int8": 0.9})
    assert not one.passed
    assert one.verdict.agreement < 0.9


@pytest.mark.parametrize(("shift", "passes"), [(0.0, True), (1e-9, False)])
def test_agreement_at_the_threshold_passes_and_below_it_fails(
    found: dict[str, Calibration], monkeypatch: pytest.MonkeyPatch, shift: float, passes: bool
) -> None:
    monkeypatch.setattr(scores, "agreement", lambda wanted, here: 0.75)
    (one,) = calibrate(bench_of(), ROWS[:1], thresholds={"int4": 0.75 + shift})
    assert one.passed == passes


def test_a_codec_that_takes_no_such_entries_is_not_measured_and_does_not_pass() -> None:
    half, int8 = calibrate(bench_of(dtype=torch.bfloat16), ROWS[:1], thresholds={"half": 0.5, "int8": 0.0})
    assert (half.verdict, half.passed, half.size) == (None, False, None)
    assert "saves nothing" in half.errors[0]
    assert int8.passed


def test_a_row_that_cannot_be_asked_is_told_and_the_others_are_scored() -> None:
    (one,) = calibrate(bench_of(), [row_of(texts=()), *ROWS[:2]], thresholds={"int8": 0.5})
    assert one.verdict.rows == 2
    assert len(one.errors) == 1
    assert "no document" in one.errors[0]


def test_other_rows_give_other_figures() -> None:
    digests = {
        calibrate(bench_of(), rows, thresholds={"half": 0.5})[0].verdict.figures for rows in (ROWS[:1], ROWS[1:2])
    }
    assert len(digests) == 2


@pytest.mark.parametrize("least", [-0.1, 1.1, float("nan")])
def test_a_threshold_is_a_share(least: float) -> None:
    with pytest.raises(InputError, match="shares from 0 to 1"):
        calibrate(bench_of(), ROWS, thresholds={"int8": least})


def test_there_is_no_gate_for_a_codec_that_is_not_known() -> None:
    with pytest.raises(InputError, match="no codec 'zip'"):
        calibrate(bench_of(), ROWS, thresholds={"zip": 0.5})


def test_progress_is_told_after_each_row() -> None:
    calls: list[None] = []
    calibrate(bench_of(), ROWS[:2], thresholds={"half": 0.5}, progress=lambda: calls.append(None))
    assert len(calls) == 2
