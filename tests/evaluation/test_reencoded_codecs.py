"""`concat_reencoded(codec=...)` uses what a codec makes of the entries, and nothing else changes."""

from dataclasses import replace

import pytest
import torch
from benches import bench_of, by_method, results_of, row_of, rows_of
from torch import Tensor

from kvlink import InputError
from kvlink.evaluation import case as cases
from kvlink.evaluation.case import Case
from kvlink.evaluation.methods import method_named
from kvlink.store import CODECS
from tiny_models import largest

LOSSY = ("half", "int8", "int4")


def scored(case: Case, asked: str) -> Tensor:
    method = method_named(asked)
    method.prepare(case)
    return method.score(case, case.scored).logits


def test_raw_changes_no_bit() -> None:
    case = Case(bench_of(), row_of())
    assert torch.equal(scored(case, "concat_reencoded(codec=raw)"), scored(case, "concat_reencoded"))


def test_the_worse_the_codec_the_farther_from_raw() -> None:
    case = Case(bench_of(), row_of())
    raw = scored(case, "concat_reencoded")
    half, int8, int4 = (largest(scored(case, f"concat_reencoded(codec={codec})") - raw) for codec in LOSSY)
    assert 0 < 3 * half < int8
    assert 3 * int8 < int4 < largest(raw)


@pytest.mark.parametrize("codec", LOSSY)
def test_the_entries_themselves_stay_as_they_are_for_other_methods(codec: str) -> None:
    case = Case(bench_of(), row_of())
    before = scored(case, "concat_reencoded")
    scored(case, f"concat_reencoded(codec={codec})")
    assert torch.equal(scored(case, "concat_reencoded"), before)


def test_bytes_are_those_that_the_codec_takes() -> None:
    asked = ["concat_reencoded", *(f"concat_reencoded(codec={codec})" for codec in LOSSY)]
    raw, half, int8, int4 = (by_method(results_of([row_of()], asked))[name]["bytes_loaded"] for name in asked)
    assert 2 * half == raw
    assert half > int8 > int4
    assert 0.5 * raw / 2 < int8 < 0.6 * raw / 2


def test_a_row_after_another_gets_its_own_entries() -> None:
    asked = "concat_reencoded(codec=int4)"
    bench = bench_of()
    together = [result["nll"] for result in results_of(rows_of(2), [asked], bench=bench)]
    apart = [results_of([row], [asked], bench=bench)[0]["nll"] for row in rows_of(2)]
    assert together == apart
    assert together[0] != together[1]


def test_entries_go_through_the_codec_once_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    through = cases.through
    monkeypatch.setattr(cases, "through", lambda *given: calls.append(1) or through(*given))
    results_of(rows_of(2), ["concat_reencoded(codec=int8)"], generate=True)
    assert len(calls) == 2 * len(row_of().documents)


def test_half_of_a_model_of_16_bits_is_an_error_of_the_row_that_says_what_to_do() -> None:
    bench = bench_of(dtype=torch.bfloat16)
    (result,) = results_of([row_of()], ["concat_reencoded(codec=half)"], bench=bench)
    assert "half of torch.bfloat16 saves nothing; take raw" in result["error"]
    assert "error" not in results_of([row_of()], ["concat_reencoded(codec=int4)"], bench=bench)[0]


PRUNED = ("pruned75", "pruned50", "pruned25")


@pytest.mark.parametrize("method", ["concat_reencoded(codec={})", "concat_reencoded(codec={}, sink=none)"])
def test_what_is_pruned_is_missed_and_takes_its_share_of_the_bytes(method: str) -> None:
    asked = [method.format(codec) for codec in ("raw", *PRUNED)]
    case = Case(bench_of(), row_of())
    raw, *others = (scored(case, name) for name in asked)
    assert all(largest(logits - raw) > 0.01 * largest(raw) for logits in others)
    assert len({logits.sum().item() for logits in others}) == len(PRUNED)
    found = by_method(results_of([row_of()], asked))
    whole, *shares = (found[name]["bytes_loaded"] for name in asked)
    assert [share / whole for share in shares] == pytest.approx([0.75, 0.5, 0.25], abs=0.03)
    assert not any("error" in result for result in found.values())


def test_pruned_documents_are_decoded_from_and_scored_alike() -> None:
    """The rows that are scored behind a prompt are those that decoding would compute, one after the other."""
    asked = "concat_reencoded(codec=pruned25)"
    case, method = Case(bench_of(dtype=torch.float64), row_of()), method_named(asked)
    method.prepare(case)
    ids = method.generate(case, limit=6, end_ids=())
    assert tuple(method.score(case, ids).logits.argmax(-1).tolist()) == ids


def test_pruned_documents_are_an_error_of_the_row_where_a_layer_has_a_sliding_window() -> None:
    (result,) = results_of([row_of()], ["concat_reencoded(codec=pruned50)"], bench=bench_of("qwen2"))
    assert "through a sliding window of" in result["error"]


def test_an_unknown_codec_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=f"no codec 'zip'; there are {', '.join(CODECS)}"):
        method_named("concat_reencoded(codec=zip)")


def test_a_row_whose_document_stands_twice_is_scored() -> None:
    row = row_of()
    twice = replace(row, documents=(*row.documents, row.documents[0]))
    assert "error" not in results_of([twice], ["concat_reencoded(codec=int8)"])[0]
