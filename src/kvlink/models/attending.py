"""Who attends what in one forward: documents and own rows as parts, and what rows find in them is merged.

Many rows of few parts are read from the queries where they stand, and merged into the output where it stands. Few rows
of many parts, as of answers under way, are gathered first: then each part costs one call, whatever else there is to do.
Both give the same to the last rounding.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlink.core.layout import reference_mask
from kvlink.models.backends import Backend, Found, Rows, Sight, backend_for, merge, merge_gathered
from kvlink.models.rows import Readable, Run
from kvlink.models.runner import Runner
from kvlink.models.turning import Turns

FEW_ROWS = 16
"""Up to so many rows of a part, on average, rows are gathered."""

Layers = Sequence[tuple[Float[Tensor, "kv_heads columns head_dim"], Float[Tensor, "kv_heads columns value_dim"]]]
"""Keys and values, layer by layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Keys and values that some rows of a forward attend.

    Attributes:
        rows: The rows of the forward that do.
        starts: How far they are turned back, as places among all starts; the first one is 0.
        sights: By the size of the window: what the rows see; None where they see nothing.
    """

    layers: Layers
    rows: Rows
    starts: slice
    sights: dict[int | None, Sight | None]


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """The rows of all parts that are seen through a window, those of one part behind those of another.

    Attributes:
        parts: Each with its place among the gathered rows.
        rows: The row in the forward of each gathered one.
        starts: How far it is turned back, as a place among all starts.
        slots: How many parts its row had before.
    """

    parts: Sequence[tuple[Part, slice]]
    rows: Int[Tensor, " gathered"]
    starts: Int[Tensor, " gathered"]
    slots: Int[Tensor, " gathered"]


@dataclass(slots=True, eq=False)
class Attending:
    """How the rows of one forward attend; travels as a keyword of the forward.

    Attributes:
        parts: All that is attended.
        gathered: By the size of the window: the rows of all parts, where there are few; else empty.
        turns: By how much the rows of documents are turned back.
        windows: The window of each layer, or None.
        served: Layers that have attended.
    """

    parts: list[Part]
    gathered: dict[int | None, Gathered]
    turns: Turns
    windows: Sequence[int | None]
    backend: Backend
    served: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, runs: Sequence[Run], runner: Runner, *, backend: Backend | None = None) -> "Attending":
        """Lay out who attends what in a forward whose rows are those of the runs, in their order."""
        windows = tuple(dict.fromkeys(runner.layer_windows))
        parts = _Parts(windows, runner.device)
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
        few = sum(map(_length, parts.found)) <= FEW_ROWS * len(parts.found)
        return cls(
            parts=parts.found,
            gathered={size: _gathered(parts.found, size, runner.device) for size in windows} if few else {},
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
        backend = partial(self.backend, scale=scale, softcap=softcap)
        gathered = self.gathered.get(self.windows[layer])
        if gathered is None:
            return self._where_they_stand(query[0], layer, backend, sinks).to(query.dtype)[None]
        return self._from_gathered(gathered, query[0], layer, backend, sinks).to(query.dtype)[None]

    def _where_they_stand(
        self, query: Float[Tensor, "heads rows head_dim"], layer: int, backend: Backend, sinks: Tensor | None
    ) -> Float[Tensor, "rows heads value_dim"]:
        quarter, window = self.turns.quarter(query, layer), self.windows[layer]
        dtype = torch.promote_types(query.dtype, torch.float32)
        lse = torch.full((len(self.parts), *query.shape[:2]), -torch.inf, dtype=dtype, device=query.device)
        found: list[Found] = []
        for number, part in enumerate(self.parts):
            if (sight := part.sights[window]) is None:
                continue
            asked = query[:, part.rows]
            if part.starts.start:
                asked = self.turns.turn(query, quarter, layer, part.rows, part.starts)
            values, lse[number, :, part.rows] = backend(asked, *part.layers[layer], sight=sight)
            found.append((number, part.rows, values))
        return merge(found, lse, sinks=sinks)

    def _from_gathered(
        self,
        gathered: Gathered,
        query: Float[Tensor, "heads rows head_dim"],
        layer: int,
        backend: Backend,
        sinks: Tensor | None,
    ) -> Float[Tensor, "rows heads value_dim"]:
        window = self.windows[layer]
        asked = self.turns.turn(query, self.turns.quarter(query, layer), layer, gathered.rows, gathered.starts)
        found: list[Tensor] = []
        sums: list[Tensor] = []
        for part, place in gathered.parts:
            sight = part.sights[window]
            assert sight is not None, "others are not gathered"
            values, lse = backend(asked[:, place], *part.layers[layer], sight=sight)
            found.append(values)
            sums.append(lse)
        values, lse = torch.cat(found, 1), torch.cat(sums, 1)
        return merge_gathered(values, lse, gathered.rows, gathered.slots, query.shape[1], sinks=sinks)


def _length(part: Part) -> int:
    return part.rows.stop - part.rows.start if isinstance(part.rows, slice) else len(part.rows)


def _gathered(parts: Sequence[Part], window: int | None, device: torch.device) -> Gathered:
    """Lay the rows of parts that are seen behind one another."""
    places: list[tuple[Part, slice]] = []
    rows: list[int] = []
    starts: list[int] = []
    for part in parts:
        if part.sights[window] is None:
            continue
        own = range(part.rows.start, part.rows.stop) if isinstance(part.rows, slice) else part.rows.tolist()
        places.append((part, slice(len(rows), len(rows) + len(own))))
        given = range(part.starts.start, part.starts.stop)
        rows += own
        starts += given if len(given) == len(own) else [given.start] * len(own)
    before = Counter[int]()
    slots: list[int] = []
    for row in rows:
        slots.append(before[row])
        before[row] += 1
    return Gathered(places, *(torch.tensor(each, dtype=torch.long, device=device) for each in (rows, starts, slots)))


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
        self.starts = [0]
        self._windows = windows
        self._device = device

    def add_own(self, run: Run, rows: Tensor) -> None:
        """Add what a request has computed before, and its new rows: one part if there is one, which sees all."""
        own, before, here = run.own, run.own.length, run.positions
        stop = before + len(rows)
        if len(rows) == 1:
            positions = torch.cat((own.positions[:before], here))
            self._add(own.keys[:, :, :stop], own.values[:, :, :stop], rows, slice(0, 1), self._sights(here, positions))
            return
        if before:
            known = own.keys[:, :, :before], own.values[:, :, :before]
            self._add(*known, rows, slice(0, 1), self._sights(here, own.positions[:before]))
        new = own.keys[:, :, before:stop], own.values[:, :, before:stop]
        self._add(*new, rows, slice(0, 1), self._sights(here, here, causal=True))

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
        self, keys: Tensor, values: Tensor, rows: Tensor, starts: slice, sights: dict[int | None, Sight | None]
    ) -> None:
        layers = tuple(zip(keys.unbind(0), values.unbind(0), strict=True))
        self.found.append(Part(layers, _places(rows, self._device), starts, sights))


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
