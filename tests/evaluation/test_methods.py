"""Methods are exact where they promise it, differ where they must, share what is encoded, and are found by name."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import METHODS, SAME_HEADER, TEXTS, bench_of, results_of, row_of, rows_of
from torch import Tensor

from kvlink import Document, InputError
from kvlink.core.entry import CacheEntry
from kvlink.evaluation.case import Bench, Case
from kvlink.evaluation.methods import Method, available, method_named, split_names
from kvlink.evaluation.methods.base import Prefilled
from kvlink.evaluation.methods.full import Full
from kvlink.models.assembler import Assembler
from kvlink.models.runner import Runner
from tiny_models import DoublePrecision, largest

SINKS = ("header", "bos", "none")
FAMILIES = ("llama", "qwen2", "phi")
"""Plain; with layers that see 16 positions; with a part of the channels rotated."""


def scored(case: Case, asked: str) -> Tensor:
    """Return the logits that a method gives for the scored ids of a row."""
    method = method_named(asked)
    method.prepare(case)
    return method.score(case, case.scored).logits


def distance(case: Case, one: str, other: str) -> float:
    return largest(scored(case, one) - scored(case, other))


# --- what is exact --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_reuse_is_the_reference_mask_in_one_forward(family: str, sink: str) -> None:
    with DoublePrecision():
        case = Case(bench_of(family, dtype=torch.float64), row_of())
        assert distance(case, f"concat_reencoded(sink={sink})", f"block_mask(sink={sink})") < 1e-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_with_the_models_own_float32_tables_and_norms_rounding_alone_is_left(
    family: str, sink: str, dtype: torch.dtype
) -> None:
    case = Case(bench_of(family, dtype=dtype), row_of())
    wanted = scored(case, f"block_mask(sink={sink})")
    assert largest(scored(case, f"concat_reencoded(sink={sink})") - wanted) < 1e-4 * largest(wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_full_is_the_base_models_own_forward(family: str) -> None:
    case = Case(bench_of(family, dtype=torch.float64), row_of())
    ids = [*case.prompt.system, *(i for ids in case.prompt.segments for i in ids), *case.prompt.tail, *case.scored[:-1]]
    with torch.inference_mode():
        wanted = case.bench.runner.model(torch.tensor([ids])).logits[0, -len(case.scored) :]
    assert largest(scored(case, "full") - wanted) < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
def test_one_document_behind_s_as_its_sink_prefix_is_full_attention(family: str) -> None:
    with DoublePrecision():
        bench = bench_of(family, dtype=torch.float64, template=SAME_HEADER)
        case = Case(bench, row_of(TEXTS[:1]))
        assert case.prompt.system == bench.sink_ids("header")
        assert distance(case, "concat_reencoded", "full") < 1e-10


def test_two_documents_behind_s_as_their_sink_prefix_are_not_full_attention() -> None:
    case = Case(bench_of(dtype=torch.float64, template=SAME_HEADER), row_of(TEXTS[:2]))
    assert distance(case, "concat_reencoded", "full") > 0.01


def test_a_document_that_stands_at_its_local_position_is_the_same_reused_by_either_method() -> None:
    case = Case(bench_of(dtype=torch.float64, template=SAME_HEADER), row_of(TEXTS[:1]))
    assert distance(case, "concat_local(sink=header)", "concat_reencoded(sink=header)") < 1e-12


def test_a_document_behind_another_is_not_the_same_reused_by_either_method() -> None:
    case = Case(bench_of(dtype=torch.float64, template=SAME_HEADER), row_of(TEXTS[:2]))
    assert distance(case, "concat_local(sink=header)", "concat_reencoded(sink=header)") > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_keep_their_local_positions_differ_from_rotated_ones(family: str) -> None:
    case = Case(bench_of(family, dtype=torch.float64), row_of(TEXTS[:1]))
    assert distance(case, "concat_local", "concat_reencoded(sink=none)") > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_each_sink_prefix_gives_other_logits(family: str) -> None:
    case = Case(bench_of(family, dtype=torch.float64), row_of())
    header, bos, none = (scored(case, f"concat_reencoded(sink={sink})") for sink in SINKS)
    assert min(largest(header - bos), largest(header - none), largest(bos - none)) > 0.01


@pytest.mark.parametrize(("asked", "same"), [("block_mask", "header"), ("concat_reencoded", "header")])
def test_the_sink_prefix_is_the_header_unless_another_is_asked_for(asked: str, same: str) -> None:
    case = Case(bench_of(), row_of())
    assert torch.equal(scored(case, asked), scored(case, f"{asked}(sink={same})"))


def test_local_positions_have_no_sink_prefix_unless_one_is_asked_for() -> None:
    case = Case(bench_of(), row_of())
    assert torch.equal(scored(case, "concat_local"), scored(case, "concat_local(sink=none)"))


@pytest.mark.parametrize("asked", METHODS)
def test_without_documents_all_methods_are_the_base_model(asked: str) -> None:
    with DoublePrecision():
        assert distance(Case(bench_of(dtype=torch.float64), row_of([], gold=None)), asked, "full") < 1e-10


@pytest.mark.parametrize("asked", METHODS)
def test_a_document_that_stands_twice_is_scored(asked: str) -> None:
    case = Case(bench_of(), row_of([TEXTS[0]] * 2))
    assert scored(case, asked).isfinite().all()


@pytest.mark.parametrize("asked", METHODS)
def test_the_same_row_is_scored_with_the_same_bits(asked: str) -> None:
    assert torch.equal(scored(Case(bench_of(), row_of()), asked), scored(Case(bench_of(), row_of()), asked))


@pytest.mark.parametrize("asked", METHODS)
def test_what_a_method_gives_does_not_depend_on_who_used_the_buffer_before(asked: str) -> None:
    bench = bench_of()
    wanted = scored(Case(bench_of(), row_of()), asked)
    results_of([row_of(["A much longer document. " * 20], name="before")], bench=bench, generate=True)
    assert torch.equal(scored(Case(bench, row_of()), asked), wanted)


# --- prompts --------------------------------------------------------------------------------------------------------


def test_the_ids_are_s_then_documents_then_t_and_the_answer_ends_its_turn() -> None:
    bench, row = bench_of(), row_of(TEXTS[:1])
    case = Case(bench, row)
    ids = (*case.prompt.system, *case.prompt.segments[0], *case.prompt.tail, *case.scored)
    assert bench.prompter.decode(ids) == (
        "system\nAnswer the question using the documents.\nuser\n"
        "Paper 0\nThe office opens at seven. Anna has the key.\n\n"
        "Question: When does the office open?\nAnswer in a few words.\nassistant\nat seven"
    )
    assert case.scored[-1] in bench.prompter.end_ids


def test_only_the_first_right_answer_is_scored() -> None:
    bench = bench_of()
    one, other = (Case(bench, row_of(answers=answers)) for answers in (["seven"], ["seven", "at seven"]))
    assert one.scored == other.scored


def test_a_blank_document_is_left_out_and_not_counted_as_dropped() -> None:
    case = Case(bench_of(), row_of([TEXTS[0], " \n", TEXTS[1]]))
    assert (len(case.prompt.documents), case.dropped) == (2, 0)


def test_characters_that_were_lost_before_are_read_like_any_other() -> None:
    case = Case(bench_of(), row_of(["a \ufffd b"], question="\ufffd?", answers=["\ufffd"]))
    assert bench_of().prompter.decode(case.prompt.segments[0]) == "Paper 0\na \ufffd b\n\n"


# --- generation -----------------------------------------------------------------------------------------------------

GENERATING = [asked for asked in METHODS if asked != "block_mask"]


@pytest.mark.parametrize("asked", GENERATING)
def test_a_methods_answer_is_what_its_own_scores_say_is_most_likely(asked: str) -> None:
    case = Case(bench_of(dtype=torch.float64), row_of())
    method = method_named(asked)
    ids = method.generate(case, limit=8, end_ids=())
    assert method.score(case, ids).logits.argmax(-1).tolist() == list(ids)


@pytest.mark.parametrize("asked", GENERATING)
def test_an_answer_stops_at_an_end_id_and_holds_it(asked: str) -> None:
    case = Case(bench_of(dtype=torch.float64), row_of())
    ids = method_named(asked).generate(case, limit=8, end_ids=())
    assert method_named(asked).generate(case, limit=8, end_ids=ids[2:3]) == ids[: ids.index(ids[2]) + 1]


@pytest.mark.parametrize("limit", [1, 5])
@pytest.mark.parametrize("asked", GENERATING)
def test_an_answer_has_no_more_tokens_than_its_limit(asked: str, limit: int) -> None:
    assert len(method_named(asked).generate(Case(bench_of(), row_of()), limit=limit, end_ids=())) == limit


def test_only_the_oracle_does_not_generate() -> None:
    assert {asked: method_named(asked).generates for asked in METHODS} == {
        "full": True,
        "block_mask": False,
        "concat_local": True,
        "concat_reencoded": True,
    }


# --- what is computed -----------------------------------------------------------------------------------------------


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The ids of every segment that is encoded."""
    found: list[tuple[int, ...]] = []
    encode = Runner.encode

    def counting(self: Runner, batch: Any, **options: Any) -> list[CacheEntry]:
        found.extend(batch)
        return encode(self, batch, **options)

    monkeypatch.setattr(Runner, "encode", counting)
    return found


@pytest.mark.parametrize("generate", [False, True], ids=["scored", "generated"])
def test_documents_are_encoded_once_per_row_and_sink_prefix(encoded: list[tuple[int, ...]], generate: bool) -> None:
    asked = ["full", "block_mask", "concat_reencoded", "concat_local", "concat_reencoded(sink=none)"]
    asked += ["concat_local(sink=header)", "concat_reencoded(sink=header)"]  # header and none, three times each
    results_of(rows_of(2), asked, generate=generate)
    assert len(encoded) == 2 * 2 * len(TEXTS)
    assert all(encoded.count(ids) == 2 for ids in encoded)


def test_full_and_the_oracle_encode_nothing(encoded: list[tuple[int, ...]]) -> None:
    results_of(rows_of(2), ["full", "block_mask"], generate=True)
    assert encoded == []


def test_a_document_that_stands_twice_in_a_row_is_encoded_once(encoded: list[tuple[int, ...]]) -> None:
    row = row_of()
    entries = Case(bench_of(), replace(row, documents=(*row.documents, row.documents[0]))).entries(())
    assert (len(encoded), entries[0] is entries[-1]) == (len(TEXTS), True)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of every forward of full attention."""
    found: list[int] = []
    prefill = Assembler.prefill_plain

    def counting(self: Assembler, prompt: Any, **options: Any) -> Any:
        found.append(prompt.num_tokens)
        return prefill(self, prompt, **options)

    monkeypatch.setattr(Assembler, "prefill_plain", counting)
    return found


@pytest.mark.parametrize("asked", [METHODS, METHODS[1:], METHODS[::-1]], ids=["first", "unasked", "last"])
def test_full_attention_is_computed_once_per_row_whoever_is_compared(forwards: list[int], asked: Sequence[str]) -> None:
    results_of(rows_of(3), asked)
    assert len(forwards) == 3


def test_with_answers_full_attention_is_computed_for_score_answer_and_score_of_that_answer(forwards: list[int]) -> None:
    results_of(rows_of(2), METHODS, generate=True)
    assert len(forwards) == 2 * 3


def test_costs_are_the_tokens_that_were_computed_and_the_bytes_that_were_taken() -> None:
    bench = bench_of()
    case = Case(bench, row_of())
    documents = sum(map(len, case.prompt.segments))
    tail, all_ = len(case.prompt.tail) + len(case.scored) - 1, case.prompt.num_tokens + len(case.scored) - 1
    held = documents * bench.runner.geometry.bytes_per_token(bench.runner.dtype)
    copies = len(TEXTS) * len(bench.sink_ids("header"))
    found = {r["method"]: (r["tokens_computed"], r["bytes_loaded"]) for r in results_of([row_of()])}
    assert found == {
        "full": (all_, 0),
        "block_mask": (all_ + copies, 0),
        "concat_local": (tail, held),
        "concat_reencoded": (tail, held),
    }


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("full", ["full"]),
        ("full,concat_local", ["full", "concat_local"]),
        (" full , concat_local(sink=none) ", ["full", "concat_local(sink=none)"]),
        ("a(b=1,c=2),d", ["a(b=1,c=2)", "d"]),
        ("a(b=1, c=2),d(e=3)", ["a(b=1, c=2)", "d(e=3)"]),
        ("full,,full,", ["full"]),
        ("", []),
    ],
)
def test_names_are_split_at_commas_outside_parentheses(text: str, wanted: list[str]) -> None:
    assert split_names(text) == wanted


@pytest.mark.parametrize("asked", METHODS)
def test_a_method_is_found_by_its_name(asked: str) -> None:
    assert type(method_named(asked)).__name__.lower() == asked.replace("_", "")


@pytest.mark.parametrize("asked", ["full()", " full ", "full ( )"])
def test_empty_parentheses_and_spaces_change_nothing(asked: str) -> None:
    assert isinstance(method_named(asked), Full)


@pytest.mark.parametrize("asked", ["concat_reencoded(sink=none)", "concat_reencoded( sink = none )"])
def test_a_method_takes_its_parameters(asked: str) -> None:
    assert getattr(method_named(asked), "sink", None) == "none"


def test_an_unknown_method_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"no method 'magic'; there are a3, ape, block_mask, .*, full"):
        method_named("magic(k=3)")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("full(sink=none)", "takes no arguments"),
        ("concat_local(k=3)", "unexpected keyword argument 'k'"),
        ("block_mask(sinks=none)", "unexpected keyword argument 'sinks'"),
    ],
)
def test_an_unknown_parameter_is_an_error_that_repeats_the_method(asked: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        method_named(asked)
    assert str(caught.value).startswith(f"method {asked!r}: ")


@pytest.mark.parametrize("asked", ["block_mask", "concat_local", "concat_reencoded"])
def test_an_unknown_sink_prefix_is_an_error_that_lists_the_known_ones(asked: str) -> None:
    with pytest.raises(InputError, match="no sink prefix 'system'; there are none, bos, header"):
        method_named(f"{asked}(sink=system)")


@pytest.mark.parametrize("asked", ["full(", "full)", "full(sink)", "concat_local(none)", "a b", "", "full(a=1)b"])
def test_what_is_no_call_is_an_error_that_shows_the_form(asked: str) -> None:
    with pytest.raises(InputError, match=r"is not of the form name or name\(parameter=value, ...\)"):
        method_named(asked)


# --- methods of other packages --------------------------------------------------------------------------------------

PLUGIN = """
from kvlink.evaluation.methods import Method, Prefilled
from kvlink.evaluation.methods.full import Full

class Plain(Method):
    def __init__(self, *, shift="0"):
        self.shift = float(shift)

    def prefill(self, case, tail, *, keep, room=0):
        found = Full().prefill(case, tail, keep=keep, room=room)
        return Prefilled(found.logits + self.shift, 1, 2, found.cache)
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with one method that works and one that cannot be loaded."""
    (tmp_path / "kvlink_plugin.py").write_text(PLUGIN)
    info = tmp_path / "kvlink_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvlink-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvlink.methods]\nplain = kvlink_plugin:Plain\nbroken = kvlink_plugin_that_is_gone:Broken\n"
        "empty = kvlink_plugin:Nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("kvlink_plugin", None)


@pytest.mark.usefixtures("plugin")
def test_a_method_of_another_package_is_found_through_its_entry_point() -> None:
    assert {*METHODS, "plain"} <= {*available()}


@pytest.mark.usefixtures("plugin")
def test_a_method_of_another_package_is_scored_like_any_other() -> None:
    (result,) = results_of([row_of()], ["plain(shift=2)"])
    assert (result["method"], result["agreement"], result["tokens_computed"]) == ("plain(shift=2)", 1, 1)
    assert result["kl"] == pytest.approx(0, abs=1e-9)


@pytest.mark.usefixtures("plugin")
def test_a_package_that_cannot_be_loaded_is_in_nobody_elses_way() -> None:
    assert isinstance(method_named("full"), Full)


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("asked", ["broken", "empty"])
def test_a_method_that_cannot_be_loaded_is_an_error_that_names_where_it_should_be(asked: str) -> None:
    with pytest.raises(InputError, match=f"method '{asked}' \\(kvlink_plugin.*\\) cannot be loaded: "):
        method_named(asked)


def test_a_method_is_what_its_interface_says() -> None:
    for asked in METHODS:
        method = method_named(asked)
        assert isinstance(method, Method)
        case = Case(bench_of(), row_of())
        assert isinstance(method.prefill(case, case.prompt.tail, keep=2), Prefilled)


def test_keep_is_the_number_of_the_last_rows_that_are_returned() -> None:
    for asked in METHODS:
        case = Case(bench_of(), row_of())
        assert method_named(asked).prefill(case, case.prompt.tail, keep=3).logits.shape == (3, 259)


def test_a_bench_computes_a_prefix_once() -> None:
    bench: Bench = bench_of()
    ids = bench.sink_ids("header")
    assert bench.prefix(ids) is bench.prefix(ids)


def test_the_title_is_part_of_what_is_read() -> None:
    document = Document("x", "Paper 0")
    case = Case(bench_of(), row_of(["x"]))
    assert case.prompt.segments == (bench_of().prompter.document_ids(document),)
