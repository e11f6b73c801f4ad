"""A bundle's file holds exactly what was saved, or is refused; a bundle serves the model that it was made for."""

import json
import struct
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvlink.core.errors import BundleRefused, InputError, KVLinkWarning
from kvlink.models import bundle as module
from kvlink.models.adapter import Adapter, attention_layers
from kvlink.models.bundle import Bundle, Card, check_bundle, read_bundle, shipped, shipped_for
from kvlink.models.links import LinkTokens
from tiny_bundles import tiny_bundle
from tiny_models import tiny_runner

RUNNER = tiny_runner("llama")
LAYERS = {name: layer.weight.shape for name, layer in attention_layers(RUNNER.model)}
HIDDEN = 64
CARD = Card(
    model="tiny/model",
    digest="ab" * 32,
    sink_ids=(1, 7, 300),
    template="cd" * 32,
    mode="links+lora",
    data={"rows": 40, "hand book": 2},
    steps=75,
    loss="KL to full attention",
    scores={"kl": 0.0991, "agreement": 0.871},
    recipe={"epochs": 3, "patience": None, "init": "separator"},
    licence="MIT",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.safetensors"


def tampered(path: Path, *, words: dict[str, Any] | None = None, tensors: dict[str, Tensor] | None = None) -> Path:
    """Write a good bundle whose metadata or tensors are replaced; None takes one away."""
    Bundle(tiny_bundle(RUNNER).links, CARD, tiny_bundle(RUNNER, adapter=True).adapter).save(path)
    size = struct.unpack("<Q", path.read_bytes()[:8])[0]
    kept_words = json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"] | (words or {})
    kept = load_file(path) | (tensors or {})
    save_file(
        {name: tensor for name, tensor in kept.items() if tensor is not None},
        path,
        metadata={name: word for name, word in kept_words.items() if word is not None},
    )
    return path


# --- the file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [False, True], ids=["links", "links+lora"])
@pytest.mark.parametrize("levels", [1, 2])
def test_what_is_read_is_what_was_saved(path: Path, adapter: bool, levels: int) -> None:
    saved = replace(tiny_bundle(RUNNER, adapter=adapter, levels=levels), card=CARD)
    saved.save(path)
    found = read_bundle(path)
    assert found.card == CARD
    assert torch.equal(found.links.embeddings, saved.links.embeddings)
    assert (found.links.levels, found.links.num_links) == (levels, 3)
    assert found.digest == saved.digest
    if saved.adapter is None:
        assert found.adapter is None
    else:
        assert found.adapter is not None
        assert found.adapter.scale == saved.adapter.scale
        assert list(found.adapter.down) == sorted(saved.adapter.down)
        assert all(torch.equal(found.adapter.down[name], down) for name, down in saved.adapter.down.items())
        assert all(torch.equal(found.adapter.up[name], up) for name, up in saved.adapter.up.items())


@pytest.mark.parametrize("scale", [0.1, 1 / 3, 2.0])
def test_the_scale_of_an_adapter_keeps_its_bits(path: Path, scale: float) -> None:
    adapter = tiny_bundle(RUNNER, adapter=True).adapter
    assert adapter is not None
    Bundle(tiny_bundle(RUNNER).links, CARD, Adapter(adapter.down, adapter.up, scale)).save(path)
    found = read_bundle(path).adapter
    assert found is not None
    assert found.scale == scale


def test_links_alone_are_some_kilobytes(path: Path) -> None:
    tiny_bundle(RUNNER, num_links=6).save(path)
    assert path.stat().st_size < 2 * 6 * HIDDEN * 4 + 2048


def test_links_with_gradients_in_another_dtype_are_saved_as_float32(path: Path) -> None:
    links = LinkTokens(torch.randn(2, 3, HIDDEN, dtype=torch.float64, requires_grad=True))
    Bundle(links, CARD).save(path)
    assert torch.equal(read_bundle(path).links.embeddings, links.embeddings.detach().float())


def test_the_digest_names_all_tensors_and_no_words() -> None:
    bare, full = tiny_bundle(RUNNER), tiny_bundle(RUNNER, adapter=True)
    assert full.adapter is not None
    name = next(iter(full.adapter.up))
    moved = Adapter(full.adapter.down, {**full.adapter.up, name: full.adapter.up[name] + 1e-6}, full.adapter.scale)
    digests = [
        bare.digest,
        full.digest,
        tiny_bundle(RUNNER, seed=1).digest,
        replace(full, adapter=moved).digest,
        replace(bare, links=LinkTokens(bare.links.embeddings.flip(0))).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert replace(bare, card=CARD).digest == bare.digest


def test_another_scale_is_another_bundle() -> None:
    one = tiny_bundle(RUNNER, adapter=True)
    assert one.adapter is not None
    other = replace(one, adapter=Adapter(one.adapter.down, one.adapter.up, 1.0))
    assert one.digest != other.digest


def test_folders_are_made_and_nothing_else_is_left_beside_the_file(tmp_path: Path) -> None:
    tiny_bundle(RUNNER).save(tmp_path / "new" / "deep" / "a.safetensors")
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()] == [
        "new/deep/a.safetensors"
    ]


@pytest.mark.parametrize("fails", ["writing", "renaming"])
def test_saving_that_fails_leaves_the_old_file_whole(path: Path, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_bundle(RUNNER, seed=1).save(path)
    before = path.read_bytes()

    def half(tensors: Any, file: Path, **_: Any) -> None:
        Path(file).write_bytes(b"half")
        raise OSError("no space left on device")

    def never(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(*((module, "save_file", half) if fails == "writing" else (module.os, "replace", never)))
    with pytest.raises(InputError, match=r"cannot be written to .*a\.safetensors: no space left on device"):
        tiny_bundle(RUNNER, seed=2).save(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_in_its_place_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match=r"cannot be written to .*taken"):
        tiny_bundle(RUNNER).save(tmp_path / "taken")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written to .*inside"):
        tiny_bundle(RUNNER).save(tmp_path / "file" / "inside")


# --- files that are refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_refused(path: Path, share: float) -> None:
    tiny_bundle(RUNNER, adapter=True).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(BundleRefused, match=r"a\.safetensors is no bundle of link tokens"):
        read_bundle(path)


@pytest.mark.parametrize("content", [b"\x00" * 100, b"not a bundle\n" * 50, b"\xff" * 64], ids=["zeros", "text", "ff"])
def test_garbage_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(BundleRefused, match="is no bundle"):
        read_bundle(path)


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BundleRefused, match=r"nowhere\.safetensors is no bundle"):
        read_bundle(tmp_path / "nowhere.safetensors")
    with pytest.raises(BundleRefused, match="is no bundle"):
        read_bundle(tmp_path)


def test_another_safetensors_file_is_refused(path: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(4, 4)}, path)
    with pytest.raises(BundleRefused, match="is no bundle"):
        read_bundle(path)


@pytest.mark.parametrize("number", ["0", "2", "x"])
def test_another_format_is_refused_with_both_numbers(path: Path, number: str) -> None:
    with pytest.raises(BundleRefused, match=f"has the format {number}, this version reads 1"):
        read_bundle(tampered(path, words={"format": number}))


@pytest.mark.parametrize(
    "words",
    [
        {"card": None},
        {"card": "no json"},
        {"card": "[]"},
        {"card": "{}"},
        {"card": json.dumps({"model": "a", "digest": "b", "template": "c"})},
        {"card": json.dumps({"model": "a", "sink_ids": [1], "template": "c"})},
        {"card": json.dumps({"model": "a", "digest": "b", "sink_ids": ["x"], "template": "c"})},
        {"card": json.dumps({"model": "a", "digest": 5, "sink_ids": [1], "template": "c"})},
        {"scale": None},
        {"scale": "big"},
    ],
    ids=lambda words: " ".join(f"{name}={word}"[:40] for name, word in words.items()),
)
def test_words_that_are_no_card_are_refused(path: Path, words: dict[str, Any]) -> None:
    with pytest.raises(BundleRefused, match="is no bundle"):
        read_bundle(tampered(path, words=words))


NAME = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({"links": None}, "KeyError"),
        ({"links": torch.zeros(3, 8)}, r"shape \(3, 8\)"),
        ({"links": torch.zeros(3, 2, 8)}, r"shape \(3, 2, 8\); \[1 or 2 levels"),
        ({"links": torch.zeros(2, 0, 8)}, r"shape \(2, 0, 8\)"),
        ({"links": torch.full((2, 1, 8), float("nan"))}, "no numbers"),
        ({"links": torch.full((2, 1, 8), float("inf"))}, "no numbers"),
        ({"links": torch.zeros(2, 1, 8, dtype=torch.int32)}, "no numbers"),
        ({"more": torch.zeros(2)}, "more"),
        ({f"up.{NAME}": None}, f"half an adapter.*{NAME}"),
        ({"down.elsewhere": torch.zeros(2, 8)}, "half an adapter.*elsewhere"),
        ({f"up.{NAME}": torch.zeros(64, 5)}, rf"\(4, 64\), \(64, 5\)\) at {NAME}"),
        ({f"up.{NAME}": torch.zeros(64)}, r"\[rank, in\] and \[out, rank\] are needed"),
        ({f"down.{NAME}": torch.full((4, 64), float("nan"))}, "no numbers"),
    ],
)
def test_tensors_that_are_no_bundle_are_refused(path: Path, tensors: dict[str, Any], told: str) -> None:
    with pytest.raises(BundleRefused, match=f"(?s)is no bundle.*{told}"):
        read_bundle(tampered(path, tensors=tensors))


def test_fields_of_a_later_card_are_passed_over(path: Path) -> None:
    card = {"model": "m", "digest": "d", "sink_ids": [4], "template": "t", "mood": "good"}
    assert read_bundle(tampered(path, words={"card": json.dumps(card)})).card == Card("m", "d", (4,), "t")


# --- which model ----------------------------------------------------------------------------------------------------


def check(bundle: Bundle, **changed: Any) -> None:
    check_bundle(bundle, **{"digest": "aa", "hidden": HIDDEN, "layers": LAYERS, **changed})


def test_the_model_that_it_was_trained_for_takes_it() -> None:
    check(tiny_bundle(RUNNER, digest="aa", adapter=True))


def test_other_weights_are_refused_with_both_digests_and_what_to_do() -> None:
    bundle = tiny_bundle(RUNNER, digest="0123456789abcdef")
    told = r"trained for tiny with the digest 0123456789ab, the model has fedcba987654.*foreign_links=True.*evaluate"
    with pytest.raises(BundleRefused, match=told):
        check(bundle, digest="fedcba9876543210")


def test_other_weights_of_the_same_shape_are_taken_with_a_warning_where_that_is_asked_for() -> None:
    with pytest.warns(KVLinkWarning, match=r"trained for tiny .*check its scores with `kvlink evaluate`"):
        check(tiny_bundle(RUNNER, digest="bb", adapter=True), foreign=True)


def test_the_same_weights_need_no_warning_where_others_would_be_taken() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(tiny_bundle(RUNNER, digest="aa"), foreign=True)


@pytest.mark.parametrize("foreign", [False, True])
def test_another_width_is_refused_in_any_case(foreign: bool) -> None:
    with pytest.raises(BundleRefused, match="64 wide, the model's embeddings 576: train its own"):
        check(tiny_bundle(RUNNER, digest="aa"), hidden=576, foreign=foreign)


@pytest.mark.parametrize(
    "layers", [{}, {**LAYERS, NAME: torch.Size((64, 63))}, {**LAYERS, NAME: torch.Size((65, 64))}], ids=["none", *"io"]
)
def test_an_adapter_of_other_layers_is_refused_in_any_case(layers: dict[str, torch.Size]) -> None:
    with pytest.raises(BundleRefused, match=f"a layer {NAME} of 64 x 64: not the model's"):
        check(tiny_bundle(RUNNER, digest="aa", adapter=True), layers=layers, foreign=True)
    check(tiny_bundle(RUNNER, digest="aa"), layers=layers)


# --- what ships -----------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package that ships bundles."""
    monkeypatch.setattr(module, "files", lambda name: tmp_path if name == "kvlink" else None)
    return tmp_path


def test_a_package_without_bundles_ships_none(package: Path) -> None:
    assert shipped() == []
    assert shipped_for("aa") is None
    (package / "bundles").mkdir()
    assert shipped() == []


def test_the_bundle_that_ships_for_a_model_is_found_by_its_digest(package: Path) -> None:
    for name, digest, seed in (("b", "bb", 1), ("a", "aa", 2)):
        tiny_bundle(RUNNER, digest=digest, seed=seed).save(package / "bundles" / f"{name}.safetensors")
    (package / "bundles" / "README.md").write_text("")
    assert [path.name for path in shipped()] == ["a.safetensors", "b.safetensors"]
    found = shipped_for("bb")
    assert found is not None
    assert found.digest == tiny_bundle(RUNNER, seed=1).digest
    assert shipped_for("cc") is None


def test_a_bundle_that_ships_is_read_by_its_name(package: Path) -> None:
    tiny_bundle(RUNNER, seed=1).save(package / "bundles" / "small.safetensors")
    assert read_bundle("small").digest == tiny_bundle(RUNNER, seed=1).digest
    with pytest.raises(BundleRefused, match="large is no bundle"):
        read_bundle("large")


def test_every_bundle_that_ships_can_be_read_and_is_below_ten_megabytes() -> None:
    for path in shipped():
        assert read_bundle(path).links.levels == 2
        assert path.stat().st_size < 10e6
