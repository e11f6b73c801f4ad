"""What the files of a store's folder take, and which of them go when room is needed.

A scan sees every file, whoever wrote it; in between, what this process writes and removes is counted. Nothing here is
locked: whoever calls locks its own writers out, and other processes may change the folder at any time.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import final

from kvlink.core.errors import StoreFull
from kvlink.store.folder import TEMPORARY, Folder, num_bytes

SCAN_S = 30.0
"""After so many seconds a folder is looked at again before something is written: others may have filled it."""

_LITTER_S = 3600.0


class Kind(IntEnum):
    """What a file is, in the order in which files go when room is needed."""

    LITTER = 0
    QUARANTINED = 1
    OBJECT = 2
    FRESH = 3  # somebody may be writing it: never removed


@dataclass(frozen=True, slots=True)
class File:
    """A file as a scan saw it.

    Attributes:
        mtime: Seconds since the epoch, never later than now.
    """

    path: Path
    kind: Kind
    num_bytes: int
    mtime: float


@final
class Room:
    """The account of a folder's bytes, and the budget that they are held to.

    Args:
        folder: The folder.
        budget_bytes: What all files together may take.
        clock: Seconds since the epoch.

    Attributes:
        used_bytes: Those of the last scan and of what was written and removed since; whoever writes adds to it.
        num_evicted: Objects that went because room was needed.
    """

    def __init__(self, folder: Folder, *, budget_bytes: int, clock: Callable[[], float]) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.num_evicted = 0
        self._folder = folder
        self._clock = clock
        self._scanned_at = 0.0

    def scan(self) -> Iterator[File]:
        """Look at every file. Files may come and go meanwhile."""
        now = self._clock()
        for path in self._folder.files():
            with suppress(FileNotFoundError):
                found = path.lstat()
                if path.name.endswith(TEMPORARY):
                    kind = Kind.LITTER if now - found.st_mtime > _LITTER_S else Kind.FRESH
                else:
                    kind = Kind.QUARANTINED if path.parent == self._folder.quarantine else Kind.OBJECT
                yield File(path, kind, found.st_size, min(found.st_mtime, now))

    def rescan(self) -> list[File]:
        """Return every file, and take the bytes in use from them."""
        files = list(self.scan())
        self.used_bytes = sum(file.num_bytes for file in files)
        self._scanned_at = self._clock()
        return files

    def make(self, path: Path, size: int, growth: int) -> None:
        """Evict until `growth` more bytes fit, but not `path` itself, which is to have `size`.

        Raises:
            StoreFull: They cannot fit.
        """
        recent = 0 <= self._clock() - self._scanned_at < SCAN_S
        over = self.used_bytes + growth > self.budget_bytes
        if size <= self.budget_bytes and (over or not recent):
            self.evict(self.rescan(), growth, sparing=path)
        if max(size, self.used_bytes + growth) > self.budget_bytes:
            raise StoreFull(
                f"{path} needs {size} bytes, and {self.used_bytes} of the budget of {self.budget_bytes} are in use; "
                f"raise the budget of the disk"
            )

    def evict(self, files: list[File], growth: int, *, sparing: Path | None = None) -> int:
        """Remove files, the least used first, until `growth` more bytes fit; return how many objects went."""
        num_evicted = 0
        for file in sorted(files, key=lambda file: (file.kind, file.mtime)):
            if self.used_bytes + growth <= self.budget_bytes:
                break
            if file.kind is Kind.FRESH or file.path == sparing:
                continue
            if self.remove(file.path):
                num_evicted += file.kind is Kind.OBJECT
            else:  # another process needed room, too
                self.used_bytes -= file.num_bytes
        self.num_evicted += num_evicted
        return num_evicted

    def remove(self, path: Path) -> bool:
        """Delete a file with the folders that it leaves empty; return whether it was there."""
        size = num_bytes(path)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        self.used_bytes -= size
        self._folder.prune(path)
        return True
