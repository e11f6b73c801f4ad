"""What the steps of a scheduler encode: each absent segment once, whoever waits for it, some rows at a time.

    absent -> claimed among machines -> begun, perhaps from an earlier version -> rows in forwards -> kept, resident

A segment that nobody waits for any more is dropped between two forwards. Knows no requests.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import final

from kvlink.engine.hold import Absent, Held, Opening
from kvlink.engine.leases import Leased
from kvlink.engine.loaded import Begun, LoadTimes
from kvlink.models.draft import Draft

LOOK_S = 0.05
"""How often it is looked for what another machine or thread makes."""


@dataclass(slots=True, eq=False)
class Making:
    """A segment on its way to an entry.

    Attributes:
        begun: What was known of it.
        draft: Its rows; None while another machine has claimed it, or none of them had its turn.
        claims: Lets go of what was claimed of other machines.
        since, looked: When it was first and last seen to be claimed by another machine.
        spent_s: Its share of the forwards that its rows went through.
    """

    absent: Absent
    begun: Begun = field(default_factory=Begun)
    draft: Draft | None = None
    claims: ExitStack = field(default_factory=ExitStack)
    since: float | None = None
    looked: float = 0.0
    spent_s: float = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether another machine may be at it."""
        return self.draft is None and self.since is not None


Work = list[tuple[Making, int]]
"""Segments, and how many rows of each go through the next forward."""


@final
class Drafts:
    """The segments that one scheduler encodes. Used by the thread that runs its steps."""

    def __init__(self) -> None:
        self._making: dict[Leased[Held], Making] = {}

    def __len__(self) -> int:
        """Segments that are not made yet."""
        return len(self._making)

    def add(self, opening: Opening) -> None:
        """Take on what nobody makes yet."""
        self._making |= {absent.leased: Making(absent) for absent in opening.absent}

    def next(self, openings: Iterable[Opening], rows: int) -> Work:
        """Choose so many rows at most, those of the first opening first."""
        self.sweep()
        work: Work = []
        for leased in dict.fromkeys(leased for opening in openings for leased in opening.missing):
            making = self._making.get(leased)
            if rows <= 0 or making is None:  # another thread makes it
                continue
            try:
                draft = self._begun(making)
            except Exception as error:
                self.fail(making, error)
                continue
            if draft is not None:
                number = min(rows, draft.num_left)
                work.append((making, number))
                rows -= number
        return work

    def advanced(self, work: Work, seconds: float, rows: int) -> None:
        """Keep what has become whole in a forward that took so long for so many rows."""
        for making, number in work:
            making.spent_s += seconds * number / rows
            assert making.draft is not None, "it has rows"
            if not making.draft.num_left:
                try:
                    self._keep(making, making.draft)
                except Exception as error:
                    self.fail(making, error)

    def fail(self, making: Making, error: Exception) -> None:
        """Give a segment up: whoever waits for it fails."""
        if not making.absent.leased.made.done():
            making.absent.fail(error)
        self._drop(making)

    def sweep(self) -> None:
        """Drop what nobody waits for any more."""
        for making in [*self._making.values()]:
            if making.absent.leased.made.done():
                self._drop(making)

    def wait(self, openings: Sequence[Opening]) -> None:
        """Wait a moment for what others make; there is nothing else to do."""
        missing = [leased for opening in openings for leased in opening.missing]
        for making in map(self._making.get, missing):
            if making is not None and making.is_waiting:
                making.looked = 0.0
                making.absent.loader.arrives(making.absent.leased.name, at_most_s=LOOK_S)
                return
        if others := [leased.made for leased in missing if leased not in self._making]:
            wait(others, timeout=LOOK_S)

    def _begun(self, making: Making) -> Draft | None:
        """Return the rows of a segment; None where another machine makes it, or nothing is left to compute."""
        absent = making.absent
        if making.draft is None:
            if not self._is_ours(making):
                return None
            making.begun = absent.loader.begun(absent.ids)
            making.draft = Draft(absent.loader.runner, absent.ids, prefix=absent.loader.sink, kept=making.begun.kept)
            if not making.draft.num_left:
                self._keep(making, making.draft)
                return None
        return making.draft

    def _is_ours(self, making: Making) -> bool:
        """Whether this machine is to encode a segment. What another one has put into the store meanwhile is taken."""
        absent, now = making.absent, perf_counter()
        loader, name = absent.loader, absent.leased.name
        if making.since is not None:
            if now - making.looked < LOOK_S:
                return False
            making.looked = now
        is_ours = loader.claims(absent.ids, absent.search, making.claims)
        # Behind the claim, since who had it may have put the entry and let go a moment ago.
        if absent.ids not in absent.search.refused and loader.arrives(name, at_most_s=0.0) and self._taken(making):
            return False
        if is_ours:
            return True
        making.since, making.looked = making.since or now, now
        waited = now - making.since
        if waited < loader.wait_s:
            return False
        said = f"waited {waited:.1f} s for another machine that had claimed it"
        absent.search.reasons[absent.ids] = f"not in the store; {said}"
        return True

    def _taken(self, making: Making) -> bool:
        absent = making.absent
        with absent.loader.stored([absent.ids], LoadTimes()) as (loaded, _):
            for one in loaded:
                absent.made(replace(one, reason="another machine has just encoded it"))
                self._drop(making)
            return bool(loaded)

    def _keep(self, making: Making, draft: Draft) -> None:
        absent, begun = making.absent, making.begun
        absent.made(absent.loader.drafted(draft.entry(), begun, absent.search))
        if begun.kept is None:
            absent.loader.rates.encoded(len(absent.ids), making.spent_s)
        self._drop(making)

    def _drop(self, making: Making) -> None:
        self._making.pop(making.absent.leased, None)
        making.claims.close()
