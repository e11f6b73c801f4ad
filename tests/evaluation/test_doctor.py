"""The doctor's verdict follows from thresholds and intervals, its advice from what was measured, on any corpus."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import BLANK, SAME_HEADER, TEXTS, bench_of, row_of, rows_of

from kvlink import Document, InputError
from kvlink.evaluation.doctor import (
    AGREEMENT,
    NLL,
    Setup,
    advice_of,
    asked_rows,
    diagnose,
    studied_rows,
    verdict_of,
    words_of,
)
from kvlink.models import bundle as bundles
from tiny_bundles import tiny_bundle

DIGEST = "ab" * 32


def measured(
    agreement: float, *, width: float = 0.01, nll: float = 0.5, nll_width: float = 0.1, **fields: Any
) -> dict[str, Any]:
    """Return a row of a summary with intervals of these widths to both sides."""
    own = {"difference": agreement - 1, "low": agreement - 1 - width, "high": agreement - 1 + width}
    likely = {"difference": nll, "low": nll - nll_width, "high": nll + nll_width}
    costs = {"tokens_computed": 30.0, "ttft_s": 0.2, "bytes_loaded": 4e6}
    return {
        "agreement": agreement,
        "kl": 1 - agreement,
        "n": 12,
        "against_full": {"agreement": own, "nll": likely},
        **costs,
        **fields,
    }


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (measured(1.0, nll=0.0), "as good"),
        (measured(AGREEMENT), "as good"),
        (measured(0.5, nll=NLL), "as good"),
        (measured(0.5, nll=-1.0), "as good"),
        (measured(0.94), "not measurably worse"),
        (measured(0.5, nll=0.1, nll_width=0.09), "not measurably worse"),
        (measured(0.93), "measurably worse"),
        (measured(0.5, width=0.0, nll=0.03, nll_width=0.0), "measurably worse"),
    ],
)
def test_worse_is_said_where_both_intervals_exclude_the_thresholds_only(row: dict[str, Any], verdict: str) -> None:
    assert verdict_of(row) == verdict


def test_words_name_figures_thresholds_and_savings() -> None:
    row = measured(0.9, nll=0.3)
    saves = {"tokens": 0.97, "ttft": 0.9, "ttft_s": 0.2, "full_ttft_s": 2.0, "bytes": 4e6}
    text = words_of(row, "measurably worse", saves)
    for part in ("Measurably worse", "90.0%", "89.0% to 91.0%", "95% is asked for", "0.300 nats", "0.02 is allowed"):
        assert part in text
    for part in ("over 12 questions", "97% fewer tokens", "0.20 s instead of 2.00 s", "4.0 MB"):
        assert part in text


def test_what_was_measured_to_help_is_advised_best_first_and_what_did_not_is_not() -> None:
    others = [
        ("keep entries raw", measured(0.92)),
        ("take the links", measured(0.97, nll=0.0)),
        ("do something worse", measured(0.5)),
    ]
    advice = advice_of(measured(0.9), "measurably worse", others, has_links=False, codec="int4")
    assert advice[0] == "Take the links: then it is as good as full attention, 97.0% instead of 90.0% of the tokens."
    assert advice[1].startswith("Keep entries raw: then it is nearer, 92.0%")
    assert "worse:" not in "".join(advice)
    assert "kvlink train links --corpus" in advice[2]
    assert "full attention" in advice[-1]


def test_who_has_links_is_advised_to_train_others_and_who_is_well_to_change_nothing() -> None:
    assert "kvlink train sweep" in advice_of(measured(0.9), "measurably worse", [], has_links=True, codec="raw")[0]
    assert advice_of(measured(1.0), "as good", [], has_links=True, codec="int8") == ("Nothing has to change.",)
    assert "int8" in advice_of(measured(1.0), "as good", [], has_links=True, codec="raw")[0]
    assert "more questions" in advice_of(measured(0.94), "not measurably worse", [], has_links=True, codec="raw")[0]


def test_what_can_be_changed_follows_from_the_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "shipped_for", lambda _: None)
    assert [what for what, _ in Setup(links="none").changes(DIGEST)] == []
    changes = dict(Setup(links="none", codec="int4", sink="none").changes(DIGEST))
    assert [changed.method(DIGEST) for changed in changes.values()] == [
        "concat_reencoded(sink=none, codec=raw)",
        "concat_reencoded(sink=header, codec=int4)",
    ]


def test_the_method_is_the_one_that_an_engine_of_this_setup_uses(tmp_path: Path) -> None:
    assert Setup().method(DIGEST) == "concat_reencoded(sink=header, codec=raw)"  # nothing ships for this model
    assert Setup(links="a.safetensors", foreign=True).method(DIGEST) == (
        "kvlink(bundle=a.safetensors, codec=raw, foreign=yes)"
    )
    with pytest.raises(InputError, match="no codec 'zip'"):
        Setup(codec="zip")


def test_one_document_behind_s_as_sink_prefix_is_as_good_and_saves_its_tokens() -> None:
    bench = bench_of(dtype=torch.float64, template=SAME_HEADER)
    found = diagnose(bench, [row_of([text], name=f"r{n}") for n, text in enumerate(TEXTS)], Setup(links="none"))
    full, own = found.results
    assert (found.verdict, found.is_good, own["agreement"]) == ("as good", True, 1.0)
    assert found.saves["tokens"] == 1 - own["tokens_computed"] / full["tokens_computed"] > 0.1
    assert (own["verdict"], own["saves"], own["advice"]) == ("as good", found.saves, list(found.advice))


def test_several_documents_of_random_weights_are_worse_and_what_could_be_changed_is_measured() -> None:
    setup = Setup(links="none", sink="none", codec="int4")
    asked = [replace(row, answers=()) for row in rows_of(6)]
    found = diagnose(bench_of(), asked, setup)
    assert (found.verdict, found.is_good) == ("measurably worse", False)
    assert [row["method"] for row in found.results] == [
        "full",
        "concat_reencoded(sink=none, codec=int4)",
        "concat_reencoded(sink=none, codec=raw)",
        "concat_reencoded(sink=header, codec=int4)",
    ]


def test_links_of_a_file_are_what_is_measured(tmp_path: Path) -> None:
    bench = bench_of(dtype=torch.float64)
    bench.digest = DIGEST
    path = tmp_path / "a.safetensors"
    tiny_bundle(bench.runner, digest=DIGEST, sink_ids=bench.sink_ids("header")).save(path)
    found = diagnose(bench, rows_of(3), Setup(links=str(path)))
    assert found.results[1]["links"] == 3


def test_links_of_another_model_cannot_be_measured_and_the_reason_is_told(tmp_path: Path) -> None:
    bench = bench_of(dtype=torch.float64)
    tiny_bundle(bench.runner, digest=DIGEST).save(tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="nothing could be scored: the bundle was trained for"):
        diagnose(bench, rows_of(2), Setup(links=str(tmp_path / "a.safetensors")))


def test_a_question_without_a_right_answer_is_scored_on_what_full_attention_says() -> None:
    found = diagnose(bench_of(), [row_of(answers=[], gold=None)], Setup(links="none"))
    assert found.results[0]["n"] == 1


def test_a_blank_question_is_left_out_and_the_others_go_on() -> None:
    found = diagnose(bench_of(), [BLANK, *rows_of(2)], Setup(links="none"))
    assert (found.results[1]["n"], found.results[1]["rows"]) == (2, 3)


# --- corpora --------------------------------------------------------------------------------------------------------


def asking(documents: Any, question: str, /, *, max_new_tokens: int) -> str:
    """A model that asks about the first words of what it sees."""
    words = documents[0].text.split()
    return f"What is said about {words[0]} {words[1]}?" if "Write" in question else "Seven."


def test_questions_of_a_user_get_the_documents_that_fit_them() -> None:
    documents = [Document(text, name=str(at)) for at, text in enumerate(TEXTS)]
    (row,) = asked_rows([("Where is bread baked?", ("here",))], documents, top=1)
    assert (row.documents[0].name, row.answers) == ("2", ("here",))


def test_a_corpus_of_one_file_is_asked_about() -> None:
    rows = studied_rows([Document("The office opens at seven. " * 4)], asking, number=3, top=5, max_tokens=500)
    assert rows
    assert all(len(row.documents) == 1 for row in rows)


@pytest.mark.parametrize("documents", [[], [Document(" \n")]])
def test_a_corpus_without_text_is_an_error(documents: list[Document]) -> None:
    with pytest.raises(InputError, match="holds any text"):
        asked_rows([("Why?", ())], documents, top=3)
    with pytest.raises(InputError, match="holds any text"):
        studied_rows(documents, asking, number=3, top=3, max_tokens=500)


def test_of_ten_thousand_documents_a_part_is_asked_about_and_the_best_are_found() -> None:
    documents = [Document(f"Hut {n} lies at {n} m, and its warden is Anna.", name=str(n)) for n in range(10_000)]
    seen: set[str] = set()

    def noting(given: Any, question: str, /, *, max_new_tokens: int) -> str:
        seen.update(document.name for document in given)
        return asking(given, question, max_new_tokens=max_new_tokens)

    rows = studied_rows(documents, noting, number=4, top=3, max_tokens=500)
    assert [len(row.documents) for row in rows] == [3] * len(rows) != []
    assert len(seen) <= 80
    (row,) = asked_rows([("How high is hut 7321?", ())], documents, top=2)
    assert row.documents[0].name == "7321"


def test_a_long_document_is_cut_into_pieces_that_fit() -> None:
    (row,) = asked_rows([("When does the office open?", ())], [Document("The office opens at seven. " * 1000)], top=3)
    assert len(row.documents) == 3
    assert max(len(document.text) for document in row.documents) <= 4 * 512
