"""A bundle: trained link tokens, perhaps with a request-side adapter, in one file that names what it was made for.

A safetensors file. Its metadata holds the card as JSON; its tensors are `links` and, for each layer of an adapter,
`down.<layer>` and `up.<layer>`. Link tokens mean something to the weights that they were trained with and to no
others, so a bundle is held to the digest of the model.
"""

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvlink.core.errors import BundleRefused, InputError, KVLinkWarning
from kvlink.models.adapter import Adapter
from kvlink.models.links import LinkTokens

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Card:
    """What a bundle is, for people and for checks.

    Attributes:
        model: Name of the base model.
        digest: Digest of its weights and numbers (hex); a bundle serves no other ones unless it is told to.
        sink_ids: Ids that the documents' entries were encoded behind.
        template: Version of the chat template.
        mode: How it was trained: links, links+lora, lora or full.
        data: Sources and the number of lessons of each.
        steps: Steps behind the parameters.
        loss: What was minimised.
        scores: Held-out figures.
        recipe: All settings of the run.
        licence: Under which the bundle may be used.
    """

    model: str
    digest: str
    sink_ids: tuple[int, ...]
    template: str
    mode: str = "links"
    data: Mapping[str, int] = field(default_factory=dict)
    steps: int = 0
    loss: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    licence: str = "Apache-2.0"


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Link tokens, an adapter or None, and their card. `read_bundle` opens one."""

    links: LinkTokens
    card: Card
    adapter: Adapter | None = None

    @property
    def digest(self) -> str:
        """BLAKE3 (hex) over tensors and scale; names the bundle in the tree of known beginnings and in results."""
        hasher = blake3()
        for name, tensor in sorted(self.tensors().items()):
            hasher.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n".encode())
            hasher.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        if self.adapter:
            hasher.update(f"scale:{self.adapter.scale!r}\n".encode())
        return hasher.hexdigest()

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by the names that they have in the file."""
        found = {"links": self.links.embeddings.detach().float().cpu()}
        if self.adapter:
            for name, down in self.adapter.down.items():
                found[f"down.{name}"] = down.detach().cpu()
                found[f"up.{name}"] = self.adapter.up[name].detach().cpu()
        return found

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            InputError: It cannot be written.
        """
        words = {"format": str(FORMAT), "card": json.dumps(asdict(self.card))}
        if self.adapter:
            words["scale"] = repr(self.adapter.scale)
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                save_file({k: v.contiguous() for k, v in self.tensors().items()}, Path(folder) / "b", metadata=words)
                os.replace(Path(folder) / "b", target)  # noqa: PTH105 (one call, atomic)
        except (OSError, SafetensorError) as error:
            raise InputError(f"the bundle cannot be written to {path}: {error}") from error


def read_bundle(path: str | Path) -> Bundle:
    """Return a bundle as it stands in a file, for whatever model.

    Args:
        path: The file, or the name of a bundle that comes with the package (its file there, without the ending).

    Raises:
        BundleRefused: It cannot be read, is of another format, or holds what no bundle holds.
    """
    path = next((file for file in shipped() if file.stem == str(path)), path)
    try:
        with safe_open(str(path), framework="pt") as opened:  # pyright: ignore[reportUnknownVariableType]
            words: dict[str, str] = opened.metadata() or {}
            tensors: dict[str, Tensor] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if words.get("format", str(FORMAT)) != str(FORMAT):
            raise BundleRefused(f"{path} has the format {words['format']}, this version reads {FORMAT}")
        return Bundle(_links(tensors), _card(words["card"]), _adapter(tensors, words))
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise BundleRefused(f"{path} is no bundle of link tokens: {type(error).__name__}: {error}") from error


def _card(text: str) -> Card:
    """Read a card; fields that a later version has added are passed over."""
    known = {one.name for one in fields(Card)}
    given = {key: value for key, value in json.loads(text).items() if key in known}
    given["sink_ids"] = tuple(int(token) for token in given["sink_ids"])
    if wrong := [key for key in ("model", "digest", "template", "mode") if not isinstance(given.get(key, ""), str)]:
        raise ValueError(f"{wrong[0]} on the card is {given[wrong[0]]!r}, a text is needed")
    return Card(**given)


def _links(tensors: Mapping[str, Tensor]) -> LinkTokens:
    strange = [name for name in tensors if name != "links" and not name.startswith(("down.", "up."))]
    broken = [name for name, tensor in tensors.items() if not (tensor.is_floating_point() and tensor.isfinite().all())]
    if strange or broken:
        raise ValueError(f"{strange[:3]} are in no bundle, or {broken[:3]} hold what are no numbers")
    shape = tuple(tensors["links"].shape)
    if len(shape) != 3 or shape[0] not in {1, 2} or 0 in shape:
        raise ValueError(f"its link tokens have the shape {shape}; [1 or 2 levels, K, hidden] is needed")
    return LinkTokens(tensors["links"].float())


def _adapter(tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> Adapter | None:
    down = {name.removeprefix("down."): tensor for name, tensor in tensors.items() if name.startswith("down.")}
    up = {name.removeprefix("up."): tensor for name, tensor in tensors.items() if name.startswith("up.")}
    if down.keys() != up.keys():
        raise ValueError(f"it holds half an adapter: {sorted(down.keys() ^ up.keys())[:3]}")
    shapes = {name: (tuple(tensor.shape), tuple(up[name].shape)) for name, tensor in down.items()}
    if wrong := [name for name, (a, b) in shapes.items() if not (len(a) == len(b) == 2 and a[0] == b[1] > 0)]:
        raise ValueError(f"its adapter has {shapes[wrong[0]]} at {wrong[0]}; [rank, in] and [out, rank] are needed")
    return Adapter(down, up, float(words["scale"])) if down else None


def check_bundle(
    bundle: Bundle, *, digest: str, hidden: int, layers: Mapping[str, torch.Size], foreign: bool = False
) -> None:
    """Hold a bundle to a model.

    Args:
        digest: The model's.
        hidden: Width of its embeddings.
        layers: Shapes of the weights of its attention's linear layers, by name.
        foreign: Take a bundle of other weights of the same shape (another quantisation), with a warning.

    Raises:
        BundleRefused: It was trained for other weights, or does not even fit.
    """
    card, width = bundle.card, bundle.links.embeddings.shape[2]
    if width != hidden:
        raise BundleRefused(
            f"the bundle's link tokens are {width} wide, the model's embeddings {hidden}: train its own"
        )
    for name, down in bundle.adapter.down.items() if bundle.adapter else ():
        up = bundle.adapter.up[name] if bundle.adapter else down
        if layers.get(name) != (up.shape[0], down.shape[1]):
            raise BundleRefused(
                f"the bundle's adapter has a layer {name} of {up.shape[0]} x {down.shape[1]}: not the model's"
            )
    if card.digest == digest:
        return
    told = f"the bundle was trained for {card.model} with the digest {card.digest[:12]}, the model has {digest[:12]}"
    if not foreign:
        raise BundleRefused(
            f"{told}: other weights, another dtype or quantisation. Load those weights, train links for these, or, for "
            "another quantisation of the same base, pass foreign_links=True (--foreign-links) and check with "
            "`kvlink evaluate`"
        )
    warnings.warn(f"{told}; used as asked, so check its scores with `kvlink evaluate`", KVLinkWarning, stacklevel=3)


def shipped() -> list[Path]:
    """Return the bundles that come with the package."""
    folder = files("kvlink") / "bundles"
    return (
        sorted(Path(str(file)) for file in folder.iterdir() if file.name.endswith(".safetensors"))
        if folder.is_dir()
        else []
    )


def shipped_cards() -> dict[Path, Card]:
    """Return the cards of the bundles that come with the package; no link token is read."""
    found: dict[Path, Card] = {}
    for path in shipped():
        with safe_open(str(path), framework="pt") as opened:  # pyright: ignore[reportUnknownVariableType]
            found[path] = _card((opened.metadata() or {})["card"])
    return found


def shipped_for(digest: str) -> Bundle | None:
    """Return the bundle of the package for exactly this model, of several the closest to full attention; or None."""
    fitting = {path: card for path, card in shipped_cards().items() if card.digest == digest}
    best = min(fitting, key=lambda path: fitting[path].scores.get("kl", float("inf")), default=None)
    return None if best is None else read_bundle(best)
