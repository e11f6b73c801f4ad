"""What a victim does with a library whose entries lie in the folder that is tortured, and what may be there afterwards.

Needs a model, so only the process that forks the victims imports this, once. What a step is about to do, and what it
has done, stands in a journal beside the library: whatever was acknowledged has to be there.
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from engines import QUESTION, engine_of
from libraries import edited, names_of, text_of
from victims import NAMES

from kvlink.engine.library import Library
from kvlink.store import DiskStore

TEXTS = [text_of(30, seed=seed) for seed in range(4)]
EXACT = engine_of()
"""Computes entries anew; loading it here has done the model's probe before anybody is forked."""


@contextmanager
def library_in(store: DiskStore) -> Iterator[Library]:
    root = store._folder.root
    with engine_of(store=root) as engine, Library(root.parent / "library", engine) as library:
        yield library


def rebuild(store: DiskStore, which: int) -> None:
    """Edit a document somewhere, and make its entry anew."""
    one = which % len(TEXTS)
    text = edited(TEXTS[one], random.SystemRandom().uniform(0.1, 0.9))
    with library_in(store) as library:
        _journal(store, f"d{one}", text, lambda: library.put(f"d{one}", text))
        library.work()


def remove(store: DiskStore, which: int) -> None:
    one = f"d{which % len(TEXTS)}"
    with library_in(store) as library:
        if any(row.id == one for row in library.rows()):
            _journal(store, one, "", lambda: library.remove(one))


def recompress(store: DiskStore, which: int) -> None:
    """Leave nothing raw of a library: the next rebuild has no exact beginning."""
    for name in store.names() - NAMES:
        store.recompress(name, "raw", "int8")


def check(store: DiskStore, which: int) -> None:
    """Refuse a library with another text than the last one, an entry without a document, or false numbers."""
    with library_in(store) as library:
        found = {document.name: document.text for document in library.documents()}
        for one, possible in _possible(store).items():
            assert found.get(one, "") in possible, one
        library.work()
        status = library.status()
        assert (status.jobs, status.removing) == (0, 0)
        assert store.names() - NAMES <= {name for one in found for name in names_of(library, one)}
        library.generate(QUESTION, max_new_tokens=1)  # encodes what was evicted
        assert {row.state for row in library.rows()} <= {"ready"}
        for one in found:
            for ids in library.engine.prompter.segments(library.get(one).document, cut=False):
                lease = library.store.get(library.engine.loader.name(ids), ["raw"])
                assert lease is not None, one
                (anew,) = EXACT.runner.encode([ids], prefix=EXACT.loader.sink)
                torch.testing.assert_close(lease.object.decode().keys, anew.keys, rtol=1e-9, atol=1e-9)


def _journal(store: DiskStore, one: str, text: str, step: Callable[[], object]) -> None:
    path = store._folder.root.parent / "journal"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for mark, work in (("<", step), (">", lambda: None)):
            os.write(log, f"{mark}{one}:{text!r}\n".encode())
            work()
    finally:
        os.close(log)


def _possible(store: DiskStore) -> dict[str, set[str]]:
    """Return which texts each document may have; an empty one says that it may be gone."""
    path, possible = store._folder.root.parent / "journal", dict[str, set[str]]()
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        one, _, quoted = line[1:].partition(":")
        text = quoted[1:-1].encode().decode("unicode_escape")
        before = possible.get(one, {""})
        possible[one] = before | {text} if line[0] == "<" else {text}
    return possible
