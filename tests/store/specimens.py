"""Small entries and objects to put into stores."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvlink.core.entry import CacheEntry
from kvlink.core.fingerprint import Identity, fingerprint
from kvlink.store import Seal, Store, TieredStore, encode

MakeStore = Callable[..., Store]

IDENTITY = Identity(model="a1" * 32, rope="b2" * 32, sink_ids=(1, 7), dtype="float32")

STORE_KEY = bytes(range(32))


def entry(seed: int = 0, *, tokens: int = 5, dtype: torch.dtype = torch.float32) -> CacheEntry:
    """Return an entry of 2 layers and 2 heads whose values are wider than its keys."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, 2, tokens, 3, generator=generator).to(dtype)
    values = torch.randn(2, 2, tokens, 4, generator=generator).to(dtype)
    return CacheEntry(keys, values, tuple(range(seed, seed + tokens)))


@dataclass(frozen=True, slots=True)
class Specimen:
    """An object as a store takes it."""

    entry: CacheEntry
    name: str
    data: memoryview
    codec: str = "raw"


def specimen(seed: int = 0, *, tokens: int = 5, secret: bytes | None = None, **identity: object) -> Specimen:
    """Return an object. Equal arguments give equal bytes, other seeds other names of the same length."""
    made = entry(1000 + seed, tokens=tokens)
    whose = replace(IDENTITY, **identity)
    return Specimen(made, fingerprint(whose, made.token_ids), encode(made, whose, secret=secret))


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def put(store: Store, *objects: Specimen) -> None:
    """Put copies, so that no store shares memory with another; every tier has them afterwards."""
    for one in objects:
        store.put(one.name, one.codec, bytearray(one.data))
    if isinstance(store, TieredStore):
        store.flush()


def lying_bytes(store: Store, *objects: Specimen) -> int:
    """Return what objects take where they lie: more than their own bytes in a store that seals them."""
    if isinstance(store, TieredStore):
        store = store._keeping[0].store
    seal = getattr(store, "_seal", Seal(None))
    return sum(memoryview(seal.wrap(one.data, name=one.name, codec=one.codec)).nbytes for one in objects)
