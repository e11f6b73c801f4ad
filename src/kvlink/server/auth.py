"""Who may ask: API keys, kept as digests, and addresses that are not served without one."""

import hmac
from collections.abc import Iterable, Mapping
from ipaddress import ip_address

from kvlink.core.errors import InputError
from kvlink.server.refusals import Refused
from kvlink.server.tenants import OPERATOR, Tenant, digest_of

OPEN = frozenset({"/health", "/ready", "/dashboard"})
"""Paths that need no key: a supervisor has none, and the page holds nothing."""


class Keys:
    """The keys that are taken; without any, everybody may ask.

    Args:
        keys: Of the operator.
        tenants: Further ones by the SHA-256 of their keys.

    Raises:
        InputError: A key is blank, or none that a header can carry.
    """

    def __init__(self, keys: Iterable[str] = (), tenants: Mapping[bytes, Tenant] | None = None) -> None:
        self._tenants = dict(tenants or {})
        for key in keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise InputError("an API key is blank, or holds a space or what is not ASCII: choose another")
            self._tenants[digest_of(key)] = OPERATOR

    def __bool__(self) -> bool:
        return bool(self._tenants)

    @property
    def tenants(self) -> list[Tenant]:
        """All who may ask, each once."""
        return list(dict.fromkeys(self._tenants.values() if self._tenants else [OPERATOR]))

    def check(self, header: str | None) -> Tenant:
        """Let a request pass by its `Authorization` header; return who asks.

        Raises:
            Refused: 401; the header is absent or names no key that is taken.
        """
        if not self._tenants:
            return OPERATOR
        kind, _, key = (header or "").partition(" ")
        if kind.lower() != "bearer" or not key:
            raise Refused(401, "this server needs an API key: Authorization: Bearer KEY", code="missing_api_key")
        digest = digest_of(key.strip())
        found = [who for known, who in self._tenants.items() if hmac.compare_digest(digest, known)]
        if not found:  # all were compared, so that time tells nothing
            raise Refused(401, "the API key is wrong", code="invalid_api_key")
        return found[0]


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(host: str, keys: Keys, *, insecure: bool) -> None:
    """Refuse to serve other machines without a key.

    Raises:
        InputError: The address is not loopback, there is no key, and `insecure` does not say that this is meant.
    """
    if not (is_loopback(host) or keys or insecure):
        raise InputError(
            f"{host} can be reached by other machines, and there is no API key: pass --api-key or KVLINK_API_KEY, "
            "serve on 127.0.0.1, or say --insecure if everybody may ask"
        )
