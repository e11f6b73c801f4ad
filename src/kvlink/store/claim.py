"""Who encodes: of many that find one document absent, one has the claim. Knows no place."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, final


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Claim:
    """The task of encoding one document, taken before others: a context manager. It ends by itself after a while."""

    name: str
    ending: ExitStack = field(default_factory=ExitStack, repr=False)

    def release(self) -> None:
        """Give the claim up. A second time does nothing."""
        self.ending.close()

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()
