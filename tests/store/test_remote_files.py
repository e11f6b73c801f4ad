"""Files elsewhere: an endpoint that goes down, a mount that hangs, a disk that is full. A request goes on without."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from servers import LOOPBACK, S3Server
from specimens import Clock, put, specimen

from kvlink.core.errors import StoreFull, StoreUnusable
from kvlink.store import DiskStore
from kvlink.store.address import without_secrets
from kvlink.store.objects import FsspecStore, _time_of
from kvlink.store.opening import open_remote

FIRST, SECOND = specimen(), specimen(1)
SIZE = FIRST.data.nbytes
TIMEOUT_S = 0.7
"""Long for a healthy place, also on a busy machine; short for a test that waits for it once."""

MakeS3 = Callable[..., FsspecStore]


@pytest.fixture
def later() -> Clock:
    """How much further than the real clock the store's monotonic one is."""
    return Clock(0.0)


@pytest.fixture
def store(tmp_path: Path, later: Clock) -> FsspecStore:
    return FsspecStore(f"file://{tmp_path}/kv", timeout_s=TIMEOUT_S, monotonic=lambda: time.monotonic() + later.now)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Ends all calls that hang."""
    event = threading.Event()
    yield event
    event.set()


def raising(error: Exception) -> Callable[..., None]:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_folder_of_a_disk_store_is_a_store(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as disk:
        put(disk, FIRST)
    with open_remote(f"file://{tmp_path}") as remote:
        assert remote.get(FIRST.name, ["raw"]).object.data == FIRST.data
        put(remote, SECOND)
    with DiskStore(tmp_path) as disk:
        assert disk.names() == {FIRST.name, SECOND.name}
        assert disk.get(SECOND.name, ["raw"]) is not None


def test_a_write_leaves_one_file(store: FsspecStore, tmp_path: Path) -> None:
    put(store, FIRST, FIRST)
    assert files(tmp_path) == [f"{FIRST.name}.raw.safetensors"]


def test_a_write_that_fails_leaves_the_old_object_and_no_litter(store: FsspecStore, tmp_path: Path) -> None:
    put(store, FIRST)
    store._fs.mv = raising(OSError(5, "Input/output error"))
    with pytest.raises(StoreUnusable, match="Input/output error"):
        put(store, FIRST)
    assert files(tmp_path) == [f"{FIRST.name}.raw.safetensors"]
    assert store.stats().not_kept == 1


def test_what_is_in_the_wrong_place_is_no_object(store: FsspecStore, tmp_path: Path) -> None:
    put(store, FIRST)
    found = next(tmp_path.rglob("*.safetensors"))
    found.rename(found.parent.parent / found.name)
    (found.parent / f"{SECOND.name}.raw.safetensors").mkdir()
    (found.parent / "notes.txt").write_text("hello")
    assert store.names() == set()
    assert store.stat(FIRST.name) == store.stat(SECOND.name) == {}
    assert store.get(FIRST.name, ["raw"]) is None
    assert store.stats().errors == 0


@pytest.mark.parametrize("content", [b"", b"x", b"x" * 5000])
def test_a_file_that_is_no_object_is_quarantined(store: FsspecStore, tmp_path: Path, content: bytes) -> None:
    put(store, FIRST)
    next(tmp_path.rglob("*.safetensors")).write_bytes(content)
    assert store.get(FIRST.name, ["raw"]) is None
    assert (store.stats().quarantined, store.stats().is_open, files(tmp_path)) == (1, False, [])


def test_a_file_larger_than_any_object_is_not_read(tmp_path: Path) -> None:
    store = FsspecStore(f"file://{tmp_path}", largest_bytes=SIZE - 1)
    put(store, FIRST)
    store._fs.cat_file = raising(AssertionError("it was read"))
    assert store.get(FIRST.name, ["raw"]) is None
    assert (store.stats().quarantined, store.stats().errors) == (1, 0)


def test_stores_with_other_secrets_do_not_see_each_other(tmp_path: Path) -> None:
    ours, nobodys = (FsspecStore(f"file://{tmp_path}", secret=secret) for secret in (b"ours", None))
    put(ours, specimen(secret=b"ours"))
    assert (nobodys.names(), nobodys.delete(FIRST.name), nobodys.get(FIRST.name, ["raw"])) == (set(), 0, None)
    assert ours.get(FIRST.name, ["raw"]) is not None


def test_a_call_that_hangs_costs_one_timeout(store: FsspecStore, later: Clock, release: threading.Event) -> None:
    put(store, FIRST)
    info = store._fs.info
    store._fs.info = lambda path: release.wait() and info(path)
    start = time.monotonic()
    assert store.get(FIRST.name, ["raw"]) is None
    assert time.monotonic() - start >= TIMEOUT_S
    assert (store.stats().errors, store.stats().retries) == (1, 0)
    with pytest.raises(StoreUnusable, match=r"left alone.*no answer within 0\.7 s"):
        put(store, FIRST)
    release.set()
    later.now += 30
    assert store.get(FIRST.name, ["raw"]) is not None


def test_calls_that_hang_do_not_pile_up(store: FsspecStore, later: Clock, release: threading.Event) -> None:
    store._timeout_s = 0.01
    store._fs.info = lambda _: release.wait()
    before = threading.active_count()
    for _ in range(20):
        later.now += 30
        assert store.get(FIRST.name, ["raw"]) is None
    assert threading.active_count() - before <= 8
    assert "8 calls hang" in store.stats().reason


def test_a_large_object_has_more_time(store: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store._timeout_s = 0.001
    started = threading.Event()
    monkeypatch.setattr("kvlink.store.objects._SLOWEST", 1.0)
    assert store._within(lambda: started.wait(0.02) or "done", num_bytes=60) == "done"


def test_an_early_timeout_that_the_client_reports_is_tried_again_and_told(tmp_path: Path) -> None:
    store = FsspecStore(f"file://{tmp_path}", monotonic=Clock(0.0))
    store._fs.info = raising(TimeoutError("the client's own"))
    store.get(FIRST.name, ["raw"])
    assert "the client's own" in store.stats().reason
    assert store.stats().retries == 1


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(30, "Read-only file system")])
def test_a_place_that_may_only_be_read_hits_and_refuses_writes(store: FsspecStore, error: OSError) -> None:
    put(store, FIRST)
    store._fs.makedirs = raising(error)
    with pytest.raises(StoreUnusable, match=f"refuses.*{error.strerror}"):
        put(store, SECOND)
    assert store.get(FIRST.name, ["raw"]) is not None
    assert (store.stats().is_open, store.stats().retries) == (False, 0)


def test_a_full_disk_is_told_and_what_is_there_still_served(small_disk: Path) -> None:
    store = FsspecStore(f"file://{small_disk}/kv")
    put(store, FIRST)
    with pytest.raises(StoreFull, match="is full"):
        put(store, specimen(7, tokens=4000))
    assert files(small_disk) == [f"{FIRST.name}.raw.safetensors"]
    assert store.get(FIRST.name, ["raw"]) is not None


def test_an_unknown_protocol_is_refused_with_its_name() -> None:
    with pytest.raises(StoreUnusable, match=r"carrier://x cannot be a store.*carrier"):
        open_remote("carrier://x")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:word@host:6379/0?ssl_ca=x", "redis://host:6379/0"),
        ("s3://bucket/kv", "s3://bucket/kv"),
        ("/mnt/shared/kv", "/mnt/shared/kv"),
    ],
)
def test_addresses_are_shown_without_what_is_secret(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


def test_times_of_any_spelling_are_read() -> None:
    assert _time_of({"mtime": 5.5}) == 5.5
    assert _time_of({"updated": "2025-11-29T00:00:00+00:00"}) == 1764374400.0
    assert _time_of({"updated": "yesterday"}) == _time_of({}) == 0.0


def test_one_of_many_machines_gets_the_claim(tmp_path: Path) -> None:
    clock = Clock()
    first, second = (FsspecStore(f"file://{tmp_path}", clock=clock) for _ in range(2))
    claim = first.claim(FIRST.name, ttl_s=60.0)
    assert second.claim(FIRST.name, ttl_s=60.0) is None
    assert second._is_claimed(FIRST.name)
    clock.now += 61
    assert not second._is_claimed(FIRST.name)
    with second.claim(FIRST.name, ttl_s=60.0):
        claim.release()
        assert first._is_claimed(FIRST.name)
    assert files(tmp_path) == []


@pytest.mark.parametrize("place", ["files", "other", "objects"])
def test_small_files_are_made_once(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore(f"memory://{tmp_path}" if place == "objects" else f"file://{tmp_path}")
    if place == "other":  # neither a local folder nor an object store
        monkeypatch.setattr("kvlink.store.objects.LocalFileSystem", SimpleNamespace)
    assert store._create(f"{tmp_path}/claims/x", b"one") is True
    assert store._create(f"{tmp_path}/claims/x", b"two") is False
    assert store._content(f"{tmp_path}/claims/x") == b"one"
    assert files(tmp_path) in ([], ["x"])


@pytest.mark.allow_hosts([LOOPBACK])
def test_options_are_left_as_they_were_given_and_serve_many_stores(make_s3: MakeS3, s3_server: S3Server) -> None:
    options = s3_server.options | {"client_kwargs": {"region_name": "eu-west-1"}}
    before = repr(options)
    for _ in range(2):
        store = make_s3(options=options)
        put(store, FIRST)
        assert store.get(FIRST.name, ["raw"]) is not None
    assert repr(options) == before


@pytest.mark.allow_hosts([LOOPBACK])
def test_an_endpoint_that_is_down_is_a_miss_until_it_is_back(make_s3: MakeS3) -> None:
    later = Clock(0.0)
    with S3Server() as server:
        store = make_s3(options=server.options, monotonic=lambda: time.monotonic() + later.now)
        put(store, FIRST)
        server.stop()
        assert store.get(FIRST.name, ["raw"]) is None
        with pytest.raises(StoreUnusable, match=r"left alone.*onnect"):
            put(store, SECOND)
        stats = store.stats()
        assert (stats.is_open, stats.errors, stats.passed_over, stats.not_kept) == (True, 1, 1, 1)
        server.start()  # it has forgotten everything
        later.now += 30
        store._fs.mkdir(store._top.partition("/")[0])
        put(store, SECOND)
        assert store.get(SECOND.name, ["raw"]).object.data == SECOND.data


@pytest.mark.allow_hosts([LOOPBACK])
def test_an_endpoint_that_hangs_costs_one_timeout(make_s3: MakeS3) -> None:
    with S3Server() as server:
        store = make_s3(options=server.options)
        put(store, FIRST)
        store._timeout_s = TIMEOUT_S
        server.freeze()
        start = time.monotonic()
        assert store.get(FIRST.name, ["raw"]) is None
        assert time.monotonic() - start >= TIMEOUT_S
        assert (store.stats().errors, store.stats().retries) == (1, 0)
        assert store.get(FIRST.name, ["raw"]) is None
        assert store.stats().passed_over == 1
        store.close()


@pytest.mark.allow_hosts([LOOPBACK])
def test_what_another_client_puts_is_seen_at_once(make_s3: MakeS3, s3_server: S3Server) -> None:
    reader = make_s3()
    assert reader.stat(FIRST.name) == {}
    assert reader.names() == set()
    with FsspecStore(f"s3://{reader._top}", options=s3_server.options, timeout_s=60.0) as writer:
        put(writer, FIRST)
    assert reader.names() == {FIRST.name}
    assert reader.stat(FIRST.name)["raw"].num_bytes == SIZE
    assert reader.get(FIRST.name, ["raw"]) is not None


@pytest.mark.allow_hosts([LOOPBACK])
def test_a_bucket_gives_a_claim_to_one(make_s3: MakeS3) -> None:
    store = make_s3()
    with store.claim(FIRST.name, ttl_s=60.0) as claim:
        assert claim is not None
        assert store.claim(FIRST.name, ttl_s=60.0) is None
    assert store.claim(FIRST.name, ttl_s=60.0) is not None


@pytest.mark.allow_hosts([LOOPBACK])
def test_a_bucket_that_is_not_there_refuses_puts(make_s3: MakeS3, s3_server: S3Server) -> None:
    with FsspecStore("s3://nowhere/kv", options=s3_server.options, timeout_s=60.0) as store:
        assert store.get(FIRST.name, ["raw"]) is None
        with pytest.raises(StoreUnusable, match=r"s3://nowhere/kv.*bucket does not exist"):
            put(store, FIRST)


def test_files_are_for_whom_the_folder_lets(store: FsspecStore, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        put(store, FIRST)
    finally:
        os.umask(before)
    assert next(tmp_path.rglob("*.safetensors")).stat().st_mode & 0o777 == 0o600
