"""Objects as files of any place that fsspec reaches: S3, Google Cloud Storage, a shared folder.

They lie as a `DiskStore` lays them, so a folder that was copied there is a store there. Nothing is evicted: that is
left to rules of the place. Needs the package `fsspec`, and what it needs for the protocol.
"""

import errno
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from functools import partial
from secrets import token_hex
from typing import Any, TypeVar, cast, final
from urllib.parse import quote

from kvlink.core.errors import DamagedObject, StoreError, StoreFull, StoreUnusable
from kvlink.store.address import without_secrets
from kvlink.store.base import ObjectStat
from kvlink.store.codec import CODECS, private_memory
from kvlink.store.header import canonical_json
from kvlink.store.place import Fetched
from kvlink.store.remote import LARGEST_BYTES, RemoteStore

try:
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem
except ImportError as missing:
    raise StoreUnusable("a store in files elsewhere needs fsspec: pip install 'kvlink[remote]'") from missing

_SLOWEST = 10e6  # bytes per second
_MOST_HANGING = 8
_OBJECT = re.compile(r"([0-9a-f]{64})\.([a-z0-9]+)\.safetensors")
_WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "memory"})
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_T = TypeVar("_T")


@final
class FsspecStore(RemoteStore):
    """The `remote` tier in files elsewhere. Last uses are not noted: `stat` tells when an object was put.

    Every call has a thread of its own, which is left behind when it hangs, whatever the protocol's client does.
    """

    _failures = (Exception,)  # each client has its own

    def __init__(
        self,
        url: str,
        *,
        secret: bytes | None = None,
        store_key: bytes | None = None,
        options: Mapping[str, Any] | None = None,
        connect_timeout_s: float = 1.0,
        timeout_s: float = 5.0,
        pause_s: float = 30.0,
        largest_bytes: int = LARGEST_BYTES,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Name the place. Nothing is asked before the first call.

        Args:
            url: A folder, as fsspec spells it (`s3://bucket/path`, `file:///mnt/shared/kv`).
            secret: What objects must be signed with; None for unsigned ones.
            store_key: 32 bytes that all objects are sealed with (`store.sealed`); None for clear ones.
            options: What the file system takes (credentials, an endpoint).
            connect_timeout_s: How long connecting may take, where the protocol knows that.
            timeout_s: How long a call may take; a large object gets one second more for every 10 MB.
            pause_s: How long the place is left alone after a failure.
            largest_bytes: No larger object is read.
            clock: Seconds since the epoch, for claims.
            monotonic: Seconds that only go forward.
            sleep: Waits so many seconds.

        Raises:
            StoreUnusable: fsspec does not know the protocol, or lacks a package for it.
        """
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
        given: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True} | dict(options or {})
        if url.startswith(("s3://", "s3a://")):
            bounds = {"connect_timeout": connect_timeout_s, "read_timeout": timeout_s, "retries": {"max_attempts": 0}}
            given["config_kwargs"] = bounds | dict(given.get("config_kwargs", {}))
        try:
            found = url_to_fs(url, **given)
        except (ImportError, ValueError) as error:
            raise StoreUnusable(f"{without_secrets(url)} cannot be a store: {error}") from error
        self._fs: Any = found[0]
        if hasattr(self._fs, "retries"):
            self._fs.retries = 1  # those of this store are enough
        protocols = (self._fs.protocol,) if isinstance(self._fs.protocol, str) else self._fs.protocol
        self._writes_whole = not _WHOLE.isdisjoint(protocols)
        top = str(found[1]).rstrip("/")
        self._top = f"{top}/signed-{self._signature}" if self._signature else top
        self._hanging: list[Future[Any]] = []
        self._creating = threading.Lock()

    def close(self) -> None:
        """See `Store.close`."""
        session, self._fs = getattr(self._fs, "_s3", None), None
        if session is not None:
            with suppress(Exception):
                from fsspec.asyn import get_loop, sync

                sync(get_loop(), session.__aexit__, None, None, None, timeout=1.0)

    def _folder(self, name: str) -> str:
        return f"{self._top}/objects/{name[:2]}/{name[2:4]}"

    def _path(self, name: str, codec: str) -> str:
        return f"{self._folder(name)}/{name}.{codec}.safetensors"

    def _read(self, name: str, codec: str) -> Fetched | None:
        """Return an object, read by one request, so that it is never half an old and half a new one."""
        path = self._path(name, codec)
        try:
            size = int(self._within(partial(self._fs.info, path))["size"])
            if size > self._largest_bytes:
                raise DamagedObject(f"{path} has {size} bytes, more than the largest of {self._largest_bytes}")
            content: bytes = self._within(partial(self._fs.cat_file, path), num_bytes=size)
        except FileNotFoundError:
            return None
        data = private_memory(len(content))
        data[:] = content
        return Fetched(data=data, version=b"", last_use=None)

    def _write(self, name: str, codec: str, data: memoryview) -> None:
        self._within(partial(self._publish, self._path(name, codec), data), num_bytes=data.nbytes)

    def _discard(self, name: str, codec: str, version: bytes) -> None:
        self._remove(name, codec)

    def _remove(self, name: str, codec: str) -> bool:
        path = self._path(name, codec)
        try:
            self._within(partial(self._fs.info, path))  # deleting what is not there is no error on S3
            self._within(partial(self._fs.rm_file, path))
        except FileNotFoundError:
            return False
        return True

    def _remove_all(self, name: str) -> int:
        try:
            found: list[str] = self._within(partial(self._fs.ls, self._folder(name), detail=False))
        except FileNotFoundError:
            return 0
        matches = (_OBJECT.fullmatch(path.rpartition("/")[2]) for path in found)
        return sum(self._remove(name, match[2]) for match in matches if match and match[1] == name)

    def _touch(self, name: str, codec: str, version: bytes, now: float) -> None:
        pass

    def _names(self) -> set[str]:
        found: list[str] = self._within(partial(self._fs.find, f"{self._top}/objects"))
        matches = ((path, _OBJECT.fullmatch(path.rpartition("/")[2])) for path in found)
        return {m[1] for path, m in matches if m and m[2] in CODECS and path == self._path(m[1], m[2])}

    def _look(self, name: str) -> dict[str, ObjectStat]:
        try:
            found: list[dict[str, Any]] = self._within(partial(self._fs.ls, self._folder(name), detail=True))
        except FileNotFoundError:
            return {}
        infos = {str(info["name"]).rpartition("/")[2]: info for info in found}
        stats: dict[str, ObjectStat] = {}
        for codec in CODECS:
            info = infos.get(f"{name}.{codec}.safetensors")
            if info is not None and info["type"] == "file":
                last_use = min(_time_of(info), self._clock())
                stats[codec] = ObjectStat(num_bytes=int(info["size"]), last_use=last_use)
        return stats

    def _load_setting(self, key: str) -> str | None:
        content = self._content(self._setting_path(key))
        if content is not None:
            return content.decode()
        content = self._content(f"{self._top}/settings.json")  # a `DiskStore` was copied here
        with suppress(ValueError):
            match json.loads(content or b"{}"):
                case {"settings": {**kept}} if kept.get(key) is not None:
                    return canonical_json(kept[key])
                case _:
                    pass
        return None

    def _keep_setting(self, key: str, text: str) -> str:
        kept = self._load_setting(key)
        if kept is None:
            self._create(self._setting_path(key), text.encode())
            kept = self._load_setting(key)
        return text if kept is None else kept

    def _claim(self, name: str, token: str, ttl_s: float) -> bool:
        path, content = self._claim_path(name), f"{self._clock() + ttl_s!r} {token}".encode()
        if self._create(path, content):
            return True
        if self._is_claimed(name):
            return False
        with suppress(FileNotFoundError):  # its owner has died
            self._within(partial(self._fs.rm_file, path))
        return self._create(path, content)

    def _is_claimed(self, name: str) -> bool:
        until, _, _ = (self._content(self._claim_path(name)) or b"").partition(b" ")
        try:
            return float(until) > self._clock()
        except ValueError:
            return False

    def _unclaim(self, name: str, token: str) -> None:
        path = self._claim_path(name)
        if (self._content(path) or b"").endswith(token.encode()):
            with suppress(FileNotFoundError):
                self._within(partial(self._fs.rm_file, path))

    def _setting_path(self, key: str) -> str:
        return f"{self._top}/settings/{quote(key, safe='')}.json"

    def _claim_path(self, name: str) -> str:
        return f"{self._top}/claims/{name}"

    def _explain(self, error: Exception) -> StoreError | None:
        code = error.errno if isinstance(error, OSError) else None
        if code in _FULL:
            return StoreFull(f"{self.address} is full: {error}; remove what is old there")
        if isinstance(error, PermissionError) or code in _REFUSED:
            return StoreUnusable(f"{self.address} refuses: {error}; check what this user may do there")
        return None

    def _content(self, path: str) -> bytes | None:
        try:
            return cast("bytes", self._within(partial(self._fs.cat_file, path)))
        except FileNotFoundError:
            return None

    def _create(self, path: str, content: bytes) -> bool:
        """Write a small file unless there is one, and return whether it was written."""
        try:
            with self._creating:
                self._within(partial(self._publish, path, content, replace=False))
        except FileExistsError:
            return False
        return True

    def _publish(self, path: str, data: bytes | memoryview, *, replace: bool = True) -> None:
        """Write a file, whole or not at all. Where that takes two steps, a writer that dies leaves a `.tmp` file."""
        if self._writes_whole:
            self._fs.pipe_file(path, bytes(data), mode="overwrite" if replace else "create")
            return
        temporary = f"{path}.{token_hex(8)}.tmp"
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            with self._fs.open(temporary, "wb") as file:
                file.write(data)
            if replace:
                self._fs.mv(temporary, path)
            elif isinstance(self._fs, LocalFileSystem):
                self._fs.link(temporary, path)
                self._fs.rm_file(temporary)
            elif self._fs.exists(path):
                raise FileExistsError(path)
            else:
                self._fs.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def _within(self, call: Callable[[], _T], *, num_bytes: int = 0) -> _T:
        """Return what a call returns, unless it takes too long.

        Raises:
            TimeoutError: It does, or too many others still do.
        """
        with self._counting:
            self._hanging = [other for other in self._hanging if not other.done()]
            if len(self._hanging) >= _MOST_HANGING:
                raise TimeoutError(f"{len(self._hanging)} calls hang")
        outcome: Future[_T] = Future()

        def run() -> None:
            try:
                outcome.set_result(call())
            except BaseException as error:  # raised where the call was made
                outcome.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        limit_s = self._timeout_s + num_bytes / _SLOWEST
        try:
            return outcome.result(limit_s)
        except TimeoutError as error:
            if outcome.done():
                raise
            with self._counting:
                self._hanging.append(outcome)
            raise TimeoutError(f"no answer within {limit_s:.1f} s") from error


def _time_of(info: Mapping[str, Any]) -> float:
    """Return when a file was written (seconds since the epoch), 0 where nothing says so."""
    when = next((info[key] for key in _TIMES if info.get(key) is not None), 0.0)
    try:
        when = datetime.fromisoformat(when) if isinstance(when, str) else when
        return when.timestamp() if isinstance(when, datetime) else float(when)
    except (TypeError, ValueError):
        return 0.0
