"""A packet: a document between trained soft tokens, encoded once together with them; all its rows are stored.

    [sink prefix] | header D trailer        positions of a prompt count header and trailer like tokens of the document

Source: Chen et al. 2026 (KV Packet, arXiv 2604.13226).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvlink.core.entry import CacheEntry
from kvlink.core.errors import BundleRefused, InputError
from kvlink.models.bundle import Card
from kvlink.models.cache import EncodeCache, Prefix
from kvlink.models.rotary import watching
from kvlink.models.runner import Runner

FORMAT = "packet 1"

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Wrapping:
    """Soft tokens that stand around each document, and the card of their training."""

    header: Float[Tensor, "header hidden"]
    trailer: Float[Tensor, "trailer hidden"]
    card: Card

    @property
    def soft(self) -> Float[Tensor, "soft hidden"]:
        """All soft tokens, the header first."""
        return torch.cat((self.header, self.trailer))

    def around(self, ids: Ids) -> Ids:
        """Return a document's ids between those of the soft tokens: `-1 - j` stands for the j-th."""
        return wrapped(ids, header=len(self.header), trailer=len(self.trailer))

    def save(self, path: str | Path) -> None:
        """Write a safetensors file.

        Raises:
            InputError: It cannot be written.
        """
        target = Path(path)
        tensors = {"header": self.header.float().cpu().contiguous(), "trailer": self.trailer.float().cpu().contiguous()}
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, target, metadata={"format": FORMAT, "card": json.dumps(asdict(self.card))})
        except (OSError, SafetensorError) as error:
            raise InputError(f"the soft tokens cannot be written to {path}: {error}") from error


def read_wrapping(path: str | Path, *, digest: str, hidden: int) -> Wrapping:
    """Return the soft tokens of a file, held to a model.

    Args:
        digest: The model's.
        hidden: Width of its embeddings.

    Raises:
        BundleRefused: It cannot be read, or was trained for another model.
    """
    try:
        with safe_open(str(path), framework="pt") as opened:  # pyright: ignore[reportUnknownVariableType]
            words: dict[str, str] = opened.metadata() or {}
            if words.get("format") != FORMAT:
                raise ValueError(f"its format is {words.get('format')}, not {FORMAT}")
            header, trailer = opened.get_tensor("header"), opened.get_tensor("trailer")
        fields: dict[str, Any] = json.loads(words["card"])
        fields["sink_ids"] = tuple(fields["sink_ids"])
        card = Card(**fields)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise BundleRefused(f"{path} holds no soft tokens of packets: {type(error).__name__}: {error}") from error
    if card.digest != digest or header.shape[1] != hidden:
        raise BundleRefused(
            f"{path} was trained for {card.model} ({card.digest[:12]}), the model is {digest[:12]}: train its own with "
            "`kvlink train packet`"
        )
    return Wrapping(header, trailer, card)


def wrapped(ids: Ids, *, header: int, trailer: int) -> Ids:
    """Return a document's ids between `-1 - j` for each soft token, the header's first."""
    return (*(-1 - j for j in range(header)), *ids, *(-1 - j for j in range(header, header + trailer)))


def embed_wrapped(
    runner: Runner, ids: Int[Tensor, " rows"], soft: Float[Tensor, "soft hidden"]
) -> Float[Tensor, "rows hidden"]:
    """Return input embeddings; an id `-1 - j` stands for the j-th soft token. Gradients flow to these."""
    ids = ids.to(runner.device)
    embeds = runner.embedding(ids.clamp(min=0))
    slots = torch.nonzero(ids < 0)[:, 0]
    return embeds.index_put((slots,), soft.to(embeds)[-1 - ids[slots]])


def encode_packet(runner: Runner, wrapping: Wrapping, ids: Ids, *, prefix: Prefix | None = None) -> CacheEntry:
    """Encode one document with the soft tokens around it; its entry holds the rows of all.

    Args:
        prefix: The sink prefix that the soft tokens were trained behind, or None.
    """
    around = wrapping.around(ids)
    rows: Sequence[int] = range(len(around))
    positions = torch.tensor(rows, device=runner.device) + (len(prefix) if prefix else 0)
    with watching(runner.model) as watch, torch.inference_mode():
        cache = EncodeCache(watch, prefix)
        embeds = embed_wrapped(runner, torch.tensor(around), wrapping.soft)
        runner.forward(cache=cache, inputs_embeds=embeds[None], position_ids=positions[None])
    keys, values = torch.stack(cache.keys)[:, 0], torch.stack(cache.values)[:, 0]
    return CacheEntry(keys.contiguous(), values.contiguous(), around)
