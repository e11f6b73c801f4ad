"""A place behind a network: the few calls that a protocol has to answer. Knows no bounds, retries or trust."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from kvlink.core.errors import StoreError
from kvlink.store.base import ObjectStat


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fetched:
    """An object as it came over the network, in private memory.

    Attributes:
        data: The whole file, not verified.
        version: Tells it from what is put under the same name later; empty where a place knows no versions.
        last_use: Seconds since the epoch, or None where a place notes no uses.
    """

    data: memoryview
    version: bytes
    last_use: float | None


class Place(ABC):
    """What a `RemoteStore` asks of its protocol. A call that fails raises one of `_failures`, or a StoreError."""

    _failures: tuple[type[Exception], ...]
    """What the client of this protocol raises."""

    @abstractmethod
    def _read(self, name: str, codec: str) -> Fetched | None:
        """Return an object, or None; DamagedObject if it cannot be one."""

    @abstractmethod
    def _write(self, name: str, codec: str, data: memoryview) -> None:
        """Write an object; it appears whole or not at all."""

    @abstractmethod
    def _discard(self, name: str, codec: str, version: bytes) -> None:
        """Remove an object unless it is another version by now."""

    @abstractmethod
    def _remove(self, name: str, codec: str) -> bool:
        """Remove an object and return whether it was there."""

    @abstractmethod
    def _remove_all(self, name: str) -> int:
        """Remove a name in every codec, also those that only another version knows; return how many there were."""

    @abstractmethod
    def _touch(self, name: str, codec: str, version: bytes, now: float) -> None:
        """Note a use."""

    @abstractmethod
    def _names(self) -> set[str]:
        """Return the names of all objects."""

    @abstractmethod
    def _look(self, name: str) -> dict[str, ObjectStat]:
        """Return what is there of a name, by codec, without reading it."""

    @abstractmethod
    def _load_setting(self, key: str) -> str | None:
        """Return the JSON text of a setting."""

    @abstractmethod
    def _keep_setting(self, key: str, text: str) -> str:
        """Keep a JSON text unless there is one, and return the kept one."""

    @abstractmethod
    def _claim(self, name: str, token: str, ttl_s: float) -> bool:
        """Take a claim unless somebody has it."""

    @abstractmethod
    def _is_claimed(self, name: str) -> bool:
        """Whether somebody has a claim."""

    @abstractmethod
    def _unclaim(self, name: str, token: str) -> None:
        """End a claim if it is that of `token`."""

    @abstractmethod
    def _explain(self, error: Exception) -> StoreError | None:
        """Return a refusal as an error of the store, or None where the place has not answered."""
