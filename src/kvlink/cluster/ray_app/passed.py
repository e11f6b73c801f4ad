"""What an ingress passes to a replica: a request that was read once, and what routing has to know of it."""

from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from blake3 import blake3

from kvlink.cluster.asked import Asked, Lengths

Message = dict[str, Any]
"""Of ASGI, as a replica's application sends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """One request.

    Attributes:
        headers: Names in lower case.
        documents: Short names and tokens, in the request's order.
        session: Name of its conversation; None if it has none.
        token: The same for all attempts at it.
    """

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    documents: tuple[tuple[str, int], ...] = ()
    session: str | None = None
    token: str = field(default_factory=lambda: uuid4().hex)


def weighed(asked: Asked, lengths: Lengths) -> tuple[tuple[str, int], ...]:
    """Return a request's documents by names so short that thousands of them can be reported every second."""
    return tuple(
        (blake3(name.encode("utf-8", "surrogatepass")).hexdigest(length=8), many)
        for name, many in lengths.weighed(asked)
    )
