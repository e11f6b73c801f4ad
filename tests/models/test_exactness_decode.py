"""What follows a prefill: decoding row by row, and stock `generate()` from a cache that was handed over."""

import pytest
import torch

from kvlink.core.entry import CacheEntry
from kvlink.core.layout import Prompt
from kvlink.models.assembler import Assembler
from kvlink.models.reference import reference_logits
from kvlink.models.runner import Runner
from tiny_models import (
    FAMILIES,
    DoublePrecision,
    largest,
    random_ids,
    tiny_assembler,
    tiny_prompt,
    tiny_runner,
)

HEADER = random_ids(4, seed=77)
families = pytest.mark.parametrize("family", FAMILIES)


def _entries(runner: Runner, prompt: Prompt) -> list[CacheEntry]:
    return runner.encode(prompt.segments, prefix=runner.prefix(HEADER))


def _decoded(assembler: Assembler, prompt: Prompt, entries: list[CacheEntry], count: int) -> list[int]:
    """Decode greedily from an assembled prompt."""
    runner, layout = assembler.runner, prompt.layout(num_links=assembler.num_links)
    prefix = runner.prefix(prompt.system)
    assert prefix is not None
    cache = assembler.assemble(layout, prefix=prefix, entries=entries, room=count)
    logits = assembler.prefill(cache, prompt, layout)[-1]
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = runner.decode(cache, tokens[-1])
    return tokens


@families
def test_stock_generate_goes_on_from_a_handed_over_cache_as_we_would(family: str) -> None:
    runner, prompt = tiny_runner(family, torch.float32), tiny_prompt()
    assembler = tiny_assembler(runner)
    layout, entries, prefix = prompt.layout(num_links=6), _entries(runner, prompt), runner.prefix(prompt.system)
    assert prefix is not None
    cache = assembler.assemble(layout, prefix=prefix, entries=entries)
    assembler.prefill(cache, prompt, layout, upto=len(layout) - 1)
    generated = runner.model.generate(
        input_ids=torch.tensor([prompt.tail[-1:]]),
        attention_mask=torch.ones(1, len(layout), dtype=torch.long),
        position_ids=torch.tensor([[len(layout) - 1]]),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **{runner.cache_argument: assembler.hand_over(cache)},
    )
    assert generated[0, 1:].tolist() == _decoded(assembler, prompt, entries, 20)


@families
def test_a_decoded_token_sees_what_it_would_see_in_the_reference_forward(family: str) -> None:
    runner, prompt = tiny_runner(family), tiny_prompt()
    assembler, answer = tiny_assembler(runner), random_ids(18, seed=5)
    layout = prompt.layout(num_links=6)
    whole = Prompt(prompt.system, prompt.documents, prompt.tail + answer, prompt.labels)
    with DoublePrecision():
        prefix = runner.prefix(prompt.system)
        assert prefix is not None
        cache = assembler.assemble(layout, prefix=prefix, entries=_entries(runner, prompt), room=len(answer))
        assembler.prefill(cache, prompt, layout)
        found = torch.stack([runner.decode(cache, token) for token in answer])
        wanted = reference_logits(assembler, whole, sink_ids=HEADER)[-len(answer) :]
    assert largest(found - wanted) <= 1e-9


@families
def test_a_handed_over_cache_is_a_copy(family: str) -> None:
    runner, prompt = tiny_runner(family, torch.float32), tiny_prompt()
    assembler = tiny_assembler(runner)
    cache, _ = assembler.prefill_plain(Prompt(prompt.system, (), prompt.tail))
    stock = assembler.hand_over(cache)
    before = [layer.keys.clone() for layer in stock.layers]
    cache.keys.zero_()
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(stock.layers, before, strict=True))
