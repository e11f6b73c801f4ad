"""Residents: made once, shared by all who hold them, within a budget that nothing exceeds."""

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from engines import engine_of, some_ids
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvlink.core.entry import same_bits
from kvlink.core.errors import DeviceBusy, DeviceOverflow
from kvlink.engine import residency as residency_module
from kvlink.engine.loaded import Ids, LoadTimes
from kvlink.engine.loader import Loader
from kvlink.engine.rebuild import Rebuilder
from kvlink.engine.residency import Held, Hold, Residency, device_bytes, lies_in_object
from kvlink.models.resident import Resident
from kvlink.models.runner import Runner
from kvlink.store import DiskStore, MemoryStore, Store, TieredStore
from kvlink.store.codec import CODECS, encode, open_object
from kvlink.store.opening import host_bytes

ONE, OTHER, THIRD = some_ids(20), some_ids(31), some_ids(40)
PLENTY = 1 << 30


def try_hold(residency: Residency, segments: Sequence[Ids]) -> Hold | None:
    """Hold segments, or return None where running requests leave too little room."""
    try:
        return residency.hold(segments)
    except DeviceBusy:
        return None


def loader_of(store: Store | None = None, **options: Any) -> Loader:
    base = engine_of().loader
    store = store or MemoryStore(budget_bytes=PLENTY)
    return Loader(runner=base.runner, store=store, identity=base.identity, sink=base.sink, **options)


def residency_of(store: Store | None = None, *, budget_bytes: int = PLENTY, **options: Any) -> Residency:
    return Residency(loader_of(store, **options), budget_bytes=budget_bytes)


def size(*segments: Ids) -> int:
    runner = engine_of().runner
    return sum(map(len, segments)) * runner.geometry.bytes_per_token(runner.dtype)


def seen(held: Sequence[Held]) -> list[tuple[str, str | None, str]]:
    return [(one.source, one.codec, one.reason) for one in held]


def got(residency: Residency, *segments: Ids) -> list[str]:
    """Hold segments for a moment and return where they came from."""
    with residency.hold(segments) as held:
        return [one.source for one in held]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[Ids]:
    """The ids of every segment that is encoded."""
    engine_of()  # its probe encodes, too
    ids: list[Ids] = []
    own = Runner.encode

    def noting(runner: Runner, batch: Any, **options: Any) -> Any:
        ids.extend(batch)
        return own(runner, batch, **options)

    monkeypatch.setattr(Runner, "encode", noting)
    return ids


# --- what is held ---------------------------------------------------------------------------------------------------


def test_a_segment_is_encoded_for_the_first_request_and_on_the_device_for_the_next(encoded: list[Ids]) -> None:
    residency, times = residency_of(), LoadTimes()
    with residency.hold([ONE], times) as first, residency.hold([ONE]) as second:
        assert seen(first) == [("encoded", None, "not in the store")]
        assert seen(second) == [("device", "raw", "")]
        assert first[0].resident is second[0].resident
    assert encoded == [ONE]
    assert times.encode_s > 0
    entry = residency.loader.runner.encode([ONE], prefix=residency.loader.sink)[0]
    assert same_bits(second[0].resident.keys, Resident.of(entry, residency.loader.runner).keys)
    assert same_bits(second[0].resident.values, entry.values)


@pytest.mark.parametrize("codec", ["raw", "int8", "pruned50"])
def test_a_hit_tells_the_codec_that_it_was_decoded_from(codec: str) -> None:
    store = MemoryStore(budget_bytes=PLENTY)
    list(loader_of(store, codec=codec).encode([ONE]))
    residency = residency_of(store, codec=codec)
    with residency.hold([ONE]) as read, residency.hold([ONE]) as hit:
        assert seen(read) == [("host", codec, "")]
        assert seen(hit) == [("device", codec, "")]
        assert hit[0].resident.is_pruned == (codec == "pruned50")


def test_what_is_resident_is_not_looked_for_in_a_better_codec() -> None:
    store = MemoryStore(budget_bytes=PLENTY)
    list(loader_of(store, codec="int8").encode([ONE]))
    residency = residency_of(store, codec="int8")
    got(residency, ONE)
    list(loader_of(store).encode([ONE]))
    with residency.hold([ONE]) as held:
        assert held[0].codec == "int8"


def test_residents_come_in_the_order_of_the_request_and_doubles_share(encoded: list[Ids]) -> None:
    residency = residency_of()
    got(residency, OTHER)
    with residency.hold([ONE, OTHER, ONE, THIRD]) as held:
        assert [one.resident.token_ids for one in held] == [ONE, OTHER, ONE, THIRD]
        assert [one.name for one in held] == [residency.loader.name(ids) for ids in (ONE, OTHER, ONE, THIRD)]
        assert [one.source for one in held] == ["encoded", "device", "encoded", "encoded"]
        assert held[0] is held[2]
    assert sorted(encoded, key=len) == [ONE, OTHER, THIRD]
    stats = residency.stats()
    assert (stats.num_residents, stats.hits, stats.misses, stats.used_bytes) == (3, 1, 3, size(ONE, OTHER, THIRD))


def test_a_request_without_documents_holds_nothing() -> None:
    assert got(residency_of()) == []


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [(1, [[ONE], [OTHER], [THIRD]]), (51, [[ONE, OTHER], [THIRD]]), (1000, [[ONE, OTHER, THIRD]])],
)
def test_long_requests_are_loaded_in_portions(
    monkeypatch: pytest.MonkeyPatch, tokens: int, wanted: list[list[Ids]]
) -> None:
    monkeypatch.setattr(residency_module, "PORTION_TOKENS", tokens)
    residency = residency_of()
    load, loads = residency.loader.load, []
    monkeypatch.setattr(residency.loader, "load", lambda ids, times: loads.append(list(ids)) or load(ids, times))
    assert got(residency, ONE, OTHER, THIRD) == ["encoded"] * 3
    assert loads == wanted


# --- memory ---------------------------------------------------------------------------------------------------------


def within(tensor: torch.Tensor, data: memoryview) -> bool:
    start = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
    return start <= tensor.data_ptr() < start + data.nbytes


@pytest.mark.parametrize("codec", CODECS)
def test_only_views_of_an_object_are_copied_since_they_would_keep_all_of_it(codec: str) -> None:
    loader = loader_of()
    entry = loader.runner.encode([THIRD], prefix=loader.sink)[0]
    data = encode(entry, loader.identity, codec=codec)
    decoded = open_object(data, name=loader.name(THIRD), codec=codec).decode()
    assert lies_in_object(codec) == within(decoded.values, data)
    loader.store.put(loader.name(THIRD), codec, data)
    residency = Residency(loader_of(loader.store, codec=codec), budget_bytes=PLENTY)
    with residency.hold([THIRD]) as held:
        assert held[0].codec == codec
        assert not within(held[0].resident.values, data)
        assert same_bits(held[0].resident.values, decoded.values)


@pytest.mark.parametrize("codec", [None, "int8"], ids=["encoded", "decoded"])
def test_values_that_were_encoded_or_decoded_are_taken_over_without_a_copy(
    monkeypatch: pytest.MonkeyPatch, codec: str | None
) -> None:
    residency, own, entries = residency_of(codec=codec or "raw"), Resident.of, []
    if codec:
        list(residency.loader.encode([ONE]))

    def noting(entry: Any, *rest: Any, **options: Any) -> Resident:
        entries.append(entry)
        return own(entry, *rest, **options)

    monkeypatch.setattr(Resident, "of", noting)
    with residency.hold([ONE]) as held:
        assert held[0].codec == codec
        assert held[0].resident.values.data_ptr() == entries[0].values.data_ptr()
        assert held[0].resident.keys.data_ptr() != entries[0].keys.data_ptr()


def test_the_account_is_of_real_bytes(encoded: list[Ids]) -> None:
    residency = residency_of(codec="pruned25", accept=("pruned25", "raw"))
    assert got(residency, ONE, OTHER) == ["encoded"] * 2
    residency.drop(residency.loader.name(ONE), residency.loader.name(OTHER))
    with residency.hold([ONE, OTHER, THIRD]) as held:
        assert [one.resident.is_pruned for one in held] == [True, True, False]
        assert residency.stats().used_bytes == sum(one.resident.num_bytes for one in held) < size(ONE, OTHER, THIRD)


# --- the budget -----------------------------------------------------------------------------------------------------


def test_a_request_beyond_the_budget_is_refused_with_both_figures_before_anything_is_read(encoded: list[Ids]) -> None:
    residency = residency_of(budget_bytes=size(ONE, OTHER) - 1)
    got(residency, ONE)
    encoded.clear()
    misses = residency.loader.store.stats().misses
    with pytest.raises(DeviceOverflow, match=f"take {size(ONE, OTHER)} bytes .* is {size(ONE, OTHER) - 1} bytes"):
        residency.hold([ONE, OTHER])
    with pytest.raises(DeviceOverflow):
        try_hold(residency, [ONE, OTHER])
    assert (encoded, residency.loader.store.stats().misses) == ([], misses)
    stats = residency.stats()
    assert (stats.used_bytes, stats.leased_bytes, stats.evictions, stats.hits) == (size(ONE), 0, 0, 0)
    assert got(residency, ONE) == ["device"]


def test_a_request_of_exactly_the_budget_fits() -> None:
    residency = residency_of(budget_bytes=size(ONE, OTHER))
    assert got(residency, ONE, OTHER, ONE) == ["encoded"] * 3
    assert residency.stats().used_bytes == size(ONE, OTHER)


def test_what_other_requests_hold_is_waited_for_and_not_evicted(encoded: list[Ids]) -> None:
    residency = residency_of(budget_bytes=size(OTHER, THIRD))
    got(residency, THIRD)
    running = residency.hold([ONE])
    encoded.clear()
    needed = size(OTHER, THIRD)
    with pytest.raises(DeviceBusy, match=f"{needed} bytes are needed .* hold {size(ONE)} of the {needed} bytes"):
        residency.hold([OTHER, THIRD])
    assert try_hold(residency, [OTHER, THIRD]) is None
    assert encoded == []
    assert residency.stats().evictions == 0
    shared = residency.hold([ONE, THIRD])  # what both hold counts once
    shared.release()
    running.release()
    assert got(residency, OTHER) == ["encoded"]
    assert residency.stats().evictions == 1


def test_the_least_recently_held_makes_room(encoded: list[Ids]) -> None:
    residency = residency_of(budget_bytes=size(ONE, OTHER, THIRD))
    for ids in (ONE, OTHER, THIRD, ONE):
        got(residency, ids)
    new = some_ids(25)
    assert got(residency, new) == ["encoded"]
    assert got(residency, ONE, THIRD) == ["device"] * 2
    assert got(residency, OTHER) == ["host"]


def test_the_least_recently_held_stays_while_it_is_leased() -> None:
    residency = residency_of(budget_bytes=size(ONE, OTHER, THIRD))
    with residency.hold([ONE]):
        got(residency, OTHER, THIRD)
        got(residency, some_ids(25))
        assert got(residency, ONE, THIRD) == ["device"] * 2


def test_a_second_release_does_nothing() -> None:
    residency = residency_of()
    first, second = residency.hold([ONE]), residency.hold([ONE])
    first.release()
    first.release()
    assert first.held == []
    assert residency.stats().leased_bytes == size(ONE)
    second.release()
    assert residency.stats().leased_bytes == 0


def test_pruned_documents_need_what_they_take_and_not_what_they_would_take_whole() -> None:
    store = MemoryStore(budget_bytes=PLENTY)
    list(loader_of(store, codec="pruned25").encode([ONE, OTHER]))
    with residency_of(store, codec="pruned25").hold([ONE, OTHER]) as held:
        needed = sum(one.resident.num_bytes for one in held)
    assert needed < size(ONE, OTHER) / 3
    assert got(residency_of(store, budget_bytes=needed, codec="pruned25"), ONE, OTHER) == ["host"] * 2
    with pytest.raises(DeviceOverflow, match=f"take {needed} bytes"):
        residency_of(store, budget_bytes=needed - 1, codec="pruned25").hold([ONE, OTHER])
    with pytest.raises(DeviceOverflow, match=f"take {size(ONE, OTHER)} bytes"):
        residency_of(store, budget_bytes=needed).hold([ONE, OTHER])


def test_a_damaged_pruned_object_that_is_encoded_whole_may_not_exceed_the_budget() -> None:
    store = MemoryStore(budget_bytes=PLENTY)
    list(loader_of(store, codec="pruned25").encode([ONE]))
    store._slots[loader_of(store).name(ONE), "pruned25"].data[-1] ^= 1
    residency = residency_of(store, budget_bytes=size(ONE) - 1, codec="raw", accept=("raw", "pruned25"))
    assert try_hold(residency, [ONE]) is None
    assert residency.stats().used_bytes == 0
    with pytest.raises(DeviceOverflow):  # now it is known to be whole
        residency.hold([ONE])


def test_a_damaged_pruned_object_makes_room_for_the_whole_one() -> None:
    store = MemoryStore(budget_bytes=PLENTY)
    list(loader_of(store, codec="pruned25").encode([ONE]))
    residency = residency_of(store, budget_bytes=size(ONE, OTHER) - 1, codec="raw", accept=("raw", "pruned25"))
    got(residency, OTHER)
    store._slots[residency.loader.name(ONE), "pruned25"].data[-1] ^= 1
    assert got(residency, ONE) == ["encoded"]
    stats = residency.stats()
    assert (stats.used_bytes, stats.evictions) == (size(ONE), 1)


def test_a_quarter_of_the_memory_is_the_budget_on_a_cpu() -> None:
    assert device_bytes(torch.device("cpu")) == pytest.approx(2.5 * host_bytes(), rel=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_fifths_of_its_memory_are_the_budget_on_a_gpu() -> None:
    assert device_bytes(torch.device("cuda")) == int(torch.cuda.mem_get_info()[1] * 0.4)


# --- documents that are deleted -------------------------------------------------------------------------------------


def test_a_deleted_document_is_found_no_more_and_freed_behind_its_last_lease() -> None:
    residency = residency_of(budget_bytes=size(ONE, OTHER))
    name = residency.loader.name(ONE)
    first, second = residency.hold([ONE]), residency.hold([ONE])
    memory = weakref.ref(first.held[0].resident.keys)
    assert not residency.drop(name)
    residency.loader.store.delete(name)
    assert residency.stats().num_residents == 0
    assert residency.stats().used_bytes == size(ONE)
    assert try_hold(residency, [ONE, OTHER]) is None  # a new one stands beside the old one
    first.release()
    assert not residency.drop(name)
    assert residency.stats().leased_bytes == size(ONE)
    assert memory() is second.held[0].resident.keys
    second.release()
    gc.collect()
    assert memory() is None
    assert residency.drop(name)
    assert residency.stats().used_bytes == 0
    assert got(residency, ONE, OTHER) == ["encoded"] * 2


def test_what_nobody_holds_is_gone_at_once() -> None:
    residency = residency_of()
    got(residency, ONE, OTHER)
    assert residency.drop(residency.loader.name(ONE), "0" * 64)
    assert residency.stats().used_bytes == size(OTHER)


def test_a_document_that_is_deleted_while_it_is_made_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    residency = residency_of()
    name, own, found = residency.loader.name(ONE), Resident.of, []

    def dropping(*arguments: Any, **options: Any) -> Resident:
        found.append(residency.drop(name))
        return own(*arguments, **options)

    monkeypatch.setattr(Resident, "of", dropping)
    with residency.hold([ONE]) as held:
        assert seen(held) == [("encoded", None, "not in the store")]
    assert found == [False]
    assert residency.stats().used_bytes == 0
    assert residency.drop(name)


def test_what_no_document_uses_any_more_does_not_stay_behind_its_lease() -> None:
    used = {loader_of().name(OTHER)}
    residency = Residency(loader_of(), budget_bytes=PLENTY, uses=used.__contains__)
    with residency.hold([ONE, OTHER]):
        assert residency.stats().used_bytes == size(ONE, OTHER)
    assert residency.stats().used_bytes == size(OTHER)
    assert got(residency, ONE, OTHER) == ["host", "device"]


def test_scopes_share_one_budget_and_no_resident() -> None:
    shared = residency_of(budget_bytes=size(ONE, OTHER))
    tenant = shared.over(Rebuilder.over(shared.loader, scope=b"tenant of sixtee", sources=lambda _: ()))
    assert got(shared, ONE) == got(tenant, ONE) == ["encoded"]
    assert got(shared, ONE) == got(tenant, ONE) == ["device"]
    assert shared.stats() == tenant.stats()
    running = shared.hold([ONE])
    assert try_hold(tenant, [ONE, OTHER]) is None
    running.release()
    with pytest.raises(ValueError, match="two models"):
        shared.over(engine_of("qwen2").loader)


# --- the host's copy ------------------------------------------------------------------------------------------------


def test_the_host_keeps_no_copy_of_what_a_slower_tier_has(tmp_path: Path) -> None:
    host, disk = MemoryStore(budget_bytes=PLENTY), DiskStore(tmp_path / "disk")
    residency = residency_of(TieredStore(host, disk))
    list(residency.loader.encode([ONE, OTHER]))
    with residency.loader.load([ONE, OTHER]) as loaded:
        assert {one.source for one in loaded} == {"disk"}
    assert host.names() == disk.names() != set()
    disk.delete(residency.loader.name(OTHER))
    assert got(residency, ONE, OTHER) == ["host"] * 2
    assert host.names() == {residency.loader.name(OTHER)}
    assert disk.names() == {residency.loader.name(ONE)}
    residency.drop(*disk.names(), *host.names())
    assert got(residency, ONE, OTHER) == ["disk", "host"]  # nothing was lost


@pytest.mark.parametrize("stack", [lambda host: host, TieredStore], ids=["alone", "as the only tier"])
def test_the_host_keeps_what_it_alone_has(stack: Callable[[MemoryStore], Store]) -> None:
    host = MemoryStore(budget_bytes=PLENTY)
    residency = residency_of(stack(host))
    list(residency.loader.encode([ONE]))
    assert got(residency, ONE) == ["host"]
    assert host.names() == {residency.loader.name(ONE)}


# --- threads --------------------------------------------------------------------------------------------------------


def together(*calls: Callable[[], None]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def waiting(residency: Residency, ids: Ids) -> int:
    leased = residency._leases._kept.get(residency.loader.name(ids))
    return leased.count if leased else 0


def test_two_threads_that_need_one_absent_segment_make_it_once(
    encoded: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    residency, own, made, found = residency_of(), Resident.of, [], []

    def slowly(*arguments: Any, **options: Any) -> Resident:
        while waiting(residency, ONE) < 2:
            pass
        made.append(own(*arguments, **options))
        return made[-1]

    def ask() -> None:
        with residency.hold([ONE]) as held:
            found.extend(held)

    monkeypatch.setattr(Resident, "of", slowly)
    together(ask, ask)
    assert encoded == [ONE]
    assert len(made) == 1
    assert found[0].resident is found[1].resident
    assert sorted(one.reason for one in found) == ["encoded by another request", "not in the store"]


def test_what_fails_is_made_by_who_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    residency, own = residency_of(budget_bytes=size(ONE)), Resident.of
    outcomes: list[Any] = []

    def failing_once(*arguments: Any, **options: Any) -> Resident:
        if outcomes:
            return own(*arguments, **options)
        while waiting(residency, ONE) < 2:
            pass
        outcomes.append("failed")
        raise ZeroDivisionError

    def ask() -> None:
        try:
            with residency.hold([ONE]) as held:
                outcomes.extend(seen(held))
        except ZeroDivisionError:
            outcomes.append("raised")

    monkeypatch.setattr(Resident, "of", failing_once)
    together(ask, ask)
    assert sorted(map(str, outcomes)) == ["('host', 'raw', '')", "failed", "raised"]
    stats = residency.stats()
    assert (stats.num_residents, stats.used_bytes, stats.leased_bytes) == (1, size(ONE), 0)


def test_what_was_made_before_a_failure_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    residency, own = residency_of(), Resident.of

    def failing(entry: Any, *rest: Any, **options: Any) -> Resident:
        if entry.token_ids != ONE:
            raise ZeroDivisionError
        return own(entry, *rest, **options)

    monkeypatch.setattr(residency_module, "PORTION_TOKENS", 1)
    monkeypatch.setattr(Resident, "of", failing)
    with pytest.raises(ZeroDivisionError):
        residency.hold([ONE, OTHER])
    assert got(residency, ONE) == ["device"]
    assert residency.stats().used_bytes == size(ONE)


def test_what_another_request_makes_does_not_hold_up_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    residency, own, others = residency_of(), Resident.of, threading.Event()

    def only_then(entry: Any, *rest: Any, **options: Any) -> Resident:
        if entry.token_ids == OTHER:
            others.set()
        assert others.wait(60)
        return own(entry, *rest, **options)

    def wait_then_ask() -> None:
        while not waiting(residency, ONE):
            pass
        assert got(residency, ONE, OTHER) == ["encoded"] * 2

    monkeypatch.setattr(Resident, "of", only_then)
    together(lambda: got(residency, ONE), wait_then_ask)
    assert got(residency, ONE, OTHER) == ["device"] * 2


def test_under_many_threads_the_budget_holds_and_every_resident_is_the_right_one() -> None:
    segments = [some_ids(10 + number) for number in range(12)]
    residency = residency_of(budget_bytes=size(*segments[:5]))
    names = [residency.loader.name(ids) for ids in segments]
    runner, sink = residency.loader.runner, residency.loader.sink
    wanted = {ids: Resident.of(runner.encode([ids], prefix=sink)[0], runner) for ids in segments}
    faults: list[str] = []

    def work(seed: int) -> None:
        random = Random(seed)
        for _ in range(60):
            if random.random() < 0.1:
                residency.drop(random.choice(names))
            asked = random.sample(segments, random.randint(1, 2))
            hold = try_hold(residency, asked)
            stats = residency.stats()
            if not stats.leased_bytes <= stats.used_bytes <= stats.budget_bytes:
                faults.append(str(stats))
            if hold:
                with hold as held:
                    for ids, one in zip(asked, held, strict=True):
                        if (one.resident.keys - wanted[ids].keys).abs().max() > 1e-9:
                            faults.append(str(one.name))

    together(*(lambda seed=seed: work(seed) for seed in range(4)))
    assert faults == []
    assert residency.stats().leased_bytes == 0
    assert residency._leases._leaving == set()


# --- against a dict -------------------------------------------------------------------------------------------------

SEGMENTS = [some_ids(tokens) for tokens in (5, 8, 9, 13, 21, 34)]
WHICH = st.sampled_from(range(len(SEGMENTS)))
BUDGET = size(*SEGMENTS[:5])


@functools.cache
def encoded_segments() -> Store:
    loader = loader_of()
    list(loader.encode(SEGMENTS))
    return loader.store


class ResidencyMachine(RuleBasedStateMachine):
    """The model: what is `there`, least recently used first, and who `holds` what; dropped ones live in holds alone."""

    def __init__(self) -> None:
        super().__init__()
        self.residency = residency_of(encoded_segments(), budget_bytes=BUDGET)
        self.there: dict[int, object] = {}
        self.holds: list[tuple[Hold, dict[object, int]]] = []
        self.hits = self.misses = self.evictions = 0

    def leased(self) -> dict[object, int]:
        return {token: which for _, tokens in self.holds for token, which in tokens.items()}

    def used(self) -> int:
        tokens = {token: which for which, token in self.there.items()} | self.leased()
        return size(*(SEGMENTS[which] for which in tokens.values()))

    @rule(asked=st.lists(WHICH, min_size=1, max_size=3))
    def hold(self, asked: list[int]) -> None:
        segments = [SEGMENTS[which] for which in asked]
        distinct = list(dict.fromkeys(asked))
        needed = size(*(SEGMENTS[which] for which in distinct))
        ours = {self.there[which] for which in distinct if which in self.there}
        others = size(*(SEGMENTS[which] for token, which in self.leased().items() if token not in ours))
        if needed > BUDGET:
            with pytest.raises(DeviceOverflow):
                self.residency.hold(segments)
            return
        hold = try_hold(self.residency, segments)
        assert (hold is None) == (needed + others > BUDGET)
        if hold is None:
            return
        found = [which for which in distinct if which in self.there]
        assert [one.source for one in hold.held] == ["device" if which in found else "host" for which in asked]
        assert [one.resident.token_ids for one in hold.held] == segments
        self.hits += len(found)
        self.misses += len(distinct) - len(found)
        tokens = {which: self.there.pop(which, None) or object() for which in distinct}
        self.there |= {which: tokens[which] for which in found}
        self.holds.append((hold, {tokens[which]: which for which in distinct}))
        new = [which for which in distinct if which not in found]
        leased = self.leased()
        for which, token in list(self.there.items()):
            if self.used() > BUDGET and token not in leased:
                del self.there[which]
                self.evictions += 1
        self.there |= {which: tokens[which] for which in new}

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        hold, _ = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        hold.release()

    @rule(which=WHICH)
    def drop(self, which: int) -> None:
        self.there.pop(which, None)
        is_gone = which not in self.leased().values()
        assert self.residency.drop(self.residency.loader.name(SEGMENTS[which])) == is_gone

    @invariant()
    def agrees(self) -> None:
        stats = self.residency.stats()
        assert (stats.hits, stats.misses, stats.evictions) == (self.hits, self.misses, self.evictions)
        assert stats.num_residents == len(self.there)
        assert stats.used_bytes == self.used() <= BUDGET == stats.budget_bytes
        assert stats.leased_bytes == size(*(SEGMENTS[which] for which in self.leased().values()))
        names = [self.residency.loader.name(SEGMENTS[which]) for which in self.there]
        assert list(self.residency._leases._kept) == names


def test_residency_agrees_with_a_dict() -> None:
    run_state_machine_as_test(
        ResidencyMachine, settings=settings(max_examples=20, stateful_step_count=40, deadline=None)
    )
