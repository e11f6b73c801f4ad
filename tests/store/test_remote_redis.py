"""Redis as it is on bad days: gone, silent, full, forgetful. It costs one timeout, and nothing false is served."""

import time
from collections.abc import Callable, Iterator

import pytest
import redis
from servers import LOOPBACK, Proxy, RedisServer, free_port
from specimens import Clock, put, specimen

from kvlink.core.errors import StoreFull, StoreUnusable
from kvlink.store import Claim, open_remote
from kvlink.store.redis import RedisStore

FIRST, SECOND = specimen(), specimen(1)
SIZE = FIRST.data.nbytes
TIMEOUT_S = 0.7
"""Long for a healthy server, also on a busy machine; short for a test that waits for it once."""

PATIENCE_S = 20.0
"""Far below a hundred timeouts, and far above what a busy machine takes."""

MakeRedis = Callable[..., RedisStore]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server that the test may stop."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def later() -> Clock:
    """How much further than the real clock the store's monotonic one is."""
    return Clock(0.0)


@pytest.fixture
def store(server: RedisServer, make_redis: MakeRedis, later: Clock) -> RedisStore:
    return make_redis(url=server.url, timeout_s=TIMEOUT_S, pause_s=30.0, monotonic=lambda: time.monotonic() + later.now)


def keys(store: RedisStore) -> list[bytes]:
    return store._client.keys(f"{store._begin}*")


def test_an_object_lies_in_parts_and_is_one_name(make_redis: MakeRedis) -> None:
    store = make_redis(part_bytes=300)
    put(store, FIRST)
    (key,) = keys(store)
    fields = store._client.hgetall(key)
    sizes = [len(fields.pop(b"%d" % number)) for number in range(-(-SIZE // 300))]
    assert sizes == [300, 300, 300, 300, SIZE - 1200]
    assert set(fields) == {b"generation", b"bytes", b"last_use"}
    assert store._client.ttl(key) == -1


@pytest.mark.parametrize("part_bytes", [31, SIZE - 1, SIZE, SIZE + 1, 8 * 2**20])
def test_parts_of_any_size_come_back_bit_for_bit(make_redis: MakeRedis, part_bytes: int) -> None:
    writer = make_redis(part_bytes=part_bytes)
    put(writer, FIRST)
    found = writer.get(FIRST.name, ["raw"]).object
    assert found.data == FIRST.data


@pytest.mark.parametrize("part_bytes", [0, -1, 512 * 2**20])
def test_parts_stay_below_the_limit_of_the_server(part_bytes: int) -> None:
    with pytest.raises(ValueError, match="a part has"):
        RedisStore("redis://localhost", part_bytes=part_bytes)


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_vanished_part_is_a_miss_and_takes_the_rest_with_it(make_redis: MakeRedis, number: int) -> None:
    store = make_redis()
    put(store, FIRST, SECOND)
    store._client.hdel(store._key(FIRST.name, "raw"), str(number))
    assert store.get(FIRST.name, ["raw"]) is None
    assert store.names() == {SECOND.name}
    assert (store.stats().misses, store.stats().quarantined, store.stats().errors) == (1, 0, 0)


def test_delete_leaves_nothing_of_an_object(make_redis: MakeRedis) -> None:
    store = make_redis()
    put(store, FIRST)
    assert store.delete(FIRST.name) == 1
    assert keys(store) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"bytes": "x"},
        {"bytes": "0"},
        {"bytes": "-5"},
        {"bytes": str(10**15)},
        {"bytes": str(SIZE - 1)},
        {"4": ""},
        {"3": "longer than all the rest" * 99},
    ],
)
def test_an_object_that_lies_about_itself_is_quarantined(make_redis: MakeRedis, fields: dict[str, str]) -> None:
    store = make_redis()
    put(store, FIRST)
    store._client.hset(store._key(FIRST.name, "raw"), mapping=fields)
    assert store.get(FIRST.name, ["raw"]) is None
    assert (store.stats().quarantined, keys(store)) == (1, [])


def test_what_is_no_hash_is_no_object(make_redis: MakeRedis) -> None:
    store = make_redis()
    store._client.set(store._key(FIRST.name, "raw"), b"text")
    assert store.stat(FIRST.name) == {}
    assert store.get(FIRST.name, ["raw"]) is None
    assert (store.stats().quarantined, keys(store)) == (1, [])


def test_quarantine_spares_what_was_put_meanwhile(make_redis: MakeRedis) -> None:
    store = make_redis()
    put(store, FIRST)
    bad = store._read(FIRST.name, "raw")
    put(store, FIRST)
    store._discard(FIRST.name, "raw", bad.version)
    assert store.get(FIRST.name, ["raw"]) is not None


def test_a_reader_whose_object_is_replaced_midway_mixes_nothing(make_redis: MakeRedis) -> None:
    store = make_redis(part_bytes=100)
    put(store, FIRST)
    asked = store._client.hmget

    def replace_then_ask(*arguments: object) -> object:
        store._client.hmget = asked
        answer = asked(*arguments)
        put(store, FIRST)
        return answer

    store._client.hmget = replace_then_ask
    assert store.get(FIRST.name, ["raw"]) is None
    assert store.get(FIRST.name, ["raw"]) is not None
    assert store.stats().quarantined == 0


def test_several_codecs_are_asked_for_at_once(make_redis: MakeRedis) -> None:
    store = make_redis()
    put(store, FIRST)
    asked = []
    ask = store._ask
    store._ask = lambda what, call: asked.append(what) or ask(what, call)
    assert store.get(SECOND.name, ["raw", "raw", "raw"]) is None
    assert len(asked) == 1
    assert store.get(FIRST.name, ["raw", "raw"]).object.data == FIRST.data


def test_stores_with_other_secrets_do_not_see_each_other(make_redis: MakeRedis) -> None:
    ours, theirs, nobodys = (make_redis(prefix="shared", secret=secret) for secret in (b"ours", b"theirs", None))
    put(ours, specimen(secret=b"ours"))
    for other in (theirs, nobodys):
        assert other.get(FIRST.name, ["raw"]) is None
        assert other.delete(FIRST.name) == 0
        assert other.names() == set()
    assert ours.get(FIRST.name, ["raw"]) is not None
    ours.delete(FIRST.name)


def test_a_writer_that_dies_leaves_only_what_expires(make_redis: MakeRedis) -> None:
    store = make_redis()
    put(store, FIRST)
    pipeline, runs = store._client.pipeline, []

    def dying(*arguments: object, **options: object) -> object:
        runs.append(1)
        if len(runs) == 3:
            raise KeyboardInterrupt
        return pipeline(*arguments, **options)

    store._client.pipeline = dying
    with pytest.raises(KeyboardInterrupt):
        put(store, FIRST)
    left = [key for key in keys(store) if key != store._key(FIRST.name, "raw").encode()]
    assert len(left) == 1
    assert 0 < store._client.ttl(left[0]) <= 600
    store._client.pipeline = pipeline
    assert store.names() == {FIRST.name}
    assert store.get(FIRST.name, ["raw"]) is not None


def test_an_object_that_is_evicted_while_it_is_written_is_not_kept(make_redis: MakeRedis) -> None:
    store = make_redis()
    evaluate = store._client.eval

    def evict_then_publish(script: str, count: int, temporary: str, *rest: object) -> object:
        store._client.hdel(temporary, "0")
        return evaluate(script, count, temporary, *rest)

    store._client.eval = evict_then_publish
    with pytest.raises(StoreFull, match="maxmemory"):
        put(store, FIRST)
    assert keys(store) == []
    assert (store.stats().not_kept, store.stats().puts) == (1, 0)


def test_last_uses_are_noted_once_a_minute(make_redis: MakeRedis, clock: Clock) -> None:
    store = make_redis()
    put(store, FIRST)
    put_at = clock.now
    clock.now += 59
    store.get(FIRST.name, ["raw"])
    assert store.stat(FIRST.name)["raw"].last_use == put_at
    clock.now += 1
    store.get(FIRST.name, ["raw"])
    assert store.stat(FIRST.name)["raw"].last_use == clock.now


def test_a_server_that_stopped_is_a_miss_until_it_is_back(store: RedisStore, server: RedisServer, later: Clock) -> None:
    put(store, FIRST)
    server.stop()
    assert store.get(FIRST.name, ["raw"]) is None
    stats = store.stats()
    assert (stats.misses, stats.errors, stats.retries, stats.is_open) == (1, 1, 1, True)
    assert "ConnectionError" in stats.reason
    server.start()
    assert store.get(FIRST.name, ["raw"]) is None
    assert store.stats().passed_over == 1
    later.now += 30
    put(store, FIRST)
    assert store.get(FIRST.name, ["raw"]).source == "remote"
    assert store.stats().is_open is False


def test_a_server_that_restarted_is_used_at_once(store: RedisStore, server: RedisServer) -> None:
    put(store, FIRST)
    server.stop()
    server.start()
    put(store, SECOND)
    stats = store.stats()
    assert (stats.errors, stats.is_open, stats.puts) == (0, False, 2)
    assert store.names() == {SECOND.name}


def test_a_connection_that_breaks_costs_one_retry_and_no_miss(store: RedisStore) -> None:
    put(store, FIRST)
    ask, broken = store._client.hmget, [1]

    def break_once(*arguments: object) -> object:
        if broken.pop():
            broken.append(0)
            raise redis.ConnectionError
        broken.append(0)
        return ask(*arguments)

    store._client.hmget = break_once
    assert store.get(FIRST.name, ["raw"]) is not None
    stats = store.stats()
    assert (stats.retries, stats.errors, stats.is_open) == (1, 0, False)


def test_a_server_that_hangs_costs_one_timeout_and_is_then_left_alone(
    store: RedisStore, server: RedisServer, later: Clock
) -> None:
    put(store, FIRST)
    server.freeze()
    start = time.monotonic()
    assert store.get(FIRST.name, ["raw"]) is None
    assert time.monotonic() - start >= TIMEOUT_S
    for _ in range(100):
        assert store.get(FIRST.name, ["raw"]) is None
    assert time.monotonic() - start < PATIENCE_S
    stats = store.stats()
    assert (stats.errors, stats.retries, stats.passed_over, stats.misses) == (1, 0, 100, 101)
    server.thaw()
    later.now += 30
    assert store.get(FIRST.name, ["raw"]) is not None


def test_a_server_that_hangs_refuses_puts_deletions_and_lists_with_a_reason(
    store: RedisStore, server: RedisServer
) -> None:
    put(store, FIRST)
    server.freeze()
    with pytest.raises(StoreUnusable, match=r"cannot write to unix://.*TimeoutError"):
        put(store, SECOND)
    for call in (
        lambda: put(store, SECOND),
        lambda: store.delete(FIRST.name),
        lambda: store.stat(FIRST.name),
        store.names,
        lambda: store.setting("sink"),
        lambda: store.keep_setting("sink", 1),
    ):
        with pytest.raises(StoreUnusable, match=r"left alone for up to 30 s since it failed \(TimeoutError"):
            call()
    assert (store.stats().not_kept, store.stats().errors) == (2, 1)
    server.thaw()


@pytest.mark.parametrize("answer_bytes", [0, 3, 400, 900])
def test_an_answer_that_stops_midway_is_a_miss_after_one_timeout(
    server: RedisServer, make_redis: MakeRedis, answer_bytes: int
) -> None:
    put(make_redis(url=server.url, prefix="kv"), FIRST)
    with Proxy(server.socket) as proxy:
        store = make_redis(url=proxy.url, prefix="kv", timeout_s=TIMEOUT_S)
        assert store.get(FIRST.name, ["raw"]).object.data == FIRST.data
        proxy.answer_bytes = answer_bytes
        start = time.monotonic()
        assert store.get(FIRST.name, ["raw"]) is None
        assert time.monotonic() - start >= TIMEOUT_S
        assert (store.stats().is_open, store.stats().errors, store.stats().retries) == (True, 1, 0)
        store.close()


def test_a_server_that_is_full_refuses_with_what_to_do_and_still_serves(make_redis: MakeRedis) -> None:
    with RedisServer("--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        store = make_redis(url=server.url, part_bytes=20_000)
        put(store, FIRST)
        with pytest.raises(StoreFull, match=r"is full.*maxmemory"):  # noqa: PT012
            for seed in range(100, 140):
                put(store, specimen(seed, tokens=1000))
        assert store.stats().not_kept == 1
        assert not store.stats().is_open
        assert store.get(FIRST.name, ["raw"]) is not None
        assert not any(b"raw." in key for key in keys(store))
        store.close()


def test_a_server_that_evicts_serves_whole_objects_or_none(make_redis: MakeRedis) -> None:
    with RedisServer("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru") as server:
        store = make_redis(url=server.url, part_bytes=20_000)
        objects = [specimen(seed, tokens=1000) for seed in range(100, 140)]
        num_refused = 0
        for one in objects:
            try:
                put(store, one)
            except StoreFull:  # the server may evict what is just being written, too
                num_refused += 1
        found = [store.get(one.name, ["raw"]) for one in objects]
        hits = [lease.object.data == one.data for lease, one in zip(found, objects, strict=True) if lease]
        assert 0 < len(hits) < len(objects)
        assert all(hits)
        stats = store.stats()
        assert (stats.quarantined, stats.errors, stats.not_kept) == (0, 0, num_refused)
        store.close()


def test_a_user_who_may_only_read_hits_and_is_refused_writes(server: RedisServer, make_redis: MakeRedis) -> None:
    owner = make_redis(url=server.url, prefix="kv")
    put(owner, FIRST)
    owner._client.acl_setuser("reader", enabled=True, passwords=["+word"], keys=["*"], categories=["+@read"])
    store = make_redis(url=server.url.replace("unix://", "unix://reader:word@"), prefix="kv")
    with pytest.raises(StoreUnusable, match="refuses"):
        put(store, SECOND)
    assert store.get(FIRST.name, ["raw"]) is not None
    assert not store.stats().is_open


def test_a_wrong_password_is_a_miss_and_no_message_holds_it(server: RedisServer, make_redis: MakeRedis) -> None:
    store = make_redis(url=server.url.replace("unix://", "unix://somebody:hunter2@"))
    assert store.get(FIRST.name, ["raw"]) is None
    with pytest.raises(StoreUnusable) as error:
        put(store, FIRST)
    assert "hunter2" not in f"{error.value} {store.stats().reason} {store.address}"
    assert store.stats().errors == 1


@pytest.mark.allow_hosts([LOOPBACK])
def test_a_url_with_host_and_port_reaches_a_server(make_redis: MakeRedis) -> None:
    port = free_port()
    with RedisServer(port=port), open_remote(f"redis://{LOOPBACK}:{port}/1") as store:
        put(store, FIRST)
        assert isinstance(store, RedisStore)
        assert store.get(FIRST.name, ["raw"]) is not None
        assert store._client.connection_pool.connection_kwargs["db"] == 1


@pytest.mark.allow_hosts([LOOPBACK])
def test_a_server_that_was_never_there_can_be_opened_and_is_a_miss() -> None:
    with open_remote(f"redis://{LOOPBACK}:{free_port()}") as store:
        assert store.get(FIRST.name, ["raw"]) is None
        assert store.stats().is_open


def test_one_of_many_machines_gets_the_claim(make_redis: MakeRedis) -> None:
    machines = [make_redis(prefix="claims") for _ in range(4)]
    claims = [machine.claim(FIRST.name, ttl_s=60.0) for machine in machines]
    assert [claim is not None for claim in claims] == [True, False, False, False]
    claims[0].release()
    claims[0].release()
    with machines[3].claim(FIRST.name, ttl_s=60.0) as claim:
        assert isinstance(claim, Claim)
    assert machines[0]._client.exists(machines[0]._claim_key(FIRST.name)) == 0


def test_a_claim_ends_by_itself_and_its_owner_ends_no_other(make_redis: MakeRedis) -> None:
    slow, fast = make_redis(prefix="late"), make_redis(prefix="late")
    claim = slow.claim(FIRST.name, ttl_s=60.0)
    key = slow._claim_key(FIRST.name)
    assert 59_000 < slow._client.pttl(key) <= 60_000
    slow._client.unlink(key)  # as if a minute had gone by
    with fast.claim(FIRST.name, ttl_s=60.0):
        claim.release()
        assert fast._is_claimed(FIRST.name)


def test_waiting_ends_when_the_object_is_there(make_redis: MakeRedis) -> None:
    owner = make_redis(prefix="wait")
    waits = []

    def put_after_three(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            put(owner, FIRST)

    waiting = make_redis(prefix="wait", sleep=put_after_three)
    with owner.claim(FIRST.name, ttl_s=60.0):
        assert waiting.wait(FIRST.name, ["raw"], at_most_s=60.0) is True
    assert len(waits) == 3
    owner.delete(FIRST.name)


def test_waiting_ends_when_the_claim_is_given_up(make_redis: MakeRedis) -> None:
    owner = make_redis(prefix="wait")
    claim = owner.claim(FIRST.name, ttl_s=60.0)
    waiting = make_redis(prefix="wait", sleep=lambda _: claim.release())
    assert waiting.wait(FIRST.name, ["raw"], at_most_s=60.0) is False


def test_waiting_is_bounded(make_redis: MakeRedis) -> None:
    later = Clock(0.0)

    def sleep(seconds: float) -> None:
        later.now += seconds

    store = make_redis(prefix="bound", sleep=sleep, monotonic=later)
    with store.claim(FIRST.name, ttl_s=60.0):
        assert store.wait(FIRST.name, ["raw"], at_most_s=2.0) is False
    assert later.now == pytest.approx(2.0)


def test_who_cannot_ask_gets_the_claim_and_does_not_wait(store: RedisStore, server: RedisServer) -> None:
    server.stop()
    with store.claim(FIRST.name, ttl_s=60.0) as claim:
        assert claim is not None
    assert store.wait(FIRST.name, ["raw"], at_most_s=60.0) is False
