"""Objects in Redis or Valkey. An object is one hash, its bytes in fields, so that the server evicts it whole.

An object is written under a temporary name that expires, and renamed when it is whole. All names of one object lie in
one slot of a cluster. Needs the package `redis`.
"""

import re
import time
from collections.abc import Callable, Mapping
from secrets import token_hex
from typing import Any, cast, final

from kvlink.core.errors import DamagedObject, StoreError, StoreFull, StoreUnusable
from kvlink.store.base import ObjectStat
from kvlink.store.codec import CODECS, private_memory
from kvlink.store.place import Fetched
from kvlink.store.remote import LARGEST_BYTES, LAYOUT, RemoteStore

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.exceptions import OutOfMemoryError
    from redis.retry import Retry
except ImportError as missing:
    raise StoreUnusable("a store in Redis needs the package redis: pip install 'kvlink[redis]'") from missing

PART_BYTES = 8 * 2**20
"""An object is written and read in parts of so many bytes. A server takes no value above 512 MB."""

_PARTS_AT_ONCE = 4
_UNFINISHED_S = 600
_GENERATION, _BYTES, _LAST_USE = b"generation", b"bytes", b"last_use"
_NAME = re.compile(rb"\{([0-9a-f]{64})\}\.([a-z0-9]+)")

_PUBLISH = """
if redis.call('HLEN', KEYS[1]) ~= tonumber(ARGV[1]) then redis.call('UNLINK', KEYS[1]) return 0 end
redis.call('RENAME', KEYS[1], KEYS[2])
redis.call('PERSIST', KEYS[2])
return 1
"""
_DISCARD = """
local is_hash = redis.call('TYPE', KEYS[1]).ok == 'hash'
if is_hash and (redis.call('HGET', KEYS[1], 'generation') or '') ~= ARGV[1] then return 0 end
return redis.call('UNLINK', KEYS[1])
"""
_TOUCH = """
if redis.call('HGET', KEYS[1], 'generation') == ARGV[1] then redis.call('HSET', KEYS[1], 'last_use', ARGV[2]) end
"""
_UNCLAIM = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('UNLINK', KEYS[1]) end
"""


@final
class RedisStore(RemoteStore):
    """The `remote` tier in a Redis or Valkey server, from version 6 on.

    Its `maxmemory` is the budget. Let it evict (`maxmemory-policy allkeys-lru`): a server that does not raises
    StoreFull once it is full.
    """

    _failures = (redis.RedisError, OSError)

    def __init__(
        self,
        url: str,
        *,
        secret: bytes | None = None,
        store_key: bytes | None = None,
        prefix: str = "kvlink",
        part_bytes: int = PART_BYTES,
        connect_timeout_s: float = 1.0,
        timeout_s: float = 2.0,
        pause_s: float = 30.0,
        largest_bytes: int = LARGEST_BYTES,
        options: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Name the server. Nothing is asked before the first call.

        Args:
            url: `redis://`, `rediss://` (with TLS) or `unix://`; user, password and database stand in it.
            secret: What objects must be signed with; None for unsigned ones.
            store_key: 32 bytes that all objects are sealed with (`store.sealed`); None for clear ones.
            prefix: How all names in the server begin.
            part_bytes: Objects are written in parts of so many bytes.
            connect_timeout_s: How long connecting may take.
            timeout_s: How long the server may be silent within an answer.
            pause_s: How long the server is left alone after a failure.
            largest_bytes: No larger object is read.
            options: What `redis.Redis` takes besides.
            clock: Seconds since the epoch, for last uses.
            monotonic: Seconds that only go forward.
            sleep: Waits so many seconds.

        Raises:
            ValueError: The URL is none of a Redis, or `part_bytes` is out of range.
        """
        if not 0 < part_bytes < 512 * 2**20:
            raise ValueError(f"a part has at least 1 and less than {512 * 2**20} bytes, not {part_bytes}")
        super().__init__(
            url,
            secret=secret,
            store_key=store_key,
            timeout_s=timeout_s,
            pause_s=pause_s,
            largest_bytes=largest_bytes,
            clock=clock,
            monotonic=monotonic,
            sleep=sleep,
        )
        self._part_bytes = part_bytes
        self._begin = f"{prefix}:{LAYOUT}:{self._signature or 'unsigned'}:"
        # The client's own retries would come on top of those of this store.
        bounds = {
            "socket_connect_timeout": connect_timeout_s,
            "socket_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 0),
        }
        self._client: Any = redis.Redis.from_url(url, **(bounds | dict(options or {})))

    def close(self) -> None:
        """See `Store.close`."""
        self._client.close()

    def _key(self, name: str, codec: str) -> str:
        return f"{self._begin}{{{name}}}.{codec}"

    def _read(self, name: str, codec: str) -> Fetched | None:
        """Return an object, read in parts of one generation. A part that has vanished makes it a miss."""
        key = self._key(name, codec)
        generation, size, last_use, *parts = self._fields(key, _GENERATION, _BYTES, _LAST_USE, b"0")
        if generation is None and size is None and parts == [None]:
            return None
        data = private_memory(self._size(key, size))
        filled = number = 0
        found = generation
        while True:
            for part in parts:
                if part is None or found != generation:  # deleted by hand, or evicted or overwritten meanwhile
                    self._discard(name, codec, generation or b"")
                    return None
                if not part or filled + len(part) > data.nbytes:
                    raise self._damaged(key, f"its part {number} has {len(part)} bytes")
                data[filled : filled + len(part)] = part
                filled, number = filled + len(part), number + 1
                if filled == data.nbytes:
                    return Fetched(data=data, version=generation or b"", last_use=_number(last_use))
            wanted = min(_PARTS_AT_ONCE, -(-(data.nbytes - filled) // len(parts[0] or b"1")))
            found, *parts = self._fields(key, _GENERATION, *(b"%d" % (number + i) for i in range(wanted)))

    def _write(self, name: str, codec: str, data: memoryview) -> None:
        key, generation = self._key(name, codec), token_hex(16)
        temporary = f"{key}.{generation}"
        head = {_GENERATION: generation, _BYTES: data.nbytes, _LAST_USE: repr(self._clock())}
        starts = range(0, data.nbytes, self._part_bytes)
        try:
            for number, start in enumerate(starts):
                with self._client.pipeline(transaction=True) as both:  # so that no part outlives a dead writer
                    both.hset(temporary, mapping={number: data[start : start + self._part_bytes]} | head)
                    both.expire(temporary, _UNFINISHED_S)
                    both.execute()
                head = {}
            whole = self._client.eval(_PUBLISH, 2, temporary, key, len(starts) + 3)
        except redis.ResponseError:
            self._client.unlink(temporary)
            raise
        if not whole:
            raise StoreFull(
                f"{self.address} evicted {name}.{codec} ({data.nbytes} bytes) while it was written; raise its maxmemory"
            )

    def _discard(self, name: str, codec: str, version: bytes) -> None:
        self._client.eval(_DISCARD, 1, self._key(name, codec), version)

    def _remove(self, name: str, codec: str) -> bool:
        return bool(self._client.unlink(self._key(name, codec)))

    def _remove_all(self, name: str) -> int:
        """Remove every codec. Codecs are in no list that could be lost, so all names of the server are looked at."""
        begin = self._begin.encode()
        found = self._client.scan_iter(match=f"{_literal(self._begin)}{{{name}}}.*", count=1000)
        keys = [key for key in set(found) if _NAME.fullmatch(key.removeprefix(begin))]
        return int(self._client.unlink(*keys)) if keys else 0

    def _touch(self, name: str, codec: str, version: bytes, now: float) -> None:
        self._client.eval(_TOUCH, 1, self._key(name, codec), version, repr(now))

    def _names(self) -> set[str]:
        begin = self._begin.encode()
        found = self._client.scan_iter(match=_literal(self._begin) + "{*", count=1000)
        matches = (_NAME.fullmatch(key.removeprefix(begin)) for key in found)
        return {match[1].decode() for match in matches if match and match[2].decode() in CODECS}

    def _look(self, name: str) -> dict[str, ObjectStat]:
        with self._client.pipeline(transaction=False) as questions:
            for codec in CODECS:
                questions.hmget(self._key(name, codec), _BYTES, _LAST_USE)
            answers = questions.execute(raise_on_error=False)  # what is no hash is no object
        now = self._clock()
        return {
            codec: ObjectStat(num_bytes=int(_number(answer[0]) or 0), last_use=min(_number(answer[1]) or 0.0, now))
            for codec, answer in zip(CODECS, answers, strict=True)
            if isinstance(answer, list) and answer[0] is not None
        }

    def _load_setting(self, key: str) -> str | None:
        text = self._client.hget(f"{self._begin}settings", key.encode())
        return None if text is None else text.decode()

    def _keep_setting(self, key: str, text: str) -> str:
        settings = f"{self._begin}settings"
        self._client.hsetnx(settings, key.encode(), text)
        kept = self._client.hget(settings, key.encode())
        return text if kept is None else kept.decode()

    def _claim(self, name: str, token: str, ttl_s: float) -> bool:
        return bool(self._client.set(self._claim_key(name), token, nx=True, px=max(1, round(ttl_s * 1000))))

    def _is_claimed(self, name: str) -> bool:
        return bool(self._client.exists(self._claim_key(name)))

    def _unclaim(self, name: str, token: str) -> None:
        self._client.eval(_UNCLAIM, 1, self._claim_key(name), token)

    def _claim_key(self, name: str) -> str:
        return f"{self._begin}{{{name}}}:claim"

    def _explain(self, error: Exception) -> StoreError | None:
        if isinstance(error, OutOfMemoryError):
            return StoreFull(
                f"{self.address} is full: {error}; raise its maxmemory, or let it evict (maxmemory-policy allkeys-lru)"
            )
        if isinstance(error, redis.ResponseError):
            return StoreUnusable(f"{self.address} refuses: {error}; check what this user may do there")
        return None

    def _fields(self, key: str, *fields: bytes) -> list[bytes | None]:
        try:
            return cast("list[bytes | None]", self._client.hmget(key, *fields))
        except redis.ResponseError as error:
            if str(error).startswith("WRONGTYPE"):
                raise self._damaged(key, "it is no hash") from error
            raise

    def _size(self, key: str, size: bytes | None) -> int:
        if size is None or not size.isdigit() or not 0 < int(size) <= self._largest_bytes:
            raise self._damaged(key, f"it claims {size!r} of at most {self._largest_bytes} bytes")
        return int(size)

    def _damaged(self, key: str, what: str) -> DamagedObject:
        return DamagedObject(f"{key} in {self.address} is no object: {what}; it must be encoded again")


def _number(text: bytes | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _literal(text: str) -> str:
    """Return a pattern of the server that matches just this text."""
    return re.sub(r"([*?\[\]\\^])", r"\\\1", text)
