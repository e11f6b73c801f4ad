"""The tiers against a dict: whatever is damaged, lost or broken in between, they serve what was put, or nothing."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from specimens import put, specimen

from kvlink.core.errors import StoreError, StoreUnusable
from kvlink.store import DiskStore, MemoryStore, Store
from kvlink.store.objects import FsspecStore
from kvlink.store.tiered import TieredStore

OBJECTS = [specimen(seed) for seed in range(4)]
WHICH = st.sampled_from(range(len(OBJECTS)))
TIER = st.sampled_from(range(3))
CALLS = ("get", "put", "delete", "names", "stat", "setting", "keep_setting")


class TierMachine(RuleBasedStateMachine):
    """The model: which tiers hold which object whole (`held`), or damaged (`bad`), and which tiers are `broken`."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.stores: list[Store] = [
            MemoryStore(budget_bytes=2**20),
            DiskStore(self.folder / "disk"),
            FsspecStore(f"file://{self.folder}/remote"),
        ]
        self.tiers = TieredStore(*self.stores)
        self.held: dict[int, set[int]] = {which: set() for which in range(len(OBJECTS))}
        self.bad: dict[int, set[int]] = {which: set() for which in range(len(OBJECTS))}
        self.broken: set[int] = set()
        self.kept: dict[str, int] = {}
        self.hits = self.misses = 0

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(which=WHICH)
    def put(self, which: int) -> None:
        keeping = {1, 2} - self.broken
        try:
            put(self.tiers, OBJECTS[which])
        except StoreUnusable:
            assert not keeping
            return
        assert keeping
        self.held[which] |= keeping
        self.bad[which] -= keeping
        if 0 not in self.broken:
            self.held[which].discard(0)
            self.bad[which].discard(0)

    @rule(which=WHICH)
    def get(self, which: int) -> None:
        one = OBJECTS[which]
        expected = None
        for tier in range(3):
            if tier in self.broken:
                continue
            self.bad[which].discard(tier)
            if tier in self.held[which]:
                expected = tier
                break
        lease = self.tiers.get(one.name, ["raw"])
        self.tiers.flush()
        if expected is None:
            assert lease is None
            self.misses += 1
            return
        self.hits += 1
        with lease:
            assert lease.object.data == one.data
            assert lease.source == self.stores[expected].source
        promoted = set(range(expected)) - self.broken
        self.held[which] |= promoted
        self.bad[which] -= promoted

    @rule(which=WHICH)
    def delete(self, which: int) -> None:
        there = (self.held[which] | self.bad[which]) - self.broken
        try:
            assert self.tiers.delete(OBJECTS[which].name) == bool(there)
            assert not self.broken
        except StoreError:
            assert self.broken
        self.held[which] &= self.broken
        self.bad[which] &= self.broken

    @rule(which=WHICH, tier=TIER)
    def lose(self, which: int, tier: int) -> None:
        """Another process, an eviction, a lifecycle rule."""
        type(self.stores[tier]).delete(self.stores[tier], OBJECTS[which].name)
        self.held[which].discard(tier)
        self.bad[which].discard(tier)

    @rule(which=WHICH, tier=TIER)
    def damage(self, which: int, tier: int) -> None:
        if tier not in self.held[which]:
            return
        name, store = OBJECTS[which].name, self.stores[tier]
        if isinstance(store, MemoryStore):
            store._slots[name, "raw"].data = memoryview(bytearray(OBJECTS[which].data))
            store._slots[name, "raw"].data[-1] ^= 1
        else:
            path = Path(store._path(name, "raw"))
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        self.held[which].discard(tier)
        self.bad[which].add(tier)

    @precondition(lambda self: len(self.broken) < 3)
    @rule(tier=TIER)
    def break_down(self, tier: int) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise StoreUnusable("broken")

        self.broken.add(tier)
        for call in CALLS:
            setattr(self.stores[tier], call, refuse)

    @precondition(lambda self: self.broken)
    @rule(data=st.data())
    def repair(self, data: st.DataObject) -> None:
        tier = data.draw(st.sampled_from(sorted(self.broken)))
        self.broken.discard(tier)
        for call in CALLS:
            delattr(self.stores[tier], call)

    @precondition(lambda self: not self.broken)
    @rule(key=st.sampled_from("ab"), value=st.integers(0, 3))
    def keep_setting(self, key: str, value: int) -> None:
        assert self.tiers.keep_setting(key, value) == self.kept.setdefault(key, value)

    @rule(key=st.sampled_from("ab"))
    def setting(self, key: str) -> None:
        if len(self.broken) == 3:
            with pytest.raises(StoreUnusable):
                self.tiers.setting(key)
        else:
            assert self.tiers.setting(key) == self.kept.get(key)

    @invariant()
    def agrees(self) -> None:
        there = {which: (self.held[which] | self.bad[which]) - self.broken for which in self.held}
        assert self.tiers.names() == {OBJECTS[which].name for which, tiers in there.items() if tiers}
        for which, tiers in there.items():
            assert set(self.tiers.stat(OBJECTS[which].name)) == ({"raw"} if tiers else set())
        stats = self.tiers.stats()
        assert (stats.hits, stats.misses) == (self.hits, self.misses)
        assert (self.tiers._flights._flights, self.tiers._flights._deleting) == ({}, {})


def test_tiers_agree_with_a_dict() -> None:
    run_state_machine_as_test(TierMachine, settings=settings(max_examples=25, stateful_step_count=40, deadline=None))
