"""Who may ask: API keys, kept as digests, and addresses that are not served without one."""

import hashlib
import hmac
from collections.abc import Iterable
from ipaddress import ip_address

from kvlink.core.errors import InputError
from kvlink.server.refusals import Refused

OPEN = frozenset({"/health", "/ready"})
"""Paths that need no key: a supervisor has none."""


class Keys:
    """The keys that are taken; without any, everybody may ask."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        """Keep the digests of the keys.

        Raises:
            InputError: A key is blank, or none that a header can carry.
        """
        self._digests: list[bytes] = []
        for key in keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise InputError("an API key is blank, or holds a space or what is not ASCII: choose another")
            self._digests.append(_digest(key))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, header: str | None) -> None:
        """Let a request pass by its `Authorization` header.

        Raises:
            Refused: 401; the header is absent or names no key that is taken.
        """
        if not self._digests:
            return
        kind, _, key = (header or "").partition(" ")
        if kind.lower() != "bearer" or not key:
            raise Refused(401, "this server needs an API key: Authorization: Bearer KEY", code="missing_api_key")
        digest = _digest(key.strip())
        if sum(hmac.compare_digest(digest, known) for known in self._digests) == 0:  # all, so that time tells nothing
            raise Refused(401, "the API key is wrong", code="invalid_api_key")


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


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
