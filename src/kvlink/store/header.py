"""What a file says of itself. Each header has exactly one canonical spelling, and so does the head of its file.

A reader parses leniently, spells out what it has understood, and demands the very bytes that it has read: a second
spelling, a stray tensor, a gap or a wrong shape cannot hide. Knows no codec: it is told which tensors there are.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from blake3 import blake3

from kvlink.core.fingerprint import Identity

MAX_HEADER_BYTES = 16 * 2**20
"""A header is read before anything about it is known; this bounds what is read."""

LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, little-endian."""

UNSIGNED = "0" * 64
"""Stands for the digest while it is not known; as long as any."""

_ALIGNMENT = 8
_THREADED_BYTES = 2**20
_CONTEXT = "kvlink 2025-11-29 digest of stored objects"
_CONTEXT_OF_SIGNATURE = "kvlink 2025-11-29 signature of a store"
_TAGS = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _TAGS if dtype.is_floating_point}


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of an entry along its axes, each at least one."""

    layers: int
    kv_heads: int
    tokens: int
    head_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        if min(asdict(self).values()) < 1:
            raise ValueError(f"every axis of an entry has at least one element, but this one is {self}")


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """What one tensor of a file looks like."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What stands in the metadata of a file under `kvlink`.

    Attributes:
        name: Fingerprint of the entry.
        provenance: Facts that do not decide the numbers.
        digest: BLAKE3 over the header without it, and the payload (hex).
    """

    format: int
    name: str
    codec: str
    identity: Identity
    geometry: Geometry
    token_ids: tuple[int, ...]
    provenance: dict[str, str]
    digest: str = UNSIGNED

    @classmethod
    def parse(cls, head: bytes) -> "Header":
        """Read the header out of the head of a file. Lenient: whoever calls compares `head()` with what was read.

        Raises:
            ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError: It makes no sense.
        """
        outer: Any = json.loads(head[LENGTH_BYTES:].decode("ascii"))
        raw: Any = json.loads(outer["__metadata__"]["kvlink"])
        return cls(
            format=int(raw["format"]),
            name=str(raw["fingerprint"]),
            codec=str(raw["codec"]),
            identity=Identity(
                model=str(raw["model"]),
                rope=str(raw["rope"]),
                sink_ids=tuple(map(int, raw["sink_ids"])),
                dtype=str(raw["dtype"]),
                scope=bytes.fromhex(raw["scope"]),
            ),
            geometry=Geometry(**{axis: int(size) for axis, size in raw["geometry"].items()}),
            token_ids=tuple(map(int, raw["token_ids"])),
            provenance={key: str(value) for key, value in raw["provenance"].items()},
            digest=bytes.fromhex(raw["digest"]).hex(),
        )

    @property
    def dtype(self) -> torch.dtype:
        """The entry's dtype.

        Raises:
            ValueError: It is none that a file can hold.
        """
        if self.identity.dtype not in _DTYPES:
            raise ValueError(f"{self.identity.dtype!r} is none of the dtypes {', '.join(_DTYPES)}")
        return _DTYPES[self.identity.dtype]

    def text(self, *, signed: bool = True) -> str:
        """Return the canonical spelling; unsigned it is what the digest runs over."""
        fields: dict[str, object] = {
            "format": self.format,
            "fingerprint": self.name,
            "codec": self.codec,
            "model": self.identity.model,
            "rope": self.identity.rope,
            "sink_ids": self.identity.sink_ids,
            "dtype": self.identity.dtype,
            "scope": self.identity.scope.hex(),
            "geometry": asdict(self.geometry),
            "token_ids": self.token_ids,
            "provenance": self.provenance,
        }
        return canonical_json(fields | {"digest": self.digest} if signed else fields)

    def head(self, plans: Mapping[str, TensorPlan]) -> bytes:
        """Return everything before the payload, padded so that the payload is aligned for every dtype.

        Args:
            plans: The tensors of the file, in the order of their bytes.
        """
        fields: dict[str, object] = {"__metadata__": {"kvlink": self.text()}}
        start = 0
        for name, plan in plans.items():
            stop = start + plan.num_bytes
            fields[name] = {"dtype": _TAGS[plan.dtype], "shape": plan.shape, "data_offsets": (start, stop)}
            start = stop
        text = canonical_json(fields).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(LENGTH_BYTES, "little") + text

    def digest_of(self, payload: memoryview, secret: bytes | None) -> str:
        """Return BLAKE3 over this header without its digest, and the payload; keyed if there is a secret."""
        threads = blake3.AUTO if payload.nbytes >= _THREADED_BYTES else 1
        unsigned = self.text(signed=False).encode()
        if secret is None:
            hasher = blake3(unsigned, max_threads=threads)
        else:
            key = blake3(secret, derive_key_context=_CONTEXT).digest()
            hasher = blake3(unsigned, key=key, max_threads=threads)
        return hasher.update(payload).hexdigest()


def signature_of(secret: bytes | None) -> str:
    """Return what tells a secret from others without giving it away; empty for none."""
    return "" if secret is None else blake3(secret, derive_key_context=_CONTEXT_OF_SIGNATURE).hexdigest()[:16]


def canonical_json(value: object) -> str:
    """Return the one spelling of a JSON value: sorted keys, no spaces, ASCII, no NaN.

    Raises:
        TypeError, ValueError: It is not a JSON value.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
