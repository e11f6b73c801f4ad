"""Whether documents can be pruned on a model is measured, and a model is refused with the reason."""

from typing import Any

import pytest
import torch

from kvlink.core.errors import ModelRefused
from kvlink.models import assembler
from kvlink.models.pruning import require_prunable
from kvlink.models.runner import Runner
from tiny_models import FAMILIES, tiny_model, tiny_runner

SLIDING = [name for name, (_, options) in FAMILIES.items() if options.get("sliding_window")]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SLIDING])
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 0.1)], ids=str
)
def test_every_family_without_windows_attends_pruned_documents_as_its_own_attention_does(
    family: str, dtype: torch.dtype, most: float
) -> None:
    assert require_prunable(tiny_runner(family, dtype)) <= most


@pytest.mark.parametrize("family", SLIDING)
def test_a_model_with_a_sliding_window_is_refused_with_its_size(family: str) -> None:
    with pytest.raises(ModelRefused, match="through a sliding window of 16 positions"):
        require_prunable(tiny_runner(family, torch.float32))


def test_a_model_that_does_not_attend_by_sdpa_is_refused_with_what_it_does() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(ModelRefused, match="loaded with eager"):
        require_prunable(Runner(model))


def test_a_model_whose_layers_do_not_pass_the_masks_on_is_refused_by_name() -> None:
    runner = Runner(tiny_model("llama"))
    attention = runner.model.model.layers[0].self_attn
    attention.forward = lambda hidden_states, present=None, **given: type(attention).forward(
        attention, hidden_states, **given
    )
    with pytest.raises(ModelRefused, match=r"LlamaForCausalLM takes no mask per layer and head .*present.*take raw"):
        require_prunable(runner)


@pytest.mark.parametrize("fault", ["shifted", "whole"])
def test_pruned_rows_that_land_elsewhere_are_found_with_both_figures(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread = assembler._spread

    def spoilt(rows: Any, kept: Any, *, out: Any) -> Any:
        return spread(rows, kept, out=out).roll(1, dims=2) if fault == "shifted" else spread(rows + 1, kept, out=out)

    monkeypatch.setattr(assembler, "_spread", spoilt)
    with pytest.raises(ModelRefused, match=r"miss those of its own attention by .*nothing pruned: "):
        require_prunable(tiny_runner("llama", torch.float32))


def test_a_mask_that_shows_everything_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlink.models.attention.Present.mask", _whole)
    with pytest.raises(ModelRefused, match="miss those of its own attention"):
        require_prunable(tiny_runner("llama", torch.float32))


def _whole(present: Any, layer: int, query: Any, key: Any, mask: Any) -> Any:
    present.served.add(layer)
    return mask
