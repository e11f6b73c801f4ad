"""kill -9 at any moment: every object is whole or absent, what was acknowledged is there, and no litter stays."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from specimens import put
from victims import (
    CHECK,
    OBJECTS,
    OPERATIONS,
    SURVIVED,
    WITH_LIBRARY,
    Expected,
    Plan,
    Scaffold,
    random_steps,
)

from kvlink.store import DiskStore

TORTURE = "KVLINK_TORTURE" in os.environ
SEEDS = range(300 if TORTURE else 10)
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def scaffold() -> Iterator[Scaffold]:
    with Scaffold() as scaffold:
        yield scaffold


def test_a_victim_does_what_is_planned_and_the_model_follows_it(scaffold: Scaffold, tmp_path: Path) -> None:
    """Otherwise the tests below would pass for the wrong reason."""
    root, expected = tmp_path / "store", Expected()
    steps = [("put", 0), ("put", 1), ("put small", 1), ("recompress", 0), ("delete", 1), ("put", 2), ("quarantine", 2)]
    plan = Plan(root=str(root), log=str(tmp_path / "log"), steps=[*steps, ("put", 3), ("keep a setting", 4)])
    assert scaffold.run(plan) == [SURVIVED]
    expected.follow(plan)
    assert expected.states[:4] == [{frozenset({"int8"})}, {frozenset()}, {frozenset()}, {frozenset({"raw"})}]
    expected.check(root)
    (root / "objects" / "stray").touch()
    with pytest.raises(AssertionError):
        expected.check(root)
    (root / "objects" / "stray").unlink()
    DiskStore(root).delete(OBJECTS[3].name)
    with pytest.raises(AssertionError, match="object 3"):
        expected.check(root)


@pytest.mark.parametrize("sealed", [False, True], ids=["clear", "sealed"])
def test_a_death_at_any_call_of_the_system_while_a_folder_is_begun_leaves_a_sound_one(
    scaffold: Scaffold, tmp_path: Path, sealed: bool
) -> None:
    def begin(root: Path, number: int) -> tuple[Plan, Expected]:
        log = str(tmp_path / "log")
        return Plan(root=str(root), log=log, steps=[("put", 0)], sealed=sealed, die_at=number), Expected()

    assert deaths(scaffold, tmp_path, begin) > 20


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_death_at_any_call_of_the_system_leaves_a_sound_folder(
    scaffold: Scaffold, tmp_path: Path, operation: str
) -> None:
    def begin(root: Path, number: int) -> tuple[Plan, Expected]:
        put(DiskStore(root), OBJECTS[0])
        expected = Expected()
        expected.states[0] = {frozenset({"raw"})}
        steps = [(operation, 0), (operation, 1)]  # of what is there, and of what is not
        return Plan(root=str(root), log=str(tmp_path / "log"), steps=steps, die_at=number), expected

    assert deaths(scaffold, tmp_path, begin) > 3


def deaths(scaffold: Scaffold, folder: Path, begin: Callable[[Path, int], tuple[Plan, Expected]]) -> int:
    """Kill a victim at its first call, another one at its second, until one survives; return how many died."""
    for number in count(1):
        root = folder / str(number)
        plan, expected = begin(root, number)
        Path(plan.log).write_bytes(b"")
        (ended,) = scaffold.run(plan)
        expected.follow(plan)
        expected.check(root, sealed=plan.sealed)
        if ended == SURVIVED:
            return number - 1
        assert ended == KILLED
    raise AssertionError


def test_a_folder_survives_killed_processes_at_random_moments(scaffold: Scaffold, tmp_path: Path) -> None:
    root, expected = tmp_path / "store", Expected()
    num_killed = 0
    for seed in SEEDS:
        delay_s = random.Random(seed).uniform(0.0, 0.1)
        plan = Plan(root=str(root), log=str(tmp_path / "log"), steps=random_steps(seed, 2000), die_after_s=delay_s)
        Path(plan.log).write_bytes(b"")
        num_killed += scaffold.run(plan) == [KILLED]
        expected.follow(plan)
        expected.check(root)
    assert num_killed == len(SEEDS)
    store = DiskStore(root)
    put(store, *OBJECTS)
    store.gc()
    assert store.names() == {one.name for one in OBJECTS}
    assert list((root / "quarantine").iterdir()) == []


def test_a_library_that_is_rebuilt_survives_killed_processes_at_random_moments(tmp_path: Path) -> None:
    """Documents change while objects of others are put, evicted, recompressed and deleted in the same folder."""
    root, log, expected = tmp_path / "store", str(tmp_path / "log"), Expected()
    check = Plan(root=str(root), log=str(tmp_path / "log of checks"), steps=[(CHECK, 0)])
    num_killed = 0
    with Scaffold("victims, rebuilds") as scaffold:
        for seed in range(300 if TORTURE else 3):
            steps = [("rebuild", seed % len(OBJECTS)), *random_steps(seed, 2000, WITH_LIBRARY)]
            plan = Plan(root=str(root), log=log, steps=steps, die_after_s=random.Random(seed).uniform(0.0, 0.5))
            Path(log).write_bytes(b"")
            num_killed += scaffold.run(plan) == [KILLED]
            expected.follow(plan)
            expected.check(root)
            assert scaffold.run(check) == [SURVIVED]
        assert num_killed == seed + 1
        Path(log).write_bytes(b"")
        undisturbed = Plan(root=str(root), log=log, steps=[("rebuild", 0)])
        assert scaffold.run(undisturbed) == [SURVIVED]
        expected.follow(undisturbed)
        assert len((tmp_path / "journal").read_text().splitlines()) > 1
        for path in (root / "objects").rglob("*.raw.safetensors"):
            path.write_bytes(path.read_bytes()[:-1] + b"\xa5")
        assert scaffold.run(check) == [SURVIVED]
        with (tmp_path / "journal").open("a") as journal:
            journal.write(">d0:'a text that nobody put'\n")
        assert scaffold.run(check) == [1]


def test_eight_processes_on_one_folder_of_which_four_are_killed_serve_nothing_false(
    scaffold: Scaffold, tmp_path: Path
) -> None:
    """The four that live stop with an error as soon as they are served anything but what was put."""
    root = tmp_path / "store"
    for seed in range(20 if TORTURE else 2):
        draw = random.Random(seed)
        plans = [
            Plan(
                root=str(root),
                log=str(tmp_path / f"log {number}"),
                steps=random_steps(100 * seed + number, 2000 if number < 4 else 60),
                die_after_s=draw.uniform(0.02, 0.3) if number < 4 else None,
            )
            for number in range(8)
        ]
        assert scaffold.run(*plans) == [KILLED] * 4 + [SURVIVED] * 4
        DiskStore(root, clock=lambda: time.time() + 4000)
        assert list(root.rglob("*.tmp")) == []
        store = DiskStore(root, budget_bytes=2**30)
        assert store.stats().used_bytes == sum(p.stat().st_size for p in root.rglob("*.safetensors"))
        for one in OBJECTS:
            lease = store.get(one.name, ["raw"])
            assert lease is None or lease.object.data == one.data
        assert all(verdict.error is None for verdict in store.verify())
