"""Shared attention: documents are read where they lie, by all requests, and never copied, moved or rotated.

A row of a request attends its own request's rows and every document before it. Each document is one part, each
request's own rows one or two; what a row found in its parts is merged by their log-sum-exp, exactly. Rows of several
requests stand one behind another in one forward without padding; those that attend one document do so together.

    request 1    S D_1 L_1 D_2 L_2 T          own rows    S | L_1 L_2 T   (known before | new)
    request 2    S D_2 L_2 T                  document 2  turned back by 2 starts: rows of both requests
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

from kvlink.core.layout import reference_mask
from kvlink.models.adapter import Adapter
from kvlink.models.backends import Backend, Found, Rows, Sight, backend_for, merge
from kvlink.models.cache import unrotated_keys
from kvlink.models.rotary import Watch, watching
from kvlink.models.runner import Runner
from kvlink.models.turning import Turns


@runtime_checkable
class Readable(Protocol):
    """A document as it lies in memory: keys rotated at positions 0, 1, ..., those that were pruned left out."""

    @property
    def keys(self) -> Float[Tensor, "layers kv_heads kept head_dim"]:
        """Keys of all layers."""
        ...

    @property
    def values(self) -> Float[Tensor, "layers kv_heads kept value_dim"]:
        """Values of all layers."""
        ...

    @property
    def num_tokens(self) -> int:
        """Positions that it takes, pruned ones counted."""
        ...


class OwnRows:
    """Keys and values of one request's own tokens, in position order, rotated at their global positions.

    Attributes:
        keys: `[layers, kv_heads, capacity, head_dim]`.
        values: `[layers, kv_heads, capacity, value_dim]`.
        positions: Global positions of the rows; those behind `length` mean nothing.
        length: Rows that hold something, or will once the forward that was announced has run.
    """

    def __init__(self, runner: Runner, capacity: int) -> None:
        shape = runner.geometry
        rows = shape.layers, shape.kv_heads, capacity
        self.keys = torch.empty(*rows, shape.head_dim, dtype=runner.dtype, device=runner.device)
        self.values = torch.empty(*rows, shape.value_dim, dtype=runner.dtype, device=runner.device)
        self.positions = torch.empty(capacity, dtype=torch.long)
        self.length = 0

    @property
    def capacity(self) -> int:
        """Rows that it can hold."""
        return self.keys.shape[2]

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values, free rows counted."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """New rows of one request in a forward.

    Attributes:
        own: What the request has computed; the new rows are written behind it.
        positions: Global positions of the new rows, ascending.
        documents: Documents with their first positions, ascending; a row attends those that start before it.
        unrotated: Where the keys of the new rows are noted as they are before the rotary embedding, or None.
    """

    own: OwnRows
    positions: Int[Tensor, " rows"]
    documents: Sequence[tuple[Readable, int]] = ()
    unrotated: Float[Tensor, "layers kv_heads rows head_dim"] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Keys and values that some rows of a forward attend.

    Attributes:
        rows: The rows of the forward that do.
        starts: How far they are turned back, as places among all starts; None where they are not.
        sights: By the size of the window: what the rows see; None where they see nothing.
    """

    keys: Float[Tensor, "layers kv_heads columns head_dim"]
    values: Float[Tensor, "layers kv_heads columns value_dim"]
    rows: Rows
    starts: slice | None
    sights: dict[int | None, Sight | None]


@dataclass(slots=True, eq=False)
class Attending:
    """How the rows of one forward attend; travels as a keyword of the forward.

    Attributes:
        parts: All that is attended.
        turns: By how much the rows of documents are turned back.
        windows: The window of each layer, or None.
        served: Layers that have attended.
    """

    parts: list[Part]
    turns: Turns
    windows: Sequence[int | None]
    backend: Backend
    served: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, runs: Sequence[Run], runner: Runner, *, backend: Backend | None = None) -> "Attending":
        """Lay out who attends what in a forward whose rows are those of the runs, in their order."""
        parts = _Parts(tuple(dict.fromkeys(runner.layer_windows)), runner.device)
        readers: dict[tuple[int, int], list[_Reading]] = {}  # by document, and how often the request had it before
        first = 0
        for run in runs:
            rows = torch.arange(first, first + len(run.positions))
            parts.add_own(run, rows)
            times = Counter[int]()
            for document, start in run.documents:
                behind = run.positions >= start
                if bool(behind.any()):
                    reading = _Reading(document, rows[behind], run.positions[behind], start)
                    readers.setdefault((id(document), times[id(document)]), []).append(reading)
                    times[id(document)] += 1
            first += len(rows)
        for reading in readers.values():
            parts.add_document(reading)
        starts = torch.tensor(parts.starts, dtype=torch.long, device=runner.device)
        head_dim = runner.geometry.head_dim
        return cls(
            parts=parts.found,
            turns=Turns.back(runner.rotary, starts, head_dim=head_dim, dtype=runner.dtype),
            windows=runner.layer_windows,
            backend=backend or backend_for(runner.device),
        )

    def attend(
        self,
        query: Float[Tensor, "1 heads rows head_dim"],
        layer: int,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Float[Tensor, " heads"] | None = None,
    ) -> Float[Tensor, "1 rows heads value_dim"]:
        """Return what rotated queries of one layer find in all their parts."""
        self.served.add(layer)
        here, window = query[0], self.windows[layer]
        quarter = self.turns.quarter(here, layer)
        dtype = torch.promote_types(query.dtype, torch.float32)
        lse = torch.full((len(self.parts), *here.shape[:2]), -torch.inf, dtype=dtype, device=query.device)
        found: list[Found] = []
        for number, part in enumerate(self.parts):
            if (sight := part.sights[window]) is None:
                continue
            asked = here[:, part.rows]
            if part.starts is not None:
                asked = self.turns.turn(here, quarter, layer, part.rows, part.starts)
            values, lse[number, :, part.rows] = self.backend(
                asked, part.keys[layer], part.values[layer], scale=scale, sight=sight, softcap=softcap
            )
            found.append((number, part.rows, values))
        return merge(found, lse, sinks=sinks).to(query.dtype)[None]


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


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """Rows of one request that attend a document, at their global positions, and where it starts for them."""

    document: Readable
    rows: Int[Tensor, " rows"]
    positions: Int[Tensor, " rows"]
    start: int


class _Parts:
    """Parts in the making."""

    def __init__(self, windows: Sequence[int | None], device: torch.device) -> None:
        self.found: list[Part] = []
        self.starts: list[int] = []
        self._windows = windows
        self._device = device

    def add_own(self, run: Run, rows: Tensor) -> None:
        """Add what a request has computed before, and its new rows."""
        own, before, here = run.own, run.own.length, run.positions
        stop = before + len(rows)
        if before:
            known = own.keys[:, :, :before], own.values[:, :, :before]
            self._add(*known, rows, None, self._sights(here, own.positions[:before]))
        new = own.keys[:, :, before:stop], own.values[:, :, before:stop]
        self._add(*new, rows, None, self._sights(here, here, causal=True))

    def add_document(self, readings: Sequence[_Reading]) -> None:
        """Add a document with all rows that attend it."""
        document = readings[0].document
        rows = torch.cat([reading.rows for reading in readings])
        positions = torch.cat([reading.positions - reading.start for reading in readings])
        sights = self._sights(positions, torch.arange(document.num_tokens))
        first = len(self.starts)
        if len({reading.start for reading in readings}) == 1:
            self.starts.append(readings[0].start)
        else:
            self.starts += [reading.start for reading in readings for _ in reading.rows]
        self._add(document.keys, document.values, rows, slice(first, len(self.starts)), sights)

    def _sights(self, positions: Tensor, columns: Tensor, *, causal: bool = False) -> dict[int | None, Sight | None]:
        return {size: _sight(positions, columns, causal=causal, window=size) for size in self._windows}

    def _add(
        self,
        keys: Tensor,
        values: Tensor,
        rows: Tensor,
        starts: slice | None,
        sights: dict[int | None, Sight | None],
    ) -> None:
        self.found.append(Part(keys, values, _places(rows, self._device), starts, sights))


def _places(rows: Int[Tensor, " rows"], device: torch.device) -> Rows:
    """Return rows as a slice, which is read without a copy, where they stand side by side."""
    first, stop = int(rows[0]), int(rows[-1]) + 1
    return slice(first, stop) if rows.tolist() == list(range(first, stop)) else rows.to(device)


def _sight(
    positions: Int[Tensor, " rows"], columns: Int[Tensor, " columns"], *, causal: bool, window: int | None
) -> Sight | None:
    """Return what rows see of columns through a window of positions; None for nothing."""
    if window is None or int(positions.max()) - int(columns[0]) < window:
        return Sight(causal=causal)
    groups = torch.zeros_like(positions), torch.zeros_like(columns)
    seen = reference_mask(positions, groups[0], columns, groups[1], window=window)
    return Sight(mask=seen) if bool(seen.any()) else None
