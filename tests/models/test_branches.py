"""Rows behind constant keys and values compute what the assembled prompt computes, and gradients reach their inputs."""

import pytest
import torch
from torch import Tensor

from kvlink.core.entry import CacheEntry
from kvlink.core.layout import Kind, Layout
from kvlink.models.adapter import Adapter
from kvlink.models.assembler import Assembler
from kvlink.models.branches import Past, Rows, branch_logits, branch_mask
from kvlink.models.cache import PastCache, Prefix
from kvlink.models.reference import reference_logits
from kvlink.models.runner import Runner
from tiny_bundles import adapted
from tiny_models import DoublePrecision, largest, random_ids, tiny_assembler, tiny_model, tiny_prompt, tiny_runner

SINK = random_ids(4, seed=77)
PROMPT = tiny_prompt(labels=())
KINDS = ("llama", "mistral", "qwen2", "gemma2", "gemma3", "phi", "smollm3")
families = pytest.mark.parametrize("family", KINDS)


def parts(runner: Runner) -> tuple[Prefix, list[CacheEntry]]:
    prefix = runner.prefix(PROMPT.system)
    assert prefix is not None
    return prefix, runner.encode(PROMPT.segments, prefix=runner.prefix(SINK))


def past_of(runner: Runner, layout: Layout) -> Past:
    prefix, entries = parts(runner)
    return Past.of_entries(runner, layout, prefix=prefix, entries=entries)


def request_rows(assembler: Assembler, layout: Layout) -> Rows:
    """All rows of a prompt that are computed: links, then T, which is one branch."""
    at = layout.request_rows(after=len(PROMPT.system))
    branches = (at >= layout.of(Kind.TAIL)[0].start).long()
    return Rows(assembler.embed(PROMPT.ids(layout)[at]), at, branches)


def all_of(rows: Rows) -> Tensor:
    return torch.arange(len(rows.positions))


# --- the same logits ------------------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("adapter", [False, True], ids=["links", "links+lora"])
def test_the_rows_of_one_prompt_are_the_reference_forward(family: str, adapter: bool) -> None:
    runner = tiny_runner(family)
    assembler = adapted(runner) if adapter else tiny_assembler(runner)
    layout = PROMPT.layout(num_links=6)
    with DoublePrecision(), torch.no_grad():
        wanted = reference_logits(assembler, PROMPT, sink_ids=SINK)[len(PROMPT.system) :]
        rows = request_rows(assembler, layout)
        found = branch_logits(runner, past_of(runner, layout), rows, keep=all_of(rows), adapter=assembler.adapter)
    assert largest(found - wanted) <= 1e-9


def test_an_adapter_that_is_left_out_is_found() -> None:
    assembler, layout = adapted(tiny_runner("llama")), PROMPT.layout(num_links=6)
    with torch.no_grad():
        rows, past = request_rows(assembler, layout), past_of(assembler.runner, layout)
        found = branch_logits(assembler.runner, past, rows, keep=all_of(rows))
        wanted = branch_logits(assembler.runner, past, rows, keep=all_of(rows), adapter=assembler.adapter)
    assert largest(found - wanted) > 0.01 * largest(wanted)


@families
def test_entries_are_placed_as_the_assembled_buffer_has_them(family: str) -> None:
    runner, layout = tiny_runner(family), PROMPT.layout(num_links=6)
    prefix, entries = parts(runner)
    cache = Assembler(runner).assemble(layout, prefix=prefix, entries=entries)
    past = Past.of_entries(runner, layout, prefix=prefix, entries=entries)
    known = layout.of(Kind.SYSTEM, Kind.SEGMENT)
    assert past.positions.tolist() == [at for span in known for at in range(span.start, span.stop)]
    assert torch.equal(past.keys, cache.keys[:, :, past.positions])
    assert torch.equal(past.values, cache.values[:, :, past.positions])


@families
def test_behind_a_plain_forward_rows_are_the_models_own(family: str) -> None:
    runner, ids = tiny_runner(family), random_ids(40, seed=4)
    prompt = tiny_prompt(documents=(), labels=(), tail=30)
    assembler = Assembler(runner)
    own = torch.tensor([[*prompt.system, *prompt.tail, *ids]])
    with DoublePrecision(), torch.no_grad():
        cache, _ = assembler.prefill_plain(prompt)
        at = torch.arange(len(ids))
        rows = Rows(runner.embed(ids), at + cache.length, at * 0 + 1)
        found = branch_logits(runner, Past.of_cache(cache), rows, keep=at)
        wanted = runner.model(input_ids=own).logits[0, -len(ids) :]
    assert largest(found - wanted) <= 1e-9


def test_only_the_rows_that_are_asked_for_are_returned_in_that_order() -> None:
    assembler, layout = tiny_assembler(tiny_runner("llama")), PROMPT.layout(num_links=6)
    with torch.no_grad():
        rows, past = request_rows(assembler, layout), past_of(assembler.runner, layout)
        whole = branch_logits(assembler.runner, past, rows, keep=all_of(rows))
        found = branch_logits(assembler.runner, past, rows, keep=torch.tensor([7, 2, 30]))
    assert largest(found - whole[[7, 2, 30]]) < 1e-12


@families
def test_the_order_of_rows_is_free(family: str) -> None:
    assembler, layout = tiny_assembler(tiny_runner(family)), PROMPT.layout(num_links=6)
    with DoublePrecision(), torch.no_grad():
        rows, past = request_rows(assembler, layout), past_of(assembler.runner, layout)
        order = torch.randperm(len(rows.positions), generator=torch.Generator().manual_seed(1))
        mixed = Rows(rows.embeds[order], rows.positions[order], rows.branches[order])
        whole = branch_logits(assembler.runner, past, rows, keep=all_of(rows))
        found = branch_logits(assembler.runner, past, mixed, keep=all_of(rows))
    assert largest(found - whole[order]) <= 1e-9


# --- who sees whom --------------------------------------------------------------------------------------------------


def test_the_mask_in_a_small_case() -> None:
    """Columns: two known ones, then a shared row, then two rows of question 1 and one of question 2."""
    empty = torch.zeros(1, 1, 2, 2)
    past = Past(empty, empty, torch.tensor([0, 3]))
    rows = Rows(torch.zeros(4, 8), torch.tensor([2, 4, 5, 4]), torch.tensor([0, 1, 1, 2]))
    assert branch_mask(past, rows).int().tolist() == [
        [1, 0, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]
    assert branch_mask(past, rows, window=2).int().tolist() == [
        [0, 0, 1, 0, 0, 0],
        [0, 1, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 1, 0, 0, 0, 1],
    ]


@families
def test_questions_side_by_side_are_each_as_alone(family: str) -> None:
    runner, layout = tiny_runner(family), PROMPT.layout()
    tails = [random_ids(count, seed=50 + count) for count in (9, 1, 5)]
    start = layout.of(Kind.TAIL)[0].start

    def rows_of(asked: list[tuple[int, ...]]) -> Rows:
        return Rows(
            runner.embed([token for tail in asked for token in tail]),
            torch.cat([torch.arange(len(tail)) + start for tail in asked]),
            torch.cat([torch.full((len(tail),), number) for number, tail in enumerate(asked, start=1)]),
        )

    with DoublePrecision(), torch.no_grad():
        past = past_of(runner, layout)
        together = rows_of(tails)
        found = branch_logits(runner, past, together, keep=all_of(together))
        wanted = torch.cat(
            [branch_logits(runner, past, rows_of([tail]), keep=torch.arange(len(tail))) for tail in tails]
        )
    assert largest(found - wanted) <= 1e-9


# --- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi"])
def test_gradients_of_the_embeddings_are_finite_differences(family: str) -> None:
    runner, layout = tiny_runner(family), PROMPT.layout(num_links=2)
    assembler = tiny_assembler(runner, num_links=2)
    rows, past = request_rows(assembler, layout), past_of(runner, layout)
    embeds = rows.embeds.detach().clone().requires_grad_()
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(len(embeds), 320, generator=generator, dtype=torch.float64)
    direction = torch.randn(embeds.shape, generator=generator, dtype=torch.float64)

    def loss(embeds: Tensor) -> Tensor:
        logits = branch_logits(runner, past, Rows(embeds, rows.positions, rows.branches), keep=all_of(rows))
        return (logits.log_softmax(-1) * weights).mean()

    with DoublePrecision():
        (gradient,) = torch.autograd.grad(loss(embeds), embeds)
        step = 1e-6
        with torch.no_grad():
            slope = (loss(embeds + step * direction) - loss(embeds - step * direction)) / (2 * step)
    assert (gradient * direction).sum().item() == pytest.approx(slope.item(), rel=1e-6)
    assert abs(slope.item()) > 1e-3


def test_gradients_reach_the_adapter_and_not_what_is_constant() -> None:
    runner, layout = Runner(tiny_model("llama").requires_grad_(False)), PROMPT.layout(num_links=6)
    assembler, fresh = tiny_assembler(runner), Adapter.fresh(runner.model)
    down = {name: tensor.requires_grad_() for name, tensor in fresh.down.items()}
    up = {name: tensor.requires_grad_() for name, tensor in fresh.up.items()}
    rows, past = request_rows(assembler, layout), past_of(runner, layout)
    logits = branch_logits(runner, past, rows, keep=all_of(rows), adapter=Adapter(down, up, 2.0))
    logits.log_softmax(-1)[:, 3].sum().backward()
    assert all(tensor.grad is not None and tensor.grad.abs().max() > 0 for tensor in up.values())
    assert all(tensor.grad is not None and tensor.grad.abs().max() == 0 for tensor in down.values())  # behind zeros
    assert not past.keys.requires_grad
    assert not any(parameter.grad is not None for parameter in runner.model.parameters())


def test_what_is_constant_is_not_written_to() -> None:
    assembler, layout = tiny_assembler(tiny_runner("llama")), PROMPT.layout(num_links=6)
    past = past_of(assembler.runner, layout)
    keys, values = past.keys.clone(), past.values.clone()
    with torch.no_grad():
        rows = request_rows(assembler, layout)
        branch_logits(assembler.runner, past, rows, keep=all_of(rows))
    assert torch.equal(past.keys, keys)
    assert torch.equal(past.values, values)


# --- the cache under them -------------------------------------------------------------------------------------------


def test_new_rows_stand_behind_the_constant_ones_for_each_row_of_a_batch() -> None:
    keys, values = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 5)
    cache = PastCache(keys, values)
    new_keys, new_values = torch.randn(2, 1, 6, 4), torch.randn(2, 1, 6, 5)
    found_keys, found_values = cache.update(new_keys, new_values, 1)
    for row in range(2):
        assert torch.equal(found_keys[row], torch.cat((keys[1], new_keys[row]), dim=1))
        assert torch.equal(found_values[row], torch.cat((values[1], new_values[row]), dim=1))
    assert cache.get_seq_length() == 3
    assert cache.get_mask_sizes(6, 0) == (9, 0)
