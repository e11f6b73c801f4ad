"""Prompts computed by shared attention, for tests: entries made resident, laid out, and run in one or several steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlink.core.entry import CacheEntry
from kvlink.core.layout import Kind, Prompt
from kvlink.models.assembler import Assembler
from kvlink.models.backends import Backend
from kvlink.models.links import embed
from kvlink.models.rows import OwnRows, Run
from kvlink.models.runner import Runner
from kvlink.models.shared import forward


@dataclass(frozen=True, slots=True, eq=False)
class Lying:
    """A document where it lies: keys rotated at 0, 1, ..., by the reference."""

    keys: Tensor
    values: Tensor
    num_tokens: int

    @classmethod
    def of(cls, entry: CacheEntry, runner: Runner) -> "Lying":
        assert entry.kept is None
        at = torch.arange(entry.num_tokens)
        return cls(runner.rotary.rotate(entry.keys, at), entry.values, entry.num_tokens)


class Shared:
    """One prompt that attends documents where they lie.

    Attributes:
        documents: Documents with their first positions; a test may change them.
        rows: Positions that are computed.
    """

    def __init__(
        self,
        assembler: Assembler,
        prompt: Prompt,
        *,
        sink_ids: tuple[int, ...] = (),
        lying: Sequence[Lying] | None = None,
        room: int = 0,
    ) -> None:
        self.runner = assembler.runner
        layout = prompt.layout(num_links=assembler.num_links)
        if lying is None:
            prefix = self.runner.prefix(sink_ids)
            entries = self.runner.encode(prompt.segments, prefix=prefix) if prompt.segments else []
            lying = [Lying.of(entry, self.runner) for entry in entries]
        spans = layout.of(Kind.SEGMENT)
        self.documents = [(document, span.start) for document, span in zip(lying, spans, strict=True)]
        self.rows = layout.request_rows()
        self._embeds = embed(self.runner.embedding, assembler.links, prompt.ids(layout))
        self.own = OwnRows(self.runner, len(self.rows) + room)

    def run(self, rows: Tensor) -> Run:
        """Return these positions as new rows of a forward."""
        return Run(self.own, rows, self.documents)

    def embeds(self, rows: Tensor) -> Tensor:
        return self._embeds[rows]

    def logits(self, *, steps: int | None = None, backend: Backend | None = None) -> Tensor:
        """Compute all rows, `steps` at a time, and return their logits."""
        found = []
        for rows in self.rows.split(steps or len(self.rows)):
            keep = torch.arange(len(rows))
            found.append(forward(self.runner, [self.run(rows)], self.embeds(rows), keep=keep, backend=backend))
        return torch.cat(found)

    def decode(self, token: int, *, backend: Backend | None = None) -> Tensor:
        """Append a token and return the next logits."""
        at = self.own.positions[self.own.length - 1 : self.own.length] + 1
        return forward(
            self.runner, [self.run(at)], self.runner.embed([token]), keep=torch.tensor([0]), backend=backend
        )[0]


def together(requests: Sequence[Shared]) -> list[Tensor]:
    """Compute several prompts in one forward; returns the logits of each one's rows."""
    runs = [request.run(request.rows) for request in requests]
    embeds = torch.cat([request.embeds(request.rows) for request in requests])
    logits = forward(requests[0].runner, runs, embeds, keep=torch.arange(len(embeds)))
    return list(logits.split([len(request.rows) for request in requests]))
