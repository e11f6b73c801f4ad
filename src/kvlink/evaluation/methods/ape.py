"""`ape`: documents at the same positions behind a shared prefix; attention to them has a temperature and a scale.

Source: Yang et al. 2025 (APE, arXiv 2502.05431), merged as its public code does it, whose T and S are 0.9, too. With
T = S = 1 it is parallel context windows (Ratner et al. 2023).
"""

from typing import ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from kvlink.core.errors import InputError
from kvlink.evaluation.case import Case, Ids
from kvlink.evaluation.methods.base import Method, Prefilled, number, sink_named
from kvlink.evaluation.methods.reading import Reading
from kvlink.models.cache import SlotCache
from kvlink.models.parallel import ParallelCache, parallel_cache, parallel_logits

SHARED = "shared"
"""The sink prefix that is the prompt's own S."""


class Ape(Method):
    """Parallel documents, whose positions never change: their keys are kept rotated."""

    takes: ClassVar[tuple[str, ...]] = ("T", "S")

    def __init__(self, *, T: str = "0.9", S: str = "0.9", sink: str = SHARED) -> None:  # noqa: N803 (as published)
        """Take parameters.

        Args:
            T: What attention logits of documents are divided by.
            S: What T times the log-sum-exp of documents is multiplied with, before it is merged with the rest.
            sink: What stands before a document while it is encoded: `shared` is S itself, as published.
        """
        self.temperature = number(T, "T", above=True)
        self.scale = number(S, "S", above=True)
        self.sink = sink if sink == SHARED else sink_named(sink)
        self._reading = Reading()
        self._rotated: tuple[Case, list[tuple[Tensor, Tensor]], int] | None = None

    def prepare(self, case: Case) -> None:
        """Encode the documents and turn their keys to the positions that they have in every prompt; encode S."""
        self._documents(case)
        case.bench.prefix(case.prompt.system)

    def prefill(self, case: Case, tail: Ids, *, keep: int, room: int = 0) -> Prefilled:
        """Lay out what is known and compute T."""
        prefix = case.bench.prefix(case.prompt.system)
        documents, loaded = self._documents(case)
        assert prefix is not None, "S is never empty"
        layout = case.with_tail(tail).layout()
        cache = parallel_cache(case.bench.runner, layout, prefix=prefix, documents=documents, room=room)
        logits = self._logits(case, cache, tail, at=layout.spans[-1].start, keep=keep)
        return Prefilled(logits, len(tail), loaded, cache)

    def step(self, case: Case, cache: SlotCache, token_id: int) -> Float[Tensor, " vocab"]:
        """Append one id; documents keep their temperature and scale."""
        return self._logits(case, cast("ParallelCache", cache), (token_id,))[-1]

    def _logits(
        self, case: Case, cache: ParallelCache, ids: Ids, *, at: int | None = None, keep: int = 1
    ) -> Float[Tensor, "kept vocab"]:
        return parallel_logits(
            case.bench.runner, cache, ids, temperature=self.temperature, scale=self.scale, at=at, logits_to_keep=keep
        )

    def _documents(self, case: Case) -> tuple[list[tuple[Tensor, Tensor]], int]:
        if self._rotated is None or self._rotated[0] is not case:
            sink = case.prompt.system if self.sink == SHARED else case.bench.sink_ids(self.sink)
            entries, loaded = self._reading.entries(case, sink)
            if any(entry.is_pruned for entry in entries):
                raise InputError("documents of which tokens were pruned cannot stand in parallel; take another codec")
            runner, start = case.bench.runner, len(case.prompt.system)
            rotated: list[tuple[Tensor, Tensor]] = []
            for entry in entries:
                positions = torch.arange(start, start + entry.num_tokens, device=runner.device)
                keys = runner.rotary.rotate(entry.keys.to(runner.device), positions)
                rotated.append((keys, entry.values.to(runner.device)))
            self._rotated = case, rotated, loaded
        return self._rotated[1:]
