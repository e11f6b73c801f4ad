"""Objects as files. There is no index: the folder is the truth, and other processes may change it at any time.

An object's last use is the mtime of its file, so it survives restarts. Knows no models and no network.
"""

import os
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from kvlink.core.errors import DamagedObject, StoreError
from kvlink.store.base import JSON, BoundedStore, Lease, ObjectStat, StoreStats, check_names, check_step, recoded
from kvlink.store.codec import CODECS, BytesLike, StoredObject, check_head, open_object
from kvlink.store.folder import Folder, explained, matching, mtime, num_bytes, read_whole
from kvlink.store.header import signature_of
from kvlink.store.room import Kind, Room
from kvlink.store.sealed import Seal

_TOUCH_S = 60.0
_OBJECT = re.compile(r"([0-9a-f]{64})\.([a-z0-9]+)\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What verifying one file found.

    Attributes:
        name, codec: Which object it is; None where the file's name or place is not that of any.
        error: What is wrong with it, or None.
    """

    path: Path
    name: str | None
    codec: str | None
    num_bytes: int
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """What a collection removed, and the bytes of all of it."""

    num_litter: int
    num_quarantined: int
    num_evicted: int
    num_folders: int
    freed_bytes: int


@final
class DiskStore(BoundedStore):
    """The `disk` tier: `objects/ab/cd/<name>.<codec>.safetensors` below one folder.

    The budget counts every file there. What other processes write is noticed within half a minute, so for that long
    they can take the folder over it; while an object is overwritten or recompressed, its old bytes are not counted.
    """

    source = "disk"

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        budget_bytes: int = 20 * 2**30,
        secret: bytes | None = None,
        store_key: bytes | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the folder, or make it, and remove the litter of writers that died.

        Args:
            root: The folder.
            budget_bytes: What all files together may take.
            secret: What objects must be signed with; None for unsigned ones.
            store_key: 32 bytes that all objects are sealed with (`store.sealed`); None for clear ones.
            clock: Seconds since the epoch. May be set back: no age is ever negative.

        Raises:
            StoreUnusable: The folder is not a store's, is of another format, was begun with another secret or key, or
                cannot be made or read.
        """
        self._seal = Seal(store_key)
        self._folder = Folder(root, signature=signature_of(secret), seal=self._seal)
        self._room = Room(self._folder, budget_bytes=budget_bytes, clock=clock)
        self._secret = secret
        self._clock = clock
        self._writing = threading.Lock()
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()
        with explained("open", self._folder.root):
            self._folder.establish()
            for file in self._room.rescan():
                if file.kind is Kind.LITTER:
                    with suppress(OSError):  # a read-only folder can still be read
                        self._room.remove(file.path)

    def get(self, name: str, accept: Sequence[str]) -> Lease | None:
        """See `Store.get`. The bytes are in private memory, so a lease holds nothing on the disk.

        A file larger than the whole budget is never read; it counts as damaged.
        """
        check_names(name, accept)
        for codec in accept:
            path = self._path(name, codec)
            try:
                with explained("read", path):
                    read = read_whole(path, at_most=self._room.budget_bytes)
                if read is None:
                    continue
                data, mtime = read
                clear = self._seal.unwrap(data, name=name, codec=codec)
                found = open_object(clear, name=name, codec=codec, secret=self._secret)
            except DamagedObject:
                self._set_aside(path)
                continue
            self._touch(path, mtime)
            self._count("hits")
            return Lease(object=found, source=self.source)
        self._count("misses")
        return None

    def put(self, name: str, codec: str, data: BytesLike) -> None:
        """See `Store.put`. Once it returns, the object outlives a crash of the machine."""
        check_names(name, (codec,))
        check_head(data, name=name, codec=codec)
        data = self._seal.wrap(data, name=name, codec=codec)
        path, size = self._path(name, codec), memoryview(data).nbytes
        with self._writing, explained("write", path, needed=size):
            replaced = num_bytes(path)
            self._room.make(path, size, size - replaced)
            self._folder.publish(path, data, now=self._clock())
            self._room.used_bytes += size - replaced
        self._count("puts")

    def delete(self, name: str, codec: str | None = None) -> int:
        """See `Store.delete`."""
        check_names(name, () if codec is None else (codec,))
        pattern = f"{name}.{codec or '*'}.safetensors"
        with self._writing, explained("delete from", self._folder.root):
            for path in matching(self._folder.quarantine, pattern):
                self._room.remove(path)
            folder, num_removed = self._path(name, "raw").parent, 0
            while found := matching(folder, pattern):  # another process may put one in place of another meanwhile
                num_removed += sum(self._room.remove(path) for path in found)
            return num_removed

    def recompress(
        self, name: str, codec: str, into: str, *, wanted: Callable[[StoredObject], bool] = lambda found: True
    ) -> bool:
        """See `BoundedStore.recompress`. Readers have copies of their own."""
        check_step(name, codec, into)
        old, new = self._path(name, codec), self._path(name, into)
        with explained("read", old):
            read = read_whole(old, at_most=self._room.budget_bytes)
        if read is None:
            return False
        try:
            found = open_object(
                self._seal.unwrap(read[0], name=name, codec=codec), name=name, codec=codec, secret=self._secret
            )
        except DamagedObject:
            self._set_aside(old)
            return False
        if not wanted(found):
            return False
        data = self._seal.wrap(recoded(found, into, secret=self._secret), name=name, codec=into)
        size = memoryview(data).nbytes
        # Of two processes that recompress one object, the second finds the old form gone.
        with self._writing, explained("write", new, needed=size), self._folder.locked():
            replaced, freed = num_bytes(new), num_bytes(old)
            # As where an object is overwritten, the old bytes are not counted: a full folder could shrink no more.
            over = self._room.used_bytes + size - replaced - freed > self._room.budget_bytes
            if mtime(old) != read[1] or size >= freed or over:
                return False
            self._folder.publish(new, data, now=max(read[1], mtime(new) or 0.0))
            self._room.used_bytes += size - replaced
            if self._room.remove(old):
                return True
            self._room.used_bytes -= freed
            self._room.remove(new)  # another process has deleted the name since
            return False

    def names(self) -> set[str]:
        """See `Store.names`."""
        return {key[0] for file in self._room.scan() if file.kind is Kind.OBJECT and (key := self._key(file.path))}

    def stat(self, name: str) -> dict[str, ObjectStat]:
        """See `Store.stat`."""
        check_names(name)
        stats: dict[str, ObjectStat] = {}
        for codec in CODECS:
            path = self._path(name, codec)
            with explained("read", path), suppress(FileNotFoundError):
                found = path.lstat()
                if stat.S_ISREG(found.st_mode):
                    last_use = min(found.st_mtime, self._clock())
                    stats[codec] = ObjectStat(num_bytes=found.st_size, last_use=last_use)
        return stats

    def stats(self) -> StoreStats:
        """See `Store.stats`. Bytes are those of the last scan and of this process's writes since."""
        with self._counting:
            return StoreStats(
                hits=self._counts["hits"],
                misses=self._counts["misses"],
                puts=self._counts["puts"],
                evictions=self._room.num_evicted,
                quarantined=self._counts["quarantined"],
                used_bytes=self._room.used_bytes,
                budget_bytes=self._room.budget_bytes,
            )

    def setting(self, key: str) -> JSON:
        """See `Store.setting`."""
        with explained("read", self._folder.root):
            return self._folder.setting(key)

    def keep_setting(self, key: str, value: JSON) -> JSON:
        """See `Store.keep_setting`."""
        if value is None:
            raise ValueError(f"setting {key!r} needs a value; None says that there is none")
        with explained("write", self._folder.root):
            return self._folder.keep_setting(key, value)

    def close(self) -> None:
        """See `Store.close`. Nothing is held open."""

    def __enter__(self) -> "DiskStore":
        return self

    def verify(self) -> Iterator[Verdict]:
        """Verify every file below `objects`; move and touch none. Files that are being written are left out."""
        for file in self._room.scan():
            if file.kind is not Kind.OBJECT:
                continue
            name, codec = self._key(file.path) or (None, None)
            error = None
            if name is None or codec is None:
                error = "its name and place are not those of any object that this version knows"
            else:
                try:
                    read = read_whole(file.path, at_most=self._room.budget_bytes)
                    if read is None:
                        continue
                    clear = self._seal.unwrap(read[0], name=name, codec=codec)
                    open_object(clear, name=name, codec=codec, secret=self._secret)
                except (StoreError, OSError) as found:
                    error = str(found)
            yield Verdict(path=file.path, name=name, codec=codec, num_bytes=file.num_bytes, error=error)

    def gc(self) -> GcReport:
        """Remove litter, what is quarantined, empty folders, and the least used objects over the budget.

        Raises:
            StoreUnusable: The folder cannot be written.
        """
        with self._writing, explained("collect in", self._folder.root):
            files, before = self._room.rescan(), self._room.used_bytes
            gone = Counter(f.kind for f in files if f.kind <= Kind.QUARANTINED and self._room.remove(f.path))
            num_evicted = self._room.evict([file for file in files if file.kind is Kind.OBJECT], 0)
            num_folders = 0
            for folder, _, _ in os.walk(self._folder.objects, topdown=False):
                if Path(folder) != self._folder.objects:
                    with suppress(OSError):  # it is not empty
                        Path(folder).rmdir()
                        num_folders += 1
            return GcReport(
                num_litter=gone[Kind.LITTER],
                num_quarantined=gone[Kind.QUARANTINED],
                num_evicted=num_evicted,
                num_folders=num_folders,
                freed_bytes=before - self._room.used_bytes,
            )

    def _path(self, name: str, codec: str) -> Path:
        return self._folder.objects / name[:2] / name[2:4] / f"{name}.{codec}.safetensors"

    def _key(self, path: Path) -> tuple[str, str] | None:
        """Return the (name, codec) whose object belongs at `path`, if this version knows any."""
        match = _OBJECT.fullmatch(path.name)
        if match is None or match[2] not in CODECS or path != self._path(match[1], match[2]):
            return None
        return match[1], match[2]

    def _set_aside(self, path: Path) -> None:
        """Move a damaged object into quarantine, in place of an older one of that name."""
        target = self._folder.quarantine / path.name
        with self._writing:
            try:
                self._folder.quarantine.mkdir(mode=0o700, exist_ok=True)
                replaced = num_bytes(target)
                path.replace(target)
                self._room.used_bytes -= replaced
            except FileNotFoundError:  # another reader was faster
                return
            except OSError:  # a read-only folder: it stays where it is, and stays a miss
                pass
        self._folder.prune(path)
        self._count("quarantined")

    def _touch(self, path: Path, mtime: float) -> None:
        """Note a use, at most once a minute. A read-only folder forgets it."""
        now = self._clock()
        if not 0 <= now - mtime < _TOUCH_S:
            with suppress(OSError):
                os.utime(path, (now, now), follow_symlinks=False)

    def _count(self, what: str) -> None:
        with self._counting:
            self._counts[what] += 1
