"""`encode`, `ask` and `plan` on a folder of texts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlink import Engine, InputError, ModelRefused, StoreFull, StoreUnusable, TextUnavailable
from kvlink.corpus import read_corpus
from tiny import byte_tokenizer
from tiny_models import tiny_model

Run = Callable[..., Any]
QUESTION = "When does the office open?"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def result_of(text: str, command: str) -> dict[str, Any]:
    """Return the only row of a result file."""
    found = json.loads(text)
    assert (found["schema"], found["command"]) == (1, command)
    (row,) = found["results"]
    return row


# --- encode ---------------------------------------------------------------------------------------------------------


def test_encode_says_what_it_did(run: Run, model: str, corpus: Path, store: Path) -> None:
    result = run("encode", corpus, "-m", model, "--store", store)
    assert result.exit_code == 0
    assert result.stdout.startswith("3 encoded (")
    assert "0 already in the store, 1 skipped; the store holds " in result.stdout


def test_encode_a_second_time_encodes_nothing(run: Run, model: str, corpus: Path, store: Path) -> None:
    run("encode", corpus, "-m", model, "--store", store)
    result = run("encode", corpus, "-m", model, "--store", store)
    assert result.stdout.startswith("0 encoded, 3 already in the store, 1 skipped")


def test_encode_encodes_only_what_is_new(run: Run, model: str, corpus: Path, store: Path) -> None:
    run("encode", corpus, "-m", model, "--store", store)
    (corpus / "office.md").write_text("The office opens at eight.")
    result = run("encode", corpus, "-m", model, "--store", store)
    assert result.stdout.startswith("1 encoded (")


def test_encode_names_what_it_skips_and_why(run: Run, model: str, corpus: Path, store: Path) -> None:
    result = run("encode", corpus, "-m", model, "--store", store)
    assert "skipped blank.md: blank" in result.stderr


def test_encode_writes_a_row_for_each_document(run: Run, model: str, corpus: Path, store: Path) -> None:
    row = result_of(run("encode", corpus, "-m", model, "--store", store, "--json", "-").stdout, "encode")
    assert (row["encoded"], row["disk"], row["skipped"]) == (3, 0, 1)
    assert [document["id"] for document in row["documents"]] == ["bakery.md", "blank.md", "huts/hut.md", "office.md"]


def test_encode_takes_one_file(run: Run, model: str, corpus: Path, store: Path) -> None:
    assert run("encode", corpus / "office.md", "-m", model, "--store", store).stdout.startswith("1 encoded (")


@pytest.mark.parametrize("name", ["[draft] a.md", "[/b].md", "[red].md", ":100:.md", "caf\udce9.md"], ids=ascii)
def test_encode_takes_any_name_of_a_file(run: Run, model: str, corpus: Path, store: Path, name: str) -> None:
    (corpus / name).parent.mkdir(exist_ok=True)
    (corpus / name).write_text(" ")
    result = run("encode", corpus, "-m", model, "--store", store, "--json", corpus / "out.json")
    row = result_of((corpus / "out.json").read_text("utf-8"), "encode")
    assert name.replace("\udce9", "?") in [document["id"] for document in row["documents"]]
    assert "2 skipped" in result.stdout


# --- ask ------------------------------------------------------------------------------------------------------------


def expected(model: str, corpus: Path, **options: Any) -> str:
    engine = Engine.from_pretrained(model, device="cpu")
    return engine.generate(read_corpus(corpus), QUESTION, max_new_tokens=8, **options).text


def test_ask_prints_the_answer_and_nothing_else_to_standard_output(run: Run, model: str, corpus: Path) -> None:
    result = run("ask", QUESTION, "--docs", corpus, "-m", model, "-n", 8)
    assert result.stdout_bytes.decode().removesuffix("\n") == expected(model, corpus)


def test_ask_ends_with_a_line_of_usage(run: Run, model: str, corpus: Path) -> None:
    run("encode", corpus, "-m", model)
    result = run("ask", QUESTION, "--docs", corpus, "-m", model, "-n", 8)
    assert "reused" in result.stderr
    assert "(disk 3, skipped 1); first token" in result.stderr.replace("skipped 1, disk 3", "disk 3, skipped 1")


def test_ask_warns_of_what_it_left_out(run: Run, model: str, corpus: Path) -> None:
    result = run("ask", QUESTION, "--docs", corpus, "-m", model, "-n", 8)
    assert "warning blank.md is blank and was skipped" in result.stderr


def test_ask_without_documents_asks_the_model_alone(run: Run, model: str) -> None:
    result = run("ask", QUESTION, "-m", model, "-n", 8)
    assert result.exit_code == 0
    assert "(no documents)" in result.stderr


def test_ask_top_reads_the_best_documents_best_first(run: Run, model: str, corpus: Path) -> None:
    out = run("ask", QUESTION, "--docs", corpus, "--top", 1, "-m", model, "-n", 2, "--json", "-").stdout
    documents = result_of(out, "ask")["usage"]["kvlink"]["documents"]
    assert [document["id"] for document in documents] == ["office.md"]


def test_ask_json_to_standard_output_is_json_alone(run: Run, model: str, corpus: Path) -> None:
    result = run("ask", QUESTION, "--docs", corpus, "-m", model, "-n", 8, "--json", "-")
    row = result_of(result.stdout, "ask")
    assert set(row) == {"question", "answer", "finish_reason", "usage", "timings"}
    assert row["answer"] == expected(model, corpus)


def test_ask_json_to_a_file_leaves_the_answer_on_standard_output(
    run: Run, model: str, corpus: Path, tmp_path: Path
) -> None:
    result = run("ask", QUESTION, "--docs", corpus, "-m", model, "-n", 8, "--json", tmp_path / "a.json")
    assert result.stdout_bytes.decode().removesuffix("\n") == expected(model, corpus)
    assert result_of((tmp_path / "a.json").read_text("utf-8"), "ask")["question"] == QUESTION


def test_ask_passes_system_prompt_labels_and_stop_strings_on(run: Run, model: str, corpus: Path) -> None:
    whole = expected(model, corpus, system="Be brief.", labels=True)
    result = run(
        *("ask", QUESTION, "--docs", corpus, "-m", model, "-n", 8, "--system", "Be brief.", "--labels"),
        *("--stop", whole[3:5], "--stop", "never", "--json", "-"),
    )
    row = result_of(result.stdout, "ask")
    assert row["answer"] == whole[: whole.index(whole[3:5])]
    assert row["usage"]["kvlink"]["labels"]


def test_ask_drops_documents_only_when_told_to(run: Run, model: str, corpus: Path) -> None:
    (corpus / "zoo.md").write_text("x" * 9000)
    with pytest.raises(InputError, match="more than the context"):
        run("ask", QUESTION, "--docs", corpus, "-m", model, "-n", 8)
    result = run("ask", QUESTION, "--docs", corpus, "-m", model, "-n", 8, "--drop-last")
    assert "warning zoo.md was dropped" in result.stderr


def test_an_answer_is_printed_as_it_is(run: Run, tmp_path: Path) -> None:
    """Neither emoji for what looks like their names, nor spaces for tabs, nor tags."""
    merges = [
        ("1", "0"),
        ("10", "0"),
        (":", "100"),
        (":100", ":"),
        ("[", "b"),
        ("[b", "]"),
        ("ĉ", "[b]"),
        (":100:", "ĉ[b]"),
    ]
    tokenizer = byte_tokenizer(merges=merges)
    tiny = tiny_model("phi", vocab_size=len(tokenizer))
    with torch.no_grad():
        tiny.lm_head.bias[tokenizer.convert_tokens_to_ids(":100:ĉ[b]")] = 1e6  # it never says anything else
    tiny.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    result = run("ask", QUESTION, "-m", tmp_path / "model", "-n", 2)
    assert result.stdout == 2 * ":100:\t[b]" + "\n"


# --- plan -----------------------------------------------------------------------------------------------------------


def test_plan_says_what_encoding_would_cost(run: Run, model: str, corpus: Path) -> None:
    result = run("plan", "--corpus", corpus, "-m", model)
    assert result.exit_code == 0
    for line in ("3 documents in ", "bytes in the store", "to encode now", "pays from"):
        assert line in result.stdout


def test_plan_writes_its_figures(run: Run, model: str, corpus: Path) -> None:
    row = result_of(run("plan", "--corpus", corpus, "-m", model, "--json", "-").stdout, "plan")
    assert (row["documents"], row["stored"]) == (3, 0)
    assert set(row) == {
        *("documents", "tokens", "longest_tokens", "num_bytes", "stored"),
        *("tokens_per_s", "encode_s", "full_s", "load_s", "break_even"),
    }


def test_plan_knows_what_is_encoded_already(run: Run, model: str, corpus: Path) -> None:
    run("encode", corpus, "-m", model)
    assert result_of(run("plan", "--corpus", corpus, "-m", model, "--json", "-").stdout, "plan")["stored"] == 3


# --- probe ----------------------------------------------------------------------------------------------------------


def test_probe_writes_the_agreed_fields(run: Run, model: str) -> None:
    result = run("probe", model, "--json", "-")
    row = result_of(result.stdout, "probe")
    assert result.exit_code == 0
    assert {"supported", "reason", "attention", "key_error", "value_error", "logit_error", "rope"} <= set(row)
    assert (row["supported"], row["reason"], row["attention"]) == (True, "", "shared")


def test_probe_shows_its_verdict(run: Run, model: str) -> None:
    assert "supported" in run("probe", model).stdout


def test_probe_needs_no_tokenizer(run: Run, tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    assert run("probe", tmp_path / "model").exit_code == 0
    with pytest.raises(TextUnavailable):
        run("ask", QUESTION, "-m", tmp_path / "model")


def test_probe_of_a_refused_model_exits_with_1_and_still_writes_json(run: Run, tmp_path: Path) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path / "model")
    result = run("probe", tmp_path / "model", "--json", tmp_path / "probe.json")
    assert result.exit_code == 1
    assert "refused" in result.stdout
    row = result_of((tmp_path / "probe.json").read_text(), "probe")
    assert (row["supported"], "position" in row["reason"]) == (False, True)
    with pytest.raises(ModelRefused):
        run("ask", QUESTION, "-m", tmp_path / "model")


def test_probe_looks_as_far_as_it_is_told(run: Run, model: str) -> None:
    row = result_of(run("probe", model, "--dtype", "float64", "--context", 500, "--json", "-").stdout, "probe")
    assert row["context"] == 500
    assert [offset for offset, _, _ in row["far_error"]] == [7, 500 - 24]


# --- where the store is ---------------------------------------------------------------------------------------------


def test_the_store_of_a_user_who_names_none_is_in_the_cache_folder(
    run: Run, model: str, corpus: Path, tmp_path: Path
) -> None:
    run("encode", corpus, "-m", model)
    assert len(list((tmp_path / "cache" / "kvlink" / "store").rglob("*.safetensors"))) == 3


def test_the_store_may_be_named_by_the_environment(run: Run, model: str, corpus: Path, store: Path) -> None:
    run("encode", corpus, "-m", model, KVLINK_STORE=str(store))
    assert len(list(store.rglob("*.safetensors"))) == 3


def test_a_named_store_goes_before_that_of_the_environment(
    run: Run, model: str, corpus: Path, store: Path, tmp_path: Path
) -> None:
    run("encode", corpus, "-m", model, "--store", store, KVLINK_STORE=str(tmp_path / "other"))
    assert store.is_dir()
    assert not (tmp_path / "other").exists()


def test_a_secret_in_the_environment_signs_the_store(run: Run, model: str, corpus: Path, store: Path) -> None:
    run("encode", corpus, "-m", model, "--store", store, KVLINK_SECRET="ours")
    again = run("encode", corpus, "-m", model, "--store", store, KVLINK_SECRET="ours")
    assert again.stdout.startswith("0 encoded, 3 already in the store")
    with pytest.raises(StoreUnusable, match="signed with a secret"):
        run("ask", QUESTION, "--docs", corpus, "-m", model, "--store", store)


def test_a_store_of_a_small_budget_says_that_it_is_full(run: Run, model: str, corpus: Path, store: Path) -> None:
    with pytest.raises(StoreFull, match="budget"):
        run("encode", corpus, "-m", model, "--store", store, "--budget", "1e-6")


def test_encode_warns_when_new_objects_push_older_ones_out(run: Run, model: str, corpus: Path, store: Path) -> None:
    result = run("encode", corpus, "-m", model, "--store", store, "--budget", "5e-5")
    assert "warning the budget is too small: 1 objects" in result.stderr
    assert len(list(store.rglob("*.safetensors"))) == 2
