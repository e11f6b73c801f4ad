"""The comparison with the reference forward has teeth: each fault, planted on purpose, is far from passing it.

Exactness is 1e-9 in float64. A fault must move some logit by more than 1 % of the largest one: seven orders more.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvlink.core.entry import CacheEntry
from kvlink.core.layout import Kind, Layout, ReferenceOrder
from kvlink.models.assembler import Assembler
from kvlink.models.cache import SlotCache
from kvlink.models.links import LinkTokens
from kvlink.models.reference import reference_logits
from kvlink.models.runner import Runner, Window
from tiny_models import (
    FAMILIES,
    DoublePrecision,
    Spoil,
    largest,
    random_ids,
    reuse_logits,
    tiny_assembler,
    tiny_model,
    tiny_prompt,
    tiny_runner,
)

SINK = random_ids(4, seed=77)
PROMPT = tiny_prompt()
SLIDING = [name for name, (_, options) in FAMILIES.items() if options.get("sliding_window")]
families = pytest.mark.parametrize("family", FAMILIES)
sliding = pytest.mark.parametrize("family", SLIDING)
Masks = dict[Window, Tensor]


def fault(
    assembler: Assembler,
    *,
    spoil: Spoil | None = None,
    order: ReferenceOrder | None = None,
    change: Callable[[Tensor, ReferenceOrder, Window], Tensor] | None = None,
    reused_by: Assembler | None = None,
) -> float:
    """Return how far a planted fault moves the logits, as a share of the largest, after a sound run has passed.

    Args:
        assembler: Whose reference forward, and reuse, are sound.
        spoil: Changes the assembled buffer.
        order: Replaces the order of the reference forward.
        change: Changes its masks, one per window.
        reused_by: Reuses in the sound one's place.
    """
    after = len(PROMPT.system)
    sound = ReferenceOrder.of(PROMPT.layout(num_links=assembler.num_links), len(SINK))
    used = order or sound
    masks: Masks | None = None
    if change:
        masks = {w: change(used.mask(window=w.size), used, w) for w in assembler.runner.windows}
    with DoublePrecision():
        wanted = reference_logits(assembler, PROMPT, sink_ids=SINK)[after:]
        assert largest(reuse_logits(assembler, PROMPT, sink_ids=SINK) - wanted) <= 1e-9
        compared = reference_logits(assembler, PROMPT, sink_ids=SINK, order=order, masks=masks)[after:]
        found = reuse_logits(reused_by or assembler, PROMPT, sink_ids=SINK, spoil=spoil)
    return largest(found - compared) / largest(wanted)


@families
def test_keys_that_are_not_rotated_are_found(family: str) -> None:
    def unrotated(cache: SlotCache, layout: Layout, entries: list[CacheEntry]) -> None:
        for span, entry in zip(layout.of(Kind.SEGMENT), entries, strict=True):
            cache.keys[:, :, span.start : span.stop] = entry.keys

    assert fault(tiny_assembler(tiny_runner(family)), spoil=unrotated) > 0.01


@families
def test_keys_that_keep_their_local_positions_are_found(family: str) -> None:
    rotary = tiny_runner(family).rotary

    def local(cache: SlotCache, layout: Layout, entries: list[CacheEntry]) -> None:
        for span, entry in zip(layout.of(Kind.SEGMENT), entries, strict=True):
            cache.keys[:, :, span.start : span.stop] = rotary.rotate(entry.keys, torch.arange(len(span)) + len(SINK))

    assert fault(tiny_assembler(tiny_runner(family)), spoil=local) > 0.01


@families
def test_keys_that_are_rotated_twice_are_found(family: str) -> None:
    rotary = tiny_runner(family).rotary

    def twice(cache: SlotCache, layout: Layout, entries: list[CacheEntry]) -> None:
        for span in layout.of(Kind.SEGMENT):
            rows = slice(span.start, span.stop)
            cache.keys[:, :, rows] = rotary.rotate(cache.keys[:, :, rows], torch.arange(span.start, span.stop))

    assert fault(tiny_assembler(tiny_runner(family)), spoil=twice) > 0.01


@families
def test_keys_that_are_off_by_one_position_are_found(family: str) -> None:
    rotary = tiny_runner(family).rotary

    def shifted(cache: SlotCache, layout: Layout, entries: list[CacheEntry]) -> None:
        for span, entry in zip(layout.of(Kind.SEGMENT), entries, strict=True):
            rows = torch.arange(span.start, span.stop)
            cache.keys[:, :, rows] = rotary.rotate(entry.keys, rows + 1)

    assert fault(tiny_assembler(tiny_runner(family)), spoil=shifted) > 0.01


@pytest.mark.parametrize("family", ["llama-llama3", "llama-yarn", "llama-linear"])
def test_default_frequencies_on_a_scaled_model_are_found(family: str) -> None:
    sound = tiny_assembler(tiny_runner(family))
    runner, tables = Runner(sound.runner.model), tiny_model("llama").model.rotary_emb
    runs = tuple(replace(run, source=replace(run.source, module=tables)) for run in runner.rotary.runs)
    runner.rotary = replace(runner.rotary, runs=runs)
    assert fault(sound, reused_by=Assembler(runner, links=sound.links)) > 0.01


def test_a_dropped_attention_scaling_is_found() -> None:
    sound = tiny_assembler(tiny_runner("llama-yarn"))
    runner, tables = Runner(sound.runner.model), tiny_model("llama-yarn").model.rotary_emb
    assert tables.attention_scaling > 1.1
    tables.attention_scaling = 1.0
    runs = tuple(replace(run, source=replace(run.source, module=tables)) for run in runner.rotary.runs)
    runner.rotary = replace(runner.rotary, runs=runs)
    assert fault(sound, reused_by=Assembler(runner, links=sound.links)) > 0.01


@families
def test_a_document_that_sees_an_earlier_link_is_found(family: str) -> None:
    layout = PROMPT.layout(num_links=6)
    links = torch.cat([torch.arange(s.start, s.stop) for s in layout.of(Kind.LINK)])

    def open_links(mask: Tensor, order: ReferenceOrder, window: Window) -> Tensor:
        distance = order.positions[:, None] - order.positions[None, :]
        seen = torch.isin(order.source, links)[None, :] & (order.groups > 0)[:, None] & (distance >= 0)
        return mask | (seen if window.size is None else seen & (distance < window.size))

    assert fault(tiny_assembler(tiny_runner(family)), change=open_links) > 0.01


@families
def test_a_document_that_sees_the_system_prompt_is_found(family: str) -> None:
    def open_system(mask: Tensor, order: ReferenceOrder, window: Window) -> Tensor:
        in_system = (order.source >= 0) & (order.source < len(PROMPT.system))
        return mask | (in_system[None, :] & (order.groups > 0)[:, None])

    assert fault(tiny_assembler(tiny_runner(family)), change=open_system) > 0.01


@families
def test_a_link_that_does_not_see_earlier_documents_is_found(family: str) -> None:
    """Block by block: what is lost when links do not carry anything between documents."""
    layout = PROMPT.layout(num_links=6)
    owner, is_link = torch.full((len(layout),), -1), torch.zeros(len(layout), dtype=torch.bool)
    for span in layout.of(Kind.SEGMENT, Kind.LINK):
        assert span.document is not None
        owner[span.start : span.stop] = span.document
        is_link[span.start : span.stop] = span.kind is Kind.LINK

    def close(mask: Tensor, order: ReferenceOrder, window: Window) -> Tensor:
        at = order.source.clamp(min=0)  # copies of the sink prefix become S, which is no link
        other = (owner[at][:, None] != owner[at][None, :]) & (order.groups > 0)[None, :]
        return mask & ~(is_link[at][:, None] & other)

    assert fault(tiny_assembler(tiny_runner(family)), change=close) > 0.01


@families
def test_one_shared_copy_of_the_sink_prefix_is_found(family: str) -> None:
    layout, count = PROMPT.layout(num_links=6), len(SINK)
    order = ReferenceOrder(
        torch.cat((-1 - torch.arange(count), torch.arange(len(layout)))),
        torch.cat((torch.arange(count), torch.arange(len(layout)))),
        torch.cat((torch.full((count,), 999), layout.groups())),
    )

    def share(mask: Tensor, order: ReferenceOrder, window: Window) -> Tensor:
        copies, distance = order.source < 0, order.positions[:, None] - order.positions[None, :]
        seen = copies[None, :] & (order.groups > 0)[:, None] & (distance >= 0)
        return mask | (seen if window.size is None else seen & (distance < window.size))

    assert fault(tiny_assembler(tiny_runner(family)), order=order, change=share) > 0.01


@families
def test_documents_that_saw_no_sink_prefix_are_found(family: str) -> None:
    bare = ReferenceOrder.of(PROMPT.layout(num_links=6), 0)
    assert fault(tiny_assembler(tiny_runner(family)), order=bare) > 0.01


@families
def test_link_embeddings_of_another_level_are_found(family: str) -> None:
    sound = tiny_assembler(tiny_runner(family))
    assert sound.links is not None
    swapped = Assembler(sound.runner, links=LinkTokens(sound.links.embeddings.flip(0)))
    assert fault(sound, reused_by=swapped) > 0.01


@families
def test_link_embeddings_in_another_order_are_found(family: str) -> None:
    sound = tiny_assembler(tiny_runner(family))
    assert sound.links is not None
    turned = Assembler(sound.runner, links=LinkTokens(sound.links.embeddings.roll(1, 1)))
    assert fault(sound, reused_by=turned) > 0.01


@sliding
def test_a_window_that_is_counted_within_a_document_is_found(family: str) -> None:
    """Whoever stands behind a document would see its last tokens, however far away."""
    layout = PROMPT.layout(num_links=6)
    ends = torch.arange(len(layout))
    for span in layout.of(Kind.SEGMENT):
        ends[span.start : span.stop] = span.stop

    def local(mask: Tensor, order: ReferenceOrder, window: Window) -> Tensor:
        if window.size is None:
            return mask
        at = order.source.clamp(min=0)
        last = (order.source >= 0) & (order.groups > 0) & (ends[at] - at < window.size)
        behind = (order.groups == 0)[:, None] & (order.positions[:, None] > order.positions[None, :])
        return mask | (last[None, :] & behind)

    assert fault(tiny_assembler(tiny_runner(family)), change=local) > 0.01


@sliding
def test_a_forgotten_window_is_found(family: str) -> None:
    def forget(mask: Tensor, order: ReferenceOrder, window: Window) -> Tensor:
        return order.mask()

    assert fault(tiny_assembler(tiny_runner(family)), change=forget) > 0.01


@families
def test_another_physical_order_is_found_where_a_window_slides(family: str) -> None:
    """Stock masks of sliding windows come from physical indices; full attention does not care."""
    assembler = tiny_assembler(tiny_runner(family))
    runner, layout = assembler.runner, PROMPT.layout(num_links=6)
    with DoublePrecision():
        prefix, entries = runner.prefix(PROMPT.system), runner.encode(PROMPT.segments, prefix=runner.prefix(SINK))
        assert prefix is not None
        cache = assembler.assemble(layout, prefix=prefix, entries=entries, room=1)
        assembler.prefill(cache, PROMPT, layout, upto=len(layout) - 1)
        stock, moved = assembler.hand_over(cache), DynamicCache()
        for index, layer in enumerate(stock.layers):
            moved.update(layer.keys.roll(40, 2), layer.values.roll(40, 2), index)
        last = {
            "input_ids": torch.tensor([PROMPT.tail[-1:]]),
            "position_ids": torch.tensor([[len(layout) - 1]]),
        }
        wanted = reference_logits(assembler, PROMPT, sink_ids=SINK)[-1]
        with torch.inference_mode():
            sound, found = (runner.forward(cache=kept, **last)[0, -1] for kept in (stock, moved))
    assert largest(sound - wanted) <= 1e-9
    if family in SLIDING:
        assert largest(found - wanted) > 0.01 * largest(wanted)
    else:
        assert largest(found - wanted) <= 1e-9
