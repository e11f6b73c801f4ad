"""The device tier: each segment decoded and rotated once, then read by every request that holds it.

    hold -> what is resident is leased, what is absent is loaded or encoded -> release
    ahead -> what is absent is loaded in the background
    open -> as hold, but what has to be encoded is left to whoever runs the model -> hold

Within a hard budget, least recently used first. Knows no tensors: how a resident is made is the model's affair, where
its numbers come from the loader's.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from typing import final

import torch

from kvlink.core.errors import StoreError
from kvlink.engine.hold import Absent, Held, Hold, Opening, from_another, from_device
from kvlink.engine.leases import Leased, Leases, ResidencyStats
from kvlink.engine.loaded import Ids, Loaded, LoadTimes, Search
from kvlink.engine.loader import Loader
from kvlink.engine.prefetch import Prefetch
from kvlink.models.resident import Resident
from kvlink.store.codec import RAW, codec_named
from kvlink.store.header import Geometry
from kvlink.store.tiered import TieredStore

PORTION_TOKENS = 8192
"""Entries of so many tokens are loaded at once: what they take besides the residents made of them is in no budget."""


def device_bytes(device: torch.device) -> int:
    """Return the budget of residents where nobody says: 40 % of a GPU's memory, on a CPU a quarter of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory * 2 // 5
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


@final
class Residency:
    """Residents of one model. Every method may be called from any thread.

    One resident per fingerprint: what is resident is not looked for in a better codec.
    """

    def __init__(self, loader: Loader, *, budget_bytes: int, uses: Callable[[str], bool] = lambda _: True) -> None:
        """Hold nothing yet.

        Args:
            loader: Gets what is not resident.
            budget_bytes: What all residents together may take; see `device_bytes`.
            uses: Whether a name is used; what is not does not stay behind its leases.
        """
        self.loader = loader
        self._uses = uses
        self._leases: Leases[Held] = Leases(budget_bytes=budget_bytes)
        self._takes_pruned = any(codec_named(codec).prunes for codec in loader.accept)

    def over(self, loader: Loader, *, uses: Callable[[str], bool] = lambda _: True) -> "Residency":
        """Return one for another loader of the same model (another scope), within the same budget.

        Raises:
            ValueError: The loader is of another model.
        """
        if loader.runner is not self.loader.runner:
            raise ValueError("residents of two models share no budget: make a residency for each")
        made = Residency(loader, budget_bytes=self._leases.budget_bytes, uses=uses)
        made._leases = self._leases
        return made

    def hold(self, segments: Sequence[Ids], times: LoadTimes | None = None) -> Hold:
        """Lease the residents of these segments; load or encode, and keep, those that are absent.

        A segment that occurs twice is held once. Of several threads that need one absent segment, one makes it. Room is
        made before anything is read.

        Args:
            segments: Their ids, in the request's order.
            times: Is told how long loads and encodes took.

        Raises:
            DeviceOverflow: They take more than the whole budget.
            DeviceBusy: They take more than what running requests leave.
        """
        names = [self.loader.name(ids) for ids in segments]
        with ExitStack() as ending:
            found = self._found(dict(zip(names, segments, strict=True)), ending, times)
            return Hold([found[name] for name in names], ending.pop_all())

    def open(self, segments: Sequence[Ids], times: LoadTimes | None = None) -> Opening:
        """Lease and load like `hold`, but encode nothing: what is absent from the store waits to be made.

        Raises:
            DeviceOverflow: They take more than the whole budget.
            DeviceBusy: They take more than what running requests leave.
        """
        names = [self.loader.name(ids) for ids in segments]
        wanted = dict(zip(names, segments, strict=True))
        with ExitStack() as ending:
            entered = self._leases.enter({name: self._size(name, ids) for name, ids in wanted.items()})
            for leased in (*entered.there.values(), *entered.others.values(), *entered.new.values()):
                ending.callback(self._leases.leave, leased)
            absent: list[Absent] = []
            for portion in _portions(wanted[name] for name in entered.new):
                with self.loader.stored(portion, times or LoadTimes()) as (loaded, search):
                    self._take(loaded, entered.new)
                self._free_host(one.name for one in loaded)
                there = {one.name for one in loaded}
                missing = [name for name in map(self.loader.name, portion) if name not in there]
                absent += [self._absent(wanted[name], entered.new[name], search) for name in missing]
            return Opening(names, entered, absent, ending.pop_all())

    def ahead(self, segments: Sequence[Ids]) -> Prefetch:
        """Load what is absent of these segments in the background, unless it may be faster to encode it."""
        rates, absent = self.loader.rates, [ids for ids in segments if self.loader.name(ids) not in self]
        return self.loader.prefetch([ids for ids in absent if not rates.may_refuse(self._bytes(ids), len(ids))])

    def __contains__(self, name: str) -> bool:
        """Whether a name is resident, or being made so."""
        return name in self._leases

    def drop(self, *names: str) -> bool:
        """Let no new request find these residents, and free them behind the last of their leases.

        Returns:
            Whether nothing of them is left. If not, running requests read them: calling it again asks again.
        """
        return self._leases.drop(*names)

    def stats(self) -> ResidencyStats:
        """Return counters and fill."""
        return self._leases.stats()

    def _found(self, wanted: dict[str, Ids], ending: ExitStack, times: LoadTimes | None) -> dict[str, Held]:
        """Lease what is wanted until all of it is there: who waited in vain for another request makes it itself."""
        found: dict[str, Held] = {}
        beside: list[Leased[Held]] = []
        while missing := {name: ids for name, ids in wanted.items() if name not in found}:
            entered = self._leases.enter({name: self._size(name, ids) for name, ids in missing.items()}, beside=beside)
            for leased in (*entered.there.values(), *entered.others.values(), *entered.new.values()):
                ending.callback(self._leases.leave, leased)
                beside.append(leased)
            found |= {name: from_device(leased.made.result()) for name, leased in entered.there.items()}
            self._make(entered.new, missing, times)
            found |= {name: leased.made.result() for name, leased in entered.new.items()}
            for name, leased in entered.others.items():  # only now: it holds up nothing of one's own
                with suppress(CancelledError):
                    found[name] = from_another(leased.made.result())
        return found

    def _make(self, new: dict[str, Leased[Held]], ids: dict[str, Ids], times: LoadTimes | None) -> None:
        """Make what is new; give up what of it could not be made."""
        try:
            for portion in _portions(ids[name] for name in new):
                self._load(portion, new, times)
        finally:
            for leased in new.values():
                self._leases.give_up(leased)

    def _load(self, segments: list[Ids], new: dict[str, Leased[Held]], times: LoadTimes | None) -> None:
        with self.loader.load(segments, times) as loaded:
            self._take(loaded, new)
        self._free_host(one.name for one in loaded)

    def _take(self, loaded: Sequence[Loaded], new: dict[str, Leased[Held]]) -> None:
        for one in loaded:
            self._give(new[one.name], one)

    def _give(self, leased: Leased[Held], loaded: Loaded) -> None:
        """Give what was made to all who wait for it."""
        self._leases.resize(leased, loaded.entry.keys.nbytes + loaded.entry.values.nbytes)
        leased.made.set_result(self._made(loaded))
        if not self._uses(loaded.name):
            self._leases.drop(loaded.name)

    def _absent(self, ids: Ids, leased: Leased[Held], search: Search) -> Absent:
        """Return what is to be encoded; room is kept for the whole of it, whatever object was thought to be there."""
        self._leases.resize(leased, self._bytes(ids))
        give, fail = partial(self._give, leased), partial(self._leases.fail, leased)
        return Absent(ids, leased, search, self.loader, give, fail)

    def _made(self, loaded: Loaded) -> Held:
        """Return what an entry becomes. Values that lie in an object are copied: they would keep its keys in memory."""
        is_view = loaded.entry.values.device.type == "cpu" and lies_in_object(loaded.codec)
        resident = Resident.of(loaded.entry, self.loader.runner, copy_values=is_view)
        return Held(resident, loaded.name, loaded.source, loaded.codec, loaded.reason)

    def _free_host(self, names: Iterable[str]) -> None:
        """Where host and device share one memory, keep no object there that a slower tier has."""
        if isinstance(self.loader.store, TieredStore) and self.loader.runner.device.type == "cpu":
            for name in names:
                self.loader.store.free_host(name)

    def _bytes(self, ids: Ids) -> int:
        return len(ids) * self.loader.runner.geometry.bytes_per_token(self.loader.runner.dtype)

    def _size(self, name: str, ids: Ids) -> int:
        """Return what a segment's resident takes, by the object that would be read; as a whole one if it is there."""
        shape, dtype = self.loader.runner.geometry, self.loader.runner.dtype
        codec = None
        if self._takes_pruned and name not in self._leases:
            with suppress(StoreError):
                located = self.loader.locate(name)
                codec = located[1] if located else None
        if codec is None or not codec_named(codec).prunes:
            return self._bytes(ids)
        plans = codec_named(codec).plan(Geometry(**asdict(shape), tokens=len(ids)), dtype)
        return plans["keys"].num_bytes + plans["values"].num_bytes


def lies_in_object(codec: str | None) -> bool:
    """Whether an entry that was read in this codec consists of views of its object's memory."""
    return codec is not None and (codec == RAW or codec_named(codec).prunes)


def _portions(segments: Iterable[Ids]) -> Iterator[list[Ids]]:
    """Yield segments in their order, so many tokens at a time, or one that is longer."""
    portion: list[Ids] = []
    for ids in segments:
        if portion and sum(map(len, portion)) + len(ids) > PORTION_TOKENS:
            yield portion
            portion = []
        portion.append(ids)
    if portion:
        yield portion
