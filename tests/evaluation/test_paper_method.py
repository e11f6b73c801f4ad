"""`paper`: the published form of a prompt, id by id, on weights of that vocabulary that were never trained."""

import functools

import pytest
import torch
from benches import bench_of, by_method, results_of, row_of

from kvlink.core.layout import ReferenceOrder
from kvlink.evaluation.case import Bench, Case
from kvlink.evaluation.methods import method_named
from kvlink.evaluation.methods.paper import Paper
from kvlink.models.prompt import Prompter
from kvlink.models.reference import reference_logits
from kvlink.models.runner import Runner
from tiny import byte_tokenizer
from tiny_models import DoublePrecision, largest, tiny_model


@functools.cache
def runner() -> Runner:
    """A tiny Llama with the vocabulary of the real one."""
    return Runner(tiny_model("llama", dtype=torch.float64, vocab_size=128256))


def bench() -> Bench:
    return Bench(runner(), Prompter(tokenizer=byte_tokenizer()), 2048)


def test_ids_are_those_of_the_published_form() -> None:
    case, method = Case(bench(), row_of(["One.", "Two."])), Paper(K="5")
    prompt = method.prompt(case, case.prompt.tail)
    decode = case.bench.prompter.decode
    ids = prompt.ids(prompt.layout()).tolist()
    start = len(case.prompt.system)
    assert ids[start] == 128254
    first, second = "Document [1](Title: Paper 0) One.\n", "Document [2](Title: Paper 1) Two.\n"
    assert decode(ids[start + 1 : start + 1 + len(first)]) == first
    at = start + 1 + len(first)
    assert ids[at : at + 5] == [128011, 128012, 128013, 128014, 128015]
    at += 5
    assert decode(ids[at : at + len(second)]) == second
    at += len(second)
    assert ids[at : at + 6] == [128016, 128017, 128018, 128019, 128020, 128255]
    assert tuple(ids[at + 6 :]) == case.prompt.tail


def test_links_see_all_before_them_and_documents_nothing_but_themselves() -> None:
    with DoublePrecision():
        case, method = Case(bench(), row_of()), Paper()
        method.prepare(case)
        found = method.score(case, case.scored).logits
        prompt = method.prompt(case, (*case.prompt.tail, *case.scored[:-1]))
        wanted = reference_logits(case.bench.assembler, prompt)[-len(case.scored) :]
        assert largest(found - wanted) < 1e-10
        layout = prompt.layout()
        masks = {window: ReferenceOrder.of(layout, 0).mask() for window in runner().windows}
        for mask in masks.values():
            mask[torch.tensor([span.start for span in layout.spans if span.kind == "label"]), 0] = False
        blind = reference_logits(case.bench.assembler, prompt, masks=masks)[-len(case.scored) :]
        assert largest(found - blind) > 1e-6


def test_the_last_of_40_slots_ends_before_the_marks() -> None:
    assert Paper(K="5").links(39)[-1] == 128011 + 199
    assert set(Paper(K="5").links(0)).isdisjoint(Paper(K="5").links(1))


def test_without_links_it_is_the_form_alone() -> None:
    case = Case(bench(), row_of())
    assert Paper(K="0").prompt(case, case.prompt.tail).labels == ((), (), ())


def test_a_run_gives_scores_answers_and_costs() -> None:
    (row,) = results_of([row_of()], ["paper(5)"], bench=bench(), generate=True)
    case = Case(bench(), row_of())
    assert {"nll", "kl", "f1", "answer"} <= {*row}
    assert row["tokens_computed"] == 5 * 3 + 1 + len(case.prompt.tail) + len(case.scored) - 1
    assert row["links"] == 5


def test_rows_without_documents_are_scored() -> None:
    (row,) = results_of([row_of([], gold=None)], ["paper"], bench=bench())
    assert "error" not in row


def test_more_documents_than_slots_are_an_error_of_the_row() -> None:
    (row,) = results_of([row_of(["x"] * 41)], ["paper"], bench=Bench(runner(), bench().prompter, 8192))
    assert row["error"] == "41 documents, but there are 40 slots: pass --max-documents 40"


def test_a_model_of_another_vocabulary_is_refused_and_others_go_on() -> None:
    found = by_method(results_of([row_of()], ["paper", "epic"], bench=bench_of()))
    assert "the vocabulary ends at 258, this form needs 128255" in found["paper"]["error"]
    assert "error" not in found["epic"]


def test_more_links_than_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="40 slots of 7 ids each do not fit"):
        method_named("paper(K=7)")
