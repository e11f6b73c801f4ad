"""Shared attention equals one forward over the whole prompt under the reference mask, in every family.

Bounds as for assembled prompts: 1e-9 in float64 all through, on weights wide enough for peaked attention, where faults
show; with the model's own tables 2e-6 (float64) and 2e-5 (float32) at the families' usual initialisation.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing import Lying, Shared, together

from kvlink.core.errors import ModelRefused
from kvlink.core.layout import Prompt
from kvlink.models import attending, backends
from kvlink.models.backends import Backend
from kvlink.models.reference import reference_logits
from kvlink.models.rows import OwnRows, Run
from kvlink.models.runner import Runner
from kvlink.models.shared import forward
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

SINKS = {"none": (), "header": random_ids(4, seed=77), "longer-than-system": random_ids(9, seed=78)}
HEADER = SINKS["header"]
BACKENDS = {"reference": backends.reference, "cpu": backends.cpu}
USUAL_INIT = 0.02
OWN_TABLES = {torch.float64: 2e-6, torch.float32: 2e-5}
families = pytest.mark.parametrize("family", FAMILIES)


@families
@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("num_links", [0, 6])
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_shared_equals_the_reference_forward(family: str, sink: str, num_links: int, backend: Backend) -> None:
    assembler, prompt = tiny_assembler(tiny_runner(family), num_links=num_links), tiny_prompt()
    with DoublePrecision():
        wanted = reference_logits(assembler, prompt, sink_ids=SINKS[sink])
        found = Shared(assembler, prompt, sink_ids=SINKS[sink]).logits(backend=backend)
    assert largest(found - wanted) <= 1e-9


@families
@pytest.mark.parametrize("dtype", OWN_TABLES, ids=str)
@pytest.mark.parametrize("longest", [20, 600])
def test_shared_equals_assembled_with_the_models_own_tables(family: str, dtype: torch.dtype, longest: int) -> None:
    runner = tiny_runner(family, dtype, initializer_range=USUAL_INIT)
    prompt = tiny_prompt(documents=((longest, 7), (longest // 3,), (1,), (17,)))
    allowed = OWN_TABLES[torch.float32 if family == "gemma3" and longest > 20 else dtype]
    assembler = tiny_assembler(runner)
    wanted = reuse_logits(assembler, prompt, sink_ids=HEADER)
    found = Shared(assembler, prompt, sink_ids=HEADER).logits()[len(prompt.system) :]
    assert largest(found - wanted) <= allowed


@families
def test_a_prompt_in_several_steps_and_an_answer_equal_the_reference_forward(family: str) -> None:
    assembler, prompt, answer = tiny_assembler(tiny_runner(family)), tiny_prompt(), random_ids(18, seed=5)
    whole = Prompt(prompt.system, prompt.documents, prompt.tail + answer, prompt.labels)
    with DoublePrecision():
        wanted = reference_logits(assembler, whole, sink_ids=HEADER)
        shared = Shared(assembler, prompt, sink_ids=HEADER, room=len(answer))
        found = [shared.logits(steps=11), *(shared.decode(token)[None] for token in answer)]
    assert largest(torch.cat(found) - wanted) <= 1e-9


@families
@pytest.mark.parametrize("few", [0, 1 << 30], ids=["where they stand", "gathered"])
def test_requests_in_one_forward_equal_each_alone(family: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same documents at other places, in another order, one of them twice; a prompt without any beside them."""
    monkeypatch.setattr(attending, "FEW_ROWS", few)
    assembler = tiny_assembler(tiny_runner(family))
    first = tiny_prompt()
    twice = (*first.documents[::-1], first.documents[1])
    second = Prompt(random_ids(3, seed=50), twice, random_ids(5, seed=51))
    plain = Prompt(random_ids(4, seed=52), (), random_ids(19, seed=53))
    with DoublePrecision():
        entries = {e.token_ids: e for e in assembler.runner.encode(first.segments)}
        lying = {ids: Lying.of(entry, assembler.runner) for ids, entry in entries.items()}
        requests = [Shared(assembler, p, lying=[lying[ids] for ids in p.segments]) for p in (first, second, plain)]
        found = together(requests)
        wanted = [reference_logits(assembler, prompt) for prompt in (first, second, plain)]
    assert max(largest(f - w) for f, w in zip(found, wanted, strict=True)) <= 1e-9


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts over one pool of documents, and how many rows go through at a time."""

    prompts: list[Prompt]
    num_links: int
    steps: int
    family: str


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.lists(st.integers(1, 24), min_size=1, max_size=3), min_size=1, max_size=4))
    pool = tiny_prompt(documents=lengths, labels=()).documents
    prompts = [
        Prompt(
            random_ids(draw(st.integers(1, 9)), seed=at),
            tuple(draw(st.permutations(pool))),
            random_ids(4, seed=-at - 1),
        )
        for at in range(draw(st.integers(1, 3)))
    ]
    family = draw(st.sampled_from(["llama", "gemma2", "gemma3", "smollm3", "glm"]))
    return Case(prompts, draw(st.integers(0, 3)), draw(st.integers(1, 30)), family)


@settings(derandomize=True, max_examples=60, deadline=None, database=None)
@given(cases())
def test_any_layouts_equal_the_reference_forward(case: Case) -> None:
    assembler = tiny_assembler(tiny_runner(case.family), num_links=case.num_links)
    with DoublePrecision():
        entries = assembler.runner.encode(case.prompts[0].segments)
        lying = {entry.token_ids: Lying.of(entry, assembler.runner) for entry in entries}
        wanted = [reference_logits(assembler, prompt) for prompt in case.prompts]
        made = [[Shared(assembler, p, lying=[lying[i] for i in p.segments]) for p in case.prompts] for _ in range(2)]
        found = together(made[0])
        stepwise = [shared.logits(steps=case.steps) for shared in made[1]]
    assert max(largest(f - w) for f, w in zip(found, wanted, strict=True)) <= 1e-9
    assert max(largest(f - w) for f, w in zip(stepwise, wanted, strict=True)) <= 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_sixteen_bits_shared_is_as_near_to_float32_as_assembled(dtype: torch.dtype) -> None:
    """Bounded by the rounding that assembled prompts have themselves, not by a figure of ours."""
    prompt = tiny_prompt(documents=((60, 7), (40,)), labels=())
    exact = tiny_assembler(tiny_runner("llama", torch.float32, initializer_range=0.1))
    short = tiny_assembler(tiny_runner("llama", dtype, initializer_range=0.1))
    wanted = reuse_logits(exact, prompt, sink_ids=HEADER)
    assembled = reuse_logits(short, prompt, sink_ids=HEADER).float()
    shared = Shared(short, prompt, sink_ids=HEADER).logits()[len(prompt.system) :].float()
    assert (shared - wanted).norm() <= 1.5 * (assembled - wanted).norm()


@pytest.mark.parametrize("few", [0, 1 << 30])
def test_learned_sinks_enter_the_merge_once(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attending, "FEW_ROWS", few)
    model = tiny_model("gpt_oss")
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    assembler, prompt = tiny_assembler(Runner(model)), tiny_prompt()
    wanted = reference_logits(assembler, prompt, sink_ids=HEADER)
    found = Shared(assembler, prompt, sink_ids=HEADER).logits()
    assert largest(found - wanted) <= 1e-4 * largest(wanted)


def test_rows_without_room_are_refused_before_anything_is_written() -> None:
    shared = Shared(tiny_assembler(tiny_runner("llama")), tiny_prompt())
    shared.logits()
    before = shared.own.keys.clone()
    with pytest.raises(ValueError, match="room"):
        shared.decode(5)
    assert torch.equal(shared.own.keys, before)


def test_a_model_whose_attention_cannot_be_replaced_is_refused() -> None:
    model = tiny_model("llama")
    runner = Runner(model)
    attention = model.model.layers[1].self_attn

    def own(hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        return hidden_states, None

    attention.forward = own
    run = Run(OwnRows(runner, 4), torch.arange(4))
    with pytest.raises(ModelRefused, match="1 of 2 layers"):
        forward(runner, [run], runner.embed([1, 2, 3, 4]), keep=torch.tensor([3]))
