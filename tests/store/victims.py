"""Processes that work on one folder and are killed in the middle of it, and what may be there afterwards.

torch is imported once, in a process that forks the victims; so is the model that the operations of `WITH_LIBRARY` need,
where these are asked for. To torture another operation, add it to `OPERATIONS`.
"""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from specimens import IDENTITY, STORE_KEY, put, specimen

from kvlink.core.errors import StoreFull
from kvlink.store import DiskStore, encode

OBJECTS = [specimen(seed, tokens=40) for seed in range(6)]
SMALL = [encode(one.entry, IDENTITY, codec="int8") for one in OBJECTS]
SIZE = OBJECTS[0].data.nbytes
NAMES = {one.name for one in OBJECTS}
SURVIVED = 0

State = frozenset[str]
"""The codecs in which an object is there."""


def subsets(state: State) -> set[State]:
    return {frozenset(some) for number in range(len(state) + 1) for some in combinations(state, number)}


@dataclass(frozen=True)
class Operation:
    """What a victim does with one object.

    Attributes:
        work: Does it, and raises where what it sees is wrong.
        ends: What may be there once it is done, from what was.
        between: What may be there besides while it is being done.
        others: Whether it may drop any other object, too.
    """

    work: Callable[[DiskStore, int], object]
    ends: Callable[[State], set[State]] = lambda state: {state}
    between: Callable[[State], set[State]] = lambda state: {state}
    others: bool = False


def get(store: DiskStore, which: int) -> None:
    lease = store.get(OBJECTS[which].name, ["raw", "int8"])
    if lease is not None:
        check(which, lease.object.codec, lease.object.data)


def damage(store: DiskStore, which: int) -> None:
    path = store._path(OBJECTS[which].name, "raw")
    with suppress(FileNotFoundError), path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xa5")
    store.get(OBJECTS[which].name, ["raw"])


def evict(store: DiskStore, which: int) -> None:
    small = DiskStore(store._folder.root, budget_bytes=2 * SIZE, store_key=store._seal._key)
    with suppress(StoreFull):
        put(small, OBJECTS[which])


def after_recompression(state: State) -> State:
    return state - {"raw"} | {"int8"} if "raw" in state else state


OPERATIONS = {
    "get": Operation(get),
    "put": Operation(
        lambda store, which: put(store, OBJECTS[which]),
        ends=lambda state: {state | {"raw"}},
    ),
    "put small": Operation(
        lambda store, which: store.put(OBJECTS[which].name, "int8", bytes(SMALL[which])),
        ends=lambda state: {state | {"int8"}},
    ),
    "delete": Operation(
        lambda store, which: store.delete(OBJECTS[which].name),
        ends=lambda state: {frozenset()},
        between=subsets,
    ),
    "recompress": Operation(
        lambda store, which: store.recompress(OBJECTS[which].name, "raw", "int8"),
        ends=lambda state: {after_recompression(state)},
        between=lambda state: {state, state | after_recompression(state)},
    ),
    "quarantine": Operation(damage, ends=lambda state: {state - {"raw"}}),
    "evict": Operation(evict, ends=lambda state: subsets(state | {"raw"}), others=True),
    "collect": Operation(lambda store, which: store.gc()),
    "keep a setting": Operation(lambda store, which: store.keep_setting(f"setting {which}", which)),
    "open": Operation(lambda store, which: DiskStore(store._folder.root, store_key=store._seal._key)),
}


def of_library(work: str) -> Operation:
    """Return what `rebuilds` does with a library in the folder: the objects here are none of its business."""

    def run(store: DiskStore, which: int) -> None:
        import rebuilds

        getattr(rebuilds, work)(store, which)

    return Operation(run)


WITH_LIBRARY = OPERATIONS | {
    "rebuild": of_library("rebuild"),
    "remove a document": of_library("remove"),
    "recompress a library": of_library("recompress"),
}
CHECK = "check a library"
EVERY = WITH_LIBRARY | {CHECK: of_library("check")}


def check(which: int, codec: str, data: memoryview) -> None:
    """Refuse bytes that are not those that were put, or that recompression makes of them."""
    if data != (OBJECTS[which].data if codec == "raw" else SMALL[which]):
        raise AssertionError(f"object {which} in {codec} is not what was put")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one victim does, and when it dies.

    Attributes:
        steps: Operations and the objects that they are done with.
        die_at: It kills itself at its so many-th call of the system, in the middle of it if it is a write.
        die_after_s: It is killed from outside after so many seconds.
    """

    root: str
    log: str
    steps: list[tuple[str, int]]
    sealed: bool = False
    die_at: int | None = None
    die_after_s: float | None = None


def random_steps(seed: int, number: int, among: dict[str, Operation] = OPERATIONS) -> list[tuple[str, int]]:
    draw = random.Random(seed)
    return [(draw.choice(list(among)), draw.randrange(len(OBJECTS))) for _ in range(number)]


def live(plan: Plan) -> None:
    """Do what is planned, and note each step when it begins and when it is done."""
    note = os.write
    log = os.open(plan.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    if plan.die_at is not None:
        die_at(plan.die_at)
    store = DiskStore(plan.root, store_key=STORE_KEY if plan.sealed else None)
    for operation, which in plan.steps:
        note(log, b"<")
        EVERY[operation].work(store, which)
        note(log, b">")


def die_at(number: int) -> None:
    """Kill this process at its so many-th call that changes a folder."""
    calls = iter(range(1, number + 1))

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            if next(calls) == number:
                if call is write:
                    write(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return wrapped

    write = os.write
    for name in ("open", "write", "fsync", "close", "replace", "unlink", "mkdir", "rmdir", "utime", "readv"):
        setattr(os, name, deadly(getattr(os, name)))
    fcntl.flock = deadly(fcntl.flock)


def serve() -> None:
    """For each line of plans: fork a victim for each, kill those that are to be killed, and tell how all ended."""
    torch.set_num_threads(1)
    say("ready")
    for line in sys.stdin:
        plans = [Plan(**plan) for plan in json.loads(line)]
        sys.stdout.flush()
        victims: dict[int, Plan] = {}
        for plan in plans:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    live(plan)
                    code = SURVIVED
                except Exception:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            victims[pid] = plan
        begun = time.monotonic()
        for pid, plan in sorted(victims.items(), key=lambda item: item[1].die_after_s or 0.0):
            if plan.die_after_s is not None:
                time.sleep(max(0.0, begun + plan.die_after_s - time.monotonic()))
                os.kill(pid, signal.SIGKILL)
        say(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in victims]))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Scaffold:
    """The process that forks the victims, while a block lasts.

    Args:
        modules: What it imports before: all that the victims need.
    """

    def __init__(self, modules: str = "victims") -> None:
        self.modules = modules

    def __enter__(self) -> "Scaffold":
        here = Path(__file__).parent
        places = os.pathsep.join(map(str, (here, here.parent, here.parent / "engine")))
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"import {self.modules}; victims.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (places, os.environ.get("PYTHONPATH"))))},
        )
        assert self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def run(self, *plans: Plan) -> list[int]:
        """Return how the victims ended: `SURVIVED`, or minus the signal that killed them."""
        self.process.stdin.write(json.dumps([vars(plan) for plan in plans]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


class Expected:
    """What may be in a folder, object by object, as far as the steps that a victim noted tell."""

    def __init__(self) -> None:
        self.states: list[set[State]] = [{frozenset()} for _ in OBJECTS]
        self.settings: set[int] = set()

    def follow(self, plan: Plan) -> None:
        """Take over what a victim did before it died."""
        noted = Path(plan.log).read_bytes()
        num_done = noted.count(b">")
        for operation, which in plan.steps[:num_done]:
            self._after(EVERY[operation], which, cut_off=False)
            if operation == "keep a setting":
                self.settings.add(which)
        if noted.count(b"<") > num_done:
            operation, which = plan.steps[num_done]
            self._after(EVERY[operation], which, cut_off=True)

    def _after(self, operation: Operation, which: int, *, cut_off: bool) -> None:
        ends = set(chain.from_iterable(operation.ends(state) for state in self.states[which]))
        between = set(chain.from_iterable(operation.between(state) for state in self.states[which]))
        self.states[which] = ends | between if cut_off else ends
        if operation.others:
            self.states = [set(chain.from_iterable(map(subsets, states))) for states in self.states]

    def check(self, root: Path, *, sealed: bool = False) -> None:
        """Refuse a folder that holds anything else, serves anything else, or keeps litter beyond the next start."""
        key = STORE_KEY if sealed else None
        DiskStore(root, store_key=key, clock=lambda: time.time() + 4000)  # litter is removed when it is an hour old
        store = DiskStore(root, store_key=key)
        assert list(root.rglob("*.tmp")) == []
        lying = sum(path.stat().st_size for part in ("objects", "quarantine") for path in files(root / part))
        assert store.stats().used_bytes == lying
        for which, one in enumerate(OBJECTS):
            found = set()
            for codec in store.stat(one.name):
                lease = store.get(one.name, [codec])
                if lease is not None:
                    check(which, codec, lease.object.data)
                    found.add(codec)
            assert frozenset(found) in self.states[which], f"object {which}"
            self.states[which] = {frozenset(found)}
        assert all(verdict.error is None for verdict in store.verify())
        for which in range(len(OBJECTS)):
            kept = store.setting(f"setting {which}")
            assert kept == which or (kept is None and which not in self.settings)


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
