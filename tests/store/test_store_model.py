"""Both stores against a dict: whatever the order of calls, they agree on what is there and what it takes."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from specimens import Clock, put, specimen

from kvlink.core.errors import StoreFull
from kvlink.store import DiskStore, Lease, MemoryStore, Store

OBJECTS = [specimen(seed, tokens=tokens) for seed, tokens in enumerate([5, 5, 5, 20, 20, 60, 200])]
BUDGET = OBJECTS[0].data.nbytes + OBJECTS[3].data.nbytes + OBJECTS[5].data.nbytes + 100
WHICH = st.sampled_from(range(len(OBJECTS)))


@dataclass(eq=False)
class Kept:
    """What the model knows of one object."""

    size: int
    used_at: float
    damaged: bool = False
    leases: int = 0


class StoreMachine(RuleBasedStateMachine):
    """The model: `live` objects, those set `aside`, and `leases` that keep objects where `place` is memory.

    Two minutes pass before each rule, so that the last use of a file is exact, too.
    """

    def __init__(self, place: Literal["memory", "disk"]) -> None:
        super().__init__()
        self.clock = Clock()
        self.folder = Path(tempfile.mkdtemp())
        self.on_disk = place == "disk"
        self.live: dict[int, Kept] = {}
        self.aside: dict[int, Kept] = {}
        self.leases: list[tuple[Lease, Kept, int]] = []
        self.kept_settings: dict[str, int] = {}
        self.open()

    def open(self) -> None:
        self.store: Store = (
            DiskStore(self.folder / "store", budget_bytes=BUDGET, clock=self.clock)
            if self.on_disk
            else MemoryStore(budget_bytes=BUDGET, clock=self.clock)
        )
        self.counts = dict.fromkeys(("hits", "misses", "puts", "evictions", "quarantined"), 0)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @property
    def used(self) -> int:
        counted = {*self.live.values(), *self.aside.values(), *(kept for _, kept, _ in self.leases)}
        return sum(kept.size for kept in counted)

    @rule(which=WHICH)
    def put(self, which: int) -> None:
        self.clock.now += 120
        one = OBJECTS[which]
        try:
            put(self.store, one)
        except StoreFull:
            pinned = sum(kept.size for kept in {kept for _, kept, _ in self.leases})
            assert one.data.nbytes + pinned > BUDGET
            return
        self.counts["puts"] += 1
        old = self.live.get(which)
        if old and old.leases:
            return
        self.live.pop(which, None)
        order = sorted(self.aside, key=lambda i: self.aside[i].used_at)
        while self.used + one.data.nbytes > BUDGET and order:
            del self.aside[order.pop(0)]
        for other in sorted(self.live, key=lambda i: self.live[i].used_at):
            if self.used + one.data.nbytes > BUDGET and not self.live[other].leases:
                del self.live[other]
                self.counts["evictions"] += 1
        self.live[which] = Kept(one.data.nbytes, self.clock.now)

    @rule(which=WHICH, keep=st.booleans())
    def get(self, which: int, keep: bool) -> None:
        self.clock.now += 120
        lease = self.store.get(OBJECTS[which].name, ["raw"])
        kept = self.live.get(which)
        if kept is None or kept.damaged:
            assert lease is None
            self.counts["misses"] += 1
            if kept:
                self.counts["quarantined"] += 1
                if self.on_disk:
                    self.aside[which] = kept
                del self.live[which]
            return
        assert lease is not None
        self.counts["hits"] += 1
        kept.used_at = self.clock.now
        assert lease.object.decode().equals(OBJECTS[which].entry)
        if keep and not self.on_disk:
            kept.leases += 1
            self.leases.append((lease, kept, which))
        else:
            lease.release()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, kept, which = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        assert kept.damaged or lease.object.decode().equals(OBJECTS[which].entry)
        lease.release()
        kept.leases -= 1

    @rule(which=WHICH)
    def delete(self, which: int) -> None:
        removed = self.store.delete(OBJECTS[which].name)
        assert removed == (which in self.live)
        self.live.pop(which, None)
        self.aside.pop(which, None)

    @rule(which=WHICH)
    def damage(self, which: int) -> None:
        if which not in self.live or self.live[which].damaged:
            return
        self.clock.now += 120
        self.live[which].damaged = True
        name = OBJECTS[which].name
        if isinstance(self.store, MemoryStore):
            self.store._slots[name, "raw"].data[-1] ^= 1
        else:
            assert isinstance(self.store, DiskStore)
            with self.store._path(name, "raw").open("r+b") as file:
                file.seek(-1, 2)
                file.write(b"\xff")
            self.store._touch(self.store._path(name, "raw"), 0.0)
            self.live[which].used_at = self.clock.now

    @rule(key=st.sampled_from("ab"), value=st.integers(0, 3))
    def keep_setting(self, key: str, value: int) -> None:
        assert self.store.keep_setting(key, value) == self.kept_settings.setdefault(key, value)

    @precondition(lambda self: self.on_disk)
    @rule()
    def restart(self) -> None:
        self.open()

    @precondition(lambda self: self.on_disk)
    @rule()
    def collect(self) -> None:
        assert isinstance(self.store, DiskStore)
        report = self.store.gc()
        assert report.freed_bytes == sum(kept.size for kept in self.aside.values())
        assert (report.num_quarantined, report.num_evicted, report.num_folders) == (len(self.aside), 0, 0)
        self.aside.clear()

    @precondition(lambda self: self.on_disk)
    @rule()
    def verify(self) -> None:
        assert isinstance(self.store, DiskStore)
        bad = {verdict.name for verdict in self.store.verify() if verdict.error}
        assert bad == {OBJECTS[which].name for which, kept in self.live.items() if kept.damaged}

    @invariant()
    def agrees(self) -> None:
        assert self.store.names() == {OBJECTS[which].name for which in self.live}
        for which, one in enumerate(OBJECTS):
            kept = self.live.get(which)
            found = self.store.stat(one.name)
            assert {codec: (s.num_bytes, s.last_use) for codec, s in found.items()} == (
                {"raw": (kept.size, kept.used_at)} if kept else {}
            )
        stats = self.store.stats()
        assert {what: getattr(stats, what) for what in self.counts} == self.counts
        assert stats.used_bytes == self.used <= BUDGET == stats.budget_bytes
        for key in "ab":
            assert self.store.setting(key) == self.kept_settings.get(key)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_store_agrees_with_a_dict(place: Literal["memory", "disk"]) -> None:
    run_state_machine_as_test(
        lambda: StoreMachine(place), settings=settings(max_examples=40, stateful_step_count=40, deadline=None)
    )
