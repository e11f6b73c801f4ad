"""Bundles as if they had been trained: link tokens of two levels, adapters that change something."""

import functools

import torch

from kvlink.models.adapter import Adapter
from kvlink.models.assembler import Assembler
from kvlink.models.bundle import Bundle, Card
from kvlink.models.links import LinkTokens
from kvlink.models.runner import Runner

RANK = 4


@functools.cache
def tiny_adapter(runner: Runner, *, seed: int = 0, size: float = 0.1) -> Adapter:
    """Return an adapter in float64 whose changes are not zero."""
    generator = torch.Generator().manual_seed(1000 + seed)
    fresh = Adapter.fresh(runner.model, rank=RANK, scale=2.0, seed=seed).to(runner.device, torch.float64)
    up = {name: size * torch.randn(to.shape, generator=generator, dtype=to.dtype) for name, to in fresh.up.items()}
    return Adapter(fresh.down, up, fresh.scale)


def adapted(runner: Runner, *, num_links: int = 6, levels: int = 2) -> Assembler:
    """Return an assembler with random link tokens and an adapter."""
    links = LinkTokens.random(runner.embedding, num_links=num_links, levels=levels) if num_links else None
    return Assembler(runner, links=links, adapter=tiny_adapter(runner))


def tiny_bundle(
    runner: Runner,
    *,
    digest: str = "00",
    adapter: bool = False,
    num_links: int = 3,
    levels: int = 2,
    seed: int = 0,
    sink_ids: tuple[int, ...] = (),
    template: str = "",
) -> Bundle:
    """Return a bundle with random link tokens, and perhaps an adapter, for a model of this digest."""
    links = LinkTokens.random(runner.embedding, num_links=num_links, levels=levels, seed=seed)
    found = tiny_adapter(runner, seed=seed).to(runner.device, torch.float32) if adapter else None
    card = Card("tiny", digest, sink_ids, template, mode="links+lora" if adapter else "links")
    return Bundle(LinkTokens(links.embeddings.float()), card, found)
