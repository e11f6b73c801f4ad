"""A store that recompresses against a dict: what it kept is what was put, and deleted names stay deleted."""

import shutil
import tempfile
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from specimens import Clock, put
from test_recompress import ANY, LADDER, MANY, SIZE

from kvlink.store import BoundedStore, DiskStore, Lease, MemoryStore
from kvlink.store.recompress import recompress
from kvlink.store.recompressing import RecompressingStore

WHICH = st.sampled_from(range(6))
BUDGET = 3 * SIZE


class RecompressMachine(RuleBasedStateMachine):
    """The model: when each object was used last, and how far down the ladder it may be at most.

    The thread in the background is waited for after each rule; two minutes pass before it, so that the last use of a
    file is exact. Evictions are the store's business: an object may go, but never come back by itself.
    """

    def __init__(self, place: Literal["memory", "disk"]) -> None:
        super().__init__()
        self.clock = Clock()
        self.folder = Path(tempfile.mkdtemp())
        self.inner: BoundedStore = (
            DiskStore(self.folder / "store", budget_bytes=BUDGET, clock=self.clock)
            if place == "disk"
            else MemoryStore(budget_bytes=BUDGET, clock=self.clock)
        )
        self.store = RecompressingStore(self.inner, ladder=LADDER)
        self.used_at: dict[int, float] = {}
        self.leases: list[tuple[int, Lease]] = []

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(which=WHICH)
    def put(self, which: int) -> None:
        if any(leased == which for leased, _ in self.leases):
            return
        self.clock.now += 120
        put(self.store, MANY[which])
        self.used_at[which] = self.clock.now

    @rule(which=WHICH, keep=st.booleans())
    def get(self, which: int, keep: bool) -> None:
        self.clock.now += 120
        lease = self.store.get(MANY[which].name, ANY)
        if lease is None:
            assert MANY[which].name not in self.store.names()
            return
        assert which in self.used_at
        self.used_at[which] = self.clock.now
        if keep and not self.leases:
            self.leases.append((which, lease))
        else:
            lease.release()

    @rule()
    def release(self) -> None:
        for which, lease in self.leases:
            off = lease.object.decode().values - MANY[which].entry.values
            assert off.abs().max() < (1e-9 if lease.object.codec == "raw" else 0.4)
            lease.release()
        self.leases.clear()

    @rule(which=WHICH)
    def delete(self, which: int) -> None:
        self.store.delete(MANY[which].name)
        self.used_at.pop(which, None)

    @rule(steps=st.integers(1, 3))
    def squeeze(self, steps: int) -> None:
        leased = {MANY[which].name for which, _ in self.leases}
        before = {name: set(self.store.stat(name)) for name in leased}
        names = self.store.names()
        done: list[int] = []
        recompress(
            self.inner,
            LADDER,
            is_leased=leased.__contains__,
            stop=lambda: len(done) >= steps,
            progress=lambda at, total: done.append(at),
        )
        assert self.store.names() == names
        assert before == {name: set(self.store.stat(name)) for name in leased}

    @invariant()
    def agrees(self) -> None:
        self.store.settle()
        names = self.store.names()
        assert names <= {MANY[which].name for which in self.used_at}
        for which, used_at in self.used_at.items():
            found = self.store.stat(MANY[which].name)
            if found:
                assert max(stat.last_use for stat in found.values()) == used_at
                assert set(found) <= set(ANY)
        self.used_at = {which: at for which, at in self.used_at.items() if MANY[which].name in names}
        stats = self.store.stats()
        assert stats.used_bytes <= BUDGET
        if not self.leases:
            assert stats.used_bytes == sum(stat.num_bytes for name in names for stat in self.store.stat(name).values())
        assert (stats.quarantined, stats.recompression.failures) == (0, 0)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_store_that_recompresses_agrees_with_a_dict(place: Literal["memory", "disk"]) -> None:
    run_state_machine_as_test(
        lambda: RecompressMachine(place), settings=settings(max_examples=25, stateful_step_count=20, deadline=None)
    )
