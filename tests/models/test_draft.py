"""A segment encoded among the rows of requests equals the encoder's entry, in every family; a fault in it is seen."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing import Shared
from torch import Tensor

from kvlink.core.entry import CacheEntry
from kvlink.core.errors import ModelError
from kvlink.models import rotary
from kvlink.models.draft import Draft
from kvlink.models.rows import Run
from kvlink.models.runner import Runner
from kvlink.models.shared import forward
from tiny_models import (
    FAMILIES,
    DoublePrecision,
    largest,
    random_ids,
    tiny_assembler,
    tiny_model,
    tiny_prompt,
    tiny_runner,
)

HEADER = random_ids(4, seed=77)
LONG, SHORT = random_ids(45, seed=1), random_ids(9, seed=2)


def computed(
    runner: Runner, drafts: Sequence[Draft], *, number: int, requests: Sequence[tuple[Run, Tensor]] = ()
) -> None:
    """Compute all drafts, up to `number` rows of each in a forward; the first forward has rows of requests, too."""
    others = list(requests)
    while left := [draft for draft in drafts if draft.num_left]:
        parts = [*others, *(draft.rows(min(number, draft.num_left)) for draft in left)]
        embeds = torch.cat([embeds for _, embeds in parts])
        forward(runner, [run for run, _ in parts], embeds, keep=torch.arange(len(embeds)))
        others = []


def apart(one: CacheEntry, other: CacheEntry) -> float:
    assert one.token_ids == other.token_ids
    return max(largest(one.keys - other.keys), largest(one.values - other.values))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sink", [(), HEADER], ids=["no sink", "header"])
def test_a_draft_becomes_the_encoder_s_entry(family: str, sink: tuple[int, ...]) -> None:
    """Two segments at once, in chunks, beside the rows of a request that reads another document."""
    runner = tiny_runner(family)
    prefix, prompt = runner.prefix(sink), tiny_prompt()
    with DoublePrecision():
        wanted = [runner.encode([ids], prefix=prefix)[0] for ids in (LONG, SHORT)]
        beside, alone = (Shared(tiny_assembler(runner), prompt, sink_ids=sink) for _ in range(2))
        drafts = [Draft(runner, ids, prefix=prefix) for ids in (LONG, SHORT)]
        rows = beside.rows
        computed(runner, drafts, number=7, requests=[(beside.run(rows), beside.embeds(rows))])
        assert max(apart(d.entry(), w) for d, w in zip(drafts, wanted, strict=True)) <= 1e-9
        alone.logits()
    assert largest(beside.own.values - alone.own.values) <= 1e-9


@settings(max_examples=25)
@given(
    length=st.integers(1, 60),
    number=st.integers(1, 70),
    sink=st.integers(0, 5),
    kept=st.integers(0, 60),
    family=st.sampled_from(["llama", "gemma3", "smollm3", "glm"]),
)
def test_any_chunks_and_any_kept_beginning_give_the_entry(
    length: int, number: int, sink: int, kept: int, family: str
) -> None:
    runner, ids = tiny_runner(family), random_ids(length, seed=length)
    prefix = runner.prefix(random_ids(sink, seed=3))
    with DoublePrecision():
        wanted = runner.encode([ids], prefix=prefix)[0]
        kept = min(kept, length)
        known = CacheEntry(wanted.keys[:, :, :kept], wanted.values[:, :, :kept], ids[:kept]) if kept else None
        draft = Draft(runner, ids, prefix=prefix, kept=known)
        assert draft.num_left == length - kept
        computed(runner, [draft], number=number)
    assert apart(draft.entry(), wanted) <= 1e-9


@pytest.mark.parametrize("fault", ["prefix", "position", "rotated", "other rows"])
def test_a_fault_is_seen(fault: str) -> None:
    """Negative controls: what stands before, where it stands, what is noted, and whose rows are noted."""
    runner = tiny_runner("gemma3")
    prefix = runner.prefix(HEADER)
    wanted = runner.encode([LONG], prefix=prefix)[0]
    draft = Draft(runner, LONG, prefix=runner.prefix(HEADER[::-1]) if fault == "prefix" else prefix)
    shift = 3 if fault == "position" else 0
    first = 1 if fault == "other rows" else 0
    while draft.num_left:
        run, embeds = draft.rows(min(9, draft.num_left))
        parts = [Run(run.own, run.positions + shift * (run.positions > 20), unrotated=run.unrotated)]
        if first:
            embeds = embeds.roll(1, 0)
        forward(runner, parts, embeds, keep=torch.tensor([0]))
    entry = draft.entry()
    if fault == "rotated":
        entry = CacheEntry(draft.own.keys[:, :, len(HEADER) :], entry.values, LONG)
    assert apart(entry, wanted) > 1e-3


def test_a_forward_that_fails_leaves_the_draft_as_it_was() -> None:
    runner = tiny_runner("llama")
    draft = Draft(runner, SHORT)
    run, embeds = draft.rows(4)
    length = draft.own.length
    with pytest.raises(IndexError):
        forward(runner, [run], embeds, keep=torch.tensor([99]))
    draft.own.length = length
    computed(runner, [draft], number=4)
    assert apart(draft.entry(), runner.encode([SHORT])[0]) <= 1e-5


def test_a_model_whose_rotary_function_was_replaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(tiny_model("llama"))
    monkeypatch.setattr(rotary.Watch, "take", lambda _: None)
    run, embeds = Draft(runner, SHORT).rows(4)
    with pytest.raises(ModelError, match="load the model again"):
        forward(runner, [run], embeds, keep=torch.tensor([0]))
