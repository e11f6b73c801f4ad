"""A student of packets: soft tokens around each document, in one forward over everything with gradients.

    S | P H D_1 R | P H D_2 R | T_1 A_1        H, R: header and trailer, trained, the same for all documents
                              | T_2 A_2        P: a copy of the sink prefix, if there is one

The model is frozen. Source: Chen et al. 2026 (KV Packet, arXiv 2604.13226).
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvlink.core.layout import Prompt
from kvlink.models.attention import grouped
from kvlink.models.bundle import Card
from kvlink.models.links import LinkTokens
from kvlink.models.packet import Wrapping, embed_wrapped, wrapped
from kvlink.models.runner import Runner
from kvlink.training.lesson import Ids, Lesson
from kvlink.training.student import Student
from kvlink.training.whole import WholeRows


class Packets(Student):
    """Header and trailer; what `links()` gives are both, the header first."""

    def __init__(
        self,
        runner: Runner,
        *,
        header: Float[Tensor, "header hidden"],
        trailer: Float[Tensor, "trailer hidden"],
        sink_ids: Ids = (),
    ) -> None:
        """Take the model and what training begins with.

        Args:
            sink_ids: Ids that stand before the header while a document is encoded; none as published.
        """
        self._runner = runner
        self._sizes = len(header), len(trailer)
        self._sink_ids = sink_ids
        self.trained = {"links": torch.cat((header, trailer)).detach().clone().requires_grad_()}
        runner.model.requires_grad_(False)

    def logits(self, lesson: Lesson) -> Float[Tensor, "rows vocab"]:
        """Compute everything, packets included, under the reference mask."""
        runner, (header, trailer) = self._runner, self._sizes
        given = lesson.prompt
        documents = tuple(
            tuple(wrapped(ids, header=header, trailer=trailer) for ids in document) for document in given.documents
        )
        packed = replace(lesson, prompt=Prompt(given.system, documents, given.tail))
        rows = WholeRows.of(packed, num_links=0, sink_ids=self._sink_ids)
        visible = {window: rows.mask(window=window.size) for window in runner.windows}
        with grouped(runner.config, runner.device):
            return runner.forward(
                cache=None,
                inputs_embeds=embed_wrapped(runner, rows.ids, self.trained["links"])[None],
                position_ids=rows.positions[None].to(runner.device),
                attention_mask=runner.masks(visible),
                logits_to_keep=torch.nonzero(rows.branches)[:, 0].to(runner.device),
            )[0]

    def links(self) -> LinkTokens:
        """Return all soft tokens as they are now, as one level."""
        return LinkTokens(self.trained["links"].detach().clone()[None])

    def wrapping(self, card: Card) -> Wrapping:
        """Return them as what `kv_packet` reads."""
        header, trailer = self.trained["links"].detach().clone().split(self._sizes)
        return Wrapping(header, trailer, replace(card, sink_ids=self._sink_ids))
