"""What a server says of what it serves, so that nobody takes answers of other weights or other links for the same.

Knows no engine: a gateway reads it, too.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from blake3 import blake3

HEADER = "x-kvlink-serves"
"""Names the digest that a request is meant for; a server of another one refuses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serves:
    """Two servers whose values are equal give the same answers, and read each other's entries.

    Attributes:
        model: The name by which clients ask for it.
        weights: Digest of the model.
        entries: Digest of what decides the numbers of an entry: weights, sink prefix, RoPE, dtype.
        links: Digest of the bundle; empty without one.
    """

    model: str
    weights: str
    entries: str
    links: str

    @property
    def digest(self) -> str:
        """32 hex digits over all of it."""
        return blake3(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest(length=16)

    def to_json(self) -> dict[str, str]:
        """Return it as `/ready` tells it."""
        return {**asdict(self), "digest": self.digest}

    def other_than(self, wanted: "Serves") -> str:
        """Return in words in what this differs from what is wanted."""
        what = {"model": "name", "weights": "weights", "entries": "sink prefix or dtype", "links": "link bundle"}
        apart = [name for name in what if getattr(self, name) != getattr(wanted, name)]
        named = [name for name in apart if name != "entries" or "weights" not in apart]
        return "; ".join(
            f"another {what[name]}: {_short(getattr(self, name))}, where {_short(getattr(wanted, name))} is served"
            for name in named
        )

    @classmethod
    def read(cls, told: Any) -> "Serves | None":
        """Return what the body of `/ready` tells, or None if it tells nothing of the kind."""
        found = cast("Mapping[str, Any]", told).get("serves") if isinstance(told, Mapping) else None
        if not isinstance(found, Mapping):
            return None
        values = {field.name: cast("Mapping[str, Any]", found).get(field.name) for field in fields(cls)}
        if not all(isinstance(value, str) for value in values.values()):
            return None
        return cls(**cast("dict[str, str]", values))


def _short(value: str) -> str:
    return f"{value[:16]}..." if len(value) > 32 else value or "none"
