"""The journal over a real Redis: numbers in the order of changes, one text per key, refusals that say why."""

import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import redis
from servers import RedisServer
from specimens import STORE_KEY

from kvlink.core.errors import StoreError, StoreUnusable
from kvlink.store.journal import PORTION, Change, Head, Journal

pytestmark = pytest.mark.enable_socket

ONE, OTHER = "1" * 64, "2" * 64


@pytest.fixture
def journal(redis_server: RedisServer, request: pytest.FixtureRequest) -> Iterator[Journal]:
    with closing(Journal(redis_server.url, prefix=request.node.name)) as one:
        yield one


def test_changes_are_numbered_and_each_key_has_its_latest_text(journal: Journal) -> None:
    start = journal.head()
    assert start.number == 0
    assert [journal.append(*change) for change in ((ONE, b"a"), (OTHER, b"b"), (ONE, b"c"))] == [1, 2, 3]
    assert journal.head() == Head(start.epoch, 3)
    assert list(journal.since(0)) == [Change(2, OTHER, b"b"), Change(3, ONE, b"c")]
    assert list(journal.since(2)) == [Change(3, ONE, b"c")]
    assert list(journal.since(3)) == []


def test_a_key_is_added_once_though_another_journal_added_it_meanwhile(journal: Journal) -> None:
    assert journal.add(ONE, b"a") == 1
    journal.append(OTHER, b"removed")
    for key in (ONE, OTHER):
        assert journal.add(key, b"old") is None
    assert journal.head().number == 2
    assert list(journal.since(0)) == [Change(1, ONE, b"a"), Change(2, OTHER, b"removed")]


def test_more_changes_than_are_read_at_once_come_in_their_order(journal: Journal) -> None:
    keys = [f"{number:064x}" for number in range(2 * PORTION + 5)]
    for key in keys:
        journal.append(key, key.encode())
    assert [change.key for change in journal.since(0)] == keys


def test_a_server_that_has_lost_everything_begins_another_epoch(journal: Journal, redis_server: RedisServer) -> None:
    journal.append(ONE, b"a")
    before = journal.head()
    with closing(redis.Redis.from_url(redis_server.url)) as client:
        client.delete(*client.scan_iter(match="test_a_server_that_has_lost*"))
    after = journal.head()
    assert after.number == 0
    assert after.epoch != before.epoch
    assert journal.head() == after


def test_sealed_texts_are_read_with_their_key_alone(redis_server: RedisServer) -> None:
    with (
        closing(Journal(redis_server.url, prefix="sealed", store_key=STORE_KEY)) as sealed,
        closing(Journal(redis_server.url, prefix="sealed")) as clear,
        closing(redis.Redis.from_url(redis_server.url)) as client,
    ):
        sealed.append(ONE, b"a secret")
        assert [change.text for change in sealed.since(0)] == [b"a secret"]
        assert not any(b"a secret" in value for value in client.hgetall("sealed:{journal}:1:texts").values())
        with pytest.raises(StoreUnusable, match="KVLINK_STORE_KEY"):
            list(clear.since(0))
        clear.append(OTHER, b"in the clear")
        with pytest.raises(StoreError, match="not sealed"):
            list(sealed.since(0))


def test_a_server_that_evicts_is_refused() -> None:
    with (
        RedisServer("--maxmemory", "20mb", "--maxmemory-policy", "allkeys-lru") as server,
        closing(Journal(server.url)) as journal,
    ):
        for call in (journal.head, lambda: journal.append(ONE, b"a")):
            with pytest.raises(StoreUnusable, match="noeviction"):
                call()


def test_a_full_server_refuses_and_keeps_what_it_has_until_something_is_removed() -> None:
    large = [f"{number:064x}" for number in range(8)]
    with (
        RedisServer("--maxmemory", "100mb") as server,
        closing(Journal(server.url)) as journal,
        closing(redis.Redis.from_url(server.url)) as client,
    ):
        for key in (ONE, *large):
            journal.append(key, b"a" if key == ONE else bytes(1 << 18))
        client.config_set("maxmemory", client.info("memory")["used_memory"] - (1 << 19))
        for key in (ONE, OTHER, large[0]):
            with pytest.raises(StoreUnusable, match="refuses"):
                journal.append(key, bytes(1 << 18 | 1))
        assert [change.number for change in journal.since(0)] == [*range(1, 10)]
        assert [journal.append(key, b"removed") for key in large] == [*range(10, 18)]
        assert journal.append(OTHER, b"new") == 18
        assert [change.text for change in journal.since(9)] == [b"removed"] * 8 + [b"new"]


def test_a_dead_server_costs_one_timeout_and_is_found_again(redis_server: RedisServer) -> None:
    with RedisServer() as server, closing(Journal(server.url, timeout_s=0.3, pause_s=0.2)) as journal:
        journal.append(ONE, b"a")
        server.freeze()
        start = time.monotonic()
        for _ in range(20):
            with pytest.raises(StoreUnusable, match="answer"):
                journal.head()
        assert time.monotonic() - start < 20 * 0.3, "most were refused at once"
        server.thaw()
        end = time.monotonic() + 30
        while True:
            try:
                assert journal.head().number == 1
                break
            except StoreUnusable:
                assert time.monotonic() < end
                time.sleep(0.05)


@pytest.mark.parametrize("url", ["http://x", "file:///tmp", "redis"])
def test_what_is_no_redis_is_refused(url: str) -> None:
    with pytest.raises(StoreUnusable, match="redis://"):
        Journal(url)
