"""Names that cannot lie: a fingerprint holds everything that decides an entry's numbers, and nothing else.

Not in it: paths, hosts, devices, memory, the tokenizer and its template (the ids decide), codecs, link tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

FORMAT = 1
"""Version of the fingerprint and of the objects that it names."""

SHARED = bytes(16)
"""The scope of entries that every tenant may use."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What decides the numbers of an entry, besides its own token ids.

    Attributes:
        model: Digest of the weights and of every numeric field of the configuration (hex).
        rope: Digest of the rotary tables' regime: frequencies and scaling (hex).
        sink_ids: Ids that stand before each document while it is encoded.
        dtype: Compute dtype at encode, as torch names it (`float32`).
        scope: 16 bytes; zeros are shared, all else belongs to one tenant.
    """

    model: str
    rope: str
    sink_ids: tuple[int, ...]
    dtype: str
    scope: bytes = SHARED

    def __post_init__(self) -> None:
        if len(self.scope) != len(SHARED):
            raise ValueError(f"a scope has {len(SHARED)} bytes, this one has {len(self.scope)}")


def fingerprint(identity: Identity, token_ids: Iterable[int]) -> str:
    """Return the name of the entry: BLAKE3 (64 hex digits) over a canonical, tagged encoding.

    Each field is preceded by its tag and its length, so that no two different inputs give the same bytes.
    """
    hasher = blake3()
    for tag, field in (
        ("format", str(FORMAT).encode()),
        ("model", identity.model.encode()),
        ("rope", identity.rope.encode()),
        ("sink", ids_bytes(identity.sink_ids)),
        ("dtype", identity.dtype.encode()),
        ("scope", identity.scope),
        ("ids", ids_bytes(token_ids)),
    ):
        hasher.update(f"{tag}:{len(field)}:".encode())
        hasher.update(field)
    return hasher.hexdigest()


def ids_bytes(token_ids: Iterable[int]) -> bytes:
    """Return token ids as little-endian int64, the canonical form in names and digests."""
    return np.fromiter(token_ids, dtype="<i8").tobytes()


def is_fingerprint(name: str) -> bool:
    """Whether `name` has the form of a fingerprint. Guards paths: nothing else may become part of one."""
    return len(name) == 64 and all(c in "0123456789abcdef" for c in name)
