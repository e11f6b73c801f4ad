"""Shared attention: documents are read where they lie, by all requests, and never copied, moved or rotated.

A row of a request attends its own request's rows and every document before it. Each document is one part, each
request's own rows one or two; what a row found in its parts is merged by their log-sum-exp, exactly. Rows of several
requests stand one behind another in one forward without padding; those that attend one document do so together.

    request 1    S D_1 L_1 D_2 L_2 T          own rows    S | L_1 L_2 T   (known before | new)
    request 2    S D_2 L_2 T                  document 2  turned back by 2 starts: rows of both requests
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

from kvlink.models.adapter import Adapter
from kvlink.models.attending import Attending
from kvlink.models.backends import Backend
from kvlink.models.cache import unrotated_keys
from kvlink.models.rotary import Watch, watching
from kvlink.models.rows import Run
from kvlink.models.runner import Runner


class SharedCache(Cache):
    """Writes the new rows of one forward behind each request's own; what is attended, `attending` knows.

    Attributes:
        turned: Of each layer so far whether it rotated; empty where nothing is watched.
    """

    def __init__(self, runs: Sequence[Run], attending: Attending, watch: Watch | None = None) -> None:
        super().__init__(layers=[])
        self.attending = attending
        self.turned: list[bool] = []
        self._watch = watch
        self._runs = runs
        self._spans: list[tuple[int, int]] = []
        for run in runs:
            before, stop = run.own.length, run.own.length + len(run.positions)
            if stop > run.own.capacity:
                raise ValueError(f"a request's own rows have room for {run.own.capacity}, {stop} were announced")
            run.own.positions[before:stop] = run.positions
            run.own.length = stop
            self._spans.append((before, stop))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new rows; return them as they came."""
        first, unrotated = 0, key_states
        if self._watch is not None:
            call = self._watch.take()
            self.turned.append(call is not None)
            unrotated = unrotated_keys(call, key_states)
        for run, (start, stop) in zip(self._runs, self._spans, strict=True):
            rows = slice(first, first + stop - start)
            run.own.keys[layer_idx, :, start:stop] = key_states[0, :, rows]
            run.own.values[layer_idx, :, start:stop] = value_states[0, :, rows]
            if run.unrotated is not None:
                run.unrotated[layer_idx] = unrotated[0, :, rows]
            first = rows.stop
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows before this forward's: of no meaning here, where positions are given."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns of the mask, of which there is none, and the index of the first."""
        return query_length, 0


def forward(
    runner: Runner,
    runs: Sequence[Run],
    embeds: Float[Tensor, "rows hidden"],
    *,
    keep: Int[Tensor, " kept"],
    adapter: Adapter | None = None,
    factor: Float[Tensor, " rows"] | None = None,
    backend: Backend | None = None,
) -> Float[Tensor, "kept vocab"]:
    """Run a model over the new rows of some requests, laid one behind another; returns logits of the kept rows.

    Args:
        embeds: Input embeddings of all rows, in the order of the runs.
        keep: Rows whose logits are wanted.
        adapter, factor: Low-rank changes, and what each row's change is multiplied with.
        backend: How to attend; the fastest way on the device if None.

    Raises:
        ValueError: A request's own rows have no room left.
        ModelRefused: The model's layers attend in a way that cannot be replaced.
        ModelError: Unrotated keys are wanted, and the model does not rotate as it did when it was loaded.
    """
    watched = any(run.unrotated is not None for run in runs)
    with torch.inference_mode(), watching(runner.model) if watched else nullcontext() as watch:
        cache = SharedCache(runs, Attending.of(runs, runner, backend=backend), watch)
        logits = runner.forward(
            cache=cache,
            adapter=adapter,
            factor=None if factor is None else factor[None],
            inputs_embeds=embeds[None],
            position_ids=torch.cat([run.positions for run in runs])[None].to(runner.device),
            logits_to_keep=keep,
        )[0]
    if watched:
        runner.require_turning(cache.turned)
    return logits
