"""A replica's folder of its own, below one that many share: gone with the replica, however that ends.

A replica that is killed cannot tidy up: the next one to come does. A lock says who lives, since the system frees it
with its process.
"""

import fcntl
import shutil
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

PREFIX = "replica-"
LOCK = "lock"

_MAKING = "replicas.lock"
"""Held, in the shared folder, by the one that makes or removes folders: none is seen before it is locked."""


@contextmanager
def own_folder(shared: Path) -> Generator[Path]:
    """Make a folder in another one, until the block is left; remove those of processes that have ended."""
    shared.mkdir(parents=True, exist_ok=True)
    with ExitStack() as ending:
        with (shared / _MAKING).open("wb") as making:
            fcntl.flock(making, fcntl.LOCK_EX)
            for other in shared.glob(f"{PREFIX}*"):
                _remove_unless_held(other)
            folder = TemporaryDirectory(prefix=PREFIX, dir=shared, ignore_cleanup_errors=True)
            own = Path(ending.enter_context(folder))
            held = ending.enter_context((own / LOCK).open("wb"))
            fcntl.flock(held, fcntl.LOCK_EX)
        yield own


def _remove_unless_held(folder: Path) -> None:
    with suppress(OSError), (folder / LOCK).open("ab") as lock:  # it is held, or is going
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
