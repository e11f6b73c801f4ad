"""Rows are scored against full attention, within limits, whatever a method does; result files hold no texts."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benches import (
    BLANK,
    CONTEXT,
    COSTS,
    DISTANCES,
    METHODS,
    SUMMARY,
    TEXTS,
    bench_of,
    by_method,
    results_of,
    row_of,
    rows_of,
    without_times,
)
from hypothesis import given
from hypothesis import strategies as st

from kvlink import Document, InputError, KVLinkError
from kvlink.core import scores
from kvlink.evaluation import evaluate as module
from kvlink.evaluation.case import Case, within
from kvlink.evaluation.evaluate import Limits, evaluate, evaluate_row, rouge_l, settings_of, summarise
from kvlink.evaluation.methods import Method, method_named
from kvlink.evaluation.methods.base import Prefilled
from kvlink.evaluation.methods.full import Full
from kvlink.evaluation.rows import RowsFile
from kvlink.models.assembler import Assembler
from kvlink.models.prompt import Prompter
from kvlink.models.runner import Runner
from kvlink.training.data import Row
from tiny import NO_SYSTEM

ABOUT = {"task", "id", "digest", "method", "documents", "dropped", "prompt_tokens", "gold"}
MATCHES = {"answer", "em", "f1", "substring"}


# --- a row's results ------------------------------------------------------------------------------------------------


def test_each_row_has_a_result_per_method_in_the_order_that_was_asked_for(plain: list[dict[str, Any]]) -> None:
    assert [(r["id"], r["method"]) for r in plain] == [(f"r{n}", method) for n in range(3) for method in METHODS]


def test_a_result_has_the_row_scores_and_costs(plain: list[dict[str, Any]]) -> None:
    assert [set(result) for result in plain] == [ABOUT | DISTANCES | COSTS] * len(plain)


def test_a_result_says_what_stood_in_the_prompt(plain: list[dict[str, Any]]) -> None:
    prompt = Case(bench_of(), rows_of(1)[0]).prompt
    found = {key: plain[0][key] for key in ABOUT}
    assert found == {
        "task": "t",
        "id": "r0",
        "digest": rows_of(1)[0].digest,
        "method": "full",
        "documents": 3,
        "dropped": 0,
        "prompt_tokens": prompt.num_tokens,
        "gold": [0],
    }


def test_full_is_at_no_distance_from_itself(plain: list[dict[str, Any]]) -> None:
    assert [(r["kl"], r["agreement"]) for r in plain if r["method"] == "full"] == [(0, 1)] * 3


def test_scores_are_those_of_the_methods_logits_on_the_first_answer_and_the_end_of_turn() -> None:
    case = Case(bench_of(), row_of())
    reference = Full().score(case, case.scored).logits
    for method, result in by_method(results_of([row_of()])).items():
        logits = method_named(method).score(case, case.scored).logits
        assert result["nll"] == scores.nll(logits, torch.tensor(case.scored))
        assert result["kl"] == scores.kl(reference, logits)
        assert result["agreement"] == scores.agreement(reference, logits)


def test_the_time_to_the_first_token_is_that_of_tokenising_and_the_forward_with_entries_at_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = [0.0]  # a clock that work alone moves

    def costing(name: str, owner: type, price: float) -> None:
        work = getattr(owner, name)

        def worked(*arguments: Any, **options: Any) -> Any:
            seconds[0] += price
            return work(*arguments, **options)

        monkeypatch.setattr(owner, name, worked)

    costing("tail_ids", Prompter, 0.25)
    costing("encode", Runner, 100)
    costing("prefix", Runner, 100)
    costing("prefill_plain", Assembler, 2)
    costing("prefill", Assembler, 1)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    monkeypatch.setattr("kvlink.evaluation.case.perf_counter", lambda: seconds[0])
    found = results_of([row_of()], ["full", "concat_local", "concat_reencoded"])
    assert [result["ttft_s"] for result in found] == [2.25, 1.25, 1.25]


def test_methods_that_reuse_are_at_a_distance_from_full(plain: list[dict[str, Any]]) -> None:
    assert all(r["kl"] > 0 for r in plain if r["method"] != "full")


def test_the_same_run_gives_the_same_results_apart_from_times(plain: list[dict[str, Any]]) -> None:
    assert without_times(results_of(rows_of(3))) == without_times(plain)


def test_a_row_is_scored_alike_whoever_is_compared_with_it(plain: list[dict[str, Any]]) -> None:
    alone = results_of(rows_of(1), ["concat_reencoded"])
    assert without_times(alone) == without_times([plain[METHODS.index("concat_reencoded")]])


def test_results_are_json(answered: list[dict[str, Any]]) -> None:
    assert json.loads(json.dumps(answered, allow_nan=False)) == answered


def test_a_row_without_answers_is_not_scored() -> None:
    assert [set(result) for result in results_of([row_of(answers=[])])] == [ABOUT] * len(METHODS)


def test_rows_that_are_done_are_not_computed_again() -> None:
    found = evaluate(bench_of(), {"t": rows_of(3)}, ["full"], limits=Limits(), done=lambda task, row: row != "r1")
    assert [result["id"] for results in found for result in results] == ["r1"]


def test_an_unknown_method_is_an_error_before_anything_is_computed() -> None:
    with pytest.raises(InputError, match="no method 'magic'"):
        next(evaluate(bench_of(), {"t": rows_of(1)}, ["full", "magic"], limits=Limits()))


# --- answers --------------------------------------------------------------------------------------------------------


def test_with_answers_a_result_has_their_scores_too(answered: list[dict[str, Any]]) -> None:
    for result in answered[: 2 * len(METHODS)]:
        answer = MATCHES if result["method"] != "block_mask" else set()
        assert set(result) == ABOUT | DISTANCES | COSTS | {"on_full"} | answer


def test_a_summary_has_rouge_l_too(answered: list[dict[str, Any]]) -> None:
    rouge = {r["method"] for r in answered if "rouge_l" in r}
    assert rouge == {*METHODS} - {"block_mask"}
    assert {r["id"] for r in answered if "rouge_l" in r} == {SUMMARY.id}


def test_an_answer_is_what_the_method_generates_scored_against_all_right_ones() -> None:
    bench, row = bench_of(), row_of(answers=["at seven", "é"])
    for method, result in by_method(results_of([row], ["full", "concat_reencoded"], generate=True)).items():
        ids = method_named(method).generate(Case(bench, row), limit=32, end_ids=bench.prompter.end_ids)
        text = bench.prompter.decode(ids).strip()
        assert {key: result[key] for key in MATCHES} == {
            "answer": text,
            "em": scores.exact_match(text, row.answers),
            "f1": scores.f1(text, row.answers),
            "substring": scores.substring(text, row.answers),
        }


def test_a_right_answer_scores_one() -> None:
    (wrong,) = results_of([row_of()], ["full"], generate=True)
    (right,) = results_of([row_of(answers=["no", wrong["answer"]])], ["full"], generate=True)
    assert (right["em"], right["f1"], right["substring"]) == (1, 1, 1)


def test_full_agrees_with_its_own_answer(answered: list[dict[str, Any]]) -> None:
    for result in answered:
        if result["method"] == "full":
            assert (result["on_full"]["kl"], result["on_full"]["agreement"]) == (0, 1)


def test_each_method_is_scored_on_fulls_own_answer() -> None:
    bench, row = bench_of(), row_of()
    case = Case(bench, row)
    own = Full().generate(case, limit=32, end_ids=bench.prompter.end_ids)
    reference = Full().score(case, own).logits
    for method, result in by_method(results_of([row], generate=True)).items():
        logits = method_named(method).score(case, own).logits
        assert result["on_full"] == {
            "nll": scores.nll(logits, torch.tensor(own)),
            "kl": scores.kl(reference, logits),
            "agreement": scores.agreement(reference, logits),
        }


def test_answers_change_no_score(answered: list[dict[str, Any]]) -> None:
    fields = ABOUT | DISTANCES
    plain = results_of(rows_of(2))
    assert [{k: r[k] for k in fields} for r in plain] == [{k: r[k] for k in fields} for r in answered[: len(plain)]]


def test_a_row_without_answers_can_be_answered() -> None:
    (result,) = results_of([row_of(answers=[])], ["full"], generate=True)
    assert set(result) == ABOUT | {"answer", "on_full"}


@pytest.mark.parametrize(("task", "most"), [("qa", 32), ("summarization", 96)])
def test_an_answer_is_cut_at_the_length_of_its_task(monkeypatch: pytest.MonkeyPatch, task: str, most: int) -> None:
    limits: list[int] = []

    def generate(self: Full, case: Case, *, limit: int, end_ids: tuple[int, ...]) -> tuple[int, ...]:
        limits.append(limit)
        return (65,)

    monkeypatch.setattr(Full, "generate", generate)
    results_of([row_of(task=task)], ["full"], generate=True)
    assert limits == [most]


def test_an_answer_is_cut_at_the_end_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    generate = Full.generate

    def counting(self: Full, case: Case, *, limit: int, end_ids: tuple[int, ...]) -> tuple[int, ...]:
        limits.append(limit)
        return generate(self, case, limit=limit, end_ids=end_ids)

    monkeypatch.setattr(Full, "generate", counting)
    prompt = Case(bench_of(), row_of(answers=["a"])).prompt
    results_of([row_of(answers=["a"])], METHODS, bench=bench_of(context=prompt.num_tokens + 5), generate=True)
    assert limits == [5]


# --- ROUGE-L --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "answer", "wanted"),
    [
        ("the cat sat on the mat", "the cat sat on the mat", 1),
        ("the cat sat on the mat", "the dog sat on a mat", 4 / 6),  # the longest common subsequence has 4 words
        ("the cat", "the cat sat on the mat", 2 * (1 * 2 / 6) / (1 + 2 / 6)),
        ("mat the on sat", "sat on the mat", 1 / 4),  # order counts
        ("Cats running.", "cat run", 1),  # words are stemmed
        ("", "the cat", 0),
        ("dog", "", 0),
    ],
)
def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence(found: str, answer: str, wanted: float) -> None:
    assert rouge_l(found, [answer]) == pytest.approx(wanted)


def test_rouge_l_is_that_of_the_best_summary() -> None:
    assert rouge_l("the cat", ["a dog", "the cat", "cat"]) == 1


def test_rouge_l_without_rouge_score_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=re.escape("pip install 'kvlink[evaluate]'")):
        rouge_l("x", ["x"])


# --- limits ---------------------------------------------------------------------------------------------------------


def kept(*lengths: int, gold: Sequence[int] = (), most: int | None = None, room: int = 10_000) -> list[int]:
    documents = [(at, (7,) * length) for at, length in enumerate(lengths)]
    return [at for at, _ in within(documents, gold=gold, most=most, room=room)]


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (kept(5, 5, 5), [0, 1, 2]),
        (kept(5, 5, 5, most=2), [0, 1]),
        (kept(5, 5, 5, most=2, gold=[2]), [0, 2]),
        (kept(5, 5, 5, most=1, gold=[1, 2]), [1, 2]),  # gold ones stay, though they are too many
        (kept(5, 5, 5, room=14), [0, 1]),
        (kept(5, 5, 5, room=15), [0, 1, 2]),
        (kept(5, 9, 5, room=10), [0]),  # from the back, not by what would fit
        (kept(5, 9, 5, room=10, gold=[2]), [0, 2]),
        (kept(5, 9, 5, room=3, gold=[1]), [1]),
        (kept(5, 9, 5, room=-100), []),
        (kept(), []),
    ],
)
def test_documents_are_left_out_from_the_back_until_both_limits_hold(found: list[int], wanted: list[int]) -> None:
    assert found == wanted


@given(
    st.lists(st.integers(1, 9), max_size=8),
    st.sets(st.integers(0, 7)),
    st.none() | st.integers(0, 9),
    st.integers(-5, 50),
)
def test_gold_documents_stay_in_any_row_and_others_go_only_if_they_must(
    lengths: list[int], gold: set[int], most: int | None, room: int
) -> None:
    found = kept(*lengths, gold=sorted(gold), most=most, room=room)
    gone = [at for at in range(len(lengths)) if at not in found]
    assert gold & set(range(len(lengths))) <= {*found}
    assert found == sorted(found)
    fits = (most is None or len(found) <= most) and sum(lengths[at] for at in found) <= room
    assert fits or {*found} <= gold
    if gone:  # one more, the first of those that went, would have been too many
        more = [*found, min(gone)]
        assert (most is not None and len(more) > most) or sum(lengths[at] for at in more) > room


def test_the_row_says_how_many_documents_were_dropped() -> None:
    for result in results_of([row_of(gold=[2])], limits=Limits(max_documents=2)):
        assert (result["documents"], result["dropped"]) == (2, 1)


@pytest.mark.parametrize(
    ("gold", "most", "wanted"),
    [([2], 2, [1]), ([0, 2], 2, [0, 1]), ([1, 2], 1, [0, 1]), ([0], 1, [0]), ([], 1, []), (None, 1, None)],
)
def test_the_row_says_where_gold_stands_once_documents_were_dropped(
    gold: list[int] | None, most: int, wanted: list[int] | None
) -> None:
    (result,) = results_of([row_of(gold=gold)], ["full"], limits=Limits(max_documents=most))
    assert result["gold"] == wanted


def test_the_row_says_where_gold_stands_behind_a_blank_document() -> None:
    (result,) = results_of([row_of([" ", *TEXTS], gold=[0, 2])], ["full"])
    assert (result["documents"], result["dropped"], result["gold"]) == (3, 0, [1])


def test_a_dropped_document_is_gone_from_every_methods_prompt() -> None:
    short = without_times(results_of([row_of(TEXTS[:2])]))
    limited = without_times(results_of([row_of()], limits=Limits(max_documents=2)))
    assert [{**result, "dropped": 0, "digest": row_of(TEXTS[:2]).digest} for result in limited] == short


@pytest.mark.parametrize("tokens", [220, 250, 300])
def test_prompt_and_answer_keep_to_the_limit_of_tokens(tokens: int) -> None:
    case = Case(bench_of(), row_of(), max_tokens=tokens)
    assert case.prompt.num_tokens + len(case.scored) <= tokens


def test_a_limit_of_tokens_drops_no_more_than_it_must() -> None:
    whole = Case(bench_of(), row_of())
    exact = whole.prompt.num_tokens + len(whole.scored)
    assert Case(bench_of(), row_of(), max_tokens=exact).dropped == 0
    assert Case(bench_of(), row_of(), max_tokens=exact - 1).dropped == 1


def test_gold_documents_stay_beyond_the_limit_of_tokens() -> None:
    case = Case(bench_of(), row_of(gold=[0, 1, 2]), max_tokens=10)
    assert (len(case.prompt.documents), case.dropped) == (3, 0)


def test_a_row_that_exceeds_what_was_asked_for_says_by_how_much_and_is_scored() -> None:
    row = row_of(gold=[0, 2])
    case = Case(bench_of(), row_of([TEXTS[0], TEXTS[2]]))
    over = case.prompt.num_tokens + len(case.scored) - 10
    for result in results_of([row], limits=Limits(max_documents=1, max_tokens=10)):
        assert result["over_limit"] == {"documents": 1, "tokens": over}
        assert "nll" in result


@pytest.mark.parametrize("more", [0, 1])
def test_a_row_that_keeps_to_the_limits_does_not_speak_of_them(more: int) -> None:
    case = Case(bench_of(), row_of())
    exact = case.prompt.num_tokens + len(case.scored)
    limits = Limits(max_documents=3, max_tokens=exact + more)
    assert all("over_limit" not in result for result in results_of([row_of()], limits=limits))


def test_a_question_that_is_longer_than_the_limit_exceeds_it_without_any_document() -> None:
    (result,) = results_of([row_of(gold=None)], ["full"], limits=Limits(max_tokens=10))
    assert (result["documents"], list(result["over_limit"])) == (0, ["tokens"])


def test_the_summary_counts_rows_that_exceed_the_limits() -> None:
    rows = [row_of(gold=[0, 1], name="r0"), row_of(gold=[0], name="r1"), row_of(gold=[0, 2], name="r2")]
    for row in summarise(results_of(rows, limits=Limits(max_documents=1))):
        assert (row["over_limit"], row["n"], row["rows"]) == (2, 3, 3)


@pytest.mark.parametrize("limits", [Limits(), Limits(max_tokens=5000)], ids=["no limit", "a larger limit"])
def test_a_row_longer_than_the_context_loses_documents(limits: Limits) -> None:
    found = results_of([row_of([*TEXTS, "Long. " * 100])], bench=bench_of(context=600), limits=limits)
    assert {(r["documents"], r["dropped"], "error" in r) for r in found} == {(3, 1, False)}


def test_a_row_whose_gold_documents_exceed_the_context_has_an_error_that_says_by_how_much() -> None:
    row = row_of(["Long. " * 100], gold=[0])
    case = Case(bench_of(), row)
    over = case.prompt.num_tokens + len(case.scored) - 600
    for result in results_of([row], bench=bench_of(context=600), generate=True):
        assert result["error"] == f"{over} tokens over the context of 600, though only gold documents are left"
        assert set(result) == ABOUT | {"error"}


def test_rows_beside_one_that_exceeds_the_context_go_on() -> None:
    rows = [row_of(name="r0"), row_of(["Long. " * 100], name="r1"), row_of(name="r2")]
    found = results_of(rows, bench=bench_of(context=600))
    assert {r["id"] for r in found if "error" not in r} == {"r0", "r2"}


def test_a_row_that_just_fits_the_context_is_scored_and_answered() -> None:
    case = Case(bench_of(), row_of())
    exact = case.prompt.num_tokens + len(case.scored)
    for result in results_of([row_of()], bench=bench_of(context=exact), generate=True):
        assert ("error" in result, "nll" in result, "on_full" in result) == (False, True, True)


# --- errors ---------------------------------------------------------------------------------------------------------


class Failing(Method):
    """Raises on one row."""

    def __init__(self, error: Exception, *, on: str = "r1") -> None:
        self.error = error
        self.on = on

    def prefill(self, case: Case, tail: tuple[int, ...], *, keep: int, room: int = 0) -> Prefilled:
        if case.row.id == self.on:
            raise self.error
        return Full().prefill(case, tail, keep=keep, room=room)


def with_failing(error: Exception, *, generate: bool = False) -> list[dict[str, Any]]:
    methods = {"full": Full(), "failing": Failing(error), "concat_reencoded": method_named("concat_reencoded")}
    rows = rows_of(3)
    found = (evaluate_row(bench_of(), "t", row, methods, limits=Limits(), generate=generate) for row in rows)
    return [result for results in found for result in results]


@pytest.mark.parametrize("generate", [False, True])
@pytest.mark.parametrize("error", [KVLinkError("no luck"), InputError("no luck"), NotImplementedError("no luck")])
def test_an_error_of_a_method_on_a_row_is_its_result_and_the_others_go_on(error: Exception, generate: bool) -> None:
    found = with_failing(error, generate=generate)
    assert [(r["id"], r["method"], r["error"]) for r in found if "error" in r] == [("r1", "failing", "no luck")]
    assert all("nll" in r for r in found if "error" not in r)


def test_errors_are_listed_in_the_summary_and_n_counts_the_rows_without() -> None:
    summary = by_method(summarise(with_failing(KVLinkError("no luck"))))
    assert (summary["failing"]["n"], summary["failing"]["errors"]) == (2, ["no luck"])
    assert (summary["full"]["n"], "errors" in summary["full"]) == (3, False)


def test_an_error_that_nobody_raised_on_purpose_is_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        with_failing(RuntimeError("a bug"))


def test_a_method_with_an_error_is_compared_on_the_rows_that_it_carried() -> None:
    summary = by_method(summarise(with_failing(KVLinkError("no luck"))))
    assert summary["failing"]["against_full"]["nll"] == {"difference": 0, "low": 0, "high": 0}


def test_a_row_that_gives_no_prompt_has_an_error_and_the_others_go_on() -> None:
    found = results_of([row_of(name="r0"), BLANK, row_of(name="r2")])
    assert {r["id"] for r in found if "error" not in r} == {"r0", "r2"}
    assert {r["error"] for r in found if r["id"] == "blank"} == {
        "the question ' ' is blank or gives no token ids: ask something"
    }


def test_a_model_without_system_prompts_says_so_in_every_row() -> None:
    found = results_of(rows_of(2), bench=bench_of(template=NO_SYSTEM))
    assert all("chat template refuses it" in result["error"] for result in found)


# --- resuming -------------------------------------------------------------------------------------------------------

SETTINGS = settings_of(
    model={"name": "tiny", "digest": "ab"}, methods=METHODS, limits=Limits(max_documents=2), generate=False, seed=0
)


def kept_run(folder: Path, *, resume: bool = False) -> Path:
    """Evaluate into a folder."""
    with RowsFile(folder, SETTINGS, resume=resume) as file:
        limits = Limits(max_documents=2)
        for results in evaluate(bench_of(), {"t": rows_of(3)}, METHODS, limits=limits, done=file.done):
            file.append(results)
    return folder / "rows.jsonl"


def read(file: bytes) -> list[dict[str, Any]]:
    return without_times(json.loads(line) for line in file.splitlines())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a run that nobody disturbed."""
    return kept_run(tmp_path_factory.mktemp("whole")).read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 0.3, 0.34, 0.5, 0.66, 0.7, 0.9, 0.999])
def test_a_run_that_was_killed_anywhere_goes_on_to_the_same_results(tmp_path: Path, whole: bytes, share: float) -> None:
    (tmp_path / "rows.jsonl").write_bytes(whole[: int(share * len(whole))])
    found = kept_run(tmp_path, resume=True).read_bytes()
    assert read(found) == read(whole)


# --- texts stay where they are --------------------------------------------------------------------------------------


@pytest.mark.parametrize("generate", [False, True])
def test_results_hold_no_texts_of_rows(generate: bool) -> None:
    secret = Row(
        id="r0",
        question="Wherefore zanzibar?",
        documents=(Document("quagmire inside", "xylophone"), Document("mumbling " * 400, "yesteryear")),
        answers=("brouhaha", "kerfuffle"),
        gold=(0,),
    )
    rows = [secret, row_of(["flapdoodle " * 400], name="r1", answers=["gobbledygook"]), BLANK]
    results = results_of(rows, bench=bench_of(context=900), generate=generate)
    written = json.dumps([results, summarise(results)])
    words = "Wherefore zanzibar quagmire xylophone mumbling yesteryear brouhaha kerfuffle flapdoodle gobbledygook"
    assert [word for word in words.split() if word in written] == []
    assert {r["id"] for r in results} == {"r0", "r1", "blank"}


def test_the_context_of_these_tests_is_larger_than_their_rows() -> None:
    assert Case(bench_of(), row_of()).prompt.num_tokens < CONTEXT / 2
