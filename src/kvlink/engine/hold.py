"""What a request holds of the device tier: residents under lease, or leases on what is still being made."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, final

from kvlink.engine.leases import Entered, Leased
from kvlink.engine.loaded import Ids, Loaded, Search
from kvlink.engine.loader import Loader
from kvlink.engine.usage import Source
from kvlink.models.resident import Resident
from kvlink.store.codec import RAW


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """One segment's resident and where it came from.

    Attributes:
        source: `device` if it was resident already.
        codec: Codec of the stored object that was read, or None where it was encoded now.
        reason: Why it was encoded, or who else made it.
    """

    resident: Resident
    name: str
    source: Source
    codec: str | None = None
    reason: str = ""


@final
class Hold:
    """Residents under lease until `release`: a context manager that gives them in the order of the request.

    Attributes:
        held: One per segment that was asked for; empty after the release.
    """

    def __init__(self, held: list[Held], ending: ExitStack) -> None:
        self.held = held
        self._ending = ending

    def release(self) -> None:
        """End the leases. A second time does nothing."""
        self.held = []
        self._ending.close()

    def __enter__(self) -> list[Held]:
        return self.held

    def __exit__(self, *_: Any) -> None:
        self.release()


@dataclass(frozen=True, slots=True, eq=False)
class Absent:
    """A segment that has to be encoded.

    Attributes:
        search: What is known of why.
        loader: Of its scope.
        made: Gives what was made to all who wait for it.
        fail: Tells them why it could not be made.
    """

    ids: Ids
    leased: Leased[Held]
    search: Search
    loader: Loader
    made: Callable[[Loaded], None]
    fail: Callable[[Exception], None]


@final
class Opening:
    """A hold in the making: leases on all its segments, some of which are not made yet.

    Attributes:
        names: Of its segments, in the order of the request.
        absent: Those of them that nobody makes yet.
        waits: Whether something of it was not there.
        keep: What is computed behind these documents may be known later; not where one of them was removed meanwhile.
    """

    def __init__(self, names: list[str], entered: Entered[Held], absent: list[Absent], ending: ExitStack) -> None:
        self.absent = absent
        self.waits = bool(absent or entered.others)
        self.keep = True
        self.names = names
        self._entered, self._ending = entered, ending
        self._leased = entered.there | entered.others | entered.new

    @property
    def missing(self) -> list[Leased[Held]]:
        """What is not made yet."""
        return [leased for leased in self._leased.values() if not leased.made.done()]

    @property
    def error(self) -> BaseException | None:
        """Why one of them could not be made, if one could not."""
        made = (leased.made for leased in self._leased.values())
        return next((one.exception() for one in made if one.done() and not one.cancelled() and one.exception()), None)

    @property
    def is_lost(self) -> bool:
        """Whether something of it was given up by whoever made it: open it again."""
        return any(leased.made.cancelled() for leased in self._leased.values())

    def hold(self) -> Hold:
        """Return the residents, whose leases are those of the hold from now on. Nothing is missing or has failed."""
        found = {name: leased.made.result() for name, leased in self._entered.new.items()}
        found |= {name: from_device(leased.made.result()) for name, leased in self._entered.there.items()}
        found |= {name: from_another(leased.made.result()) for name, leased in self._entered.others.items()}
        return Hold([found[name] for name in self.names], self._ending.pop_all())

    def release(self) -> None:
        """End the leases; what nobody else waits for is not made. A second time does nothing."""
        self._ending.close()


def from_device(held: Held) -> Held:
    """Return what a request is told that found it resident."""
    return replace(held, source="device", codec=held.codec or RAW, reason="")


def from_another(held: Held) -> Held:
    """Return what a request is told that waited for another one to make it."""
    return replace(held, reason=f"{'encoded' if held.source == 'encoded' else 'loaded'} by another request")
