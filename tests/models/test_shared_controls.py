"""The comparison of shared attention has teeth: each fault, planted on purpose, is far from passing 1e-9."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from sharing import Shared

from kvlink.models import attending, backends, turning
from kvlink.models.backends import Sight
from kvlink.models.reference import reference_logits
from kvlink.models.turning import Turns
from tiny_models import FAMILIES, DoublePrecision, largest, random_ids, tiny_assembler, tiny_prompt, tiny_runner

SINK = random_ids(4, seed=77)
SLIDING = [name for name, (_, options) in FAMILIES.items() if options.get("sliding_window")]
families = pytest.mark.parametrize("family", FAMILIES)


def fault(family: str, change: Callable[[Shared], Any] = lambda _: None) -> float:
    """Return how far the logits are from the reference, as a share of the largest one."""
    assembler, prompt = tiny_assembler(tiny_runner(family)), tiny_prompt()
    with DoublePrecision():
        wanted = reference_logits(assembler, prompt, sink_ids=SINK)
        prepared = Shared(assembler, prompt, sink_ids=SINK)
        change(prepared)
        return largest(prepared.logits() - wanted) / largest(wanted)


def changed_turns(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    sound = Turns.back

    def back(*args: Any, **options: Any) -> Turns:
        turns = sound(*args, **options)
        return replace(turns, tables=tuple(table and change(table) for table in turns.tables))

    monkeypatch.setattr(turning.Turns, "back", back)


@families
def test_queries_that_are_not_turned_are_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Turns, "turn", lambda self, query, quarter, layer, rows, starts: query[:, rows])
    assert fault(family) > 0.01


@families
def test_queries_turned_the_wrong_way_are_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed_turns(monkeypatch, lambda table: (table[0], -table[1]))
    assert fault(family) > 0.01


def test_a_scale_that_is_applied_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """YaRN's tables hold a scale, which rotated queries and keys have already."""
    assert fault("llama-yarn") <= 1e-9
    scale = tiny_runner("llama-yarn").rotary.tables(torch.empty(0), torch.zeros(1, dtype=torch.long))[0]
    assert scale is not None
    a = float(scale[0].flatten()[0])
    assert a > 1.05
    changed_turns(monkeypatch, lambda table: (table[0] * a, table[1] * a))
    assert fault("llama-yarn") > 0.01


@pytest.mark.parametrize("family", SLIDING)
def test_a_window_that_counts_local_positions_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each document's own length alone decided what is still in sight."""
    sound = attending._sight

    def local(positions: Any, columns: Any, *, causal: bool, window: int | None) -> Sight | None:
        return sound(positions, columns, causal=causal, window=window) if causal else Sight()

    monkeypatch.setattr(attending, "_sight", local)
    assert fault(family) > 0.01


@families
def test_a_document_that_is_missing_in_the_merge_is_found(family: str) -> None:
    assert fault(family, lambda prepared: prepared.documents.pop(1)) > 0.01


@families
def test_a_document_at_another_start_is_found(family: str) -> None:
    def moved(prepared: Shared) -> None:
        document, start = prepared.documents[-1]
        prepared.documents[-1] = (document, start - 1)

    assert fault(family, moved) > 1e-4


@families
def test_parts_that_are_averaged_instead_of_merged_are_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = attending.merge

    def averaged(found: Any, lse: Any, *, sinks: Any = None) -> Any:
        return sound(found, torch.where(lse.isinf(), lse, torch.zeros_like(lse)), sinks=sinks)

    monkeypatch.setattr(attending, "merge", averaged)
    assert fault(family) > 0.01


def test_logits_capped_after_the_merge_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 2 caps each logit; without the cap its parts have other sums."""
    assert fault("gemma2") <= 1e-9
    sound = backends.reference

    def uncapped(*args: Any, softcap: float | None = None, **options: Any) -> Any:
        return sound(*args, **options)

    monkeypatch.setattr(backends, "reference", uncapped)
    assert fault("gemma2") > 1e-6
