"""Whatever interrupts a library, the next opening repairs it: never an old text, never an entry without a document."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from engines import QUESTION
from libraries import edited, library_of, names_of, text_of, traces

from kvlink.engine.catalogue import Catalogue
from kvlink.models.runner import Runner
from kvlink.store import DiskStore

OLD, OTHER = text_of(90), text_of(80, seed=5)
NEW = edited(OLD, 0.6)


class Killed(BaseException):
    """The process dies here."""


def after(function: Any) -> Any:
    def run(*args: Any, **options: Any) -> Any:
        function(*args, **options)
        raise Killed

    return run


def before(_: Any) -> Any:
    def run(*args: Any, **options: Any) -> Any:
        raise Killed

    return run


STEPS = [
    (before, Catalogue, "put"),
    (after, Catalogue, "put"),
    (before, Runner, "encode_after"),
    (after, Runner, "encode_after"),
    (before, DiskStore, "put"),
    (after, DiskStore, "put"),
    (before, Catalogue, "finish"),
    (after, Catalogue, "finish"),
    (before, DiskStore, "delete"),
    (after, DiskStore, "delete"),
    (before, Catalogue, "gone"),
    (after, Catalogue, "gone"),
]


@pytest.mark.parametrize(("when", "where", "step"), STEPS, ids=lambda part: getattr(part, "__name__", part))
def test_an_update_that_is_interrupted_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: Any, where: type, step: str
) -> None:
    library = library_of(tmp_path)
    library.put("a", OLD)
    library.put("b", OTHER)
    library.work()
    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(where, step, when(getattr(where, step)))
        library.put("a", NEW)
        library.work()
        pytest.fail("the step is never reached")
    library._catalogue._database.close()
    again = library_of(tmp_path)
    acknowledged = not (when is before and step == "put" and where is Catalogue)
    assert again.get("a").text == (NEW if acknowledged else OLD)
    again.work()
    assert [row.state for row in again.rows()] == ["ready", "ready"]
    assert again.store.names() == {*names_of(again, "a"), *names_of(again, "b")}
    assert (again.status().jobs, again.status().removing) == (0, 0)
    assert again.generate(QUESTION, max_new_tokens=1).usage.documents[0].source == "disk"


REMOVALS = [
    (before, Catalogue, "remove"),
    (after, Catalogue, "remove"),
    (before, DiskStore, "delete"),
    (after, DiskStore, "delete"),
    (before, Catalogue, "gone"),
    (after, Catalogue, "gone"),
    (before, Catalogue, "purge"),
    (before, Catalogue, "checkpoint"),
    (after, Catalogue, "checkpoint"),
    (after, Catalogue, "purge"),
]


@pytest.mark.parametrize(("when", "where", "step"), REMOVALS, ids=lambda part: getattr(part, "__name__", part))
def test_a_removal_that_is_interrupted_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: Any, where: type, step: str
) -> None:
    library = library_of(tmp_path)
    library.put("a", OLD)
    library.put("b", OTHER)
    library.work()
    removed = library.get("a").document
    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(where, step, when(getattr(where, step)))
        library.remove("a")
        pytest.fail("the step is never reached")
    library._catalogue._database.close()
    again = library_of(tmp_path)
    if when is before and step == "remove":
        again.remove("a")
    assert traces(again.engine, removed, tmp_path) == []
    assert [row.id for row in again.rows()] == ["b"]
    assert again.store.names() == set(names_of(again, "b"))


CHILD = """
import os, signal, sys
from pathlib import Path
from libraries import edited, library_of, text_of
from kvlink.store import DiskStore

library = library_of(Path(sys.argv[1]))
texts = {f"d{n}": text_of(60, seed=n) for n in range(6)}
for name, text in texts.items():
    library.put(name, text)
library.work()
for name, text in texts.items():
    library.put(name, edited(text, 0.5))
put, count = DiskStore.put, 0

def dying(self, *given):
    global count
    put(self, *given)
    count += 1
    if count == 3:
        os.kill(os.getpid(), signal.SIGKILL)

DiskStore.put = dying
library.work()
"""


def test_a_process_that_is_killed_leaves_a_library_that_goes_on(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests / "engine")])}
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr
    library = library_of(tmp_path)
    assert library.status().jobs >= 3
    for number in range(6):
        assert library.get(f"d{number}").text == edited(text_of(60, seed=number), 0.5)
    worked = library.work()
    assert 0 < sum(one.computed > 0 for one in worked) <= 4
    assert {row.state for row in library.rows()} == {"ready"}
    assert library.store.names() == {name for n in range(6) for name in names_of(library, f"d{n}")}
    assert library.status().jobs == library.status().removing == 0
