"""A store is opened by what names it: a folder, a URL, or several as tiers."""

from pathlib import Path

import pytest
from specimens import put, specimen

from kvlink.core.errors import InputError
from kvlink.store import DiskStore, MemoryStore, TieredStore, host_bytes, open_store
from kvlink.store.address import is_address
from kvlink.store.objects import FsspecStore
from kvlink.store.redis import RedisStore


def sources(store: TieredStore) -> list[str]:
    return [tier.source for tier in store.stats().tiers]


@pytest.mark.parametrize(
    ("named", "kind"),
    [("redis://localhost:1/0", RedisStore), ("memory://x", FsspecStore), ("file:///nowhere/at/all", FsspecStore)],
)
def test_a_url_is_a_remote_and_opens_though_nobody_answers(named: str, kind: type) -> None:
    with open_store(named) as store:
        assert isinstance(store, kind)


def test_a_folder_is_a_store_on_disk_also_one_with_a_colon(tmp_path: Path) -> None:
    for name in ("kv", "s3:kv"):
        assert isinstance(open_store(str(tmp_path / name)), DiskStore)
    assert not is_address(tmp_path / "redis:")


def test_several_become_tiers_below_a_tenth_of_the_memory(tmp_path: Path) -> None:
    with open_store([tmp_path / "kv", f"file://{tmp_path}/shared"]) as store:
        assert sources(store) == ["host", "disk", "remote"]
        assert store.stats().tiers[0].stats.budget_bytes == host_bytes()


def test_ready_stores_keep_their_place_and_their_budget(tmp_path: Path) -> None:
    host = MemoryStore(budget_bytes=5)
    with open_store([host, tmp_path / "kv"]) as store:
        assert sources(store) == ["host", "disk"]
        assert store.stats().tiers[0].stats.budget_bytes == 5


def test_no_place_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="names no place"):
        open_store([])


def test_every_tier_takes_the_secret(tmp_path: Path) -> None:
    one = specimen(secret=b"ours")
    with open_store([tmp_path / "kv", f"file://{tmp_path}/shared"], secret=b"ours") as store:
        put(store, one)
        assert [store.get(one.name, ["raw"]).source for _ in range(2)] == ["disk", "host"]


@pytest.mark.parametrize("kind", ["redis", "files"])
def test_deletion_removes_codecs_that_this_version_does_not_know(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    one, other = specimen(), specimen(1)
    if kind == "redis":
        store = request.getfixturevalue("make_redis")()
        put(store, one, other)
        known, unknown = (store._key(one.name, codec) for codec in ("raw", "v9"))
        store._client.copy(known, unknown)
        left = lambda: store._client.keys(f"{store._begin}*")  # noqa: E731
    else:
        store = FsspecStore(f"file://{tmp_path}")
        put(store, one, other)
        path = Path(store._path(one.name, "raw"))
        path.with_name(f"{one.name}.v9.safetensors").write_bytes(b"?")
        left = lambda: list(tmp_path.rglob("*.safetensors"))  # noqa: E731
    assert store.delete(one.name) == 2
    assert len(left()) == 1
    assert store.names() == {other.name}
    assert store.delete(one.name) == 0
