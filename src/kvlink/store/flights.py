"""Of many who look for the same at the same time, one searches, and all get what it finds. Knows no tiers.

A search is void once its name is being deleted: who asked before gets what was found, and nothing of it is kept.
"""

import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, final

from kvlink.store.base import Lease

Key: TypeAlias = tuple[str, tuple[str, ...]]
"""What is looked for: a name, and the codecs that are accepted, best first."""


@dataclass(slots=True, eq=False)
class Flight:
    """One search that serves all who asked for the same while it lasted.

    Attributes:
        is_void: The name was deleted meanwhile: nothing of it may be promoted any more.
        passengers: Leases that share what was found.
    """

    is_void: bool
    passengers: int = 0
    landed: "Future[Lease | None]" = field(default_factory=Future)


@final
class Flights:
    """The searches of one store, and the names that are being deleted. Every method may be called from any thread.

    Args:
        search: Looks for a key. It may ask its flight whether it is void.
    """

    def __init__(self, search: Callable[[Key, Flight], Lease | None]) -> None:
        self._search = search
        self._lock = threading.Lock()
        self._flights: dict[Key, Flight] = {}
        self._deleting: Counter[str] = Counter()

    def take(self, name: str, accept: Sequence[str]) -> Lease | None:
        """Return what the search that is going on finds, or begin one. Whatever it raises, all get."""
        key = (name, tuple(accept))
        with self._lock:
            flight = self._flights.get(key)
            leads = flight is None
            if flight is None:
                flight = self._flights[key] = Flight(is_void=name in self._deleting)
            flight.passengers += 1
        if leads:
            self._fly(key, flight)
        lease = flight.landed.result()
        if lease is None:
            return None
        ending = ExitStack()
        ending.callback(self._leave, flight, lease)
        return Lease(object=lease.object, source=lease.source, ending=ending)

    def alone(self, name: str) -> Flight:
        """Return a flight that nobody else boards, for what was found elsewhere."""
        with self._lock:
            return Flight(is_void=name in self._deleting)

    @contextmanager
    def deleting(self, name: str) -> Generator[None]:
        """Void the searches for a name, and those that begin while the block lasts."""
        with self._lock:
            self._deleting[name] += 1
            for (flying, _), flight in self._flights.items():
                flight.is_void |= flying == name
        try:
            yield
        finally:
            with self._lock:
                self._deleting[name] -= 1
                self._deleting += Counter()  # drops those that are zero

    @contextmanager
    def before_deletion(self, name: str) -> Generator[bool]:
        """Let no deletion begin while the block lasts; yields False where one of this name has begun already."""
        with self._lock:
            yield name not in self._deleting

    def _fly(self, key: Key, flight: Flight) -> None:
        """Search, and tell everybody who waits."""
        try:
            lease = self._search(key, flight)
        except BaseException as error:
            with self._lock:
                del self._flights[key]
            flight.landed.set_exception(error)
            return
        with self._lock:
            del self._flights[key]
        flight.landed.set_result(lease)

    def _leave(self, flight: Flight, lease: Lease) -> None:
        """End one of the leases that share what a flight found; with the last, the tier's own ends."""
        with self._lock:
            flight.passengers -= 1
            is_last = not flight.passengers
        if is_last:
            lease.release()
