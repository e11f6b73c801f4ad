"""One absent document is encoded once: by threads of one process, and by machines that share a remote."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from engines import QUESTION, TEXTS, engine_of, some_ids

from kvlink.core.errors import StoreFull
from kvlink.engine.loader import Loader
from kvlink.engine.rates import LEAST, Rates
from kvlink.models.runner import Runner
from kvlink.store import DiskStore, MemoryStore, Store, TieredStore
from kvlink.store.redis import RedisStore
from store.servers import RedisServer

ONE, OTHER = some_ids(20), some_ids(31)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def remote(server: RedisServer, request: pytest.FixtureRequest) -> Any:
    """A constructor of stores that share one place."""
    return lambda **options: RedisStore(server.url, prefix=request.node.name, **options)


def loader_of(store: Store, **options: Any) -> Loader:
    base = engine_of().loader
    return Loader(runner=base._runner, store=store, identity=base.identity, sink=base.sink, **options)


class Encodes:
    """Notes what is encoded, and holds it until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_open: bool = True) -> None:
        engine_of()  # its probe encodes, too
        self.ids: list[tuple[int, ...]] = []
        self.begun, self.opened = threading.Event(), threading.Event()
        if is_open:
            self.opened.set()
        encode = Runner.encode

        def wait_then_encode(runner: Runner, batch: Any, **options: Any) -> Any:
            self.ids += batch
            self.begun.set()
            assert self.opened.wait(60)
            return encode(runner, batch, **options)

        monkeypatch.setattr(Runner, "encode", wait_then_encode)


def load(loader: Loader, *segments: tuple[int, ...]) -> list[tuple[str, str]]:
    with loader.load(segments) as found:
        return [(one.source, one.reason) for one in found]


@pytest.mark.parametrize("budget_bytes", [1 << 24, 0], ids=["kept", "not kept"])
def test_two_threads_that_need_one_absent_segment_encode_it_once(
    monkeypatch: pytest.MonkeyPatch, budget_bytes: int
) -> None:
    loader = loader_of(MemoryStore(budget_bytes=budget_bytes))
    encodes = Encodes(monkeypatch, is_open=False)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.extend(load(loader, ONE))) for _ in range(2)]
    threads[0].start()
    assert encodes.begun.wait(60)
    threads[1].start()
    while loader.store.stats().misses != 2:
        pass
    encodes.opened.set()
    for thread in threads:
        thread.join(60)
    assert encodes.ids == [ONE]
    assert len(found) == 2
    assert loader._encoding._making == {}


def test_an_encode_that_fails_is_made_by_who_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of(MemoryStore(budget_bytes=1 << 24))
    monkeypatch.setattr(Runner, "encode", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load(loader, ONE)
    assert loader._encoding._making == {}
    monkeypatch.undo()
    assert load(loader, ONE) == [("encoded", "not in the store")]


def test_of_two_machines_one_encodes_and_the_other_reads(
    remote: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    here, there = (loader_of(TieredStore(DiskStore(tmp_path / name), remote())) for name in "ab")
    encodes = Encodes(monkeypatch, is_open=False)
    found: dict[str, Any] = {}
    first = threading.Thread(target=lambda: found.update(first=load(here, ONE)))
    first.start()
    assert encodes.begun.wait(60)
    second = threading.Thread(target=lambda: found.update(second=load(there, ONE)))
    second.start()
    while there.store.stats().misses == 0:
        pass
    encodes.opened.set()
    for thread in (first, second):
        thread.join(60)
    assert encodes.ids == [ONE]
    assert found["first"] == [("encoded", "not in the store")]
    assert found["second"] == [("remote", "another machine has just encoded it")]
    here.store.flush()
    assert remote().claim(here.name(ONE), ttl_s=1.0) is not None


def test_what_another_machine_put_and_let_go_between_look_and_claim_is_read(
    remote: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = loader_of(remote()), loader_of(remote())
    claim = here.store.claim

    def late(name: str, **options: Any) -> Any:
        assert load(there, ONE) == [("encoded", "not in the store")]
        return claim(name, **options)

    monkeypatch.setattr(here.store, "claim", late)
    assert load(here, ONE) == [("remote", "another machine has just encoded it")]
    assert there.store.claim(there.name(ONE), ttl_s=1.0) is not None


def test_a_dead_claimant_costs_at_most_the_bound_for_all_segments_together(remote: Any) -> None:
    slept: list[float] = []
    now = [0.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    loader = loader_of(remote(sleep=sleep, monotonic=lambda: now[0]), wait_s=3.0, monotonic=lambda: now[0])
    for ids in (ONE, OTHER):
        assert remote().claim(loader.name(ids), ttl_s=600.0) is not None
    found = load(loader, ONE, OTHER)
    assert [source for source, _ in found] == ["encoded"] * 2
    assert all("waited 3.0 s for another machine that had claimed it" in reason for _, reason in found)
    assert sum(slept) == pytest.approx(3.0)
    assert remote().names() == {loader.name(ONE), loader.name(OTHER)}


def test_what_others_have_claimed_does_not_hold_up_ones_own(remote: Any) -> None:
    order: list[str] = []
    loader = loader_of(remote(sleep=lambda _: order.append("slept")), wait_s=0.01)
    remote().claim(loader.name(ONE), ttl_s=600.0)
    keep = loader.store.put
    loader.store.put = lambda name, *rest: order.append(name) or keep(name, *rest)  # type: ignore[method-assign]
    load(loader, ONE, OTHER)
    assert order[0] == loader.name(OTHER)
    assert order[-1] == loader.name(ONE)


def test_a_remote_that_is_gone_costs_no_answer(server: RedisServer) -> None:
    loader = loader_of(RedisStore("unix:///nowhere/at/all"))
    assert [source for source, _ in load(loader, ONE)] == ["encoded"]


# --- load or encode -------------------------------------------------------------------------------------------------


def rates_of(source: Any, *, load_s: float, encode_s: float) -> Rates:
    rates = Rates()
    for _ in range(LEAST):
        rates.loaded(source, 10_000, load_s)
        rates.encoded(20, encode_s)
    return rates


def test_what_loads_slower_than_it_encodes_is_encoded_and_not_sent_back(remote: Any) -> None:
    list(loader_of(remote()).encode([ONE]))
    far = remote()
    loader = loader_of(
        TieredStore(MemoryStore(budget_bytes=1 << 24), far), rates=rates_of("remote", load_s=9.0, encode_s=0.1)
    )
    ((source, reason),) = load(loader, ONE)
    assert source == "encoded"
    assert reason.startswith("loading ")
    assert " from remote takes about " in reason
    loader.store.flush()
    assert (far.stats().puts, far.stats().hits) == (0, 0)
    assert load(loader, ONE) == [("host", "")]


@pytest.mark.parametrize("rates", [None, rates_of("host", load_s=0.001, encode_s=9.0)], ids=["unknown", "faster"])
def test_what_loads_faster_or_was_never_measured_is_loaded(rates: Rates | None) -> None:
    store = MemoryStore(budget_bytes=1 << 24)
    list(loader_of(store).encode([ONE]))
    assert load(loader_of(store, rates=rates), ONE) == [("host", "")]


def test_the_reason_stands_in_usage() -> None:
    engine = engine_of(store=MemoryStore(budget_bytes=1 << 24))
    engine.encode(TEXTS)
    engine.loader.rates = rates_of("host", load_s=9.0, encode_s=0.001)
    rows = engine.generate(TEXTS, QUESTION, max_new_tokens=1).usage.documents
    assert {row.source for row in rows} == {"encoded"}
    assert all(row.reason.startswith("loading ") for row in rows)
    assert {row.reason for row in engine.encode(TEXTS)} == {"already in the store"}


def test_loads_and_encodes_are_measured() -> None:
    loader = loader_of(MemoryStore(budget_bytes=1 << 24))
    for number in range(LEAST):
        load(loader, some_ids(20 + number))
        load(loader, some_ids(20 + number))
    assert loader.rates.encode_s(20) > 0
    assert loader.rates.load_s("host", 10_000) > 0


def test_an_entry_that_a_codec_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of(MemoryStore(budget_bytes=1 << 24), codec="int8")
    encode = Runner.encode

    def overflowing(runner: Runner, *arguments: Any, **options: Any) -> Any:
        made = encode(runner, *arguments, **options)
        made[0].values[0, 0, 0, 0] = float("inf")
        return made

    monkeypatch.setattr(Runner, "encode", overflowing)
    ((_, reason),) = load(loader, ONE)
    assert reason.startswith("not in the store; written raw, since int8 refuses it: ")


def test_who_must_keep_learns_that_it_is_not_kept(remote: Any) -> None:
    loader = loader_of(TieredStore(MemoryStore(budget_bytes=1), DiskStore.__new__(DiskStore)))
    loader.store._keeping[0].store.put = lambda *_: (_ for _ in ()).throw(StoreFull("the disk is full"))
    with pytest.raises(StoreFull, match="the disk is full"):
        list(loader.encode([ONE], must_keep=True))
