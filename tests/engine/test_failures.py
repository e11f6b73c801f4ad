"""Disks that fill up, files that rot, readers that press Ctrl-C: no wrong answer, and no lost work."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import NEW, QUESTION, TEXTS, engine_of, name_of, objects_of

from kvlink import DocumentUsage, Engine, MemoryStore, StoreFull, StoreUnusable
from kvlink.core.errors import StoreError
from kvlink.store import folder


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_of(store=tmp_path / "store")


@pytest.fixture(scope="module")
def wanted() -> tuple[int, ...]:
    """The right answer."""
    return engine_of().generate(TEXTS, QUESTION, max_new_tokens=NEW).ids


def file_of(engine: Engine, text: str) -> Path:
    """Return the file of a text's entry."""
    return engine.store._path(name_of(engine, text), "raw")  # type: ignore[attr-defined]


def sources(rows: Sequence[DocumentUsage]) -> list[str]:
    return [row.source for row in rows]


def failing_from(number: int, code: int) -> Callable[..., None]:
    """Return a way to write files that fails from the n-th object on (0 is the first)."""
    write, left = folder.write_whole, iter(range(number))

    def write_or_fail(path: Path, data: Any, *, now: float | None = None) -> None:
        if path.suffix == ".safetensors" and next(left, None) is None:
            raise OSError(code, os.strerror(code))
        write(path, data, now=now)

    return write_or_fail


full_or_unwritable = pytest.mark.parametrize(
    ("code", "error"), [(errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull), (errno.EROFS, StoreUnusable)]
)

# --- damaged objects ------------------------------------------------------------------------------------------------


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


damages = pytest.mark.parametrize(
    "damage",
    [
        lambda data: flip(data, 3),
        lambda data: flip(data, 100),
        lambda data: flip(data, len(data) // 2),
        lambda data: flip(data, len(data) - 1),
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda _: b"",
        lambda data: bytes(len(data)),
    ],
    ids=["length", "header", "middle", "end", "truncated", "longer", "empty", "zeros"],
)


@damages
def test_a_damaged_object_is_set_aside_and_encoded_again(engine: Engine, damage: Callable[[bytes], bytes]) -> None:
    engine.encode(TEXTS)
    file = file_of(engine, TEXTS[1])
    file.write_bytes(damage(file.read_bytes()))
    answer = engine.generate(TEXTS, QUESTION, max_new_tokens=1)
    assert sources(answer.usage.documents) == ["disk", "encoded", "disk"]
    assert engine.store.stats().quarantined == 1


@damages
def test_a_damaged_object_changes_no_answer(
    engine: Engine, wanted: tuple[int, ...], damage: Callable[[bytes], bytes]
) -> None:
    engine.encode(TEXTS)
    file = file_of(engine, TEXTS[1])
    file.write_bytes(damage(file.read_bytes()))
    assert engine.generate(TEXTS, QUESTION, max_new_tokens=NEW).ids == wanted


def test_a_damaged_object_is_whole_again_behind_a_question(engine: Engine) -> None:
    engine.encode(TEXTS[:1])
    before = objects_of(engine)
    file = file_of(engine, TEXTS[0])
    file.write_bytes(flip(file.read_bytes(), -1))
    engine.generate(TEXTS[:1], QUESTION, max_new_tokens=1)
    assert objects_of(engine) == before


def test_an_object_with_the_bytes_of_another_is_set_aside_and_encoded_again(
    engine: Engine, wanted: tuple[int, ...]
) -> None:
    engine.encode(TEXTS)
    one, other = file_of(engine, TEXTS[0]), file_of(engine, TEXTS[1])
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    answer = engine.generate(TEXTS, QUESTION, max_new_tokens=NEW)
    assert sources(answer.usage.documents) == ["encoded", "encoded", "disk"]
    assert answer.ids == wanted


def test_objects_that_vanish_are_encoded_again(engine: Engine, wanted: tuple[int, ...]) -> None:
    engine.encode(TEXTS)
    for text in TEXTS[1:]:
        file_of(engine, text).unlink()
    answer = engine.generate(TEXTS, QUESTION, max_new_tokens=NEW)
    assert sources(answer.usage.documents) == ["disk", "encoded", "encoded"]
    assert answer.ids == wanted


# --- a store that takes nothing more --------------------------------------------------------------------------------


@full_or_unwritable
def test_a_question_is_answered_though_nothing_can_be_kept(
    engine: Engine, wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, code: int, error: type[StoreError]
) -> None:
    monkeypatch.setattr(folder, "write_whole", failing_from(0, code))
    answer = engine.generate(TEXTS, QUESTION, max_new_tokens=NEW)
    assert answer.ids == wanted
    assert sources(answer.usage.documents) == ["encoded"] * 3


@full_or_unwritable
def test_a_document_that_could_not_be_kept_says_why(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, code: int, error: type[StoreError]
) -> None:
    monkeypatch.setattr(folder, "write_whole", failing_from(2, code))
    rows = engine.generate(TEXTS, QUESTION, max_new_tokens=1).usage.documents
    kept, lost = ([row for row in rows if row.reason.startswith("not kept: ") is lost] for lost in (False, True))
    assert [row.reason for row in kept] == ["not in the store"] * 2
    assert os.strerror(code) in lost[0].reason


@full_or_unwritable
def test_encoding_into_a_store_that_takes_nothing_more_is_an_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, code: int, error: type[StoreError]
) -> None:
    monkeypatch.setattr(folder, "write_whole", failing_from(0, code))
    with pytest.raises(error, match=os.strerror(code)):
        engine.encode(TEXTS)


@full_or_unwritable
def test_what_was_encoded_before_the_store_was_full_is_kept(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, code: int, error: type[StoreError]
) -> None:
    done: list[DocumentUsage] = []
    with monkeypatch.context() as patch:
        patch.setattr(folder, "write_whole", failing_from(2, code))
        with pytest.raises(error):
            engine.encode(TEXTS, progress=done.append)
    assert len(engine.store.names()) == len(done) == 2
    assert sorted(sources(engine.encode(TEXTS))) == ["disk", "disk", "encoded"]


def test_a_store_smaller_than_a_document_refuses_to_encode_it() -> None:
    with pytest.raises(StoreFull, match="budget"):
        engine_of(store=MemoryStore(budget_bytes=1000)).encode(TEXTS)


def test_a_store_smaller_than_a_document_still_serves_its_answer(wanted: tuple[int, ...]) -> None:
    answer = engine_of(store=MemoryStore(budget_bytes=1000)).generate(TEXTS, QUESTION, max_new_tokens=NEW)
    assert answer.ids == wanted
    assert all("1000 in memory" in row.reason for row in answer.usage.documents)


def test_a_store_smaller_than_a_prompt_serves_answers_from_what_it_holds(wanted: tuple[int, ...]) -> None:
    one = engine_of()
    one.encode(TEXTS[2:])
    engine = engine_of(store=MemoryStore(budget_bytes=one.store.stats().used_bytes))
    for _ in range(2):
        assert engine.generate(TEXTS, QUESTION, max_new_tokens=NEW).ids == wanted


# --- interrupts -----------------------------------------------------------------------------------------------------


def interrupt_at(number: int) -> Callable[[DocumentUsage], None]:
    """Press Ctrl-C when the n-th document is done."""
    seen: list[DocumentUsage] = []

    def progress(row: DocumentUsage) -> None:
        seen.append(row)
        if len(seen) == number:
            raise KeyboardInterrupt

    return progress


def test_what_was_encoded_before_an_interrupt_is_kept(engine: Engine) -> None:
    with pytest.raises(KeyboardInterrupt):
        engine.encode(TEXTS, progress=interrupt_at(2))
    assert len(engine.store.names()) == 2


def test_a_second_run_behind_an_interrupt_encodes_the_rest_alone(engine: Engine) -> None:
    with pytest.raises(KeyboardInterrupt):
        engine.encode(TEXTS, progress=interrupt_at(2))
    assert sorted(sources(engine.encode(TEXTS))) == ["disk", "disk", "encoded"]


def test_an_engine_answers_on_behind_an_interrupt(engine: Engine, wanted: tuple[int, ...]) -> None:
    with pytest.raises(KeyboardInterrupt):
        engine.encode(TEXTS, progress=interrupt_at(1))
    assert engine.generate(TEXTS, QUESTION, max_new_tokens=NEW).ids == wanted


def test_progress_tells_every_document_once(engine: Engine) -> None:
    told: list[DocumentUsage] = []
    rows = engine.encode([*TEXTS, "", TEXTS[0]], progress=told.append)
    assert sorted(row.name for row in told) == sorted(row.name for row in rows)
    assert [row.name for row in rows] == [f"document {number}" for number in range(1, 6)]


def test_encoding_twice_encodes_once(engine: Engine) -> None:
    assert sources(engine.encode(TEXTS)) == ["encoded"] * 3
    assert sources(engine.encode(TEXTS)) == ["disk"] * 3
    assert engine.store.stats().puts == 3


def test_a_document_given_twice_is_encoded_once_and_has_two_rows(engine: Engine) -> None:
    rows = engine.encode([TEXTS[0], TEXTS[1], TEXTS[0]])
    assert sources(rows) == ["encoded"] * 3
    assert engine.store.stats().puts == 2


def test_leaving_an_engine_closes_its_store() -> None:
    store = MemoryStore(budget_bytes=1 << 24)
    with engine_of(store=store) as engine:
        engine.encode(TEXTS)
    assert store.names() == set()


def test_a_store_that_cannot_be_read_costs_time_and_never_an_answer(
    engine: Engine, wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.encode(TEXTS)

    def refused(*_: Any, **__: Any) -> None:
        raise StoreUnusable("the folder cannot be read: permission denied")

    monkeypatch.setattr(type(engine.store), "get", refused)
    answer = engine.generate(TEXTS, QUESTION, max_new_tokens=NEW)
    assert answer.ids == wanted
    assert {row.reason for row in answer.usage.documents} == {"not read: the folder cannot be read: permission denied"}
