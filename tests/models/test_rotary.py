"""Keys that are rotated here are the keys that the model would have cached at that place."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from threading import Event, Thread

import pytest
import torch
from torch import Tensor, nn

from kvlink.core.errors import ModelError
from kvlink.models import rotary as rotary_module
from kvlink.models import runner as runner_module
from kvlink.models.rotary import Call, Rotary, TableSource, Watch, rotary_modules
from kvlink.models.runner import Runner
from tiny_models import FAMILIES, DoublePrecision, largest, random_ids, tiny_model, tiny_runner

IDS = random_ids(24, seed=1)
OFFSETS = (0, 7, 1000, 4000)
DTYPES = (torch.float32, torch.bfloat16)
PASSING_BY = {"phi": 8, "gpt_neox": 8, "glm": 8}
"""Channels that a family rotates, where these are not all 16."""
families = pytest.mark.parametrize("family", FAMILIES)


def cached(runner: Runner, offset: int) -> tuple[Tensor, Tensor]:
    """Return keys (rotated) and values that the model itself caches for IDS at an offset."""
    cache = runner._encode([IDS], prefix=None, offset=offset)
    return torch.stack(cache.cached_keys)[:, 0], torch.stack(cache.values)[:, 0]


def places(offset: int) -> Tensor:
    return torch.arange(len(IDS)) + offset


@families
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", OFFSETS)
def test_keys_of_the_first_layer_are_rotated_to_the_very_bits(family: str, dtype: torch.dtype, offset: int) -> None:
    runner = tiny_runner(family, dtype)
    entry, (keys, values) = runner.encode([IDS])[0], cached(runner, offset)
    assert torch.equal(runner.rotary.rotate(entry.keys, places(offset))[0], keys[0])
    assert torch.equal(entry.values[0], values[0])  # layer 0 has not attended yet


@families
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_at_the_offset_of_its_encoding_every_layer_is_rotated_to_the_very_bits(family: str, dtype: torch.dtype) -> None:
    runner = tiny_runner(family, dtype)
    for offset in OFFSETS:
        entry, (keys, values) = runner.encode([IDS], offset=offset)[0], cached(runner, offset)
        assert torch.equal(runner.rotary.rotate(entry.keys, places(offset)), keys)
        assert torch.equal(entry.values, values)


@families
def test_keys_and_values_of_all_layers_stay_within_rounding_at_position_4000(family: str) -> None:
    runner = tiny_runner(family, torch.float32)
    entry, (keys, values) = runner.encode([IDS])[0], cached(runner, 4000)
    rotated = runner.rotary.rotate(entry.keys, places(4000))
    for layer in range(runner.geometry.layers):
        assert (rotated[layer] - keys[layer]).norm() <= 5e-4 * keys[layer].norm()
        assert (entry.values[layer] - values[layer]).norm() <= 5e-4 * values[layer].norm()


@families
def test_in_double_precision_no_offset_changes_keys_or_values(family: str) -> None:
    runner = tiny_runner(family)
    with DoublePrecision():
        entry = runner.encode([IDS])[0]
        for offset in OFFSETS:
            keys, values = cached(runner, offset)
            assert largest(runner.rotary.rotate(entry.keys, places(offset)) - keys) <= 1e-9
            assert largest(entry.values - values) <= 1e-9


@families
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_rotating_into_a_buffer_gives_the_same_bits(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, positions = tiny_runner(family, dtype), places(1234)
    keys = runner.encode([IDS])[0].keys
    before, tables = keys.clone(), runner.rotary.tables(keys, positions)
    wanted = runner.rotary.rotate(keys, positions)
    for chunk in (rotary_module.CHUNK_BYTES, 1):  # all layers in one step; one layer a step
        monkeypatch.setattr(rotary_module, "CHUNK_BYTES", chunk)
        buffer = torch.full((*keys.shape[:2], len(IDS) + 9, keys.shape[3]), 7.0, dtype=dtype)
        runner.rotary.rotate_into(buffer[:, :, 4 : 4 + len(IDS)], keys, tables)
        assert torch.equal(buffer[:, :, 4 : 4 + len(IDS)], wanted)
        assert (buffer[:, :, :4] == 7).all()
        assert (buffer[:, :, 4 + len(IDS) :] == 7).all()
    assert torch.equal(keys, before)


@families
def test_only_rotary_channels_and_rotary_layers_turn(family: str) -> None:
    runner = tiny_runner(family, torch.float32)
    keys = runner.encode([IDS])[0].keys
    turned = (runner.rotary.rotate(keys, places(1000)) != keys).any(dim=1).any(dim=1)  # [layers, head_dim]
    rotating = PASSING_BY.get(family, runner.geometry.head_dim)
    assert turned[0, :rotating].all()
    assert not turned[0, rotating:].any()
    assert turned[1, :rotating].all() == (family != "smollm3")  # its second layer has no rotary embedding
    assert turned[1].any() == (family != "smollm3")


def test_two_tables_by_layer_type_make_two_runs() -> None:
    local, whole = tiny_runner("gemma3", torch.float32).rotary.runs
    assert local.source is not None
    assert whole.source is not None
    assert dict(local.source.options) == {"layer_type": "sliding_attention"}
    assert dict(whole.source.options) == {"layer_type": "full_attention"}
    assert local.source.module is whole.source.module
    assert len(tiny_runner("llama", torch.float32).rotary.runs) == 1


@pytest.mark.parametrize("family", ["llama", "llama-yarn", "qwen3", "gemma3", "phi", "cohere", "glm"])
def test_the_plain_formula_is_used_where_it_gives_the_functions_bits(family: str) -> None:
    """Cohere and GLM pair neighbouring channels."""
    runs = tiny_runner(family, torch.float32).rotary.runs
    assert {run.halves for run in runs} == {family not in ("cohere", "glm")}


@families
def test_double_precision_makes_float64_tables(family: str) -> None:
    """The double itself: its tables are exact, those of the model are off by the rounding of float32 angles."""
    runner, positions = tiny_runner(family), places(4000)
    like = torch.empty(1, dtype=torch.float64)
    with DoublePrecision():
        exact = runner.rotary.tables(like, positions)
    for run, ours, own in zip(runner.rotary.runs, exact, runner.rotary.tables(like, positions), strict=True):
        if run.source is None:
            assert ours is own is None
            continue
        assert ours is not None
        assert own is not None
        kind = f"{run.source.options['layer_type']}_" if run.source.options else ""
        frequencies = getattr(run.source.module, f"{kind}inv_freq").double()
        scaling = getattr(run.source.module, f"{kind}attention_scaling")
        angles = positions[:, None] * frequencies
        pairs = angles.repeat_interleave(2, -1) if family == "cohere" else torch.cat((angles, angles), dim=-1)
        assert ours[0].dtype == torch.float64
        assert largest(ours[0][0] - pairs.cos() * scaling) <= 1e-12
        assert largest(ours[1][0] - pairs.sin() * scaling) <= 1e-12
        assert 1e-7 < largest(own[0] - ours[0]) < 1e-3


@families
def test_rounded_frequencies_give_wrong_keys_at_position_1000(family: str) -> None:
    """`model.to(bfloat16)` rounds them without a word; float32 rounding alone stays below 5e-4."""
    runner = Runner(tiny_model(family))
    keys = runner.encode([IDS])[0].keys
    right = runner.rotary.rotate(keys, places(1000))
    runner.model.to(torch.bfloat16)
    wrong = runner.rotary.rotate(keys, places(1000))
    assert (wrong - right).norm() > 5e-3 * right.norm()


def test_rounded_frequencies_are_off_by_more_than_a_radian_at_position_1000() -> None:
    model = tiny_model("llama", head_dim=128)
    (tables,) = rotary_modules(model)
    right = tables.inv_freq.clone()
    model.to(torch.bfloat16)
    assert largest((tables.inv_freq.float() - right) * 1000) > 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiny_models_keep_their_frequencies_in_any_dtype(dtype: torch.dtype) -> None:
    assert all(module.inv_freq.dtype == torch.float32 for module in rotary_modules(tiny_model("llama", dtype=dtype)))


def test_watching_leaves_no_trace() -> None:
    model = tiny_model("llama")
    home = __import__(type(model).__module__, fromlist=["apply_rotary_pos_emb"])
    before = home.apply_rotary_pos_emb
    runner = Runner(model)
    with pytest.raises(IndexError):
        runner.encode([(10**6,)])
    assert home.apply_rotary_pos_emb is before
    assert not any(module._forward_hooks for module in model.modules())


def test_tables_that_no_module_made_are_refused() -> None:
    call = Call(torch.zeros(1, 2, 3, 4), lambda q, k, *_: (q, k), {}, None)
    with pytest.raises(ValueError, match=r"layer 1 .* tables that no rotary module made"):
        Rotary.of([None, call])


def test_options_of_a_rotary_function_are_refused() -> None:
    source = TableSource(torch.nn.Identity(), "x", {})
    call = Call(torch.zeros(1, 2, 3, 4), lambda q, k, *_: (q, k), {"unsqueeze_dim": 2}, source)
    with pytest.raises(ValueError, match=r"layer 0 .* options \{'unsqueeze_dim': 2\}"):
        Rotary.of([call])


def test_an_encoding_whose_rotary_calls_were_not_seen_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(tiny_model("llama"))

    @contextmanager
    def blind(_: nn.Module) -> Generator[Watch]:
        yield Watch()

    monkeypatch.setattr(runner_module, "watching", blind)
    with pytest.raises(ModelError, match="something has replaced its rotary function"):
        runner.encode([IDS])


def test_a_second_watch_waits_for_the_first_and_both_leave_the_models_own_function() -> None:
    model, entered = tiny_model("llama"), Event()
    home = sys.modules[type(model).__module__]
    own = home.apply_rotary_pos_emb

    def watch() -> None:
        with rotary_module.watching(model):
            entered.set()

    second = Thread(target=watch)
    with rotary_module.watching(model):
        second.start()
        assert not entered.wait(0.2)
    second.join(10)
    assert entered.is_set()
    assert home.apply_rotary_pos_emb is own
