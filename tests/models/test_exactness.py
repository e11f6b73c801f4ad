"""Reuse equals one forward over the whole prompt under the reference mask: in every family, with every sink prefix.

Three bounds. In float64 all through (`DoublePrecision`) only an error of the method could be left: 1e-9, on weights
wide enough for peaked attention, where faults show. With the model's own tables, which are float32 and round
positions, the issue's 2e-6 (float64) and 2e-5 (float32) hold up to position 1,000 at the families' usual
initialisation; there logits are about 1. On the wide weights the same rounding is amplified by the attention itself,
so the yardstick is the model's own: what its plain forward changes when all positions are shifted.
"""

import pytest
import torch
from transformers import DynamicCache

from kvlink.core.layout import Prompt
from kvlink.models.assembler import Assembler
from kvlink.models.reference import reference_logits
from tiny_models import (
    FAMILIES,
    DoublePrecision,
    largest,
    random_ids,
    reuse_logits,
    tiny_assembler,
    tiny_prompt,
    tiny_runner,
)

SINKS = {"none": (), "bos": (1,), "header": random_ids(4, seed=77), "longer-than-system": random_ids(9, seed=78)}
"""The prompts' S has 6 tokens."""

USUAL_INIT = 0.02
OWN_TABLES = {torch.float64: 2e-6, torch.float32: 2e-5}
families = pytest.mark.parametrize("family", FAMILIES)


@families
@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("num_links", [0, 6])
def test_reuse_equals_the_reference_forward(family: str, sink: str, num_links: int) -> None:
    assembler, prompt = tiny_assembler(tiny_runner(family), num_links=num_links), tiny_prompt()
    with DoublePrecision():
        wanted = reference_logits(assembler, prompt, sink_ids=SINKS[sink])[len(prompt.system) :]
        found = reuse_logits(assembler, prompt, sink_ids=SINKS[sink])
    assert len(found) == len(prompt.layout(num_links=num_links).request_rows(after=len(prompt.system)))
    assert largest(found - wanted) <= 1e-9


@families
@pytest.mark.parametrize("dtype", OWN_TABLES, ids=str)
@pytest.mark.parametrize("longest", [20, 600])
def test_reuse_equals_the_reference_forward_with_the_models_own_tables(
    family: str, dtype: torch.dtype, longest: int
) -> None:
    runner = tiny_runner(family, dtype, initializer_range=USUAL_INIT)
    prompt = tiny_prompt(documents=((longest, 7), (longest // 3,), (1,), (17,)))
    # Gemma 3 normalises what attention returns: the rounding of far positions is not drowned by the residual stream
    allowed = OWN_TABLES[torch.float32 if family == "gemma3" and longest > 20 else dtype]
    for num_links, sink in [(6, "none"), (6, "longer-than-system"), *([(0, "bos"), (0, "header")] * (longest == 20))]:
        assembler = tiny_assembler(runner, num_links=num_links)
        wanted = reference_logits(assembler, prompt, sink_ids=SINKS[sink])[len(prompt.system) :]
        assert largest(reuse_logits(assembler, prompt, sink_ids=SINKS[sink]) - wanted) <= allowed


@families
def test_reuse_differs_by_no_more_than_the_models_own_forward_does_when_it_is_shifted(family: str) -> None:
    runner, prompt = tiny_runner(family, torch.float32), tiny_prompt()
    assembler, sink_ids = tiny_assembler(runner), SINKS["header"]
    layout = prompt.layout()
    ids = prompt.ids(layout)[None]
    at = torch.arange(len(layout))[None]
    with torch.inference_mode():
        here, there = (runner.model(input_ids=ids, position_ids=at + shift).logits for shift in (0, 1000))
    wanted = reference_logits(assembler, prompt, sink_ids=sink_ids)[len(prompt.system) :]
    assert largest(reuse_logits(assembler, prompt, sink_ids=sink_ids) - wanted) <= largest(here - there)


@families
@pytest.mark.parametrize("sink", SINKS)
def test_the_rows_of_the_system_prompt_are_the_models_own(family: str, sink: str) -> None:
    runner, prompt = tiny_runner(family), tiny_prompt()
    stock, ids = DynamicCache(), torch.tensor([prompt.system])
    with DoublePrecision(), torch.inference_mode():
        own = runner.forward(cache=stock, logits_to_keep=0, input_ids=ids)[0]
        wanted = reference_logits(tiny_assembler(runner), prompt, sink_ids=SINKS[sink])[: len(prompt.system)]
        prefix = runner.prefix(prompt.system)
    assert prefix is not None
    for keys, values, layer in zip(prefix.keys, prefix.values, stock.layers, strict=True):
        assert torch.equal(keys, layer.keys)
        assert torch.equal(values, layer.values)
    assert largest(own - wanted) <= 1e-9


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_documents_every_bit_is_the_base_models(family: str, dtype: torch.dtype) -> None:
    runner = tiny_runner(family, dtype)
    prompt = Prompt(random_ids(9, seed=1), (), random_ids(40, seed=2))
    ids = torch.tensor([prompt.system + prompt.tail])
    stock = DynamicCache()
    with torch.inference_mode():
        own = runner.model(input_ids=ids, logits_to_keep=1, **{runner.cache_argument: stock}).logits[0]
    cache, logits = Assembler(runner).prefill_plain(prompt, room=5)
    assert torch.equal(logits, own)
    for layer, ours in zip(stock.layers, cache.keys[:, None, :, : cache.length], strict=True):
        assert torch.equal(layer.keys, ours)


@families
def test_one_document_behind_its_own_header_equals_a_full_prefill(family: str) -> None:
    runner, prompt = tiny_runner(family), tiny_prompt(documents=((37,),), labels=())
    ids = torch.tensor([[*prompt.system, *prompt.segments[0], *prompt.tail]])
    with DoublePrecision(), torch.inference_mode():
        own = runner.model(input_ids=ids).logits[0, -len(prompt.tail) :]
        found = reuse_logits(Assembler(runner), prompt, sink_ids=prompt.system)
    assert largest(found - own) <= 1e-9


def test_links_stand_in_their_order_by_level() -> None:
    """Both sides of the comparison embed links by the same code, so this is spelled out by hand."""
    runner = tiny_runner("llama")
    assembler, prompt = tiny_assembler(runner, num_links=3), tiny_prompt(documents=((2, 3), (1,)), labels=(1, 0))
    (first, second), (third,) = prompt.documents
    assert assembler.links is not None
    behind_document, behind_segment = assembler.links.embeddings
    runs = [
        runner.embed(prompt.system + prompt.labels[0] + first),
        behind_segment,
        runner.embed(second),
        behind_document,
        runner.embed(third),
        behind_document,
        runner.embed(prompt.tail),
    ]
    assert torch.equal(assembler.embed(prompt.ids(prompt.layout(num_links=3))), torch.cat(runs))
