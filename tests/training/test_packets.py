"""Packets: what is trained in one forward is what serving reads from entries, and training brings it nearer."""

from pathlib import Path

import pytest
import torch
from lessons import SINK, base_of, lesson_of, links_of, shared_runner, short_lesson
from torch import Tensor

from kvlink import InputError
from kvlink.core.errors import BundleRefused
from kvlink.core.layout import Prompt
from kvlink.models.assembler import Assembler
from kvlink.models.bundle import Card, read_bundle
from kvlink.models.packet import Wrapping, encode_packet, read_wrapping
from kvlink.models.runner import Runner
from kvlink.training.lesson import Ids, Lesson
from kvlink.training.packets import Packets
from kvlink.training.teacher import Teacher
from kvlink.training.train import Plan, train
from kvlink.training.trainer import Recipe, held_out
from tiny_models import DoublePrecision, largest

torch.set_num_threads(1)

FAMILIES = ("llama", "qwen2", "phi", "glm")
CARD = Card(model="tiny", digest="ab" * 32, sink_ids=(), template="")


def soft(runner: Runner) -> tuple[Tensor, Tensor]:
    """Return a header of 3 and a trailer of 2."""
    drawn = links_of(runner)
    return drawn[0], drawn[1, :2]


def by_entries(runner: Runner, wrapping: Wrapping, lesson: Lesson, sink: Ids) -> Tensor:
    """Return logits of the first question by the path that serves: packets encoded alone, then T."""
    branch = lesson.branches[0]
    prompt = Prompt(lesson.prompt.system, tuple((wrapping.around(i),) for i in lesson.prompt.segments), branch.ids)
    prefix = runner.prefix(prompt.system)
    assert prefix is not None
    entries = [encode_packet(runner, wrapping, ids, prefix=runner.prefix(sink)) for ids in lesson.prompt.segments]
    assembler, layout = Assembler(runner), prompt.layout()
    cache = assembler.assemble(layout, prefix=prefix, entries=entries)
    return assembler.prefill(cache, prompt, layout, logits_to_keep=len(branch.ids))


@pytest.mark.parametrize("sink", [(), SINK], ids=["as published", "behind a sink prefix"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_trained_is_what_entries_give(family: str, sink: Ids) -> None:
    runner, lesson = shared_runner(family), lesson_of()
    header, trailer = soft(runner)
    with DoublePrecision(), torch.no_grad():
        student = Packets(runner, header=header, trailer=trailer, sink_ids=sink)
        first = len(lesson.branches[0].ids)
        found = student.logits(lesson)[:first]
        wanted = by_entries(runner, student.wrapping(CARD), lesson, sink)
        assert largest(found - wanted) < 1e-9
        swapped = Packets(runner, header=trailer, trailer=header, sink_ids=sink)
        assert largest(swapped.logits(lesson)[:first] - wanted) > 1e-3


def test_every_soft_token_gets_a_gradient() -> None:
    runner = shared_runner()
    header, trailer = soft(runner)
    student = Packets(runner, header=header, trailer=trailer)
    student.logits(lesson_of()).log_softmax(-1)[:, 7].sum().backward()
    assert student.trained["links"].grad is not None
    assert (student.trained["links"].grad.abs().sum(dim=1) > 0).all()


@pytest.mark.parametrize("mode", ["packet", "packet+sink"])
def test_training_brings_held_out_lessons_nearer_to_full_attention(mode: str, tmp_path: Path) -> None:
    runner = shared_runner(dtype=torch.float32, spread=0.1)
    base, teacher = base_of(runner), Teacher(runner, model="ab" * 32)
    lessons = [short_lesson(seed) for seed in range(12)]
    recipe = Recipe(epochs=8, batch=2, every=10, lr=0.02, patience=None)
    made = train(base, teacher, lessons, plan=Plan(mode=mode, num_links=2, held_out=4), recipe=recipe)
    first, best = made.outcome.curve[0][1].kl, min(seen.kl for _, seen in made.outcome.curve)
    assert best < 0.9 * first
    made.save(tmp_path / "a.safetensors")
    read = read_wrapping(tmp_path / "a.safetensors", digest=base.digest, hidden=64)
    assert (len(read.header), len(read.trailer), read.card.mode) == (2, 2, mode)
    assert read.card.sink_ids == (SINK if mode == "packet+sink" else ())
    student = Packets(runner, header=read.header, trailer=read.trailer, sink_ids=read.card.sink_ids)
    looked = sorted(lessons, key=lambda lesson: lesson.id)
    assert held_out(student, teacher, looked).kl == held_out(made.student, teacher, looked).kl  # pyright: ignore[reportArgumentType]


def test_packets_do_not_begin_with_a_bundle_of_links() -> None:
    from tiny_bundles import tiny_bundle

    runner = shared_runner(dtype=torch.float32)
    start = tiny_bundle(runner, digest="ab" * 32, num_links=2, sink_ids=SINK)
    lessons = [short_lesson(seed) for seed in range(4)]
    plan = Plan(mode="packet", num_links=2, held_out=1)
    with pytest.raises(InputError, match="leave --start out"):
        train(base_of(runner), Teacher(runner, model="ab"), lessons, plan=plan, recipe=Recipe(), start=start)


def test_a_file_of_packets_is_no_bundle_of_links_and_the_other_way_round(tmp_path: Path) -> None:
    from tiny_bundles import tiny_bundle

    runner = shared_runner(dtype=torch.float32)
    header, trailer = soft(runner)
    Wrapping(header, trailer, CARD).save(tmp_path / "packet.safetensors")
    tiny_bundle(runner).save(tmp_path / "links.safetensors")
    with pytest.raises(BundleRefused, match="has the format packet 1"):
        read_bundle(tmp_path / "packet.safetensors")
    for path, reason in (
        (tmp_path / "links.safetensors", "its format is 1, not packet 1"),
        (tmp_path / "nowhere", "no soft tokens of packets"),
    ):
        with pytest.raises(BundleRefused, match=reason):
            read_wrapping(path, digest="ab" * 32, hidden=64)
    with pytest.raises(BundleRefused, match="train its own with `kvlink train packet`"):
        read_wrapping(tmp_path / "packet.safetensors", digest="cd" * 32, hidden=64)


def test_a_place_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    header, trailer = soft(shared_runner(dtype=torch.float32))
    with pytest.raises(InputError, match="cannot be written to"):
        Wrapping(header, trailer, CARD).save(tmp_path / "file" / "a.safetensors")
