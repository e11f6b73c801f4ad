"""A request-side adapter acts on the rows behind the first document, on those alone, and as peft's LoRA would.

Exactness is shown in float64 all through (`DoublePrecision`), on weights wide enough for peaked attention. A planted
fault must move some logit by more than 1 % of the largest one: seven orders more.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from kvlink.core.errors import ModelRefused
from kvlink.core.layout import Kind, Layout, Prompt, ReferenceOrder
from kvlink.models.adapter import Adapter, attention_layers
from kvlink.models.assembler import Assembler
from kvlink.models.attention import grouped
from kvlink.models.cache import PastCache
from kvlink.models.reference import reference_logits
from kvlink.models.runner import Runner, Window
from tiny_bundles import adapted, tiny_adapter
from tiny_models import (
    FAMILIES,
    DoublePrecision,
    largest,
    random_ids,
    reuse_logits,
    tiny_assembler,
    tiny_model,
    tiny_prompt,
    tiny_runner,
)

SINK = random_ids(4, seed=77)
SINKS = {"none": (), "header": SINK, "longer-than-system": random_ids(9, seed=78)}
PROMPT = tiny_prompt()
"""Four documents, the first of two segments, with labels before the first, third and fourth."""

KINDS = ("llama", "mistral", "qwen2", "gemma2", "gemma3", "phi", "gpt_neox", "smollm3")
"""Plain; a window in all layers, in one; eager attention; scaled embeddings; partial rotary; fused; a NoPE layer."""

families = pytest.mark.parametrize("family", KINDS)
some = pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "phi"])


def hooks_of(runner: Runner) -> int:
    return sum(len(layer._forward_hooks) for _, layer in attention_layers(runner.model))


def prefilled(assembler: Assembler, prompt: Prompt, *, room: int = 0, sink_ids: tuple[int, ...] = SINK) -> Any:
    """Return a buffer with the whole prompt, and the logits of all rows behind S."""
    runner, layout = assembler.runner, prompt.layout(num_links=assembler.num_links)
    prefix = runner.prefix(prompt.system)
    assert prefix is not None
    entries = runner.encode(prompt.segments, prefix=runner.prefix(sink_ids)) if prompt.segments else []
    cache = assembler.assemble(layout, prefix=prefix, entries=entries, room=room)
    return cache, assembler.prefill(cache, prompt, layout, logits_to_keep=0)


# --- which layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_is_about_all_linear_layers_of_the_attention_and_no_others(family: str) -> None:
    model = tiny_runner(family).model
    found = dict(attention_layers(model))
    inside = {name for name, module in model.named_modules() if name.rpartition(".")[2] in ("self_attn", "attention")}
    wanted = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and any(name.startswith(f"{owner}.") for owner in inside)
    }
    assert len(inside) == 2
    assert set(found) == wanted
    assert len(found) in (2 * 2, 2 * 4)  # two layers; a fused projection and one behind it, or q, k, v and o


@some
def test_a_fresh_adapter_changes_nothing(family: str) -> None:
    runner = tiny_runner(family)
    bare = tiny_assembler(runner)
    fresh = Assembler(runner, links=bare.links, adapter=Adapter.fresh(runner.model))
    assert torch.equal(reuse_logits(fresh, PROMPT, sink_ids=SINK), reuse_logits(bare, PROMPT, sink_ids=SINK))


def test_a_fresh_adapter_follows_from_its_seed() -> None:
    model = tiny_runner("llama").model
    one, same, other = (Adapter.fresh(model, rank=3, seed=seed) for seed in (1, 1, 2))
    assert one.rank == 3
    assert all(torch.equal(one.down[name], same.down[name]) for name in one.down)
    assert not any(torch.equal(one.down[name], other.down[name]) for name in one.down)
    assert {(tuple(one.down[name].shape), tuple(one.up[name].shape)) for name in one.down} == {
        ((3, 64), (64, 3)),
        ((3, 64), (32, 3)),
    }


def test_a_model_without_linear_layers_in_its_attention_is_refused() -> None:
    with pytest.raises(ModelRefused, match=r"GPT2LMHeadModel has no torch\.nn\.Linear.*train links alone"):
        Adapter.fresh(tiny_model("gpt2"))


def test_moved_to_another_dtype_the_changes_are_the_same() -> None:
    adapter = tiny_adapter(tiny_runner("llama"))
    moved = adapter.to(torch.device("cpu"), torch.bfloat16)
    assert moved.scale == adapter.scale
    for name in adapter.down:
        assert torch.equal(moved.down[name], adapter.down[name].bfloat16())
        assert torch.equal(moved.up[name], adapter.up[name].bfloat16())


# --- golden: reuse is the reference forward -------------------------------------------------------------------------


@families
@pytest.mark.parametrize(("sink", "num_links"), [("none", 0), ("header", 6), ("longer-than-system", 6)])
def test_reuse_with_an_adapter_equals_the_reference_forward(family: str, sink: str, num_links: int) -> None:
    runner = tiny_runner(family)
    assembler, bare = adapted(runner, num_links=num_links), tiny_assembler(runner, num_links=num_links)
    with DoublePrecision():
        wanted = reference_logits(assembler, PROMPT, sink_ids=SINKS[sink])[len(PROMPT.system) :]
        found = reuse_logits(assembler, PROMPT, sink_ids=SINKS[sink])
        without = reuse_logits(bare, PROMPT, sink_ids=SINKS[sink])
    assert largest(found - wanted) <= 1e-9
    assert largest(found - without) > 0.05 * largest(wanted)


@some
def test_with_the_models_own_float32_tables_rounding_alone_is_left(family: str) -> None:
    runner = tiny_runner(family, torch.float32, initializer_range=0.02)
    assembler = adapted(runner)
    wanted = reference_logits(assembler, PROMPT, sink_ids=SINK)[len(PROMPT.system) :]
    assert largest(reuse_logits(assembler, PROMPT, sink_ids=SINK) - wanted) <= 2e-5


@families
def test_rows_before_the_first_document_keep_their_bits(family: str) -> None:
    """S, and the label that stands before the first document."""
    runner = tiny_runner(family)
    bare = tiny_assembler(runner)
    label, count = len(PROMPT.labels[0]), len(PROMPT.system)
    assert label == 2
    with DoublePrecision():
        plain = reference_logits(bare, PROMPT, sink_ids=SINK)[: count + label]
        assert torch.equal(reference_logits(adapted(runner), PROMPT, sink_ids=SINK)[: count + label], plain)
        wanted = reuse_logits(bare, PROMPT, sink_ids=SINK)
        found = reuse_logits(adapted(runner), PROMPT, sink_ids=SINK)
    assert torch.equal(found[:label], wanted[:label])
    assert (found[label:] - wanted[label:]).abs().amax(-1).min() > 1e-4  # and no other row does


@families
def test_decoded_tokens_are_changed_like_all_rows_behind_the_documents(family: str) -> None:
    runner, answer = tiny_runner(family), random_ids(8, seed=5)
    assembler = adapted(runner)
    whole = Prompt(PROMPT.system, PROMPT.documents, PROMPT.tail + answer, PROMPT.labels)
    with DoublePrecision():
        cache, _ = prefilled(assembler, PROMPT, room=len(answer))
        found = torch.stack([runner.decode(cache, token) for token in answer])
        wanted = reference_logits(assembler, whole, sink_ids=SINK)[-len(answer) :]
    assert largest(found - wanted) <= 1e-9


@some
def test_a_prompt_in_two_parts_is_changed_as_in_one(family: str) -> None:
    """As `assemble` leaves the last token to whoever continues."""
    assembler = adapted(tiny_runner(family))
    runner, layout = assembler.runner, PROMPT.layout(num_links=6)
    with DoublePrecision():
        _, wanted = prefilled(assembler, PROMPT)
        prefix = runner.prefix(PROMPT.system)
        assert prefix is not None
        entries = runner.encode(PROMPT.segments, prefix=runner.prefix(SINK))
        cache = assembler.assemble(layout, prefix=prefix, entries=entries, room=1)
        assembler.prefill(cache, PROMPT, layout, upto=len(layout) - 1)
        found = runner.decode(cache, PROMPT.tail[-1])
    assert largest(found - wanted[-1]) <= 1e-9


# --- golden: faults are found ---------------------------------------------------------------------------------------


def fault(assembler: Assembler, found: Callable[[], Tensor]) -> float:
    """Return how far a faulty reuse is from the reference forward, after a sound one has passed."""
    with DoublePrecision():
        wanted = reference_logits(assembler, PROMPT, sink_ids=SINK)[len(PROMPT.system) :]
        assert largest(reuse_logits(assembler, PROMPT, sink_ids=SINK) - wanted) <= 1e-9
        return largest(found() - wanted) / largest(wanted)


def everywhere(assembler: Assembler) -> Any:
    """Let the adapter act on whatever the model computes."""
    assert assembler.adapter is not None
    return assembler.adapter.acting(assembler.runner.model, torch.ones(1, 1, dtype=torch.float64))


@some
def test_an_adapter_that_acts_on_the_system_prompt_is_found(family: str) -> None:
    assembler = adapted(tiny_runner(family))
    runner, layout = assembler.runner, PROMPT.layout(num_links=6)

    def found() -> Tensor:
        with everywhere(assembler):
            prefix = runner.prefix(PROMPT.system)
        assert prefix is not None
        entries = runner.encode(PROMPT.segments, prefix=runner.prefix(SINK))
        cache = assembler.assemble(layout, prefix=prefix, entries=entries)
        return assembler.prefill(cache, PROMPT, layout, logits_to_keep=0)

    assert fault(assembler, found) > 0.01


@some
def test_an_adapter_that_acts_on_documents_is_found(family: str) -> None:
    assembler = adapted(tiny_runner(family))

    def found() -> Tensor:
        with everywhere(assembler):
            entries = assembler.runner.encode(PROMPT.segments, prefix=assembler.runner.prefix(SINK))
        return reuse_logits(assembler, PROMPT, entries=entries)

    assert fault(assembler, found) > 0.01


@some
def test_an_adapter_that_acts_on_the_first_label_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assembler = adapted(tiny_runner(family))

    def found() -> Tensor:
        monkeypatch.setattr(Layout, "behind_documents", property(lambda layout: layout.of(Kind.SYSTEM)[0].stop))
        return reuse_logits(assembler, PROMPT, sink_ids=SINK)

    assert fault(assembler, found) > 0.01


@some
def test_an_adapter_that_leaves_out_the_links_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assembler = adapted(tiny_runner(family))

    def found() -> Tensor:
        monkeypatch.setattr(Layout, "behind_documents", property(lambda layout: layout.of(Kind.TAIL)[0].start))
        return reuse_logits(assembler, PROMPT, sink_ids=SINK)

    assert fault(assembler, found) > 0.01


@some
def test_an_adapter_that_is_left_out_while_decoding_is_found(family: str) -> None:
    runner, answer = tiny_runner(family), random_ids(6, seed=5)
    assembler = adapted(runner)
    whole = Prompt(PROMPT.system, PROMPT.documents, PROMPT.tail + answer, PROMPT.labels)
    with DoublePrecision():
        cache, _ = prefilled(assembler, PROMPT, room=len(answer))
        cache.adapter = None
        found = torch.stack([runner.decode(cache, token) for token in answer])
        wanted = reference_logits(assembler, whole, sink_ids=SINK)[-len(answer) :]
    assert largest(found - wanted) > 0.01 * largest(wanted)


# --- without documents ----------------------------------------------------------------------------------------------


@some
def test_without_documents_every_bit_is_that_of_no_adapter(family: str) -> None:
    runner, answer = tiny_runner(family), random_ids(5, seed=3)
    prompt = Prompt(PROMPT.system, (), PROMPT.tail)
    bits = []
    for assembler in (Assembler(runner), adapted(runner)):
        cache, logits = assembler.prefill_plain(prompt, room=len(answer))
        bits.append([logits[-1], *(runner.decode(cache, token) for token in answer), cache.keys[:, :, : cache.length]])
    assert all(torch.equal(one, other) for one, other in zip(*bits, strict=True))


def test_a_buffer_that_is_used_again_without_documents_does_not_keep_the_adapter() -> None:
    assembler = adapted(tiny_runner("llama"))
    cache, _ = prefilled(assembler, PROMPT, room=64)
    assert cache.adapter is assembler.adapter
    assembler.release(cache)
    again, _ = assembler.prefill_plain(Prompt(PROMPT.system, (), PROMPT.tail), room=2)
    assert again is cache
    assert again.adapter is None


@some
def test_entries_have_the_same_bits_while_an_adapter_is_in_use(family: str) -> None:
    runner = tiny_runner(family)
    before = runner.encode(PROMPT.segments, prefix=runner.prefix(SINK))
    prefilled(adapted(runner), PROMPT)
    after = runner.encode(PROMPT.segments, prefix=runner.prefix(SINK))
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


# --- rows of several kinds in one forward ---------------------------------------------------------------------------


class Noted(PastCache):
    """Keeps what each layer's new rows were."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__(keys, values)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.keys.append(key_states)
        self.values.append(value_states)
        return super().update(key_states, value_states, layer_idx)


ASKED = Prompt(random_ids(5, seed=31), (), random_ids(9, seed=32))
"""Without documents."""

TEXT = random_ids(14, seed=33)
"""A document that is being encoded."""

WITH, WITHOUT, UNDER_ENCODE = range(3)


def batch_of_three(runner: Runner, *, acting: bool = True, factors: tuple[int, int, int] = (1, 0, 0)) -> Any:
    """Run links and T behind documents, T behind S, and a document behind its sink prefix, as one batch.

    Returns:
        For each of the three its logits and, `[layers, kv_heads, tokens, dim]`, its new keys and values.
    """
    assembler, layout = adapted(runner), PROMPT.layout(num_links=6)
    cache, _ = prefilled(assembler, PROMPT)
    computed = layout.request_rows(after=len(PROMPT.system))
    known = torch.tensor(sorted(set(range(len(layout))) - set(computed.tolist())))
    system, sink = runner.prefix(ASKED.system), runner.prefix(SINK)
    assert system is not None
    assert sink is not None
    past = Noted(
        torch.cat((cache.keys[:, :, known], system.keys[:, 0], sink.keys[:, 0]), dim=2),
        torch.cat((cache.values[:, :, known], system.values[:, 0], sink.values[:, 0]), dim=2),
    )
    owner = torch.tensor([WITH] * len(known) + [WITHOUT] * len(system) + [UNDER_ENCODE] * len(sink))
    column = torch.cat((known, torch.arange(len(system)), torch.arange(len(sink))))
    embeds = [assembler.embed(PROMPT.ids(layout)[computed]), runner.embed(ASKED.tail), runner.embed(TEXT)]
    places = [computed, torch.arange(len(ASKED.tail)) + len(system), torch.arange(len(TEXT)) + len(sink)]
    at = pad_sequence(places, batch_first=True)  # [3, longest]
    used = pad_sequence([torch.ones_like(row) for row in places], batch_first=True).bool()
    masks: list[dict[Window, Tensor]] = []
    for row in range(3):
        distance = at[row][:, None] - torch.cat((column, at[row]))[None, :]
        seen = (distance >= 0) & torch.cat((owner == row, used[row]))
        masks.append({one: seen & (distance < (one.size or len(layout))) for one in runner.windows})
    forms = [runner.masks(mask) for mask in masks]
    together = (
        {name: torch.cat([form[name] for form in forms]) for name in forms[0]} if len(runner.windows) > 1 else None
    )
    factor = torch.tensor(factors, dtype=runner.dtype)[:, None].repeat(1, at.shape[1])
    factor[WITH] *= at[WITH] >= layout.behind_documents
    with torch.inference_mode(), grouped(runner.config, runner.device):
        logits = runner.forward(
            cache=past,
            adapter=tiny_adapter(runner) if acting else None,
            factor=factor,
            inputs_embeds=pad_sequence(embeds, batch_first=True),
            position_ids=at,
            attention_mask=torch.cat(forms) if together is None else together,
            logits_to_keep=0,
        )
    keys, values = torch.stack(past.keys), torch.stack(past.values)  # [layers, 3, kv_heads, longest, dim]
    return [
        (logits[row, :count], keys[:, row, :, :count], values[:, row, :, :count])
        for row, count in enumerate(map(len, places))
    ]


@some
def test_a_batch_of_rows_with_without_and_under_encode_equals_each_alone(family: str) -> None:
    runner = tiny_runner(family)
    with DoublePrecision():
        with_documents, without, (_, keys, values) = batch_of_three(runner)
        _, behind = prefilled(adapted(runner), PROMPT)
        _, plain = Assembler(runner).prefill_plain(ASKED, logits_to_keep=len(ASKED.tail))
        entry = runner.encode([TEXT], prefix=runner.prefix(SINK))[0]
        rotated = runner.rotary.rotate(entry.keys, torch.arange(len(TEXT)) + len(SINK))
    assert largest(with_documents[0] - behind) <= 1e-9
    assert largest(without[0] - plain) <= 1e-9
    assert largest(keys - rotated) <= 1e-9
    assert largest(values - entry.values) <= 1e-9


@some
def test_a_factor_of_zero_leaves_a_row_its_bits_whatever_stands_beside_it(family: str) -> None:
    runner = tiny_runner(family)
    found, bare = batch_of_three(runner), batch_of_three(runner, acting=False)
    for row in (WITHOUT, UNDER_ENCODE):
        assert all(torch.equal(one, other) for one, other in zip(found[row], bare[row], strict=True))
    assert largest(found[WITH][0] - bare[WITH][0]) > 0.01 * largest(bare[WITH][0])


@pytest.mark.parametrize("row", [WITHOUT, UNDER_ENCODE])
def test_a_factor_of_one_on_another_row_is_found(row: int) -> None:
    runner, factors = tiny_runner("llama"), [1, 0, 0]
    factors[row] = 1
    found, sound = batch_of_three(runner, factors=tuple(factors)), batch_of_three(runner)
    assert largest(found[row][2] - sound[row][2]) > 0.01 * largest(sound[row][2])


# --- how it acts ----------------------------------------------------------------------------------------------------


def test_a_factor_weighs_the_change_of_each_row() -> None:
    runner, adapter = tiny_runner("llama"), tiny_adapter(tiny_runner("llama"))
    name, layer = next(attention_layers(runner.model))
    rows = torch.randn(2, 3, 64, dtype=torch.float64)
    factor = torch.tensor([[0.0, 1.0, 0.5], [1.0, 0.0, 0.0]], dtype=torch.float64)
    with torch.inference_mode():
        plain = layer(rows)
        with adapter.acting(runner.model, factor):
            found = layer(rows)
    change = 2.0 * rows @ (adapter.up[name] @ adapter.down[name]).T
    assert largest(found - plain - factor[..., None] * change) <= 1e-12


def test_nothing_of_an_adapter_is_left_in_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assembler = adapted(tiny_runner("llama"))
    prefilled(assembler, PROMPT)
    assert hooks_of(assembler.runner) == 0
    monkeypatch.setattr(assembler.runner.model.model.layers[1], "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        reuse_logits(assembler, Prompt(PROMPT.system, PROMPT.documents, PROMPT.tail), entries=[])
    assert hooks_of(assembler.runner) == 0


def test_where_no_row_is_changed_the_model_is_not_even_touched() -> None:
    runner = tiny_runner("llama")
    with tiny_adapter(runner).acting(runner.model, torch.zeros(1, 4)):
        assert hooks_of(runner) == 0
    with tiny_adapter(runner).acting(runner.model, torch.ones(1, 4)):
        assert hooks_of(runner) == 8


def test_without_a_factor_it_acts_on_all_rows_of_whatever_comes() -> None:
    runner = tiny_runner("llama")
    adapter = tiny_adapter(runner)
    with torch.inference_mode():
        for count in (7, 1):
            ids = torch.tensor([random_ids(count, seed=1)])
            with adapter.acting(runner.model):
                found = runner.model(input_ids=ids).logits
            with adapter.acting(runner.model, torch.ones(1, count)):
                assert torch.equal(runner.model(input_ids=ids).logits, found)
            assert largest(found - runner.model(input_ids=ids).logits) > 0.1


# --- against peft ---------------------------------------------------------------------------------------------------

PEFT = ("llama", "qwen2", "gemma3", "phi", "gpt_neox")
"""Plain; biases and a window; scaled embeddings; partial rotary; a fused projection."""


def peft_model(runner: Runner, adapter: Adapter, **options: Any) -> Any:
    """Return a copy of the model under peft's LoRA with the very factors of an adapter."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=adapter.rank, lora_alpha=adapter.scale * adapter.rank, target_modules=list(adapter.down), **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an older name
        model = get_peft_model(copy.deepcopy(runner.model), config).eval()
    layers = dict(model.base_model.model.named_modules())
    with torch.no_grad():
        for name in adapter.down:
            layers[name].lora_A["default"].weight.data = adapter.down[name].clone()
            layers[name].lora_B["default"].weight.data = adapter.up[name].clone()
    return model


@pytest.mark.parametrize("family", PEFT)
def test_behind_one_document_logits_are_those_of_pefts_lora(family: str) -> None:
    """S and the document by the base model, links and T by peft's: with S as sink prefix that is reuse."""
    runner, prompt = tiny_runner(family), tiny_prompt(documents=((37,),), labels=())
    assembler, layout = adapted(runner), prompt.layout(num_links=6)
    under = peft_model(runner, tiny_adapter(runner))
    start = layout.of(Kind.LINK)[0].start
    ids, stock = prompt.ids(layout), DynamicCache(config=runner.config)
    with DoublePrecision(), torch.inference_mode():
        with under.disable_adapter():
            under(input_ids=ids[None, :start], **{runner.cache_argument: stock})
        embeds = assembler.embed(ids[start:])[None]
        rows = torch.arange(start, len(layout))[None]
        wanted = under(inputs_embeds=embeds, position_ids=rows, **{runner.cache_argument: stock}).logits[0]
        found = reuse_logits(assembler, prompt, sink_ids=prompt.system)
        bare = reuse_logits(tiny_assembler(runner), prompt, sink_ids=prompt.system)
    assert largest(found - wanted) <= 1e-9
    assert largest(found - bare) > 0.01 * largest(wanted)


@pytest.mark.parametrize("family", PEFT)
def test_behind_several_documents_logits_are_those_of_pefts_activated_lora(family: str) -> None:
    """Activated LoRA begins to act at an invocation, here T: without links that is the request's side."""
    prompt = tiny_prompt(labels=())
    runner = tiny_runner(family)
    assembler, layout = adapted(runner, num_links=0), prompt.layout()
    under = peft_model(runner, tiny_adapter(runner), task_type="CAUSAL_LM", alora_invocation_tokens=list(prompt.tail))
    order = ReferenceOrder.of(layout, 0)
    with DoublePrecision(), torch.inference_mode():
        masks = runner.masks({window: order.mask(window=window.size) for window in runner.windows})
        wanted = under(input_ids=prompt.ids(layout)[None], attention_mask=masks).logits[0, -len(prompt.tail) :]
        found = reuse_logits(assembler, prompt)
        bare = reuse_logits(tiny_assembler(runner, num_links=0), prompt)
    assert largest(found - wanted) <= 1e-9
    assert largest(found - bare) > 0.01 * largest(wanted)


@pytest.mark.parametrize("family", PEFT)
def test_a_factor_from_a_row_on_is_pefts_activated_lora(family: str) -> None:
    runner, ids = tiny_runner(family), random_ids(30, seed=8)
    adapter = tiny_adapter(runner)
    under = peft_model(runner, adapter, task_type="CAUSAL_LM", alora_invocation_tokens=list(ids[17:20]))
    factor = (torch.arange(30) >= 17).to(runner.dtype)[None]
    tokens = torch.tensor([ids])
    with DoublePrecision(), torch.inference_mode():
        wanted = under(input_ids=tokens).logits
        found = runner.forward(cache=None, adapter=adapter, factor=factor, logits_to_keep=0, input_ids=tokens)
    assert largest(found - wanted) <= 1e-9
