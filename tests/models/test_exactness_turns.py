"""Reuse equals the reference forward in conversations: documents join in any turn, or in none.

Exactness is 1e-9 in float64 all through. A planted fault must move some logit by more than 1 % of the largest one.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvlink.core.layout import Kind, Lengths, Prompt, ReferenceOrder, Turn
from kvlink.models.assembler import Assembler
from kvlink.models.reference import reference_logits
from tiny_bundles import adapted
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

SINK = random_ids(4, seed=77)
LONG_SINK = random_ids(9, seed=78)
"""Longer than S, which has 6 tokens."""

BRINGS = {"documents": ((20, 7), (11,)), "labels": (2, 1)}
"""What a turn brings: segments beyond and below a window of 16, links of both levels, labels."""

NOTHING = {"documents": (), "labels": ()}
CONVERSATIONS = {
    "first": tiny_prompt(**NOTHING, history=[Lengths(tail=13, **BRINGS)]),
    "second": tiny_prompt(**BRINGS, history=[Lengths(tail=13, **NOTHING)]),
    "both": tiny_prompt(**BRINGS, history=[Lengths(((17,), (1,)), 13)]),
    "third of four": tiny_prompt(
        **NOTHING, history=[Lengths((), 1), Lengths((), 21), Lengths(tail=5, **BRINGS)], tail=1
    ),
    "none": tiny_prompt(**NOTHING, history=[Lengths(tail=13, **NOTHING)]),
}
BOTH = CONVERSATIONS["both"]
families = pytest.mark.parametrize("family", FAMILIES)
joining = pytest.mark.parametrize("joined", CONVERSATIONS)


def compared(assembler: Assembler, prompt: Prompt, sink_ids: tuple[int, ...] = SINK) -> tuple[Tensor, Tensor]:
    """Return the logits of all request-side rows behind S: by reuse, and by the reference forward."""
    with DoublePrecision():
        wanted = reference_logits(assembler, prompt, sink_ids=sink_ids)[len(prompt.system) :]
        return reuse_logits(assembler, prompt, sink_ids=sink_ids), wanted


@families
@joining
def test_a_conversation_equals_the_reference_forward_wherever_documents_join(family: str, joined: str) -> None:
    assembler, prompt = tiny_assembler(tiny_runner(family)), CONVERSATIONS[joined]
    found, wanted = compared(assembler, prompt, LONG_SINK)
    assert len(found) == len(prompt.layout(num_links=6).request_rows(after=len(prompt.system)))
    assert largest(found - wanted) <= 1e-9


@families
def test_a_conversation_without_link_tokens_equals_the_reference_forward(family: str) -> None:
    found, wanted = compared(tiny_assembler(tiny_runner(family), num_links=0), BOTH)
    assert largest(found - wanted) <= 1e-9


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "phi"])
@joining
def test_an_adapter_acts_behind_the_first_document_of_whatever_turn(family: str, joined: str) -> None:
    runner, prompt = tiny_runner(family), CONVERSATIONS[joined]
    found, wanted = compared(adapted(runner), prompt)
    assert largest(found - wanted) <= 1e-9
    plain, _ = compared(tiny_assembler(runner), prompt)
    layout = prompt.layout(num_links=6)
    behind = len(layout) if layout.behind_documents is None else layout.behind_documents
    acted = layout.request_rows(after=len(prompt.system)) >= behind
    change = (found - plain).abs().amax(dim=1)
    assert (change[~acted] <= 1e-9).all()
    assert (change[acted] > 0.001 * largest(plain)).all()
    assert bool(acted.any()) is (joined != "none")


@families
def test_without_documents_all_turns_are_the_base_models_own_full_attention(family: str) -> None:
    runner, prompt = tiny_runner(family), CONVERSATIONS["none"]
    whole = torch.tensor([[*prompt.system, *prompt.history[0].tail, *prompt.tail]])
    with torch.inference_mode():
        own = runner.model(input_ids=whole, logits_to_keep=1).logits[0]
    _, logits = Assembler(runner).prefill_plain(prompt)
    assert torch.equal(logits, own)
    with DoublePrecision(), torch.inference_mode():
        own = runner.model(input_ids=whole).logits[0, len(prompt.system) :]
    found, _ = compared(tiny_assembler(runner), prompt)
    assert largest(found - own) <= 1e-9


@families
def test_a_turn_is_computed_as_if_no_later_one_followed(family: str) -> None:
    """What makes a beginning known: rows depend on nothing behind them."""
    assembler, (earlier,) = tiny_assembler(tiny_runner(family)), BOTH.history
    with DoublePrecision():
        alone = reuse_logits(assembler, Prompt(BOTH.system, earlier.documents, earlier.tail, earlier.labels))
        found = reuse_logits(assembler, BOTH)
    assert len(found) > len(alone)
    assert largest(found[: len(alone)] - alone) <= 1e-9


# --- planted faults --------------------------------------------------------------------------------------------------


def placed_before(prompt: Prompt) -> Prompt:
    """Put the last turn's documents in front of the first turn's question."""
    (earlier,) = prompt.history
    labels = (*(earlier.labels or ((),) * len(earlier.documents)), *prompt.labels)
    moved = Turn((*earlier.documents, *prompt.documents), earlier.tail, labels)
    return Prompt(prompt.system, (), prompt.tail, history=(moved,))


@families
@pytest.mark.parametrize("joined", ["second", "both"])
def test_documents_that_are_placed_before_an_earlier_question_are_found(family: str, joined: str) -> None:
    assembler, prompt = tiny_assembler(tiny_runner(family)), CONVERSATIONS[joined]
    moved = placed_before(prompt)
    assert moved.num_tokens == prompt.num_tokens
    with DoublePrecision():
        found, wanted = (
            reuse_logits(assembler, moved, sink_ids=SINK),
            reference_logits(assembler, prompt, sink_ids=SINK),
        )
    assert largest(found[-1] - wanted[-1]) > 0.01 * largest(wanted)


Change = Callable[[Tensor, ReferenceOrder], Tensor]


def document_sees_earlier_turn(mask: Tensor, order: ReferenceOrder) -> Tensor:
    span = BOTH.layout(num_links=6).of(Kind.TAIL)[0]
    earlier = (order.source >= span.start) & (order.source < span.stop)
    behind = (order.groups > 0) & (order.source >= span.stop)
    return mask | (earlier[None, :] & behind[:, None])


def question_does_not_see_earlier_documents(mask: Tensor, order: ReferenceOrder) -> Tensor:
    span = BOTH.layout(num_links=6).of(Kind.TAIL)[0]
    earlier = (order.groups > 0) & (order.source < span.start)
    behind = (order.groups == 0) & (order.source >= span.stop)
    return mask & ~(earlier[None, :] & behind[:, None])


@pytest.mark.parametrize("family", [name for name, (_, options) in FAMILIES.items() if "sliding_window" not in options])
@pytest.mark.parametrize("change", [document_sees_earlier_turn, question_does_not_see_earlier_documents])
def test_another_mask_between_turns_is_found(family: str, change: Change) -> None:
    assembler = tiny_assembler(tiny_runner(family))
    order = ReferenceOrder.of(BOTH.layout(num_links=6), len(SINK))
    masks = {window: change(order.mask(window=window.size), order) for window in assembler.runner.windows}
    found, wanted = compared(assembler, BOTH)
    assert largest(found - wanted) <= 1e-9
    with DoublePrecision():
        spoiled = reference_logits(assembler, BOTH, sink_ids=SINK, masks=masks)[len(BOTH.system) :]
    assert largest(found - spoiled) > 0.01 * largest(wanted)
