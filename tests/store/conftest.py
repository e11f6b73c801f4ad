"""Every store, behind one interface."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from secrets import token_hex

import pytest
from servers import LOOPBACK, RedisServer, S3Server
from specimens import STORE_KEY, Clock, MakeStore

from kvlink.store import DiskStore, MemoryStore, Store
from kvlink.store.objects import FsspecStore
from kvlink.store.recompressing import RecompressingStore
from kvlink.store.redis import RedisStore
from kvlink.store.tiered import TieredStore


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One server for all stores that need no fault: each has names of its own."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One endpoint for all stores that need no fault: each has a bucket of its own."""
    with S3Server() as server:
        yield server


@pytest.fixture
def fresh() -> Callable[[], str]:
    """Names that no test has used."""
    return lambda: f"test-{token_hex(8)}"


@pytest.fixture
def make_redis(
    redis_server: RedisServer, clock: Clock, fresh: Callable[[], str]
) -> Iterator[Callable[..., RedisStore]]:
    """A constructor of empty stores in Redis, with parts so small that an object has many."""
    with ExitStack() as stores:

        def make(**options: object) -> RedisStore:
            given = {"url": redis_server.url, "prefix": fresh(), "part_bytes": 300, "clock": clock}
            given |= {"timeout_s": 60.0, "connect_timeout_s": 60.0} | options
            return stores.enter_context(RedisStore(given.pop("url"), **given))

        yield make


@pytest.fixture
def make_s3(s3_server: S3Server, fresh: Callable[[], str]) -> Iterator[Callable[..., FsspecStore]]:
    """A constructor of empty stores in a bucket. Tests that use it may reach the loopback."""
    with ExitStack() as stores:

        def make(**options: object) -> FsspecStore:
            given = {"options": s3_server.options, "timeout_s": 60.0} | options
            store = stores.enter_context(FsspecStore(f"s3://{fresh()}/kv", **given))
            store._fs.mkdir(store._top.partition("/")[0])
            return store

        yield make


BOUNDED = ["memory", "disk"]
SEALED = ["sealed disk", "sealed redis", "sealed files"]
REMOTE = ["redis", "files", "objects", pytest.param("s3", marks=pytest.mark.allow_hosts([LOOPBACK]))]


@pytest.fixture(params=[*BOUNDED, *REMOTE, *SEALED, "recompressing", "tiered"])
def make_store(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Clock, fresh: Callable[[], str]
) -> Iterator[MakeStore]:
    """A constructor of empty stores that takes what all take. Only those in memory and on disk heed the budget."""
    with ExitStack() as stores:

        def make(*, budget_bytes: int = 2**20, secret: bytes | None = None) -> Store:
            given = {"budget_bytes": budget_bytes, "secret": secret, "clock": clock}
            made: dict[str, Callable[[], Store]] = {
                "memory": lambda: MemoryStore(**given),
                "disk": lambda: DiskStore(tmp_path / fresh(), **given),
                "sealed disk": lambda: DiskStore(tmp_path / fresh(), store_key=STORE_KEY, **given),
                "redis": lambda: request.getfixturevalue("make_redis")(secret=secret),
                "sealed redis": lambda: request.getfixturevalue("make_redis")(secret=secret, store_key=STORE_KEY),
                "sealed files": lambda: FsspecStore(f"file://{tmp_path}/{fresh()}", secret=secret, store_key=STORE_KEY),
                "files": lambda: FsspecStore(f"file://{tmp_path}/{fresh()}", secret=secret),
                "objects": lambda: FsspecStore(f"memory://{fresh()}", secret=secret),
                "s3": lambda: request.getfixturevalue("make_s3")(secret=secret),
                # never fuller than it should be: tests of its own fill it up
                "recompressing": lambda: RecompressingStore(made["disk"](), ladder=("int8", "int4"), high=1.0),
                "tiered": lambda: TieredStore(made["memory"](), made["disk"](), made["redis"]()),
            }
            return stores.enter_context(made[request.param]())

        yield make


@pytest.fixture(params=BOUNDED)
def make_bounded(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock, fresh: Callable[[], str]) -> MakeStore:
    """A constructor of empty stores that keep to a budget."""

    def make(*, budget_bytes: int) -> Store:
        if request.param == "memory":
            return MemoryStore(budget_bytes=budget_bytes, clock=clock)
        return DiskStore(tmp_path / fresh(), budget_bytes=budget_bytes, clock=clock)

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
