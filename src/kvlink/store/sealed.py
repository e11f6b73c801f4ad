"""Encryption at rest: what lies on a disk or in a remote is a short clear envelope and the encrypted object.

A store seals what it writes and opens what it reads; everybody else, the host's memory included, sees clear objects.
AES-256-GCM, with a key of its own for each (fingerprint, codec), so that random nonces do not run out. Knows no places.
Needs the package `cryptography`.
"""

import base64
import json
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from blake3 import blake3

from kvlink.core.errors import DamagedObject, StoreUnusable
from kvlink.store.codec import BytesLike, private_memory
from kvlink.store.header import canonical_json

MAGIC = b"KVSEALED"
"""How a sealed object begins. Read as the length of a safetensors header it is beyond any bound."""

SEAL_FORMAT = 1
"""Version of the envelope and of the encryption."""

SEAL = "seal"
"""The setting of a store that says with which key it was begun."""

KEY_BYTES = 32
"""AES-256."""

_LENGTH_BYTES = 2
_NONCE_BYTES = 12
_TAG_BYTES = 16
_LARGEST_BYTES = 2**31 - 1 - _TAG_BYTES
_FIELDS = {"cipher": "AES-256-GCM", "format": SEAL_FORMAT}
_CONTEXT = "kvlink 2025-11-30 key of a sealed object"
_CONTEXT_OF_ID = "kvlink 2025-11-30 id of a store's key"
_HOW = "32 bytes in hex or base64, as `openssl rand -hex 32` makes them"
_HEX = re.compile(r"[0-9a-fA-F]{64}")


@final
class Seal:
    """Wraps and unwraps objects with one key; without one it lets clear objects pass, and none that is sealed.

    Attributes:
        key_id: What tells the key from others without giving it away; empty for none.
    """

    def __init__(self, store_key: bytes | None) -> None:
        """Take the key.

        Raises:
            ValueError: It has another length.
            StoreUnusable: There is one, and the package `cryptography` is not installed.
        """
        self.key_id = ""
        self._key = store_key
        if store_key is not None:
            if len(store_key) != KEY_BYTES:
                raise ValueError(f"a store's key has {KEY_BYTES} bytes, not {len(store_key)}; give {_HOW}")
            self.key_id = blake3(store_key, derive_key_context=_CONTEXT_OF_ID).hexdigest()[:16]
            self._cipher(name="", codec="")

    def wrap(self, data: BytesLike, *, name: str, codec: str) -> BytesLike:
        """Return the object as it is to lie in the store: sealed in fresh memory, or `data` itself without a key.

        Raises:
            StoreUnusable: It is longer than the cipher takes.
        """
        if self._key is None:
            return data
        clear = memoryview(data).cast("B")
        if clear.nbytes > _LARGEST_BYTES:
            raise StoreUnusable(
                f"object {name}.{codec} has {clear.nbytes} bytes, and at most {_LARGEST_BYTES} can be sealed; split "
                f"the document"
            )
        nonce = secrets.token_bytes(_NONCE_BYTES)
        envelope = self._envelope(name, codec, nonce)
        sealed = private_memory(len(envelope) + clear.nbytes + _TAG_BYTES)
        sealed[: len(envelope)] = envelope
        self._cipher(name, codec).encrypt_into(nonce, clear, envelope, sealed[len(envelope) :])
        return sealed

    def unwrap(self, data: memoryview, *, name: str, codec: str) -> memoryview:
        """Return the object that was sealed, in fresh memory, or `data` itself where no key is needed.

        Raises:
            DamagedObject: It was not sealed with this key under this name and codec, or has changed since.
            StoreUnusable: It is sealed, and there is no key.
        """
        found = sealed_with(data)
        if self._key is None:
            if found is None:
                return data
            raise StoreUnusable(
                f"object {name}.{codec} is sealed with the key {found}, and the store was opened without one; pass it "
                f"(KVLINK_STORE_KEY or KVLINK_STORE_KEY_FILE on the command line)"
            )
        if found != self.key_id:
            what = "not sealed" if found is None else f"sealed with the key {found} and not with {self.key_id}"
            raise _damaged(name, codec, f"it is {what}")
        start = len(MAGIC) + _LENGTH_BYTES + int.from_bytes(data[len(MAGIC) : len(MAGIC) + _LENGTH_BYTES], "little")
        envelope = bytes(data[:start])
        nonce = bytes.fromhex(json.loads(envelope[len(MAGIC) + _LENGTH_BYTES :])["nonce"])
        is_whole = len(nonce) == _NONCE_BYTES and data.nbytes >= start + _TAG_BYTES
        if envelope != self._envelope(name, codec, nonce) or not is_whole:
            raise _damaged(name, codec, "its envelope is that of another object, or is cut off")
        from cryptography.exceptions import InvalidTag

        clear = private_memory(data.nbytes - start - _TAG_BYTES)
        try:
            self._cipher(name, codec).decrypt_into(nonce, data[start:], envelope, clear)
        except InvalidTag as error:
            raise _damaged(name, codec, "what is sealed has changed") from error
        return clear

    def key_id_in(self, data: BytesLike | None) -> str:
        """Return the id of the key that a place was begun with, judged by any object there; None is an empty place."""
        return self.key_id if data is None else sealed_with(data) or ""

    def check_place(self, place: object, begun_with: object) -> None:
        """Refuse a place that was begun with another key.

        Args:
            place: What to call it in a message.
            begun_with: Its setting `SEAL`, the id of that key; empty or None if its objects are clear.

        Raises:
            StoreUnusable: It was.
        """
        begun = begun_with or ""
        if begun != self.key_id:
            what = f"sealed with the key {begun}" if begun else "not sealed"
            how = f"with the key {self.key_id}" if self.key_id else "without a key"
            raise StoreUnusable(
                f"the objects in {place} are {what}, and it was opened {how}; pass what the store was begun with "
                f"(KVLINK_STORE_KEY or KVLINK_STORE_KEY_FILE on the command line), or choose another place"
            )

    def _envelope(self, name: str, codec: str, nonce: bytes) -> bytes:
        fields = {"codec": codec, "key": self.key_id, "name": name, "nonce": nonce.hex()}
        text = canonical_json(_FIELDS | fields).encode()
        return MAGIC + len(text).to_bytes(_LENGTH_BYTES, "little") + text

    def _cipher(self, name: str, codec: str) -> Any:
        """Return the cipher of one object. Its key is derived by BLAKE3 from the store's key, name and codec."""
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as missing:
            raise StoreUnusable(
                "a sealed store needs the package cryptography: pip install 'kvlink[encryption]'"
            ) from missing
        material = (self._key or b"") + f"{name}.{codec}".encode()
        return AESGCM(blake3(material, derive_key_context=_CONTEXT).digest())


def sealed_with(data: BytesLike) -> str | None:
    """Return the id of the key that an object says it is sealed with, or None if it is not sealed. Proves nothing."""
    view = memoryview(data)
    start = len(MAGIC) + _LENGTH_BYTES
    if bytes(view[: len(MAGIC)]) != MAGIC:
        return None
    try:
        length = int.from_bytes(view[len(MAGIC) : start], "little")
        fields: Any = json.loads(bytes(view[start : start + length]).decode("ascii"))
        bytes.fromhex(fields["nonce"])
        return str(fields["key"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return "unknown"


def store_key(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the key that seals a store: from KVLINK_STORE_KEY, or the file that KVLINK_STORE_KEY_FILE names.

    Returns None where neither is set. One that is set and empty is no key, and is refused.

    Raises:
        StoreUnusable: Both are set, it is no key, or others than the owner may read the file.
    """
    text, file = environ.get("KVLINK_STORE_KEY"), environ.get("KVLINK_STORE_KEY_FILE")
    if text is not None and file is not None:
        raise StoreUnusable("KVLINK_STORE_KEY and KVLINK_STORE_KEY_FILE are both set; unset one of them")
    if file is not None:
        return _key_of(_private_text(Path(file)), f"the content of {file} (KVLINK_STORE_KEY_FILE)")
    return None if text is None else _key_of(text, "KVLINK_STORE_KEY")


def _private_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise StoreUnusable(
                    f"{path} (KVLINK_STORE_KEY_FILE) has mode {stat.S_IMODE(mode):04o}, so that others than its owner "
                    f"can get at the key; chmod 600 {path}"
                )
            return file.read(4096).decode("ascii", errors="replace")
    except OSError as error:
        raise StoreUnusable(f"cannot read {path} (KVLINK_STORE_KEY_FILE): {error.strerror or error}") from error


def _key_of(text: str, where: str) -> bytes:
    """Return the key that is spelled in `text`. No message holds any of it."""
    text = text.strip()
    if _HEX.fullmatch(text):
        return bytes.fromhex(text)
    try:
        key = base64.b64decode(text, altchars=b"-_" if set(text) & set("-_") else None, validate=True)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise StoreUnusable(f"{where} is no key: it has {len(text)} characters, and must be {_HOW}")
    return key


def _damaged(name: str, codec: str, what: str) -> DamagedObject:
    return DamagedObject(f"object {name}.{codec} cannot be opened: {what}; it must be encoded again")
