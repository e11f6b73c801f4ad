"""From what a caller named to a store: a folder, a URL, a ready store, or several of them as tiers."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from kvlink.core.errors import InputError
from kvlink.store.address import is_address
from kvlink.store.base import Store
from kvlink.store.disk import DiskStore
from kvlink.store.memory import MemoryStore
from kvlink.store.remote import RemoteStore
from kvlink.store.tiered import TieredStore

Named: TypeAlias = str | Path | Store
StoreLike: TypeAlias = Named | Sequence[Named] | None
"""What names a store: a folder, a URL, a ready store, several of these, or None for memory of this process."""


def host_bytes() -> int:
    """Return the budget of a store in memory where nobody says: a tenth of the machine's."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 10


def open_store(named: StoreLike, *, secret: bytes | None = None, store_key: bytes | None = None) -> Store:
    """Return a store for what a caller named.

    Args:
        named: A folder; a URL; a ready store; None for a tenth of the memory. Several of these, fastest first, become
            tiers, below a host tier of a tenth of the memory unless the first is in memory itself.
        secret: What objects must be signed with; None for unsigned ones.
        store_key: 32 bytes that objects are sealed with on disks and in remotes; None for clear ones.

    Raises:
        InputError: The list is empty.
        StoreUnusable: A place cannot be used as a store.
    """
    match named:
        case None:
            return MemoryStore(budget_bytes=host_bytes(), secret=secret)
        case Store():
            return named
        case str() | Path():
            return _open(named, secret, store_key)
        case _:
            opened = [one if isinstance(one, Store) else _open(one, secret, store_key) for one in named]
    if not opened:
        raise InputError("store=[] names no place; name a folder or a URL, or pass None for a store in memory")
    host = [] if opened[0].source == "host" else [MemoryStore(budget_bytes=host_bytes(), secret=secret)]
    return TieredStore(*host, *opened)


def open_remote(
    url: str,
    *,
    secret: bytes | None = None,
    store_key: bytes | None = None,
    options: Mapping[str, Any] | None = None,
) -> RemoteStore:
    """Return the store at a URL: `redis://`, `rediss://` and `unix://` are a Redis, all else is up to fsspec.

    Args:
        url: Where it is.
        secret: What objects must be signed with; None for unsigned ones.
        store_key: 32 bytes that objects are sealed with; None for clear ones.
        options: What the client of the protocol takes besides (credentials, an endpoint).

    Raises:
        StoreUnusable: The package for this protocol is not installed.
    """
    if urlsplit(url).scheme in ("redis", "rediss", "unix"):
        from kvlink.store.redis import RedisStore

        return RedisStore(url, secret=secret, store_key=store_key, options=options)
    from kvlink.store.objects import FsspecStore

    return FsspecStore(url, secret=secret, store_key=store_key, options=options)


def _open(named: str | Path, secret: bytes | None, store_key: bytes | None) -> Store:
    if isinstance(named, str) and is_address(named):
        return open_remote(named, secret=secret, store_key=store_key)
    return DiskStore(named, secret=secret, store_key=store_key)
