"""The probe accepts what is exact, refuses what is not with a figure, and notices faults that are planted in it."""

import copy
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from kvlink.core.errors import ModelRefused
from kvlink.models import rotary as rotary_module
from kvlink.models.probe import FAULT_SHARE, examine, probe, require
from kvlink.models.rotary import Rotary
from kvlink.models.runner import Runner, Window
from kvlink.models.turning import Turns
from tiny_models import BASE, FAMILIES, REFUSED, tiny_model, tiny_runner

families = pytest.mark.parametrize("family", FAMILIES)
SLIDING = [name for name, (_, options) in FAMILIES.items() if options.get("sliding_window")]
SCALED = ["llama-llama3", "llama-yarn", "llama-linear"]


def build(kind: str, **options: Any) -> Any:
    """Build a tiny model that is in no list."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**BASE, **options}))


def with_runs(runner: Runner, **fields: Any) -> Runner:
    """Plant a fault in what the runner believes of the rotary embedding."""
    runner.rotary = Rotary(tuple(replace(run, **fields) for run in runner.rotary.runs))
    return runner


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_supported_family_passes_up_to_its_last_position(family: str, dtype: torch.dtype) -> None:
    report = probe(tiny_runner(family, dtype))
    assert report.supported
    assert report.reason == ""
    assert report.context == 8192
    assert report.mask_error == 0
    assert report.key_error is not None
    assert report.key_fault is not None
    assert report.value_error is not None
    assert report.logit_error is not None
    assert report.logit_fault is not None
    assert report.key_error <= min(1e-3, FAULT_SHARE * report.key_fault)
    assert report.logit_error <= min(1e-5, FAULT_SHARE * report.logit_fault)
    assert report.value_error <= 1e-3
    assert [offset for offset, _, _ in report.far_error] == [7, 8192 - 24]
    assert report.window_crossed == (True if family in SLIDING else None)


@families
def test_a_supported_family_passes_in_bfloat16(family: str) -> None:
    assert probe(tiny_runner(family, torch.bfloat16, initializer_range=0.1)).supported


@families
def test_a_report_is_plain_values(family: str) -> None:
    report = probe(tiny_runner(family, torch.float32), context=256)
    fields = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert fields["supported"] is True
    assert fields["context"] == 256
    assert fields["attention"] == "shared"
    assert fields["shared_error"] < 1e-5
    assert fields["shared_fault"] > 0.1
    assert [layer["stop"] for layer in fields["rope"]["layers"]][-1] == 2
    assert len(fields["rope"]["layers"]) == (2 if family in ("gemma3", "smollm3") else 1)


@pytest.mark.parametrize(
    ("family", "kind", "layers"),
    [
        ("llama", "default", [(0, 2, 16, "half-split")]),
        ("llama-yarn", "yarn", [(0, 2, 16, "half-split")]),
        ("gemma3", "default", [(0, 1, 16, "half-split"), (1, 2, 16, "half-split")]),
        ("phi", "default", [(0, 2, 8, "half-split")]),
        ("cohere", "default", [(0, 2, 16, "own function")]),
        ("smollm3", "default", [(0, 1, 16, "half-split"), (1, 2, 0, "none")]),
    ],
)
def test_a_report_describes_the_rotary_embedding(
    family: str, kind: str, layers: list[tuple[int, int, int, str]]
) -> None:
    rope = probe(tiny_runner(family, torch.float32), context=256).rope
    assert rope is not None
    assert rope["type"] == [kind]
    assert [tuple(layer.values()) for layer in rope["layers"]] == layers


@pytest.mark.parametrize("family", REFUSED)
def test_a_refused_family_is_refused_with_a_figure(family: str) -> None:
    report = examine(tiny_model(family))
    assert not report.supported
    assert report.context == 0
    assert re.search(r"\d", report.reason)
    json.dumps(report.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt2", r"values change with its place by \d.*learned absolute positions"),
        ("opt", r"values change with its place by \d.*learned absolute positions"),
        ("mamba2", r"2 of 2 layers are of type"),
        ("bloom", r"takes no position_ids and has 0 rotary tables.*ALiBi"),
        ("mpt", r"takes no position_ids and has 0 rotary tables.*ALiBi"),
        ("hunyuan_v1_dense", r"changed after RoPE.*misses by \d"),
    ],
)
def test_a_refusal_names_its_cause(family: str, reason: str) -> None:
    assert re.search(reason, examine(tiny_model(family)).reason)


def test_the_context_of_dynamic_ntk_is_capped_at_its_switch() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    report = examine(build("llama", max_position_embeddings=512, rope_parameters=rope), context=2048)
    assert report.supported
    assert report.context == 512
    assert re.search(r"capped: .* position 2024 has other keys \(by 0\.\d+\).*switch", report.reason)
    assert [offset for offset, _, _ in report.far_error] == [7, 2024, 7, 488]


def longrope() -> Any:
    rope = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 256}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [1 + 0.5 * pair for pair in range(8)]}
    options = {"max_position_embeddings": 1024, "original_max_position_embeddings": 256, "sliding_window": None}
    return build("phi3", rope_parameters=rope, **options)


def test_the_context_of_longrope_is_capped_at_its_switch() -> None:
    report = examine(longrope())
    assert report.supported
    assert report.context == 256
    assert re.search(r"capped: .* position 1000 has other keys \(by 0\.\d+\).*switch", report.reason)


def test_a_context_below_the_switch_is_accepted_without_a_word() -> None:
    report = examine(longrope(), context=200)
    assert (report.supported, report.context, report.reason) == (True, 200, "")


@families
def test_a_rotary_embedding_that_does_not_rotate_is_refused(family: str) -> None:
    runner = with_runs(Runner(tiny_model(family)), rotary_dim=0, function=None, source=None)
    report = probe(runner)
    assert not report.supported
    assert re.search(r"misses by 0\.\d", report.reason)


@pytest.mark.parametrize("family", SCALED)
def test_a_dropped_scaling_is_refused(family: str) -> None:
    runner, unscaled = Runner(tiny_model(family)), tiny_model("llama").model.rotary_emb
    runner.rotary = Rotary(
        tuple(replace(run, source=replace(run.source, module=unscaled)) for run in runner.rotary.runs)
    )
    assert not probe(runner).supported


def test_a_dropped_attention_scaling_is_refused() -> None:
    runner, tables = Runner(tiny_model("llama-yarn")), tiny_model("llama-yarn").model.rotary_emb
    tables.attention_scaling = 1.0
    runner.rotary = Rotary(tuple(replace(run, source=replace(run.source, module=tables)) for run in runner.rotary.runs))
    assert not probe(runner).supported


@pytest.mark.parametrize("family", ["cohere", "glm"])
def test_channels_paired_as_halves_where_neighbours_are_paired_are_refused(family: str) -> None:
    """Only the assembled prompt takes the short formula, so only the logits can tell."""
    runner = Runner(tiny_model(family))
    runner = with_runs(runner, halves=True, rotary_dim=16 if family == "cohere" else 8)
    report = probe(runner)
    assert not report.supported
    assert re.search(r"an assembled prompt misses the reference forward by \d", report.reason)


def test_a_buffer_whose_keys_are_not_rotated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(out: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, *, scratch: Tensor) -> None:
        out.copy_(keys)

    runner = Runner(tiny_model("llama"))
    monkeypatch.setattr(rotary_module, "rotate_halves_into", copy)
    report = probe(runner)
    assert not report.supported
    assert re.search(r"an assembled prompt misses the reference forward by \d", report.reason)


@pytest.mark.parametrize("family", SLIDING)
@pytest.mark.parametrize("wrong", [15, 17, None])
def test_a_wrong_window_is_refused_by_the_error_of_its_mask(family: str, wrong: int | None) -> None:
    runner = Runner(tiny_model(family))
    runner.windows = tuple(Window(window.name, window.size and wrong) for window in runner.windows)
    report = probe(runner)
    assert not report.supported
    assert report.mask_error is not None
    assert report.mask_error > 1e-3
    assert re.search(r"its own forward and ours under the reference mask differ by 0\.\d", report.reason)


def test_a_window_too_wide_to_be_tried_is_said_to_be_uncrossed() -> None:
    report = probe(tiny_runner("mistral", torch.float32, sliding_window=3000), longest=1024)
    assert report.supported
    assert report.window_crossed is False


def test_heads_of_different_sizes_are_refused() -> None:
    model = tiny_model("phi")
    rope = model.config.rope_parameters | {"partial_rotary_factor": 0.25}  # as many channels rotate
    model.model.layers[1] = tiny_model("phi", head_dim=32, rope_parameters=rope).model.layers[1]
    report = examine(model)
    assert not report.supported
    assert "different shapes: [(2, 16, 16), (2, 32, 32)]" in report.reason


def test_layers_with_different_numbers_of_heads_are_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1] = tiny_model("llama", num_key_value_heads=4).model.layers[1]
    assert "different shapes: [(2, 16, 16), (4, 16, 16)]" in examine(model).reason


class Borrowing(nn.Module):
    """An attention that keeps no keys of its own."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *args: Any, **options: Any) -> Any:
        name = "cache" if "cache" in options else "past_key_values"
        return self.attention(*args, **(options | {name: None}))


def test_layers_that_keep_no_keys_of_their_own_are_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].self_attn = Borrowing(model.model.layers[1].self_attn)
    report = examine(model)
    assert not report.supported
    assert report.reason.startswith("1 of 2 layers wrote keys and values")


def test_layers_that_write_into_another_layers_cache_are_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].self_attn.layer_idx = 0
    report = examine(model)
    assert not report.supported
    assert "layer 0 wrote keys and values when 1 layers had done so before" in report.reason


def test_values_that_are_no_numbers_are_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("nan")
    assert not examine(model).supported


def test_what_is_required_and_not_met_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ModelRefused, match=r"GPT2LMHeadModel cannot reuse .* by \d.*Use it without KVLink"):
        require(Runner(tiny_model("gpt2")))
    assert require(tiny_runner("llama", torch.float32)).supported


def test_the_probe_leaves_the_model_as_it_was() -> None:
    model = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    examine(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(tensor, before[name])


def test_a_model_whose_attention_cannot_be_replaced_is_served_assembled() -> None:
    """Its layers read a configuration of their own, so they go on attending as they always did."""
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.config = copy.deepcopy(model.config)
    report = probe(Runner(model))
    assert report.supported
    assert report.attention == "assembled"
    assert report.shared_error is None
    assert "cannot be replaced" in report.reason


def test_a_model_on_which_turned_queries_miss_is_served_assembled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Turns, "turn", lambda self, query, quarter, layer, rows, starts: query[:, rows])
    report = probe(Runner(tiny_model("llama")))
    assert report.supported
    assert report.attention == "assembled"
    assert "miss by" in report.reason
