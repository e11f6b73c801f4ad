"""Rivals are done right: equal to full attention where they compute everything, blind to what stands behind a token.

Models have three layers: what is computed to choose is kept up to layer 1, so in two layers it would be everything.
"""

import functools
from typing import Any

import pytest
import torch
from benches import SAME_HEADER, TEXTS, bench_of, by_method, results_of, row_of
from torch import Tensor

from kvlink import InputError
from kvlink.core.errors import ModelRefused
from kvlink.core.layout import Kind
from kvlink.evaluation.case import Case
from kvlink.evaluation.methods import method_named
from kvlink.evaluation.methods.repairing import Placed, Repairing
from kvlink.models.recompute import attention_paid, deviations, recompute
from kvlink.models.runner import Runner
from tiny_models import DoublePrecision, largest

FAMILIES = ("llama", "qwen3", "glm", "phi3", "olmo2", "qwen2")
"""The last one has layers that see 150 positions."""

SETTINGS = {"sink is S": ("header", SAME_HEADER), "no sink": ("none", SAME_HEADER)}
CHEAP = ("cacheblend(r=0.3)", "epic(k=4)", "a3(r=0.3)", "random(r=0.3)")
RIVALS = (*CHEAP, "ape")
deep = functools.partial(bench_of, layers=3)


def case_of(family: str = "llama", setting: str = "sink is S", **fields: Any) -> tuple[Case, str]:
    """Return a row in float64, and the sink prefix of a setting."""
    sink, template = SETTINGS[setting]
    return Case(deep(family, dtype=torch.float64, template=template), row_of(**fields)), sink


def scored(case: Case, asked: str) -> Tensor:
    method = method_named(asked)
    method.prepare(case)
    return method.score(case, case.scored).logits


def placed(case: Case, asked: str) -> tuple[Repairing, Placed]:
    """Return a method and a row that it has laid out, as its own prefill does it."""
    method = method_named(asked)
    assert isinstance(method, Repairing)
    method.prepare(case)
    layout = case.prompt.layout()
    cache = method.place(case, layout, room=0)
    return method, Placed(case, case.prompt, layout, cache, method._candidates(case, layout))


# --- equal to full attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("asked", ["cacheblend(r=1", "epic(k=500", "a3(r=1", "random(r=1"])
def test_a_rival_that_computes_everything_again_is_full_attention(asked: str, family: str, setting: str) -> None:
    with DoublePrecision():
        case, sink = case_of(family, setting)
        assert largest(scored(case, f"{asked}, sink={sink})") - scored(case, "full")) < 1e-10


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("asked", CHEAP)
def test_one_that_computes_a_part_again_is_not(asked: str, setting: str) -> None:
    case, sink = case_of(setting=setting)
    assert largest(scored(case, f"{asked[:-1]}, sink={sink})") - scored(case, "full")) > 0.01


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("asked", ["cacheblend(r=0", "epic(k=0", "a3(r=0", "random(r=0"])
def test_one_that_computes_nothing_again_is_plain_reuse(asked: str, setting: str) -> None:
    with DoublePrecision():
        case, sink = case_of(setting=setting)
        plain = scored(case, f"concat_reencoded(sink={sink})")
        assert largest(scored(case, f"{asked}, sink={sink})") - plain) < 1e-10


@pytest.mark.parametrize("check_layer", [1])
def test_in_the_checked_layer_the_first_document_behind_s_does_not_deviate(check_layer: int) -> None:
    with DoublePrecision():
        case, sink = case_of()
        _, at = placed(case, f"cacheblend(sink={sink})")
        rows = torch.cat([torch.arange(s.start, s.stop) for s in at.layout.of(Kind.SEGMENT)])
        found = deviations(case.bench.assembler, at.cache, at.prompt, at.layout, rows, layer=check_layer)
    first = len(case.prompt.segments[0])
    assert largest(found[:first]) < 1e-20
    assert (found[first:] > 1e-3).all()


def test_without_a_sink_prefix_the_first_document_deviates_too() -> None:
    case, sink = case_of(setting="no sink")
    _, at = placed(case, f"cacheblend(sink={sink})")
    found = deviations(case.bench.assembler, at.cache, at.prompt, at.layout, at.candidates, layer=1)
    assert (found[: len(case.prompt.segments[0])] > 1e-3).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_deviations_are_those_from_full_attentions_own_keys_and_values(family: str) -> None:
    with DoublePrecision():
        case, sink = case_of(family, "no sink")
        _, at = placed(case, f"cacheblend(sink={sink})")
        known = at.cache.keys.clone(), at.cache.values.clone()
        found = deviations(case.bench.assembler, at.cache, at.prompt, at.layout, at.candidates, layer=1)
        full, _ = case.bench.assembler.prefill_plain(at.prompt)
        rows = at.candidates
        wanted = sum(
            (new[1][:, rows] - old[1][:, rows]).square().sum(dim=(0, 2))
            for new, old in zip((full.keys, full.values), known, strict=True)
        )
        assert largest(found - wanted) < 1e-10


def test_layer_0_knows_no_context_so_its_keys_are_exact_already() -> None:
    case, sink = case_of(setting="no sink")
    _, at = placed(case, f"cacheblend(sink={sink})")
    found = deviations(case.bench.assembler, at.cache, at.prompt, at.layout, at.candidates, layer=0)
    assert largest(found) < 1e-10


# --- who sees whom --------------------------------------------------------------------------------------------------


def recomputed_rows(text: str, *, released: bool, family: str) -> Tensor:
    """Return keys and values of every eighth token of the first document, computed again before a last document."""
    with DoublePrecision():
        case, sink = case_of(family, "no sink", texts=[TEXTS[0], TEXTS[1], text])
        _, at = placed(case, f"random(sink={sink})")
        rows = at.candidates[::8]
        recompute(case.bench.assembler, at.cache, at.prompt, at.layout, rows, released=released)
        first = at.layout.of(Kind.SEGMENT)[0]
        own = rows[rows < first.stop]
        return torch.cat((at.cache.keys[:, :, own], at.cache.values[:, :, own]), dim=-1).clone()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_last_document_says_changes_no_recomputed_token_of_the_first(family: str) -> None:
    one, other = (recomputed_rows(text, released=False, family=family) for text in ("Salt is sold.", "Rain all day!"))
    assert torch.equal(one, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_under_the_released_mask_it_does(family: str) -> None:
    one, other = (recomputed_rows(text, released=True, family=family) for text in ("Salt is sold.", "Rain all day!"))
    assert largest(one - other) > 1e-3


def test_the_released_mask_gives_other_logits_and_everything_again_hides_it() -> None:
    with DoublePrecision():
        case, _ = case_of()
        exact, released = (scored(case, f"cacheblend(r=0.4, mask={mask})") for mask in ("exact", "released"))
        assert largest(exact - released) > 1e-3
        assert largest(scored(case, "cacheblend(r=1, mask=released, sink=none)") - scored(case, "full")) < 1e-10


# --- what is chosen -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", CHEAP)
def test_the_ids_of_an_answer_have_no_say_in_what_is_chosen(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, _ = case_of()
    method = method_named(asked)
    chosen: list[list[int]] = []
    choose = type(method).choose
    monkeypatch.setattr(
        type(method), "choose", lambda self, at: chosen.append((found := choose(self, at))[0].tolist()) or found
    )
    method.prepare(case)
    for tail in (case.prompt.tail, (*case.prompt.tail, *case.scored)):
        method.prefill(case, tail, keep=1)
    assert chosen[0] == chosen[1] != []


def test_epic_takes_the_beginning_of_every_document_that_is_not_exact() -> None:
    for setting, skipped in (("sink is S", 1), ("no sink", 0)):
        case, sink = case_of(setting=setting)
        method, at = placed(case, f"epic(k=3, sink={sink})")
        starts = [span.start for span in at.layout.of(Kind.SEGMENT)][skipped:]
        assert method.choose(at)[0].tolist() == [start + more for start in starts for more in range(3)]


@pytest.mark.parametrize(
    ("asked", "share"), [("cacheblend", 0.15), ("a3", 0.15), ("random", 0.15), ("random(0.5)", 0.5)]
)
def test_a_share_is_one_of_all_document_tokens(asked: str, share: float) -> None:
    case, _ = case_of()
    method, at = placed(case, asked)
    rows = method.choose(at)[0]
    assert len(rows) == -(-sum(map(len, case.prompt.segments)) * share // 1)
    assert set(rows.tolist()) <= set(at.candidates.tolist())


def test_cacheblend_takes_what_deviates_most() -> None:
    case, sink = case_of(setting="no sink")
    method, at = placed(case, f"cacheblend(0.2, sink={sink})")
    rows = method.choose(at)[0]
    _, again = placed(case, f"cacheblend(0.2, sink={sink})")
    found = deviations(case.bench.assembler, again.cache, at.prompt, at.layout, at.candidates, layer=1)
    taken = torch.isin(at.candidates, rows)
    assert found[taken].min() >= found[~taken].max()


@pytest.mark.parametrize("asked", ["cacheblend(0.2", "a3(0.2"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_was_computed_to_choose_is_kept_chosen_or_not(asked: str, setting: str) -> None:
    with DoublePrecision():
        case, sink = case_of(setting=setting)
        method, at = placed(case, f"{asked}, sink={sink})")
        full, _ = case.bench.assembler.prefill_plain(at.prompt)
        rows = at.candidates

        def distance() -> float:
            pairs = ((full.keys, at.cache.keys), (full.values, at.cache.values))
            return max(largest(new[:2, :, rows] - old[:2, :, rows]) for new, old in pairs)

        assert distance() > 1e-3
        assert 0 < len(method.choose(at)[0]) < len(rows)
        assert distance() < 1e-10


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "glm", "phi3", "olmo2", "gemma2"])
def test_a3_ranks_by_the_weights_that_the_models_own_attention_has(family: str, setting: str) -> None:
    """Held to the eager attention of the family in one causal forward.

    The logarithms of its weights are the logits but for a constant per row and head, so the heads' mean of them, in
    another softmax without S, has to be what was found.
    """
    with DoublePrecision():
        case, sink = case_of(family, setting)
        method, at = placed(case, f"a3(0.3, sink={sink})")
        chosen = method.choose(at)[0]
        _, again = placed(case, f"a3(sink={sink})")
        first, start = len(case.prompt.system), at.layout.spans[-1].start
        rows = torch.cat((at.candidates, torch.arange(start, len(at.layout))))
        assembler, asking = case.bench.assembler, len(case.prompt.tail)
        found = attention_paid(assembler, again.cache, at.prompt, at.layout, rows, asking=asking, layer=1)
        runner, ids = case.bench.runner, at.prompt.ids(at.layout)[None]
        before = runner.config._attn_implementation
        runner.config._attn_implementation_internal = "eager"
        try:
            with torch.inference_mode():
                weights = runner.model(ids, output_attentions=True).attentions[1][0, :, start:, first:]
        finally:
            runner.config._attn_implementation_internal = before
        logits = weights.log().sum(dim=0) / len(weights) ** 0.5
        wanted = logits.softmax(dim=-1).sum(dim=0)
        assert largest(found - wanted) < 1e-9

        padded = torch.cat((torch.zeros(2), wanted[: start - first], torch.zeros(2)))
        near = padded.unfold(0, 5, 1).mean(dim=-1)[at.candidates - first]
        taken = torch.isin(at.candidates, chosen)
        assert near[taken].min() >= near[~taken].max()
        assert wanted[at.candidates - first][taken].min() < wanted[at.candidates - first][~taken].max()


def test_the_lots_of_random_are_the_rows_and_the_seeds() -> None:
    case, _ = case_of()
    method, at = placed(case, "random")
    same, other = (placed(case, asked)[0].choose(at)[0] for asked in ("random", "random(seed=1)"))
    assert torch.equal(method.choose(at)[0], same)
    assert not torch.equal(same, other)


# --- ape ------------------------------------------------------------------------------------------------------------


def parallel_windows(case: Case) -> Tensor:
    """Return one forward over everything: documents at the same positions, each seeing S and itself alone."""
    prompt, runner = case.prompt, case.bench.runner
    start, tail = len(prompt.system), (*prompt.tail, *case.scored[:-1])
    longest = max(map(len, prompt.segments))
    ids, positions, groups = list(prompt.system), list(range(start)), [0] * start
    for group, segment in enumerate(prompt.segments, start=1):
        ids += segment
        positions += range(start, start + len(segment))
        groups += [group] * len(segment)
    ids += tail
    positions += range(start + longest, start + longest + len(tail))
    groups += [-1] * len(tail)
    at, group, index = torch.tensor(positions), torch.tensor(groups), torch.arange(len(ids))
    sees = (group[:, None] == -1) | (group[None] == 0) | (group[:, None] == group[None])
    visible = sees & (index[:, None] >= index[None])
    masks = {
        window: visible & (window.size is None or at[:, None] - at[None] < window.size) for window in runner.windows
    }
    with torch.inference_mode():
        logits = runner.forward(
            cache=None,
            input_ids=torch.tensor([ids]),
            position_ids=at[None],
            attention_mask=runner.masks(masks),
            logits_to_keep=len(case.scored),
        )
    return logits[0]


@pytest.mark.parametrize("family", [*FAMILIES, "phi", "gemma2"])
def test_ape_with_temperature_and_scale_one_is_parallel_windows_behind_a_shared_prefix(family: str) -> None:
    with DoublePrecision():
        case, _ = case_of(family)
        wanted = parallel_windows(case)
        assert largest(scored(case, "ape(1, 1)") - wanted) < 1e-9
        assert largest(scored(case, "ape(T=0.9, S=1)") - wanted) > 1e-3
        assert largest(scored(case, "ape(T=1, S=0.9)") - wanted) > 1e-3


def test_apes_merge_is_what_its_source_says() -> None:
    """One head, by hand: softmax over S * T * LSE(documents / T) and LSE(rest)."""
    from kvlink.models.parallel import Merging, _merged_attention

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, n, 8, generator=generator, dtype=torch.float64) for n in (2, 7, 7))
    module = torch.nn.Module()
    module.layer_idx = 0  # pyright: ignore[reportAttributeAccessIssue]
    mask = torch.zeros(1, 1, 2, 7, dtype=torch.float64)
    found, _ = _merged_attention(module, query, key, value, mask, merging=Merging(slice(2, 5), 0.7, 0.8))
    logits = (query @ key.transpose(2, 3))[0, 0] / 8**0.5
    inside, rest = logits[:, 2:5] / 0.7, logits[:, [0, 1, 5, 6]]
    weight = torch.sigmoid(0.8 * 0.7 * inside.logsumexp(-1) - rest.logsumexp(-1))[:, None]
    wanted = weight * (inside.softmax(-1) @ value[0, 0, 2:5])
    wanted = wanted + (1 - weight) * (rest.softmax(-1) @ value[0, 0, [0, 1, 5, 6]])
    assert largest(found[0, :, 0] - wanted) < 1e-12


def test_ape_behind_another_sink_prefix_gives_other_logits() -> None:
    case, _ = case_of()
    shared = scored(case, "ape")
    assert torch.equal(scored(case, "ape(sink=header)"), shared)  # here S is the header
    assert largest(scored(case, "ape(sink=none)") - shared) > 1e-3


# --- as methods -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", RIVALS)
def test_a_rivals_answer_is_what_its_own_scores_say_is_most_likely(asked: str) -> None:
    for family in ("llama", "qwen2"):
        case, _ = case_of(family)
        method = method_named(asked)
        method.prepare(case)
        ids = method.generate(case, limit=8, end_ids=())
        assert method.score(case, ids).logits.argmax(-1).tolist() == list(ids)


@pytest.mark.parametrize("asked", RIVALS)
def test_without_documents_a_rival_is_the_base_model(asked: str) -> None:
    with DoublePrecision():
        case, _ = case_of(texts=[], gold=None)
        assert largest(scored(case, asked) - scored(case, "full")) < 1e-10


@pytest.mark.parametrize("asked", RIVALS)
def test_what_a_rival_gives_does_not_depend_on_who_used_the_buffer_before(asked: str) -> None:
    wanted = scored(Case(deep(), row_of()), asked)
    bench = deep()
    results_of([row_of(["A much longer document. " * 20], name="before")], RIVALS, bench=bench, generate=True)
    assert torch.equal(scored(Case(bench, row_of()), asked), wanted)


def test_costs_are_tokens_through_the_model_and_bytes_of_entries() -> None:
    bench, row = deep(), row_of()
    case = Case(bench, row)
    documents, tail = sum(map(len, case.prompt.segments)), len(case.prompt.tail) + len(case.scored) - 1
    found = by_method(results_of([row], RIVALS, bench=bench))
    part = -(-documents * 3 // 10)
    layers = bench.runner.geometry.layers
    assert found["random(r=0.3)"]["tokens_computed"] == tail + part
    assert found["cacheblend(r=0.3)"]["tokens_computed"] == tail + part + -(-documents // layers)
    assert found["a3(r=0.3)"]["tokens_computed"] == tail + part + -(-(documents + len(case.prompt.tail)) // layers)
    assert found["epic(k=4)"]["tokens_computed"] == tail + 4 * len(TEXTS)
    assert found["ape"]["tokens_computed"] == tail
    held = documents * bench.runner.geometry.bytes_per_token(bench.runner.dtype)
    assert {row["bytes_loaded"] for row in found.values()} == {held}


@pytest.mark.parametrize("asked", [*RIVALS, "concat_reencoded", "concat_local", "int4(epic)"])
def test_rows_of_different_lengths_in_turn_are_scored_as_each_alone(asked: str) -> None:
    bench = deep()
    rows = [row_of(), row_of([*TEXTS, "A much longer document. " * 9], name="r1"), row_of(TEXTS[:1], name="r2")]
    together = [result["nll"] for result in results_of(rows, [asked], bench=bench)]
    assert together == [results_of([row], [asked], bench=deep())[0]["nll"] for row in rows]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("cacheblend(r=2)", "r=2: a number of at least 0 and at most 1 is needed"),
        ("cacheblend(r=x)", "r=x: a number"),
        ("cacheblend(mask=none)", "mask=none; choose exact or released"),
        ("cacheblend(check_layer=0)", "check_layer=0: a whole number of at least 1"),
        ("epic(k=-1)", "k=-1: a whole number"),
        ("ape(T=0)", "T=0: a number of more than 0"),
        ("random(0.1, 0.2)", "is not of the form"),
        ("kv_packet", "until they are trained: `kvlink train packet"),
        ("kvlink(lora=maybe)", "lora=maybe; choose on or off"),
    ],
)
def test_a_parameter_that_makes_no_sense_is_an_error_that_says_what_would(asked: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason.replace("(", r"\(")):
        method_named(asked)


def test_a_layer_that_the_model_does_not_have_is_an_error_of_the_row_and_others_go_on() -> None:
    found = by_method(results_of([row_of()], ["cacheblend(check_layer=2)", "a3(layer=2)", "epic"]))
    assert found["cacheblend(check_layer=2)"]["error"] == "check_layer=2, but this model has 2 layers"
    assert found["a3(layer=2)"]["error"] == "layer=2, but this model has 2 layers"
    assert "error" not in found["epic"]


def test_a_model_whose_attention_cannot_be_replaced_is_refused_by_name_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = Runner.forward

    def deaf(self: Runner, **inputs: Any) -> Tensor:
        """A model that keeps an attention of its own."""
        inputs.pop("merging", None), inputs.pop("attended", None)
        before = self.config._attn_implementation
        self.config._attn_implementation_internal = "sdpa"
        try:
            return forward(self, **inputs)
        finally:
            self.config._attn_implementation_internal = before

    monkeypatch.setattr(Runner, "forward", deaf)
    found = by_method(results_of([row_of()], ["ape", "a3", "epic"]))
    assert "cannot be replaced by one that merges documents" in found["ape"]["error"]
    assert "attention weights of LlamaForCausalLM cannot be seen" in found["a3"]["error"]
    assert "error" not in found["epic"]


def test_a_model_with_learned_sinks_is_refused_by_what_does_not_count_them() -> None:
    from kvlink.models.recompute import attention_logits

    one = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ModelRefused, match="learned sinks"):
        attention_logits(one, one, torch.zeros(1, 1, 1, 1), scaling=None, softcap=None, options={"s_aux": one})


@pytest.mark.parametrize("asked", [*RIVALS, "int8(epic)", "prune(50, cacheblend)"])
def test_a_row_without_answers_or_gold_is_answered_and_not_scored(asked: str) -> None:
    (row,) = results_of([row_of(answers=[], gold=None)], [asked], generate=True)
    assert "error" not in row
    assert {"answer", "on_full"} <= {*row}
    assert "nll" not in row
