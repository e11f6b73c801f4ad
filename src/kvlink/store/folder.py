"""A folder that belongs to one store: its format, its settings, and files that appear whole or not at all.

Knows no objects, budgets or clocks. Several processes may use one folder at the same time.
"""

import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from kvlink.core.errors import DamagedObject, StoreFull, StoreUnusable
from kvlink.store.base import JSON
from kvlink.store.codec import BytesLike, private_memory
from kvlink.store.header import canonical_json
from kvlink.store.sealed import SEAL, Seal

FOLDER_FORMAT = 1
"""Version of the layout of the folder, kept in its settings."""

TEMPORARY = ".tmp"
"""How the name of a file ends that somebody is writing, or was."""

_LOCK = "settings.lock"
_SIGNATURE = "signature"
_RETRIES = 9


@final
class Folder:
    """The folder, its parts and its settings.

    Attributes:
        root: The folder itself, with `settings.json`.
        objects: Whole objects, two levels deep.
        quarantine: Objects that did not verify.
    """

    def __init__(self, root: str | os.PathLike[str], *, signature: str, seal: Seal) -> None:
        """Name the folder. Nothing is read or made before `establish`.

        Args:
            root: The folder.
            signature: What tells the secret of its objects from others (`header.signature_of`).
            seal: Which key its objects are sealed with.
        """
        self.root = Path(root)
        self._signature = signature
        self._seal = seal
        self.objects = self.root / "objects"
        self.quarantine = self.root / "quarantine"
        self._settings = self.root / "settings.json"

    def establish(self) -> None:
        """Make the folder unless it is there.

        Raises:
            StoreUnusable: It is somebody else's, of another format, signed with another secret, or sealed with another
                key.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Settings come first when a folder is made, so list before asking for them: what another process is making
        # at this moment then never looks foreign.
        foreign = sorted(p.name for p in self.root.iterdir() if p.name != _LOCK and p.suffix != TEMPORARY)
        if self._load() is None:
            if foreign:
                raise StoreUnusable(
                    f"{self.root} has no {self._settings.name} and is not empty (it holds {', '.join(foreign[:3])}), "
                    f"so it is not a store; choose a new or an empty folder"
                )
            with self.locked():
                if self._load() is None:
                    begun = {_SIGNATURE: self._signature, SEAL: self._seal.key_id}
                    self._save({key: value for key, value in begun.items() if value})
        if (kept := self.setting(_SIGNATURE) or "") != self._signature:
            raise StoreUnusable(
                f"the objects in {self.root} are {'signed with a secret' if kept else 'not signed'}, and it was opened "
                f"{'with another secret' if kept and self._signature else 'with one' if self._signature else 'without'}"
                "; pass what the store was begun with (KVLINK_SECRET on the command line), or choose another folder"
            )
        self._seal.check_place(self.root, self.setting(SEAL))
        for part in (self.objects, self.quarantine):
            part.mkdir(mode=0o700, exist_ok=True)

    def setting(self, key: str) -> JSON:
        """Return a kept setting, or None."""
        return (self._load() or {}).get(key)

    def keep_setting(self, key: str, value: JSON) -> JSON:
        """Keep a setting unless there is one, whichever process was first, and return the kept one."""
        kept = self.setting(key)
        if kept is not None:
            return kept
        self.establish()
        with self.locked():
            settings = self._load() or {}
            if key not in settings:
                settings[key] = json.loads(canonical_json(value))
                self._save(settings)
            return settings[key]

    def files(self) -> Iterator[Path]:
        """Yield every file that the store ever wrote here, except its settings. Links to files are among them."""
        yield from self.root.glob(f"{self._settings.name}.*{TEMPORARY}")
        for part in (self.objects, self.quarantine):
            for folder, _, names in os.walk(part):
                yield from (Path(folder, name) for name in names)

    def publish(self, path: Path, data: BytesLike, *, now: float) -> None:
        """Write an object's file, whole or not at all, and make it outlive a crash of the machine.

        Args:
            path: `objects/ab/cd/...`; its folders are made when needed.
            data: The whole file.
            now: Becomes the mtime (seconds since the epoch).

        Raises:
            OSError: It could not be written. Nothing of it is left behind.
        """
        if not self.objects.is_dir():  # somebody emptied the folder
            self.establish()
        for attempt in range(_RETRIES):
            try:
                for folder in (path.parent.parent, path.parent):
                    folder.mkdir(mode=0o700, exist_ok=True)
                write_whole(path, data, now=now)
                break
            except (FileNotFoundError, FileExistsError):  # another process removed a still empty folder in between
                if attempt + 1 == _RETRIES:
                    raise
            except BaseException:
                self.prune(path)
                raise

    def prune(self, path: Path) -> None:
        """Remove the two folders of an object's file if they are empty."""
        if path.parent.parent.parent == self.objects:
            with suppress(OSError):
                path.parent.rmdir()
                path.parent.parent.rmdir()

    def _load(self) -> dict[str, Any] | None:
        """Return the settings, or None where there are none yet."""
        try:
            content = json.loads(self._settings.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            content = None
        match content:
            case {"format": int(found), "settings": dict(settings)} if found == FOLDER_FORMAT:
                return settings
            case {"format": int(found)} if found != FOLDER_FORMAT:
                what = f"is of format {found}, and this version reads {FOLDER_FORMAT}"
            case _:
                what = "is not the settings of a store"
        raise StoreUnusable(f"{self._settings} {what}; choose another folder, or delete {self.root}")

    def _save(self, settings: dict[str, Any]) -> None:
        text = json.dumps({"format": FOLDER_FORMAT, "settings": settings}, indent=2, sort_keys=True)
        write_whole(self._settings, text.encode())

    @contextmanager
    def locked(self) -> Generator[None]:
        """Be the only one, of all threads and processes, who changes settings or forms. A crash gives the lock back."""
        descriptor = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def write_whole(path: Path, data: BytesLike, *, now: float | None = None) -> None:
    """Write a file of mode 0600 under a temporary name beside it, force it to the disk, and give it its name."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if now is not None:
                os.utime(descriptor, (now, now))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # a name survives a crash only with its folder
    finally:
        os.close(folder)


def read_whole(path: Path, *, at_most: int) -> tuple[memoryview, float] | None:
    """Return the bytes of a plain file in private memory and its mtime, or None where there is none. Reads once.

    Raises:
        DamagedObject: A link or device instead of a plain file, more bytes than `at_most`, or the disk fails.
        OSError: It could not be read for another reason.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise DamagedObject(f"{path} is a link or a socket, not a plain file; delete it") from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise DamagedObject(f"{path} is not a plain file; delete it")
        if found.st_size > at_most:
            raise DamagedObject(f"{path} has {found.st_size} bytes, more than the whole budget of {at_most}; delete it")
        data = private_memory(found.st_size)
        filled = 0
        while filled < found.st_size and (count := os.readv(descriptor, [data[filled:]])):
            filled += count
        return data[:filled], found.st_mtime
    except OSError as error:
        if error.errno == errno.EIO:
            raise DamagedObject(f"{path} cannot be read: {error.strerror}; the disk may fail") from error
        raise
    finally:
        os.close(descriptor)


def num_bytes(path: Path) -> int:
    """Return the size of a file, 0 where there is none."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def mtime(path: Path) -> float | None:
    """Return when a file was last used (seconds since the epoch), None where there is none."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return None


def matching(folder: Path, pattern: str) -> list[Path]:
    """List a folder's files whose names match; none where the folder is gone, or goes at this moment."""
    with suppress(FileNotFoundError):
        return list(folder.glob(pattern))
    return []


@contextmanager
def explained(what: str, path: Path, *, needed: int = 0) -> Generator[None]:
    """Turn errors of the operating system into those of a store.

    Raises:
        StoreFull: The disk or a quota is exhausted.
        StoreUnusable: Anything else: permissions, a read-only file system, no folder.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(next(folder for folder in path.parents if folder.exists())).free
            raise StoreFull(
                f"cannot {what} {path} ({needed} bytes): {error.strerror}, {free} bytes are free; free some, or lower "
                f"the budget of the disk to what it can hold"
            ) from error
        raise StoreUnusable(
            f"cannot {what} {path}: {error.strerror or error}; it must be in a folder that this user can read and write"
        ) from error
