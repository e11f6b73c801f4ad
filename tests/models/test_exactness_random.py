"""Reuse equals the reference forward whatever the prompt looks like: random layouts and turns on one family."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink.core.layout import Lengths, Prompt
from kvlink.models.reference import reference_logits
from tiny_models import DoublePrecision, largest, random_ids, reuse_logits, tiny_assembler, tiny_prompt, tiny_runner


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt and how its documents were encoded."""

    prompt: Prompt
    sink_ids: tuple[int, ...]
    num_links: int


@st.composite
def turns(draw: st.DrawFn, *, max_documents: int) -> Lengths:
    segments = st.lists(st.integers(1, 24), min_size=1, max_size=3)
    documents = draw(st.lists(segments, max_size=max_documents))
    labels = st.lists(st.integers(0, 3), min_size=len(documents), max_size=len(documents))
    return Lengths(documents, draw(st.integers(1, 6)), draw(st.one_of(st.just([]), labels)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    last, history = draw(turns(max_documents=4)), draw(st.lists(turns(max_documents=2), max_size=2))
    prompt = tiny_prompt(
        system=draw(st.integers(1, 9)),
        documents=last.documents,
        labels=last.labels,
        tail=last.tail,
        history=history,
    )
    sink_ids = draw(st.one_of(st.integers(0, 14).map(lambda n: random_ids(n, seed=99)), st.just(prompt.system)))
    return Case(prompt, sink_ids, draw(st.integers(0, 3)))


@settings(derandomize=True, max_examples=60, deadline=None, database=None)
@given(cases())
def test_reuse_equals_the_reference_forward_for_any_layout(case: Case) -> None:
    assembler = tiny_assembler(tiny_runner("llama"), num_links=case.num_links)
    with DoublePrecision():
        wanted = reference_logits(assembler, case.prompt, sink_ids=case.sink_ids)[len(case.prompt.system) :]
        found = reuse_logits(assembler, case.prompt, sink_ids=case.sink_ids)
    assert found.shape == wanted.shape
    assert largest(found - wanted) <= 1e-9


@settings(derandomize=True, max_examples=30, deadline=None, database=None)
@given(cases(), st.data())
def test_a_prefill_in_two_steps_leaves_the_same_buffer(case: Case, data: st.DataObject) -> None:
    """Rows below `upto` do not depend on what stands behind them."""
    assembler = tiny_assembler(tiny_runner("llama"), num_links=case.num_links)
    runner, prompt = assembler.runner, case.prompt
    layout = prompt.layout(num_links=case.num_links)
    upto = data.draw(st.integers(len(prompt.system), len(layout)))
    with DoublePrecision():
        prefix = runner.prefix(prompt.system)
        entries = runner.encode(prompt.segments) if prompt.segments else []
        assert prefix is not None
        whole, part = (assembler.assemble(layout, prefix=prefix, entries=entries) for _ in range(2))
        assembler.prefill(whole, prompt, layout)
        assembler.prefill(part, prompt, layout, upto=upto)
    assert part.length == upto
    assert largest(whole.keys[:, :, :upto] - part.keys[:, :, :upto]) <= 1e-9
    assert largest(whole.values[:, :, :upto] - part.values[:, :, :upto]) <= 1e-9
