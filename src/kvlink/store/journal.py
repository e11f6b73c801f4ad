"""The journal: what libraries on several machines share. One text per key, numbered in the order of changes, in Redis.

A change is acknowledged when the server has it, and whoever asks for the head afterwards learns of it. Numbers decide
what is newer, no clock does. Knows no documents: texts are bytes. Needs the package `redis`.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Any, TypeVar, final

from kvlink.core.errors import StoreUnusable
from kvlink.store.address import without_secrets
from kvlink.store.breaker import Breaker
from kvlink.store.sealed import Seal

LAYOUT = 1
"""Version of how it lies in the server; part of every name there."""

PORTION = 100
"""Changes that are read at once."""

_CODEC = "text"
# A full server refuses a script at its first write, unless that one frees memory.
_APPEND = """
if redis.call('HSTRLEN', KEYS[2], ARGV[1]) >= #ARGV[2] then
  redis.call('HDEL', KEYS[2], ARGV[1])
end
local number = redis.call('HINCRBY', KEYS[1], 'number', 1)
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[3], number, ARGV[1])
return number
"""
_ADD = f"""
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then
  return false
end
{_APPEND}"""
_SINCE = """
local rows = {}
for _, key in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. ARGV[1], '+inf', 'LIMIT', 0, ARGV[2])) do
  table.insert(rows, {key, redis.call('ZSCORE', KEYS[3], key), redis.call('HGET', KEYS[2], key)})
end
return rows
"""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Head:
    """Where a journal is.

    Attributes:
        epoch: Another one after the server has lost everything.
        number: Of the latest change; 0 before the first.
    """

    epoch: str
    number: int


@dataclass(frozen=True, slots=True)
class Change:
    """The latest change of one key: what it is now."""

    number: int
    key: str
    text: bytes


@final
class Journal:
    """The texts under one prefix of a Redis or Valkey server. Every method may be called from any thread.

    The server must not evict, and should write each change to its disk (`appendonly yes`, `appendfsync always`).
    """

    def __init__(
        self,
        url: str,
        *,
        store_key: bytes | None = None,
        prefix: str = "kvlink",
        timeout_s: float = 2.0,
        pause_s: float = 1.0,
    ) -> None:
        """Name the server. Nothing is asked before the first call.

        Args:
            url: `redis://`, `rediss://` or `unix://`.
            store_key: 32 bytes that texts are sealed with (`store.sealed`); None for clear ones.
            timeout_s: How long an answer may take, twice where the connection broke.
            pause_s: How long the server is left alone after a failure.

        Raises:
            StoreUnusable: It is no URL of a Redis, or the package `redis` is not installed.
        """
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as missing:
            raise StoreUnusable("a journal needs the package redis: pip install 'kvlink[redis]'") from missing
        self.address = without_secrets(url)
        self._refusal, self._failures = redis.ResponseError, (redis.RedisError, OSError)
        self._seal, self._breaker, self._is_checked = Seal(store_key), Breaker(pause_s=pause_s), False
        names = ("head", "texts", "order")
        self._keys = [f"{prefix}:{{journal}}:{LAYOUT}:{name}" for name in names]
        try:
            self._client: Any = redis.Redis.from_url(
                url,
                socket_connect_timeout=timeout_s,
                socket_timeout=timeout_s,
                retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
            )
        except ValueError as error:
            raise StoreUnusable(f"{self.address} is no journal: name one like redis://host:6379/1") from error

    def head(self) -> Head:
        """Return where it is; an empty one begins its first epoch.

        Raises:
            StoreUnusable: The server does not answer, or evicts.
        """
        return self._ask(self._head)

    def append(self, key: str, text: bytes) -> int:
        """Make a text the current one of a key; acknowledged once this returns. Return the change's number.

        A server that is full takes it all the same where it is no longer than what it replaces.

        Args:
            key: 64 hex digits.

        Raises:
            StoreUnusable: The server does not answer, refuses, or evicts. The change may have been made.
        """
        return int(self._change(_APPEND, key, text))

    def add(self, key: str, text: bytes) -> int | None:
        """Do what `append` does, unless the key was ever heard of: then nothing changes, and there is no number.

        Raises:
            StoreUnusable: As for `append`.
        """
        number = self._change(_ADD, key, text)
        return None if number is None else int(number)

    def since(self, number: int) -> Generator[Change]:
        """Yield the changes behind a number in their order, of each key the latest.

        Raises:
            StoreUnusable: The server does not answer, or holds what this store key does not open.
            DamagedObject: A text was changed by somebody who has no key.
        """
        while True:
            rows = self._ask(partial(self._client.eval, _SINCE, 3, *self._keys, number, PORTION))
            for key, score, sealed in rows:
                number, name = int(float(score)), key.decode()
                yield Change(number, name, bytes(self._seal.unwrap(memoryview(sealed), name=name, codec=_CODEC)))
            if len(rows) < PORTION:
                return

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _head(self) -> Head:
        epoch, number = self._client.hmget(self._keys[0], "epoch", "number")
        if epoch is None:
            self._client.hsetnx(self._keys[0], "epoch", token_hex(8))
            epoch, number = self._client.hmget(self._keys[0], "epoch", "number")
        return Head(epoch.decode(), int(number or 0))

    def _change(self, script: str, key: str, text: bytes) -> Any:
        sealed = bytes(self._seal.wrap(text, name=key, codec=_CODEC))
        return self._ask(lambda: self._client.eval(script, 3, *self._keys, key, sealed))

    def _ask(self, call: Callable[[], _T]) -> _T:
        breaker = self._breaker
        if not breaker.admit():
            raise StoreUnusable(f"the journal in {self.address} did not answer a moment ago: {breaker.reason}")
        try:
            self._check()
            found = call()
        except self._refusal as error:
            breaker.succeeded()
            raise StoreUnusable(f"the journal in {self.address} refuses: {error}") from error
        except self._failures as error:
            breaker.failed(f"{type(error).__name__}: {error}")
            raise StoreUnusable(f"the journal in {self.address} does not answer: {error}") from error
        breaker.succeeded()
        return found

    def _check(self) -> None:
        """Refuse a server that would forget texts when it is full.

        Raises:
            StoreUnusable: It evicts.
        """
        if not self._is_checked:
            about = self._client.info("memory")
            policy = str(about.get("maxmemory_policy", ""))
            if about.get("maxmemory") and policy.startswith("allkeys"):
                raise StoreUnusable(
                    f"{self.address} evicts ({policy}), and would lose texts: let the journal have a server of its own "
                    "with maxmemory-policy noeviction"
                )
            self._is_checked = True
