"""An entry as bytes that prove themselves: one safetensors file whose header names, describes and signs its content.

Whatever is opened has been verified in full, and is a view of the very bytes that were verified. Knows no files.
"""

import hmac
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from kvlink.core.entry import CacheEntry
from kvlink.core.errors import DamagedObject
from kvlink.core.fingerprint import FORMAT, Identity, fingerprint
from kvlink.store.codecs import CODECS, RAW, codec_named
from kvlink.store.codecs.base import geometry_of, private_memory
from kvlink.store.header import LENGTH_BYTES, MAX_HEADER_BYTES, Geometry, Header, TensorPlan

__all__ = [
    "CODECS",
    "RAW",
    "BytesLike",
    "StoredObject",
    "check_head",
    "codec_named",
    "encode",
    "open_object",
    "private_memory",
]

BytesLike: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredObject:
    """An object whose bytes have been verified. Its tensors are views of those bytes and must not be written to.

    Attributes:
        name: Fingerprint of the entry.
        dtype: That of the entry.
        provenance: Facts that do not decide the numbers (tokenizer, template, host).
        num_bytes: Bytes of the whole file.
        data: The whole file, as it was verified; what another store is given.
        tensors: The codec's own tensors.
    """

    name: str
    codec: str
    identity: Identity
    dtype: torch.dtype
    geometry: Geometry
    token_ids: tuple[int, ...]
    provenance: Mapping[str, str]
    num_bytes: int
    data: memoryview = field(repr=False)
    tensors: Mapping[str, Tensor] = field(repr=False)

    def decode(self) -> CacheEntry:
        """Return the entry, in its own dtype; with `raw` its tensors are views of the object's bytes."""
        return codec_named(self.codec).unpack(
            self.tensors, geometry=self.geometry, dtype=self.dtype, token_ids=self.token_ids
        )


def encode(
    entry: CacheEntry,
    identity: Identity,
    *,
    codec: str = "raw",
    provenance: Mapping[str, str] = MappingProxyType({}),
    secret: bytes | None = None,
) -> memoryview:
    """Return the entry as a file: fresh, writable memory that belongs to the caller. One copy, from any device.

    Args:
        entry: Keys, values and ids; on any device, with any strides.
        identity: What decided the entry's numbers; with the entry's ids it gives the object's name.
        codec: One of `CODECS`.
        provenance: Facts for a human; signed, but no part of the name.
        secret: Signs the digest, so that only its owners can make objects that verify.

    Raises:
        ValueError: The entry is empty, its tensors are not of `identity.dtype`, that dtype or the codec is unknown,
            the codec has no place for what the entry holds (`raw` holds anything), or the header would be longer
            than `MAX_HEADER_BYTES`.
    """
    for tensor in (entry.keys, entry.values):
        if str(tensor.dtype) != f"torch.{identity.dtype}":
            raise ValueError(f"the identity says {identity.dtype}, but the entry holds {tensor.dtype}")
    header = Header(
        format=FORMAT,
        name=fingerprint(identity, entry.token_ids),
        codec=codec,
        identity=identity,
        geometry=geometry_of(entry),
        token_ids=entry.token_ids,
        provenance={str(key): str(value) for key, value in provenance.items()},
    )
    plans = _plans(header)
    start = len(header.head(plans))
    if start > MAX_HEADER_BYTES:
        raise ValueError(f"a header has at most {MAX_HEADER_BYTES} bytes, this one has {start}; split the document")
    data = private_memory(start + sum(plan.num_bytes for plan in plans.values()))
    views = _views(data, start, plans)
    for name, tensor in codec_named(codec).pack(entry).items():
        views[name].copy_(tensor)
    data[:start] = replace(header, digest=header.digest_of(data[start:], secret)).head(plans)
    return data


def open_object(data: bytearray | memoryview, *, name: str, codec: str, secret: bytes | None = None) -> StoredObject:
    """Verify everything about an object and return it. Copies no payload: the tensors are views of `data`.

    Args:
        data: The whole file in private, writable memory that nobody changes afterwards.
        name: The fingerprint that was asked for.
        codec: The codec that was asked for.
        secret: What the object must be signed with; None for unsigned objects.

    Raises:
        DamagedObject: The bytes are not the object that was asked for, bit for bit.
        ValueError: `data` is read-only (torch knows no read-only tensors), or there is no such codec.
    """
    view = _flat(data)
    if view.readonly:
        raise ValueError("an object is opened in private, writable memory; copy these bytes into a bytearray")
    header, start = _read_head(view, name, codec)
    # The digest that was found stays out of the message: keyed, it would let a reader of logs sign a forgery.
    if not hmac.compare_digest(header.digest_of(view[start:], secret), header.digest):
        raise _damaged(name, codec, f"its digest is not {header.digest}: changed, or signed with another secret")
    tensors = _views(view, start, _plans(header))
    try:
        codec_named(codec).check(tensors, header.geometry)
    except ValueError as error:
        raise _damaged(name, codec, str(error)) from error
    return StoredObject(
        name=name,
        codec=codec,
        identity=header.identity,
        dtype=header.dtype,
        geometry=header.geometry,
        token_ids=header.token_ids,
        provenance=MappingProxyType(header.provenance),
        num_bytes=view.nbytes,
        data=view,
        tensors=MappingProxyType(tensors),
    )


def check_head(data: BytesLike, *, name: str, codec: str) -> None:
    """Verify everything but the digest. Costs no pass over the payload.

    Raises:
        DamagedObject: The header is not that of (name, codec), or does not describe these bytes.
        ValueError: There is no such codec.
    """
    _read_head(_flat(data), name, codec)


def _read_head(view: memoryview, name: str, codec: str) -> tuple[Header, int]:
    """Return the header of (name, codec) and where its payload begins, all of it checked but the digest."""
    codec_named(codec)
    length = int.from_bytes(view[:LENGTH_BYTES], "little")
    start = LENGTH_BYTES + length
    if start > min(view.nbytes, MAX_HEADER_BYTES):
        raise _damaged(name, codec, f"its header claims {length} of {view.nbytes} bytes")
    head = bytes(view[:start])
    try:
        header = Header.parse(head)
        if (header.format, header.name, header.codec) != (FORMAT, name, codec):
            found = f"format {header.format}, {header.name}.{header.codec}"
            raise _damaged(name, codec, f"its header says {found} and not format {FORMAT}, {name}.{codec}")
        if fingerprint(header.identity, header.token_ids) != name:
            raise _damaged(name, codec, "its identity and token ids give another fingerprint")
        plans = _plans(header)
        canonical = header.head(plans)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise _damaged(name, codec, f"its header cannot be read ({type(error).__name__}: {error})") from error
    if head != canonical or header.geometry.tokens != len(header.token_ids):
        raise _damaged(name, codec, "its header is not the canonical one for what it describes")
    expected = start + sum(plan.num_bytes for plan in plans.values())
    if view.nbytes != expected:
        raise _damaged(name, codec, f"it has {view.nbytes} bytes where its header describes {expected}")
    return header, start


def _plans(header: Header) -> dict[str, TensorPlan]:
    return codec_named(header.codec).plan(header.geometry, header.dtype)


def _damaged(name: str, codec: str, what: str) -> DamagedObject:
    return DamagedObject(f"object {name}.{codec} does not verify: {what}; it must be encoded again")


def _flat(data: BytesLike) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else view  # an empty view cannot be cast


def _views(data: memoryview, start: int, plans: Mapping[str, TensorPlan]) -> dict[str, Tensor]:
    """Return the planned tensors as views of `data`, from byte `start` on."""
    views: dict[str, Tensor] = {}
    for name, plan in plans.items():
        flat = torch.frombuffer(data, dtype=plan.dtype, count=math.prod(plan.shape), offset=start)
        views[name] = flat.view(plan.shape)
        start += plan.num_bytes
    return views
