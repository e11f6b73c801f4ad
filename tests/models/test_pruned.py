"""Pruned entries equal a forward in which each layer and head hides what was pruned from the request's rows.

The reference takes nothing from an entry but which tokens were kept: one forward over the whole prompt, each of whose
layers is handed a mask per query head by a hook. Float64 all through, so that only an error of the method could be
left.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlink.core.entry import CacheEntry
from kvlink.core.errors import InputError, ModelRefused
from kvlink.core.layout import Kind, Layout, Prompt, ReferenceOrder
from kvlink.models.assembler import Assembler
from kvlink.models.attention import Present
from kvlink.models.branches import Past
from kvlink.models.cache import SlotCache
from kvlink.models.reference import reference_logits
from kvlink.models.runner import Runner
from kvlink.store.codecs import CODECS
from kvlink.store.codecs.base import geometry_of
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

SLIDING = [name for name, (_, options) in FAMILIES.items() if options.get("sliding_window")]
FULL = [*(name for name in FAMILIES if name not in SLIDING), "qwen2-full"]
SINK = random_ids(4, seed=77)
PROMPT = tiny_prompt()
FAULT = 1e-3
"""Share of the largest logit by which a fault must move some logit: six orders more than what passes."""

families = pytest.mark.parametrize("family", FULL)
Change = Callable[[Tensor], Tensor]


@functools.cache
def runner_of(family: str, dtype: torch.dtype = torch.float64) -> Runner:
    if family != "qwen2-full":
        return tiny_runner(family, dtype)
    return Runner(tiny_model("qwen2", dtype=dtype, sliding_window=None, layer_types=["full_attention"] * 2))


def pruned(entry: CacheEntry, codec: str = "pruned50") -> CacheEntry:
    made, geometry = CODECS[codec], geometry_of(entry)
    return made.unpack(made.pack(entry), geometry=geometry, dtype=entry.keys.dtype, token_ids=entry.token_ids)


def entries_of(runner: Runner, codec: str = "pruned50") -> list[CacheEntry]:
    return [pruned(entry, codec) for entry in runner.encode(PROMPT.segments, prefix=runner.prefix(SINK))]


def with_all_kept(entry: CacheEntry) -> CacheEntry:
    kept = torch.arange(entry.num_tokens, dtype=torch.int32).expand(*entry.keys.shape[:2], -1)
    return replace(entry, kept=kept)


@contextmanager
def hidden(runner: Runner, prompt: Prompt, entries: Sequence[CacheEntry], num_links: int) -> Generator[None]:
    """Hide from the request's rows, in the reference forward, what was pruned: layer by layer, query head by head."""
    layout, heads = prompt.layout(num_links=num_links), runner.config.num_attention_heads
    order = ReferenceOrder.of(layout, len(SINK))
    visible = order.mask().repeat(runner.geometry.layers, heads, 1, 1)
    asking = (order.groups == 0) & (order.source >= 0)
    for span, entry in zip(layout.of(Kind.SEGMENT), entries, strict=True):
        for layer in range(len(visible)):
            for head in range(heads):
                kept = set(entry.kept[layer, head * runner.geometry.kv_heads // heads].tolist())
                for token in set(range(len(span))) - kept:
                    column = order.source == span.start + token
                    visible[layer, head] &= ~(asking[:, None] & column[None, :])

    def handed(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask = torch.zeros(visible.shape[1:], dtype=runner.dtype).masked_fill(~visible[module.layer_idx], -torch.inf)
        assert kwargs["attention_mask"].shape == (1, 1, *mask.shape[1:])
        return args, {**kwargs, "attention_mask": mask[None]}

    attentions = [module for module in runner.model.modules() if type(module).__name__.endswith("Attention")]
    assert len(attentions) == len(visible)
    hooks = [module.register_forward_pre_hook(handed, with_kwargs=True) for module in attentions]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# --- what pruned entries are held to ---------------------------------------------------------------------------------


@families
@pytest.mark.parametrize(("codec", "num_links"), [("pruned75", 6), ("pruned50", 0), ("pruned25", 6)])
def test_a_prefill_behind_pruned_documents_equals_the_reference(family: str, codec: str, num_links: int) -> None:
    runner = runner_of(family)
    assembler = tiny_assembler(runner, num_links=num_links)
    with DoublePrecision():
        entries = entries_of(runner, codec)
        found = reuse_logits(assembler, PROMPT, sink_ids=SINK, entries=entries)
        with hidden(runner, PROMPT, entries, num_links):
            wanted = reference_logits(assembler, PROMPT, sink_ids=SINK)[len(PROMPT.system) :]
        unpruned = reuse_logits(assembler, PROMPT, sink_ids=SINK)
    assert largest(found - wanted) <= 1e-10
    assert largest(found - unpruned) > FAULT * largest(wanted)


@families
def test_a_token_decoded_behind_pruned_documents_sees_what_it_would_see_in_the_reference(family: str) -> None:
    runner, answer = runner_of(family), random_ids(5, seed=5)
    assembler, layout = tiny_assembler(runner), PROMPT.layout(num_links=6)
    whole = Prompt(PROMPT.system, PROMPT.documents, PROMPT.tail + answer, PROMPT.labels)
    with DoublePrecision():
        entries, prefix = entries_of(runner), runner.prefix(PROMPT.system)
        assert prefix is not None
        cache = assembler.assemble(layout, prefix=prefix, entries=entries, room=len(answer))
        assembler.prefill(cache, PROMPT, layout)
        found = torch.stack([runner.decode(cache, token) for token in answer])
        with hidden(runner, whole, entries, 6):
            wanted = reference_logits(assembler, whole, sink_ids=SINK)[-len(answer) :]
    assert largest(found - wanted) <= 1e-10


def test_pruned_and_whole_documents_stand_side_by_side() -> None:
    runner = runner_of("llama")
    assembler = tiny_assembler(runner)
    with DoublePrecision():
        whole = runner.encode(PROMPT.segments, prefix=runner.prefix(SINK))
        mixed = [pruned(entry) if at % 2 else entry for at, entry in enumerate(whole)]
        named = [entry if entry.is_pruned else with_all_kept(entry) for entry in mixed]
        found = reuse_logits(assembler, PROMPT, sink_ids=SINK, entries=mixed)
        with hidden(runner, PROMPT, named, 6):
            wanted = reference_logits(assembler, PROMPT, sink_ids=SINK)[len(PROMPT.system) :]
    assert largest(found - wanted) <= 1e-10


# --- faults are found ------------------------------------------------------------------------------------------------


FAULTS: dict[str, Change] = {
    "off by one token": lambda present: present.roll(1, dims=2),
    "of the other heads": lambda present: present.flip(1),
    "of the other layers": lambda present: present.flip(0),
    "of one head for all": lambda present: present[:, :1].expand_as(present),
    "left out": torch.ones_like,
}


@families
@pytest.mark.parametrize("fault", FAULTS)
def test_a_mask_that_is_wrong_is_found(family: str, fault: str) -> None:
    runner = runner_of(family)
    assembler = tiny_assembler(runner)

    def spoil(cache: SlotCache, layout: Layout, entries: list[CacheEntry]) -> None:
        assert cache.present is not None
        cache.present = FAULTS[fault](cache.present)

    with DoublePrecision():
        entries = entries_of(runner)
        found = reuse_logits(assembler, PROMPT, sink_ids=SINK, entries=entries)
        spoilt = reuse_logits(assembler, PROMPT, sink_ids=SINK, entries=entries, spoil=spoil)
    assert largest(found - spoilt) > FAULT * largest(found)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_query_heads_that_take_the_mask_of_another_kv_head_are_found(family: str) -> None:
    """Four query heads share two of keys: 0 and 1 the first, not 0 and 2."""
    runner = runner_of(family)
    assembler = tiny_assembler(runner)
    with DoublePrecision():
        entries = entries_of(runner)
        found = reuse_logits(assembler, PROMPT, sink_ids=SINK, entries=entries)
        turned = [replace(entry, kept=entry.kept[:, [1, 0]]) for entry in entries]
        with hidden(runner, PROMPT, turned, 6):
            other = reference_logits(assembler, PROMPT, sink_ids=SINK)[len(PROMPT.system) :]
    assert largest(found - other) > FAULT * largest(found)


# --- what stays as it was --------------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_entries_of_which_all_rows_are_kept_give_the_bits_of_raw_ones(family: str, dtype: torch.dtype) -> None:
    runner = runner_of(family, dtype)
    assembler = tiny_assembler(runner)
    whole = runner.encode(PROMPT.segments, prefix=runner.prefix(SINK))
    raw = reuse_logits(assembler, PROMPT, entries=whole)
    assert torch.equal(reuse_logits(assembler, PROMPT, entries=[with_all_kept(entry) for entry in whole]), raw)


@families
def test_masks_that_hide_nothing_change_nothing_but_rounding(family: str) -> None:
    runner = runner_of(family)
    assembler = tiny_assembler(runner)

    def masked(cache: SlotCache, layout: Layout, entries: list[CacheEntry]) -> None:
        cache.present = torch.ones(*cache.keys.shape[:2], len(layout), dtype=torch.bool)

    raw = reuse_logits(assembler, PROMPT, sink_ids=SINK)
    assert largest(reuse_logits(assembler, PROMPT, sink_ids=SINK, spoil=masked) - raw) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_was_pruned_has_exactly_no_weight(dtype: torch.dtype) -> None:
    """Whatever stands in its rows: not one bit of the logits changes, neither of a prefill nor of a decoded token."""
    runner = tiny_runner("llama", dtype, initializer_range=0.02)
    assembler, layout, entries = tiny_assembler(runner), PROMPT.layout(num_links=6), entries_of(runner)
    prefix = runner.prefix(PROMPT.system)
    assert prefix is not None

    def computed(*, scale: float) -> Tensor:
        cache = assembler.assemble(layout, prefix=prefix, entries=entries, room=1)
        assert cache.present is not None
        generator = torch.Generator().manual_seed(0)
        for tensor in (cache.keys, cache.values):
            rows = tensor[:, :, : len(layout)]
            noise = scale * torch.randn(rows.shape, generator=generator).to(dtype)
            rows.copy_(torch.where(cache.present[..., None], rows, noise))
        logits = assembler.prefill(cache, PROMPT, layout, logits_to_keep=0)
        return torch.cat((logits, runner.decode(cache, 7)[None]))

    clean = computed(scale=0)
    assert clean.isfinite().all()
    assert torch.equal(computed(scale=100), clean)


def test_rows_that_are_missing_hold_zeros_whatever_the_buffer_held() -> None:
    runner = runner_of("llama", torch.float32)
    assembler, layout, entries = tiny_assembler(runner), PROMPT.layout(num_links=6), entries_of(runner)
    prefix = runner.prefix(PROMPT.system)
    assert prefix is not None
    cache = assembler.assemble(layout, prefix=prefix, entries=entries)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    assembler.release(cache)
    again = assembler.assemble(layout, prefix=prefix, entries=entries)
    assert again is cache
    for span in layout.of(Kind.SEGMENT):
        rows = slice(span.start, span.stop)
        for tensor in (again.keys, again.values):
            assert ((tensor[:, :, rows] == 0).all(dim=-1) == ~again.present[:, :, rows]).all()


def test_a_buffer_that_held_pruned_documents_forgets_them() -> None:
    runner = runner_of("llama", torch.float32)
    prefix, layout = runner.prefix(PROMPT.system), PROMPT.layout()
    assert prefix is not None
    whole = runner.encode(PROMPT.segments, prefix=runner.prefix(SINK))
    assembler, fresh = Assembler(runner), Assembler(runner)
    plain = Prompt(PROMPT.system, (), PROMPT.tail)

    def used() -> SlotCache:
        cache = assembler.assemble(layout, prefix=prefix, entries=[pruned(entry) for entry in whole], room=1)
        assembler.prefill(cache, PROMPT, layout)
        assembler.release(cache)
        return cache

    first = used()
    cache = assembler.assemble(layout, prefix=prefix, entries=whole)
    assert cache is first
    assert torch.equal(
        assembler.prefill(cache, PROMPT, layout, logits_to_keep=0),
        fresh.prefill(fresh.assemble(layout, prefix=prefix, entries=whole), PROMPT, layout, logits_to_keep=0),
    )
    assembler.release(cache)
    second = used()
    cache, logits = assembler.prefill_plain(plain)
    assert cache is second
    assert torch.equal(logits, fresh.prefill_plain(plain)[1])


@families
def test_the_models_own_attention_is_as_it_was(family: str) -> None:
    runner = runner_of(family, torch.float32)
    ids = torch.tensor([PROMPT.tail])
    before = runner.model(input_ids=ids).logits
    reuse_logits(tiny_assembler(runner), PROMPT, entries=entries_of(runner))
    assert runner.config._attn_implementation == "sdpa"
    assert torch.equal(runner.model(input_ids=ids).logits, before)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SLIDING)
def test_pruned_documents_are_refused_where_a_layer_has_a_sliding_window(family: str) -> None:
    runner = tiny_runner(family, torch.float32)
    with pytest.raises(ModelRefused, match=r"through a sliding window of 16 positions.*another codec, such as raw"):
        reuse_logits(tiny_assembler(runner), PROMPT, entries=entries_of(runner))


def test_pruned_documents_are_refused_where_the_model_does_not_attend_by_sdpa() -> None:
    model = tiny_model("llama")
    runner = Runner(model)
    model.set_attn_implementation("eager")
    with pytest.raises(ModelRefused, match="need sdpa attention, but this model was loaded with eager; take raw"):
        reuse_logits(tiny_assembler(runner), PROMPT, entries=entries_of(runner))
    assert runner.config._attn_implementation == "eager"


def test_a_layer_that_attends_in_a_way_of_its_own_is_found() -> None:
    runner = Runner(tiny_model("llama"))
    entries, attention = entries_of(runner), runner.model.model.layers[1].self_attn

    def unmasked(hidden_states: Tensor, **given: Any) -> Any:
        if "present" in given:
            given["present"] = Present(torch.ones_like(given["present"].columns))
        return type(attention).forward(attention, hidden_states, **given)

    attention.forward = unmasked
    with pytest.raises(ModelRefused, match="1 of 2 layers attended under masks of their own"):
        reuse_logits(tiny_assembler(runner), PROMPT, entries=entries)


def test_a_layer_that_the_masks_do_not_reach_fails_instead_of_attending_what_is_missing() -> None:
    runner = Runner(tiny_model("llama"))
    entries, attention = entries_of(runner), runner.model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, present, **given: type(attention).forward(
        attention, hidden_states, **given
    )
    with pytest.raises(TypeError, match="present"):
        reuse_logits(tiny_assembler(runner), PROMPT, entries=entries)


def test_several_rows_without_a_mask_are_refused() -> None:
    present, query = Present(torch.ones(1, 2, 3, dtype=torch.bool)), torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="2 rows came without a mask"):
        present.mask(0, query, torch.zeros(1, 2, 5, 8), None)


def test_a_mask_hides_by_kv_head_and_shows_what_is_behind_the_prompt() -> None:
    present = Present(torch.tensor([[[True, True, True], [True, False, True]], [[False, True, True], [True] * 3]]))
    query, key = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 5, 8)
    seen = torch.tensor([[True] * 5, [True] * 5, [True, False, True, True, True], [True, False, True, True, True]])
    additive = present.mask(0, query, key, None)
    assert torch.equal(additive == 0, seen[None, :, None])
    assert torch.equal(additive == -torch.inf, ~seen[None, :, None])
    wanted = torch.tensor([[False, True, True, False, True]] * 2 + [[True, True, True, False, True]] * 2)
    boolean = torch.tensor([[[[True, True, True, False, True]]]])
    assert torch.equal(present.mask(1, query, key, boolean), wanted[None, :, None])
    assert torch.equal(present.mask(0, query, key[:, :, :2], None) == 0, seen[None, :, None, :2])
    assert present.served == {0, 1}


def test_pruned_documents_are_not_handed_over_to_stock_generate() -> None:
    runner = runner_of("llama")
    assembler, layout, prefix = Assembler(runner), PROMPT.layout(), runner.prefix(PROMPT.system)
    assert prefix is not None
    cache = assembler.assemble(layout, prefix=prefix, entries=entries_of(runner))
    assembler.prefill(cache, PROMPT, layout)
    with pytest.raises(InputError, match=r"read from a pruned object.*accept no pruned codec"):
        assembler.hand_over(cache)


def test_nothing_is_learned_from_pruned_documents() -> None:
    runner = runner_of("llama")
    prefix = runner.prefix(PROMPT.system)
    assert prefix is not None
    with pytest.raises(ValueError, match="load the documents as raw"):
        Past.of_entries(runner, PROMPT.layout(), prefix=prefix, entries=entries_of(runner))


def test_a_pruned_entry_is_no_beginning_of_an_exact_rebuild() -> None:
    runner = runner_of("llama")
    (entry, *_) = entries_of(runner)
    with pytest.raises(ValueError, match="does not begin with"):
        runner.encode_after(entry, (*entry.token_ids, 7))
