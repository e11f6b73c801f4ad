"""`kvlink(bundle=FILE)` computes what the engine computes with that bundle, and refuses what it would refuse."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import COSTS, DISTANCES, TEXTS, bench_of, by_method, results_of, row_of, rows_of
from torch import Tensor

from kvlink import Document, InputError
from kvlink.core.errors import BundleRefused, KVLinkWarning
from kvlink.core.layout import Prompt
from kvlink.evaluation.case import Bench, Case
from kvlink.evaluation.curves import plot_training
from kvlink.evaluation.methods import method_named
from kvlink.models import bundle as bundles
from kvlink.models.assembler import Assembler
from kvlink.models.bundle import Bundle
from kvlink.models.reference import reference_logits
from tiny_bundles import tiny_bundle
from tiny_models import DoublePrecision, largest

DIGEST = "ab" * 32
SINKS = {"header": True, "none": False}


def bench_with(family: str = "llama", **options: Any) -> Bench:
    bench = bench_of(family, dtype=torch.float64, **options)
    bench.digest = DIGEST
    return bench


def bundle_for(bench: Bench, *, sink: str = "header", **options: Any) -> Bundle:
    sink_ids = bench.sink_ids(sink)
    return tiny_bundle(bench.runner, **{"digest": DIGEST, "sink_ids": sink_ids, **options})


def saved(bundle: Bundle, folder: Path) -> str:
    bundle.save(folder / "a.safetensors")
    return f"kvlink(bundle={folder / 'a.safetensors'})"


def scored(case: Case, asked: str) -> Tensor:
    method = method_named(asked)
    method.prepare(case)
    return method.score(case, case.scored).logits


def wanted(case: Case, bundle: Bundle, *, documents: Any = None) -> Tensor:
    """Return the reference forward of a row with a bundle, at the rows that predict the answer."""
    runner = case.bench.runner
    adapter = bundle.adapter.to(runner.device, runner.dtype) if bundle.adapter else None
    assembler = Assembler(runner, links=bundle.links, adapter=adapter)
    tail = (*case.prompt.tail, *case.scored[:-1])
    prompt = Prompt(case.prompt.system, documents or case.prompt.documents, tail)
    return reference_logits(assembler, prompt, sink_ids=bundle.card.sink_ids)[-len(case.scored) :]


# --- what is exact --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi"])
@pytest.mark.parametrize("adapter", [False, True], ids=["links", "links+lora"])
@pytest.mark.parametrize("sink", SINKS)
def test_it_is_the_reference_forward_with_the_bundles_links_adapter_and_sink(
    family: str, adapter: bool, sink: str, tmp_path: Path
) -> None:
    with DoublePrecision():
        case = Case(bench_with(family), row_of())
        bundle = bundle_for(case.bench, sink=sink, adapter=adapter)
        found = scored(case, saved(bundle, tmp_path))
        assert largest(found - wanted(case, bundle)) <= 1e-9
    assert largest(found - scored(case, f"concat_reencoded(sink={sink})")) > 0.01


@pytest.mark.parametrize("sink", SINKS)
def test_with_no_links_at_all_it_is_plain_reuse_behind_the_same_sink_prefix(
    sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file holds a bundle without links, so this one never was in a file."""
    with DoublePrecision():
        case = Case(bench_with(), row_of())
        bundle = bundle_for(case.bench, sink=sink, num_links=0)
        monkeypatch.setattr("kvlink.evaluation.methods.kvlink.read_bundle", lambda _: bundle)
        found = scored(case, "kvlink(bundle=none)")
        assert largest(found - scored(case, f"concat_reencoded(sink={sink})")) < 1e-10


def test_rows_of_different_lengths_in_turn_are_scored_as_each_alone(tmp_path: Path) -> None:
    asked = saved(bundle_for(bench_with(), adapter=True), tmp_path)
    rows = [row_of(), row_of([*TEXTS, "A much longer document. " * 9], name="r1"), row_of(TEXTS[:1], name="r2")]
    together = [result["nll"] for result in results_of(rows, [asked], bench=bench_with())]
    assert together == [results_of([row], [asked], bench=bench_with())[0]["nll"] for row in rows]


def test_a_row_without_documents_answers_or_gold_is_answered_as_the_base_model_does(tmp_path: Path) -> None:
    bench, empty = bench_with(), row_of([], answers=[], gold=None)
    asked = saved(bundle_for(bench, adapter=True), tmp_path)
    found = by_method(results_of([empty], ["full", asked], bench=bench, generate=True))
    assert "error" not in found[asked]
    assert "nll" not in found[asked]
    assert found[asked]["answer"] == found["full"]["answer"]


def test_without_its_adapter_a_bundle_gives_other_logits(tmp_path: Path) -> None:
    case = Case(bench_with(), row_of())
    full = bundle_for(case.bench, adapter=True)
    found = scored(case, saved(full, tmp_path))
    assert largest(found - wanted(case, replace(full, adapter=None))) > 0.01


LONG = Document(" ".join(f"Paragraph {number} says that hut {number} is full." for number in range(40)), "Huts")
"""More than 1,024 tokens."""


@pytest.mark.parametrize(("levels", "segments"), [(1, 1), (2, 2)])
def test_long_documents_are_cut_as_serving_cuts_them(levels: int, segments: int, tmp_path: Path) -> None:
    with DoublePrecision():
        bench = bench_with(context=4096)
        case = Case(bench, replace(row_of(), documents=(LONG, Document("Short.")), gold=(0,)))
        bundle = bundle_for(bench, levels=levels)
        documents = tuple(bench.prompter.segments(one, cut=levels > 1) for one in case.row.documents)
        assert len(documents[0]) == segments
        found = scored(case, saved(bundle, tmp_path))
        assert largest(found - wanted(case, bundle, documents=documents)) <= 1e-9


def test_documents_that_were_left_out_are_not_cut_in_again(tmp_path: Path) -> None:
    bench = bench_with(context=4096)
    row = replace(row_of(), documents=(Document(TEXTS[0]), LONG, Document(TEXTS[1])), gold=(0,))
    case = Case(bench, row, max_documents=1)
    assert case.dropped == 2
    assert case.with_tail(case.prompt.tail, cut=True).segments == case.prompt.segments


def test_an_answer_is_decoded_under_the_adapter(tmp_path: Path) -> None:
    case = Case(bench_with(), row_of())
    bundle = bundle_for(case.bench, adapter=True)
    method = method_named(saved(bundle, tmp_path))
    method.prepare(case)
    ids = method.generate(case, limit=5, end_ids=())
    runner = case.bench.runner
    assembler = Assembler(runner, links=bundle.links, adapter=bundle.adapter.to(runner.device, runner.dtype))  # type: ignore[union-attr]
    prompt = case.with_tail((*case.prompt.tail, *ids[:-1]))
    logits = reference_logits(assembler, prompt, sink_ids=bundle.card.sink_ids)[-len(ids) :]
    assert ids == tuple(logits.argmax(-1).tolist())


# --- what it costs --------------------------------------------------------------------------------------------------


def test_links_and_the_question_are_computed_and_documents_are_loaded(tmp_path: Path) -> None:
    case = Case(bench_with(), row_of())
    method = method_named(saved(bundle_for(case.bench), tmp_path))
    method.prepare(case)
    found = method.prefill(case, case.prompt.tail, keep=1)
    entries = case.entries(case.bench.sink_ids("header"))
    assert found.tokens_computed == len(case.prompt.tail) + 3 * len(TEXTS)
    assert found.bytes_loaded == sum(entry.num_bytes for entry in entries)


def test_entries_are_those_of_the_other_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(bench_with(), row_of())
    scored(case, "concat_reencoded")
    asked: list[Sequence[Any]] = []
    encode = case.bench.runner.encode
    monkeypatch.setattr(case.bench.runner, "encode", lambda *a, **k: asked.append(a) or encode(*a, **k))
    scored(case, saved(bundle_for(case.bench), tmp_path))
    assert asked == []


@pytest.mark.parametrize("levels", [1, 2])
def test_entries_go_through_the_codec_that_is_named(levels: int, tmp_path: Path) -> None:
    bench = bench_with()
    asked = saved(bundle_for(bench, levels=levels), tmp_path)
    case = Case(bench, row_of(["The office opens at seven. " * 60, *TEXTS[1:]]))
    raw = scored(case, asked)
    assert torch.equal(scored(case, asked.replace(")", ", codec=raw)")), raw)
    near, far = (scored(case, asked.replace(")", f", codec={codec})")) for codec in ("int8", "pruned50"))
    assert 0 < largest(near - raw) < largest(far - raw)
    half = by_method(results_of([row_of()], [asked, asked.replace(")", ", codec=pruned50)")], bench=bench))
    whole, pruned = (result["bytes_loaded"] for result in half.values())
    assert pruned / whole == pytest.approx(0.5, abs=0.03)


def test_a_bundle_is_read_once_for_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_with()
    asked = saved(bundle_for(bench), tmp_path)
    reads: list[str] = []
    read = bundles.read_bundle
    monkeypatch.setattr("kvlink.evaluation.methods.kvlink.read_bundle", lambda path: reads.append(path) or read(path))
    results = results_of(rows_of(3), ["full", asked], bench=bench)
    assert len(reads) == 1
    assert len(results) == 6


def test_results_hold_its_distance_from_full_attention(tmp_path: Path) -> None:
    bench = bench_with()
    asked = saved(bundle_for(bench), tmp_path)
    found = by_method(results_of([row_of()], ["full", asked], bench=bench, generate=True))[asked]
    assert set(found) >= DISTANCES | COSTS
    assert found["kl"] > 0
    assert json.dumps(found)


# --- which bundle ---------------------------------------------------------------------------------------------------


def test_a_bundle_of_other_weights_is_refused_unless_it_is_asked_for(tmp_path: Path) -> None:
    case = Case(bench_with(), row_of())
    bundle = bundle_for(case.bench, digest="cd" * 32)
    asked = saved(bundle, tmp_path)
    with pytest.raises(BundleRefused, match="trained for tiny with the digest cdcdcdcdcdcd"):
        scored(case, asked)
    with pytest.warns(KVLinkWarning, match="used as asked"):
        found = scored(case, asked.replace(")", ", foreign=yes)"))
    assert largest(found - wanted(case, bundle)) < 1e-3


def test_the_bundle_that_ships_is_taken_where_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(bench_with(), row_of())
    monkeypatch.setattr(bundles, "files", lambda name: tmp_path)
    with pytest.raises(BundleRefused, match=r"no link tokens ship for this model \(abababababab\).*kvlink train links"):
        scored(case, "kvlink")
    bundle = bundle_for(case.bench)
    bundle.save(tmp_path / "bundles" / "a.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert largest(scored(case, "kvlink") - wanted(case, bundle)) < 1e-3


@pytest.mark.parametrize(
    ("asked", "error", "told"),
    [
        ("kvlink(bundle=nowhere.safetensors)", BundleRefused, r"nowhere\.safetensors is no bundle"),
        ("kvlink(foreign=maybe)", InputError, "foreign=maybe; choose yes or no"),
        ("kvlink(links=6)", InputError, "links"),
    ],
)
def test_what_it_cannot_take_is_an_error(asked: str, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        scored(Case(bench_with(), row_of()), asked)


# --- figures of training --------------------------------------------------------------------------------------------


def trained_row(count: int, *, init: str = "separator", best: float = 0.1) -> dict[str, Any]:
    return {
        "mode": "links",
        "num_links": count,
        "lessons": 100,
        "recipe": {"init": init},
        "scores": {"kl_without": 0.35},
        "curve": [{"step": 0, "kl": 0.3, "agreement": 0.7}, {"step": 25, "kl": best, "agreement": 0.8}],
    }


@pytest.mark.parametrize("counts", [(6,), (4, 6, 8)])
def test_curves_are_drawn_one_per_run_with_their_best_beside_them(
    counts: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []

    def keep(plt: Any, figure: Any, axes: Any, path: Path) -> None:
        drawn.extend((axes, [(line.get_label(), line.get_xydata().tolist()) for line in axes[0].lines]))
        if len(axes) > 1:
            drawn.append(axes[1].lines[0].get_xydata().tolist())
        plt.close(figure)

    monkeypatch.setattr("kvlink.evaluation.curves.save", keep)
    rows = [trained_row(count, best=0.1 / count) for count in counts]
    plot_training(rows, tmp_path / "a.svg", title="tiny")
    axes, lines, *best = drawn
    assert len(axes) == (2 if len(counts) > 1 else 1)
    *curves, without = lines
    assert [label for label, _ in curves] == [f"links, K = {count}, separator, 100 lessons" for count in counts]
    assert [points for _, points in curves] == [[[0, 0.3], [25, 0.1 / count]] for count in counts]
    assert without == ("without links", [[0, 0.35], [1, 0.35]])
    assert best == ([[[count, 0.1 / count] for count in counts]] if len(counts) > 1 else [])


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_a_figure_is_written(tmp_path: Path, name: str) -> None:
    plot_training([trained_row(4), trained_row(6, init="mean")], tmp_path / name, title="tiny")
    assert (tmp_path / name).stat().st_size > 1000
