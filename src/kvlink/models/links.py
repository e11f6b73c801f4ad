"""Link tokens: embeddings that stand behind each document and are computed afresh with every request.

Knows how to hold and to initialise them; training and the bundle's file have their own places.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class LinkTokens:
    """Embeddings of link tokens, one shared set for all documents.

    Attributes:
        embeddings: Level 0 stands behind documents, level 1 behind segments that are not a document's last.
    """

    embeddings: Float[Tensor, "levels num_links hidden"]

    @property
    def levels(self) -> int:
        """Groups of embeddings: 1 knows the ends of documents alone, 2 those of segments within a document, too."""
        return self.embeddings.shape[0]

    @property
    def num_links(self) -> int:
        """K, the link tokens behind each segment."""
        return self.embeddings.shape[1]

    @classmethod
    def random(cls, embedding: nn.Embedding, *, num_links: int, levels: int = 2, seed: int = 0) -> "LinkTokens":
        """Draw untrained links at the RMS of the embedding table; for measuring cost and testing, never for serving."""
        table = embedding.weight.detach()
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(levels, num_links, table.shape[1], generator=generator)
        return cls(drawn.to(table) * table[:4096].float().square().mean().sqrt().to(table))


def embed(embedding: nn.Embedding, links: LinkTokens | None, ids: Int[Tensor, " rows"]) -> Float[Tensor, "rows hidden"]:
    """Return input embeddings; ids below zero stand for link tokens of level `-1 - id`, in their order."""
    embeds = embedding(ids.clamp(min=0))
    if links is None or not bool((ids < 0).any()):
        return embeds
    slots = torch.nonzero(ids < 0)[:, 0]
    number = torch.arange(len(slots), device=ids.device) % links.num_links
    return embeds.index_put((slots,), links.embeddings.to(embeds)[-1 - ids[slots], number])
