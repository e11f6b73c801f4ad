"""`int8(...)`, `int4(...)`, `prune(size, ...)` change what a method reads and nothing else; packets as a method."""

from pathlib import Path

import pytest
import torch
from benches import SAME_HEADER, bench_of, by_method, results_of, row_of, rows_of
from torch import Tensor

from kvlink import InputError
from kvlink.core.layout import Prompt
from kvlink.evaluation.case import Bench, Case
from kvlink.evaluation.methods import method_named, split_names
from kvlink.models.assembler import Assembler
from kvlink.models.bundle import Card
from kvlink.models.packet import Wrapping, encode_packet
from tiny_bundles import tiny_bundle
from tiny_models import largest

DIGEST = "ab" * 32
INNER = ("concat_reencoded", "concat_local", "cacheblend(r=0.3)", "epic(k=4)", "a3(r=0.3)", "random(r=0.3)", "ape")


def scored(case: Case, asked: str) -> Tensor:
    method = method_named(asked)
    method.prepare(case)
    return method.score(case, case.scored).logits


@pytest.mark.parametrize(("wrapper", "codec"), [("int8(", "int8"), ("int4(", "int4"), ("prune(50, ", "pruned50")])
def test_around_plain_reuse_it_is_the_codec_of_that_name(wrapper: str, codec: str) -> None:
    case = Case(bench_of(), row_of())
    assert torch.equal(scored(case, f"{wrapper}concat_reencoded)"), scored(case, f"concat_reencoded(codec={codec})"))


@pytest.mark.parametrize("inner", INNER)
def test_it_composes_with_every_method_that_reads_entries(inner: str) -> None:
    raw, int8, int4 = (
        by_method(results_of(rows_of(2), [asked], generate=True))[asked]
        for asked in (inner, f"int8({inner})", f"int4({inner})")
    )
    assert "error" not in int8
    assert "error" not in int4
    assert raw["bytes_loaded"] > int8["bytes_loaded"] > int4["bytes_loaded"]
    assert raw["tokens_computed"] == int8["tokens_computed"] == int4["tokens_computed"]


@pytest.mark.parametrize("inner", INNER)
def test_the_worse_the_codec_the_farther_from_raw(inner: str) -> None:
    case = Case(bench_of(dtype=torch.float64, layers=3), row_of())
    raw = scored(case, inner)
    int8, int4 = (largest(scored(case, f"{codec}({inner})") - raw) for codec in ("int8", "int4"))
    assert 0 < int8 < int4


@pytest.mark.parametrize("inner", ["concat_reencoded", "cacheblend(r=0.3)", "epic(k=4)", "random(r=0.3)"])
def test_the_more_is_pruned_the_fewer_bytes(inner: str) -> None:
    found = [by_method(results_of([row_of()], [a := f"prune({size}, {inner})"]))[a] for size in (75, 50, 25)]
    assert all("error" not in row for row in found)
    assert found[0]["bytes_loaded"] > found[1]["bytes_loaded"] > found[2]["bytes_loaded"]


@pytest.mark.parametrize("asked", ["cacheblend(r=1)", "epic(k=500)", "random(r=1)"])
def test_pruned_tokens_that_are_computed_again_are_there_again(asked: str) -> None:
    case = Case(bench_of(dtype=torch.float64), row_of())
    assert largest(scored(case, f"prune(30, {asked})") - scored(case, "full")) < 1e-3
    assert (
        largest(scored(case, f"prune(30, {asked.replace('=1', '=0').replace('500', '0')})") - scored(case, "full"))
        > 1e-2
    )


def test_with_s_as_sink_prefix_the_first_document_of_a_pruned_row_stays_pruned() -> None:
    case = Case(bench_of(dtype=torch.float64, template=SAME_HEADER), row_of())
    assert largest(scored(case, "prune(30, cacheblend(r=1))") - scored(case, "full")) > 1e-3


@pytest.mark.parametrize("asked", ["prune(50, a3)", "prune(50, ape)"])
def test_what_cannot_carry_pruned_documents_is_an_error_of_the_row_and_others_go_on(asked: str) -> None:
    found = by_method(results_of([row_of()], [asked, "prune(50, epic)"]))
    assert "pruned" in found[asked]["error"]
    assert "error" not in found["prune(50, epic)"]


@pytest.mark.parametrize("inner", ["full", "block_mask"])
def test_around_a_method_that_reads_no_entries_it_is_an_error_of_the_row(inner: str) -> None:
    (row,) = results_of([row_of()], [f"int8({inner})"])
    assert row["error"] == f"{inner} reads no entries, so there is nothing to compress"


def test_without_documents_there_is_nothing_to_compress_and_no_error() -> None:
    (row,) = results_of([row_of([], gold=None)], ["int8(concat_reencoded)"])
    assert "error" not in row


@pytest.mark.parametrize("asked", ["int8(int4(concat_reencoded))", "prune(50, int8(epic))"])
def test_a_codec_around_a_codec_is_refused(asked: str) -> None:
    with pytest.raises(InputError, match="no store holds such objects"):
        method_named(asked)


def test_a_codec_around_a_method_with_a_codec_is_refused() -> None:
    (row,) = results_of([row_of()], ["int8(concat_reencoded(codec=int4))"])
    assert "no store holds such objects" in row["error"]


@pytest.mark.parametrize("asked", ["prune(0, epic)", "prune(100, epic)", "prune(x, epic)", "prune(50, epic, score=x)"])
def test_a_size_or_score_that_makes_no_sense_is_an_error(asked: str) -> None:
    with pytest.raises(InputError):
        method_named(asked)


def test_names_with_parentheses_within_parentheses_are_split_where_they_end() -> None:
    text = "full,int8(kvlink(bundle=a,lora=off)), prune(25, cacheblend(r=0.1, mask=released)),ape(1, 1)"
    assert split_names(text) == [
        "full",
        "int8(kvlink(bundle=a,lora=off))",
        "prune(25, cacheblend(r=0.1, mask=released))",
        "ape(1, 1)",
    ]


@pytest.mark.parametrize("text", ["int8(kvlink", "full)", "a(b(c)"])
def test_a_parenthesis_without_a_partner_is_an_error(text: str) -> None:
    with pytest.raises(InputError, match="parenthesis"):
        split_names(text)


# --- kvlink ---------------------------------------------------------------------------------------------------------


def bench_with_digest() -> Bench:
    bench = bench_of(dtype=torch.float64)
    bench.digest = DIGEST
    return bench


def test_kvlink_without_its_adapter_is_the_bundle_without_it(tmp_path: Path) -> None:
    bench = bench_with_digest()
    case, sink = Case(bench, row_of()), bench.sink_ids("header")
    adapted = tiny_bundle(bench.runner, digest=DIGEST, adapter=True, sink_ids=sink)
    adapted.save(tmp_path / "both.safetensors")
    tiny_bundle(bench.runner, digest=DIGEST, sink_ids=sink).save(tmp_path / "links.safetensors")
    off = scored(case, f"kvlink(bundle={tmp_path / 'both.safetensors'}, lora=off)")
    assert torch.equal(off, scored(case, f"kvlink(bundle={tmp_path / 'links.safetensors'})"))
    assert largest(off - scored(case, f"kvlink(bundle={tmp_path / 'both.safetensors'})")) > 1e-3


def test_results_say_how_many_links_there_are_and_whether_an_adapter_acts(tmp_path: Path) -> None:
    bench = bench_with_digest()
    tiny_bundle(bench.runner, digest=DIGEST, adapter=True, num_links=3).save(tmp_path / "a.safetensors")
    on, off = (f"kvlink(bundle={tmp_path / 'a.safetensors'}, lora={lora})" for lora in ("on", "off"))
    found = by_method(results_of([row_of()], [on, f"int8({off})"], bench=bench))
    assert (found[on]["links"], found[on]["lora_rank"]) == (3, 4)
    assert found[f"int8({off})"]["links"] == 3
    assert "lora_rank" not in found[f"int8({off})"]


# --- packets --------------------------------------------------------------------------------------------------------


def packet_file(bench: Bench, folder: Path, *, sink: str = "none") -> str:
    generator = torch.Generator().manual_seed(0)
    header, trailer = (torch.randn(n, 64, generator=generator) * 0.3 for n in (3, 2))
    path = folder / "packet.safetensors"
    Wrapping(header, trailer, Card("tiny", DIGEST, bench.sink_ids(sink), "", mode="packet")).save(path)
    return str(path)


@pytest.mark.parametrize("sink", ["none", "header"])
def test_kv_packet_lays_packets_side_by_side_and_computes_t_alone(sink: str, tmp_path: Path) -> None:
    bench = bench_with_digest()
    case, asked = Case(bench, row_of()), f"kv_packet(8, file={packet_file(bench, tmp_path, sink=sink)})"
    asked = asked.replace("(8, ", "(h=3, t=2, ")
    found = by_method(results_of([row_of()], [asked, f"int8({asked})"], bench=bench, generate=True))
    documents = sum(map(len, case.prompt.segments)) + 5 * len(case.prompt.segments)
    assert found[asked]["bytes_loaded"] == documents * bench.runner.geometry.bytes_per_token(bench.runner.dtype)
    assert found[asked]["tokens_computed"] == len(case.prompt.tail) + len(case.scored) - 1
    assert (found[asked]["header"], found[asked]["trailer"]) == (3, 2)
    assert found[f"int8({asked})"]["bytes_loaded"] < found[asked]["bytes_loaded"] / 4


def test_kv_packet_is_the_assembled_prompt_of_its_packets(tmp_path: Path) -> None:
    from kvlink.models.packet import read_wrapping

    bench = bench_with_digest()
    case, file = Case(bench, row_of()), packet_file(bench, tmp_path, sink="header")
    wrapping = read_wrapping(file, digest=DIGEST, hidden=64)
    tail = (*case.prompt.tail, *case.scored[:-1])
    prompt = Prompt(case.prompt.system, tuple((wrapping.around(ids),) for ids in case.prompt.segments), tail)
    prefix, sink = bench.prefix(prompt.system), bench.prefix(bench.sink_ids("header"))
    assert prefix is not None
    entries = [encode_packet(bench.runner, wrapping, ids, prefix=sink) for ids in case.prompt.segments]
    assembler = Assembler(bench.runner)
    cache = assembler.assemble(prompt.layout(), prefix=prefix, entries=entries)
    wanted = assembler.prefill(cache, prompt, prompt.layout(), logits_to_keep=len(case.scored))
    assert torch.equal(scored(case, f"kv_packet(file={file})"), wanted)


def test_kv_packet_answers_a_row_without_documents_answers_or_gold_as_the_base_model_does(tmp_path: Path) -> None:
    bench = bench_with_digest()
    asked = f"kv_packet(file={packet_file(bench, tmp_path)})"
    found = by_method(results_of([row_of([], answers=[], gold=None)], ["full", asked], bench=bench, generate=True))
    assert "error" not in found[asked]
    assert found[asked]["answer"] == found["full"]["answer"]


def test_a_file_with_other_soft_tokens_than_were_asked_for_is_an_error_of_the_row(tmp_path: Path) -> None:
    bench = bench_with_digest()
    (row,) = results_of([row_of()], [f"kv_packet(8, 8, file={packet_file(bench, tmp_path)})"], bench=bench)
    assert "holds 3 + 2 soft tokens, not those that were asked for" in row["error"]
