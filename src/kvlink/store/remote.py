"""A store behind a network: each call is bounded in time, and nothing that comes back is trusted before it is verified.

Knows no protocol: a subclass speaks one, and answers the calls of a `Place`. The budget and the evictions are those of
the server.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from secrets import token_hex
from typing import TypeVar, final

from kvlink.core.errors import DamagedObject, StoreError, StoreUnusable
from kvlink.store.address import without_secrets
from kvlink.store.base import JSON, Lease, ObjectStat, Store, check_names
from kvlink.store.breaker import Breaker
from kvlink.store.claim import Claim
from kvlink.store.codec import BytesLike, StoredObject, check_head, open_object
from kvlink.store.header import canonical_json, signature_of
from kvlink.store.place import Fetched, Place
from kvlink.store.remote_stats import RemoteStats
from kvlink.store.sealed import SEAL, Seal

LAYOUT = 1
"""Version of how objects lie in a remote. It is part of every name there, so versions cannot meet."""

LARGEST_BYTES = 4 * 2**30
"""No larger object is read: what a server claims must not decide how much memory is taken."""

_TOUCH_S = 60.0
_POLL_S = 0.05
_T = TypeVar("_T")


class RemoteStore(Store, Place):
    """The `remote` tier. Whoever cannot reach it goes on without: `get` is then a miss, and counted as an error.

    `put`, `delete`, `names`, `stat` and settings raise StoreUnusable instead, at once while the breaker is open.
    An object that does not verify is removed. Stores with another secret do not see each other's objects; a place whose
    objects are sealed with another key refuses every call.
    """

    source = "remote"

    def __init__(
        self,
        address: str,
        *,
        secret: bytes | None,
        store_key: bytes | None,
        timeout_s: float,
        pause_s: float,
        largest_bytes: int,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        """Name the place. Nothing is asked before the first call, so a place that is down can be opened.

        Args:
            address: A URL; what is secret in it stays out of messages.
            secret: What objects must be signed with; None for unsigned ones.
            store_key: 32 bytes that all objects are sealed with (`store.sealed`); None for clear ones.
            timeout_s: How long an answer may take. Only a call that failed in less than half of it is made again.
            pause_s: How long the place is left alone after a failure.
            largest_bytes: No larger object is read.
            clock: Seconds since the epoch.
            monotonic: Seconds that only go forward.
            sleep: Waits so many seconds.
        """
        self.address = without_secrets(address)
        self._signature = signature_of(secret)
        self._secret = secret
        self._seal = Seal(store_key)
        self._is_admitted = self._has_begun = False
        self._timeout_s = timeout_s
        self._largest_bytes = largest_bytes
        self._clock = clock
        self._monotonic = monotonic
        self._sleep = sleep
        self._breaker = Breaker(pause_s=pause_s, clock=monotonic)
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()

    @final
    def get(self, name: str, accept: Sequence[str]) -> Lease | None:
        """See `Store.get`. A place that does not answer is a miss. The bytes are in private memory."""
        check_names(name, accept)
        with suppress(StoreError):
            there = tuple(accept)
            if len(there) > 1:  # one question about all codecs instead of one about each
                kept = self._ask("look at", partial(self._look, name))
                there = tuple(codec for codec in accept if codec in kept)
            for codec in there:
                found = self._open(name, codec)
                if found is not None:
                    self._count("hits")
                    return Lease(object=found, source=self.source)
        self._count("misses")
        return None

    @final
    def put(self, name: str, codec: str, data: BytesLike) -> None:
        """See `Store.put`. What raises is not kept, and counted.

        Raises:
            StoreUnusable: The place does not answer, or refuses.
            StoreFull: The place is full and evicts nothing.
        """
        check_names(name, (codec,))
        check_head(data, name=name, codec=codec)
        try:
            wrapped = memoryview(self._seal.wrap(data, name=name, codec=codec)).cast("B")
            self._ask("write to", partial(self._write_sealed, name, codec, wrapped))
        except StoreError:
            self._count("not_kept")
            raise
        self._count("puts")

    @final
    def delete(self, name: str, codec: str | None = None) -> int:
        """See `Store.delete`.

        Raises:
            StoreUnusable: The place does not answer, so that the object may still be there.
        """
        check_names(name, () if codec is None else (codec,))
        if codec is None:
            return self._ask("delete from", partial(self._remove_all, name))
        return int(self._ask("delete from", partial(self._remove, name, codec)))

    @final
    def names(self) -> set[str]:
        """See `Store.names`."""
        return self._ask("list", self._names)

    @final
    def stat(self, name: str) -> dict[str, ObjectStat]:
        """See `Store.stat`."""
        check_names(name)
        return self._ask("look at", partial(self._look, name))

    @final
    def stats(self) -> RemoteStats:
        """See `Store.stats`. Asks nobody."""
        with self._counting:
            return RemoteStats(
                hits=self._counts["hits"],
                misses=self._counts["misses"],
                puts=self._counts["puts"],
                evictions=0,
                quarantined=self._counts["quarantined"],
                used_bytes=0,
                budget_bytes=0,
                errors=self._counts["errors"],
                retries=self._counts["retries"],
                passed_over=self._counts["passed_over"],
                not_kept=self._counts["not_kept"],
                is_open=self._breaker.is_open,
                reason=self._breaker.reason,
            )

    @final
    def setting(self, key: str) -> JSON:
        """See `Store.setting`."""
        return json.loads(self._ask("read a setting of", partial(self._load_setting, key)) or "null")

    @final
    def keep_setting(self, key: str, value: JSON) -> JSON:
        """See `Store.keep_setting`."""
        if value is None:
            raise ValueError(f"setting {key!r} needs a value; None says that there is none")
        return json.loads(self._ask("keep a setting in", partial(self._keep_setting, key, canonical_json(value))))

    @final
    def claim(self, name: str, *, ttl_s: float) -> Claim | None:
        """Take the task of encoding `name`, or return None where another machine has it: then `wait`.

        Whoever cannot ask gets the claim, too: work that is done twice is better than none.

        Args:
            name: Fingerprint of the entry.
            ttl_s: After so many seconds the claim ends by itself, should its owner have died.
        """
        check_names(name)
        token, ending = token_hex(16), ExitStack()
        try:
            if not self._ask("claim in", partial(self._claim, name, token, ttl_s)):
                return None
            ending.callback(self._give_up, name, token)
        except StoreError:
            pass
        return Claim(name=name, ending=ending)

    @final
    def wait(self, name: str, accept: Sequence[str], *, at_most_s: float) -> bool:
        """Wait until an accepted object of `name` is there, and return whether it is; if not, encode it yourself.

        It ends early when nobody has a claim, or when the place does not answer.
        """
        check_names(name, accept)
        until = self._monotonic() + at_most_s
        while True:
            try:
                is_claimed = self._ask("look at", partial(self._is_claimed, name))
                if not self.stat(name).keys().isdisjoint(accept):
                    return True
            except StoreError:
                return False
            left_s = until - self._monotonic()
            if not is_claimed or left_s <= 0:
                return False
            self._sleep(min(_POLL_S, left_s))

    def __enter__(self) -> "RemoteStore":
        return self

    def _open(self, name: str, codec: str) -> StoredObject | None:
        """Read, verify and touch an object; one that does not verify is removed."""
        fetched: Fetched | None = None
        try:
            fetched = self._ask("read from", partial(self._read, name, codec))
            if fetched is None:
                return None
            clear = self._unwrap(fetched.data, name, codec)
            found = open_object(clear, name=name, codec=codec, secret=self._secret)
        except DamagedObject:
            self._count("quarantined")
            discard = partial(self._discard, name, codec, fetched.version) if fetched else None
            with suppress(StoreError):  # what cannot be removed is a miss again
                self._ask("remove from", discard or partial(self._remove, name, codec))
            return None
        now = self._clock()
        if fetched.last_use is not None and not 0 <= now - fetched.last_use < _TOUCH_S:
            with suppress(StoreError):  # who may only read leaves no trace
                self._ask("note a use in", partial(self._touch, name, codec, fetched.version, now))
        return found

    def _ask(self, what: str, call: Callable[[], _T]) -> _T:
        """Make a call, a second time if the first failed early, unless the breaker is open.

        Raises:
            StoreError: The place does not answer, or refuses. Only the former opens the breaker.
        """
        breaker = self._breaker
        if not breaker.admit():
            self._count("passed_over")
            raise StoreUnusable(
                f"cannot {what} {self.address}: it is left alone for up to {breaker.pause_s:g} s since it failed "
                f"({breaker.reason}); until then entries are encoded anew"
            )
        start, is_first = self._monotonic(), True
        while True:
            try:
                self._admit()
                result = call()
            except StoreError:
                breaker.succeeded()
                raise
            except self._failures as error:
                refusal = self._explain(error)
                if refusal is not None:
                    breaker.succeeded()
                    self._count("errors")
                    raise refusal from error
                if is_first and self._monotonic() - start < self._timeout_s / 2:
                    is_first = False
                    self._count("retries")
                    continue
                breaker.failed(f"{type(error).__name__}: {error}")
                self._count("errors")
                raise StoreUnusable(
                    f"cannot {what} {self.address}: {breaker.reason}; check that it runs and can be reached from here"
                ) from error
            breaker.succeeded()
            return result

    def _admit(self) -> None:
        """Find out once whether the objects are sealed with this store's key, or clear where it has none.

        Raises:
            StoreUnusable: They are not.
        """
        if not self._is_admitted:
            kept = self._load_setting(SEAL)
            if kept is None and self._seal.key_id:  # nobody has written, or a server has evicted the setting
                begun_with = self._seal.key_id_in(self._any_object())
            else:
                begun_with = json.loads(kept or "null")
            self._check_place(begun_with)
            self._is_admitted = True

    def _any_object(self) -> memoryview | None:
        """Return some object as it lies there, or None where there is none."""
        for name in self._names():
            for codec in self._look(name):
                with suppress(DamagedObject):
                    fetched = self._read(name, codec)
                    if fetched is not None:
                        return fetched.data
        return None

    def _write_sealed(self, name: str, codec: str, data: memoryview) -> None:
        """Write an object, where it is sealed not before the place says so to all who come."""
        if self._seal.key_id and not self._has_begun:
            self._check_place(json.loads(self._keep_setting(SEAL, canonical_json(self._seal.key_id))))
            self._has_begun = True
        self._write(name, codec, data)

    def _check_place(self, begun_with: object) -> None:
        with self._noted():
            self._seal.check_place(self.address, begun_with)

    def _unwrap(self, data: memoryview, name: str, codec: str) -> memoryview:
        with self._noted():
            return self._seal.unwrap(data, name=name, codec=codec)

    @contextmanager
    def _noted(self) -> Generator[None]:
        """Count a refusal, and keep its reason for `stats`."""
        try:
            yield
        except StoreUnusable as refusal:
            self._count("errors")
            self._breaker.reason = str(refusal)
            raise

    def _give_up(self, name: str, token: str) -> None:
        with suppress(StoreError):  # it ends by itself
            self._ask("end a claim in", partial(self._unclaim, name, token))

    def _count(self, what: str) -> None:
        with self._counting:
            self._counts[what] += 1
