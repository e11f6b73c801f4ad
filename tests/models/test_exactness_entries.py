"""An entry is the same whoever stands beside it, may stand anywhere, and never changes."""

import pytest
import torch

from kvlink.core.layout import Prompt
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

HEADER = random_ids(4, seed=77)
families = pytest.mark.parametrize("family", FAMILIES)


@families
@pytest.mark.parametrize("sink_ids", [(), HEADER], ids=["none", "header"])
def test_neighbours_in_a_batch_do_not_change_an_entry(family: str, sink_ids: tuple[int, ...]) -> None:
    runner, batch = tiny_runner(family), tiny_prompt().segments
    with DoublePrecision():
        prefix = runner.prefix(sink_ids)
        alone = [runner.encode([ids], prefix=prefix)[0] for ids in batch]
        forth, back = runner.encode(batch, prefix=prefix), runner.encode(batch[::-1], prefix=prefix)[::-1]
    assert {len(ids) for ids in batch} == {20, 7, 11, 1, 17}
    for padded in (forth, back):
        for entry, other in zip(alone, padded, strict=True):
            assert entry.token_ids == other.token_ids
            assert largest(entry.keys - other.keys) <= 1e-11
            assert largest(entry.values - other.values) <= 1e-11


@families
def test_padding_costs_no_more_than_rounding_in_float32(family: str) -> None:
    runner, batch = tiny_runner(family, torch.float32), tiny_prompt().segments
    for entry, ids in zip(runner.encode(batch, prefix=runner.prefix((1, 5))), batch, strict=True):
        alone = runner.encode([ids], prefix=runner.prefix((1, 5)))[0]
        for found, wanted in ((entry.keys, alone.keys), (entry.values, alone.values)):
            assert largest(found - wanted) <= 1e-5 * largest(wanted)


@families
def test_documents_in_another_order_are_as_if_encoded_in_that_order(family: str) -> None:
    runner, prompt = tiny_runner(family, torch.float32), tiny_prompt(labels=())
    assembler, prefix = tiny_assembler(runner), runner.prefix(HEADER)
    kept = {ids: runner.encode([ids], prefix=prefix)[0] for ids in prompt.segments}
    swapped = Prompt(prompt.system, prompt.documents[::-1], prompt.tail)
    anew = [runner.encode([ids], prefix=prefix)[0] for ids in swapped.segments]
    reused = reuse_logits(assembler, swapped, entries=[kept[ids] for ids in swapped.segments])
    assert torch.equal(reused, reuse_logits(assembler, swapped, entries=anew))
    assert largest(reused[-1] - reuse_logits(assembler, prompt, entries=list(kept.values()))[-1]) > 1e-3


@families
def test_entries_never_change(family: str) -> None:
    runner, prompt = tiny_runner(family, torch.float32), tiny_prompt()
    assembler, entries = tiny_assembler(runner), runner.encode(prompt.segments, prefix=runner.prefix(HEADER))
    layout, prefix = prompt.layout(num_links=6), runner.prefix(prompt.system)
    assert prefix is not None
    before = [(entry.keys.clone(), entry.values.clone()) for entry in entries]
    answers = []
    for _ in range(3):
        cache = assembler.assemble(layout, prefix=prefix, entries=entries, room=1)
        token = int(assembler.prefill(cache, prompt, layout)[-1].argmax())
        answers.append(runner.decode(cache, token))
        assembler.release(cache)
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    for entry, (keys, values) in zip(entries, before, strict=True):
        assert torch.equal(entry.keys, keys)
        assert torch.equal(entry.values, values)


def test_entries_share_no_memory_with_their_batch() -> None:
    runner = tiny_runner("llama")
    for entry in runner.encode(tiny_prompt().segments):
        assert entry.keys.untyped_storage().nbytes() == entry.keys.nbytes
        assert entry.values.untyped_storage().nbytes() == entry.values.nbytes


@families
def test_what_a_released_buffer_holds_is_never_read(family: str) -> None:
    runner, prompt = tiny_runner(family), tiny_prompt()
    assembler, entries = tiny_assembler(runner), runner.encode(prompt.segments)
    wanted = reuse_logits(assembler, prompt, entries=entries)
    used, _ = assembler.prefill_plain(tiny_prompt(documents=(), labels=(), tail=400))
    used.keys.fill_(float("nan"))
    used.values.fill_(float("nan"))
    assembler.release(used)
    found = reuse_logits(assembler, prompt, entries=entries)
    assert largest(found - wanted) <= 1e-9
