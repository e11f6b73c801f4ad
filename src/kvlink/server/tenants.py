"""Tenants: who a key stands for, which documents that tenant sees, and how much it may ask and keep.

What a tenant brings is named by its own scope, so that nobody else's lookup can ever find it. The server alone says who
is who: no field of a request does.
"""

import hashlib
import hmac
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from kvlink.core.errors import InputError
from kvlink.core.fingerprint import SHARED

_FIELDS = {"tenant", "sha256", "shared", "quota_mb", "requests_per_minute"}


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks.

    Attributes:
        scope: Of the entries of its documents; zeros are shared: the operator's own.
        sees_shared: Whether it may ask about shared documents, too.
        quota_bytes: What keys and values of its library documents may take; None for any.
        requests_per_minute: None for any.
    """

    name: str
    scope: bytes
    sees_shared: bool = True
    quota_bytes: int | None = None
    requests_per_minute: float | None = None

    @property
    def is_operator(self) -> bool:
        """Whether it is whoever runs the server: its documents are the shared ones."""
        return self.scope == SHARED


OPERATOR = Tenant("operator", SHARED)
"""Who asks without a key where none is needed, or with one that names no tenant."""


def scope_of(secret: bytes, tenant: str) -> bytes:
    """Return the 16 bytes that name a tenant's entries."""
    return hmac.digest(secret, b"tenant:" + tenant.encode(), "sha256")[: len(SHARED)]


def granted(rows: Any, *, secret: bytes | None) -> dict[bytes, Tenant]:
    """Return the tenants of a settings file by the SHA-256 of their keys.

    Args:
        rows: `[[keys]]`: each with `tenant` and `sha256`, perhaps `shared`, `quota_mb` and `requests_per_minute`.
        secret: Names the scopes.

    Raises:
        InputError: A row is not of that form, two have one key, two of one tenant differ, or there is no secret.
    """
    found: dict[bytes, Tenant] = {}
    known: dict[str, Tenant] = {}
    if rows and not secret:
        raise InputError(
            "tenants need a secret that names their entries: set KVLINK_SECRET, and keep it as long as the store"
        )
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
        tenant, digest = _tenant(row, number, secret or b"")
        if known.setdefault(tenant.name, tenant) != tenant:
            raise InputError(
                f"[[keys]] number {number}: {tenant.name} has other limits in an earlier row; make them equal"
            )
        if digest in found:
            raise InputError(f"[[keys]] number {number}: an earlier row has the same key")
        found[digest] = tenant
    return found


def _tenant(row: Any, number: int, secret: bytes) -> tuple[Tenant, bytes]:
    where = f"[[keys]] number {number}"
    if not isinstance(row, Mapping) or not {"tenant", "sha256"} <= row.keys() <= _FIELDS:
        raise InputError(f"{where} needs tenant and sha256, and may have shared, quota_mb, requests_per_minute")
    name, digest, shared = row["tenant"], row["sha256"], row.get("shared", True)
    if not isinstance(name, str) or not name.isprintable() or not name.strip():
        raise InputError(f"{where}: a tenant is named by some printable characters")
    if not isinstance(digest, str) or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise InputError(f"{where}: sha256 is the digest of a key, 64 hex digits: kvlink key {name} makes both")
    if not isinstance(shared, bool):
        raise InputError(f"{where}: shared is true or false")
    for field in ("quota_mb", "requests_per_minute"):
        value = row.get(field)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise InputError(f"{where}: {field} is a number above 0")
    quota, pace = row.get("quota_mb"), row.get("requests_per_minute")
    tenant = Tenant(
        name,
        scope_of(secret, name),
        shared,
        quota_bytes=None if quota is None else int(quota * 1e6),
        requests_per_minute=None if pace is None else float(pace),
    )
    return tenant, bytes.fromhex(digest)


def digest_of(key: str) -> bytes:
    """Return what is kept of a key. Keys are long and random, so one round is enough."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@final
class Pace:
    """Lets each tenant ask so many times a minute, some at once; every method may be called from any thread."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._left: dict[str, tuple[float, float]] = {}

    def wait_s(self, tenant: Tenant) -> float:
        """Count a request and return 0, or count none and return after how many seconds one is let in."""
        if tenant.requests_per_minute is None:
            return 0.0
        rate, most = tenant.requests_per_minute / 60, max(1.0, tenant.requests_per_minute / 6)
        with self._lock:
            now = self._clock()
            left, at = self._left.get(tenant.name, (most, now))
            left = min(most, left + (now - at) * rate)
            if left < 1:
                self._left[tenant.name] = left, now
                return (1 - left) / rate
            self._left[tenant.name] = left - 1, now
            return 0.0
