"""Both stores, behind one interface."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from specimens import Clock, MakeStore

from kvlink.store import DiskStore, MemoryStore, Store


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "disk"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> MakeStore:
    """A constructor of empty stores that takes what both take."""
    made = iter(range(100))

    def make(*, budget_bytes: int = 2**20, secret: bytes | None = None) -> Store:
        if request.param == "memory":
            return MemoryStore(budget_bytes=budget_bytes, secret=secret, clock=clock)
        return DiskStore(tmp_path / str(next(made)), budget_bytes=budget_bytes, secret=secret, clock=clock)

    return make


@pytest.fixture
def store(make_store: MakeStore) -> Store:
    return make_store()


@pytest.fixture
def remount(small_disk: Path) -> Callable[[str], None]:
    """Mount the small disk again with other options."""
    return lambda options: mount("-o", f"remount,{options}", str(small_disk))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, 256 KiB small, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount a file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)
