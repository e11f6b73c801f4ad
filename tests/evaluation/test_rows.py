"""A run's file survives a kill at any byte, belongs to one run at a time, and is never mixed with another run's."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlink import InputError
from kvlink.evaluation.evaluate import Limits, settings_of
from kvlink.evaluation.rows import RowsFile
from kvlink.training.data import Row

METHODS = ("full", "other")
SETTINGS = settings_of(model={"name": "tiny", "digest": "ab"}, methods=METHODS, limits=Limits(), generate=True, seed=0)


def results(number: int, task: str = "t") -> list[dict[str, Any]]:
    """Return what one row gives: a result per method, with an answer of many-byte characters."""
    about = {"task": task, "id": f"r{number}", "digest": row(number).digest}
    return [{**about, "method": m, "nll": number / 3, "answer": "schön 猫"} for m in METHODS]


def row(number: int, question: str = "Which?") -> Row:
    return Row(f"r{number}", f"{question} {number}", (), ())


def run(folder: Path, *, resume: bool = False, rows: int = 3) -> Path:
    """Do what a run does: write the rows that are not there yet."""
    with RowsFile(folder, SETTINGS, resume=resume) as file:
        for number in range(rows):
            if not file.done("t", f"r{number}"):
                file.append(results(number))
    return folder / "rows.jsonl"


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    """The file of a run that nobody disturbed."""
    return run(tmp_path / "whole").read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the results of a run."""
    run(tmp_path / "run")
    return tmp_path / "run"


# --- what is written ------------------------------------------------------------------------------------------------


def test_the_first_line_says_what_the_run_was(whole: bytes) -> None:
    assert json.loads(whole.splitlines()[0]) == {"schema": 1, "settings": SETTINGS}


def test_each_result_is_a_line(whole: bytes) -> None:
    assert [json.loads(line) for line in whole.splitlines()[1:]] == [r for n in range(3) for r in results(n)]


def test_a_rows_results_are_in_the_file_before_the_next_row_begins(tmp_path: Path) -> None:
    with RowsFile(tmp_path, SETTINGS, resume=False) as file:
        file.append(results(0))
        assert len(file.path.read_bytes().splitlines()) == 1 + len(METHODS)


def test_a_rows_results_are_seen_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    with RowsFile(tmp_path, SETTINGS, resume=False) as file:
        monkeypatch.setattr(os, "fsync", lambda _: synced.append(file.path.stat().st_size))
        file.append(results(0))
        assert synced == [len(file.path.read_bytes())]


def test_a_folder_is_made_on_the_way(tmp_path: Path) -> None:
    assert run(tmp_path / "a" / "b").is_file()


def test_a_row_is_done_once_it_is_written(tmp_path: Path) -> None:
    with RowsFile(tmp_path, SETTINGS, resume=False) as file:
        assert not file.done("t", "r0")
        file.append(results(0))
        assert file.done("t", "r0")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_hold_is_written_as_null(tmp_path: Path, value: float) -> None:
    with RowsFile(tmp_path, SETTINGS, resume=False) as file:
        file.append([{**result, "nll": value} for result in results(0)])
    for line in file.path.read_text("utf-8").splitlines()[1:]:
        found = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert found["nll"] is None


def test_a_row_of_another_task_is_not_done(tmp_path: Path) -> None:
    with RowsFile(tmp_path, SETTINGS, resume=False) as file:
        file.append(results(0))
        assert not file.done("u", "r0")


# --- after a kill ---------------------------------------------------------------------------------------------------


def test_a_run_killed_at_any_byte_ends_with_the_same_file(
    tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a thousand times: this is about bytes, not about disks
    path = tmp_path / "rows.jsonl"
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        assert run(tmp_path, resume=True).read_bytes() == whole, size


def test_a_run_killed_again_and_again_ends_with_the_same_file(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"")
    for size in range(0, len(whole), 97):
        run(tmp_path, resume=True)
        path.write_bytes(path.read_bytes()[:size])
    assert run(tmp_path, resume=True).read_bytes() == whole


def lines(whole: bytes, count: int) -> bytes:
    return b"".join(whole.splitlines(keepends=True)[:count])


@pytest.mark.parametrize(("kept", "done"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (7, 3)])
def test_rows_that_have_all_methods_are_kept_and_no_others(tmp_path: Path, whole: bytes, kept: int, done: int) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines(whole, kept) + b'{"task": "t", "id"')
    with RowsFile(tmp_path, SETTINGS, resume=True) as file:
        assert file.rows == [r for n in range(done) for r in results(n)]
        assert [file.done("t", f"r{n}") for n in range(3)] == [n < done for n in range(3)]


def test_what_was_finished_is_not_written_again(folder: Path) -> None:
    before = (folder / "rows.jsonl").read_bytes()
    assert run(folder, resume=True).read_bytes() == before


def test_a_run_may_go_on_with_more_rows(folder: Path) -> None:
    before = (folder / "rows.jsonl").read_bytes()
    after = run(folder, resume=True, rows=5).read_bytes()
    assert after.startswith(before)
    assert len(after.splitlines()) == 1 + 5 * len(METHODS)


def test_resuming_where_nothing_is_begins_a_run(tmp_path: Path, whole: bytes) -> None:
    assert run(tmp_path / "new", resume=True).read_bytes() == whole


@pytest.mark.parametrize("numbers", [[0, 1, 2], [1], [], [0, 1, 2, 3, 4], [7]])
def test_a_run_may_go_on_with_any_rows_of_which_none_has_changed(folder: Path, numbers: list[int]) -> None:
    with RowsFile(folder, SETTINGS, resume=True) as file:
        file.require("t", [row(number) for number in numbers])
        file.require("u", [row(number, "Another?") for number in numbers])


def test_rows_that_have_changed_are_refused_by_name(folder: Path) -> None:
    before = (folder / "rows.jsonl").read_bytes()
    with (
        RowsFile(folder, SETTINGS, resume=True) as file,
        pytest.raises(InputError, match="holds results of another row 'r2' of t: its texts, answers or gold differ"),
    ):
        file.require("t", [row(0), row(1), row(2, "Another?")])
    assert (folder / "rows.jsonl").read_bytes() == before


def test_results_that_do_not_say_of_which_rows_they_are_are_refused(folder: Path) -> None:
    path = folder / "rows.jsonl"
    path.write_text(re.sub(r'"digest": "\w+", ', "", path.read_text("utf-8")), "utf-8")
    with RowsFile(folder, SETTINGS, resume=True) as file, pytest.raises(InputError, match="another row 'r0'"):
        file.require("t", [row(0)])


# --- what is refused ------------------------------------------------------------------------------------------------


def refused(folder: Path, match: str, *, resume: bool = True, **settings: Any) -> None:
    """Expect an error that names the file and leaves every byte of it alone."""
    before = (folder / "rows.jsonl").read_bytes()
    with pytest.raises(InputError, match=match) as caught:
        RowsFile(folder, {**SETTINGS, **settings}, resume=resume)
    assert str(folder / "rows.jsonl") in str(caught.value)
    assert (folder / "rows.jsonl").read_bytes() == before


def test_a_folder_with_results_is_refused_unless_a_run_goes_on(folder: Path) -> None:
    refused(folder, "holds results; pass --resume to go on with them, or give another --out", resume=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", {"name": "tiny", "digest": "cd"}),
        ("methods", ["full"]),
        ("methods", ["other", "full"]),
        ("max_documents", 3),
        ("max_tokens_context", 100),
        ("generate", False),
        ("prompt_version", 0),
        ("seed", 1),
    ],
)
def test_other_settings_are_refused_by_name(folder: Path, name: str, value: Any) -> None:
    refused(folder, rf"of a run with other settings \({name}\); give another --out", **{name: value})


def test_all_settings_that_differ_are_named(folder: Path) -> None:
    refused(folder, r"\(generate, seed\)", seed=1, generate=False)


@pytest.mark.parametrize("schema", [0, 2, None, "1"])
def test_another_schema_is_refused(folder: Path, schema: Any) -> None:
    path = folder / "rows.jsonl"
    head, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(json.dumps({**json.loads(head), "schema": schema}).encode() + b"\n" + b"".join(rest))
    refused(folder, f"has schema {schema}, this version writes 1")


@pytest.mark.parametrize(
    "content",
    [
        b"Notes of mine, without an end of line",
        b"Notes of mine\n",
        b'{"question": "Why?"}',
        b"[1, 2]\n",
        b"\x00\xff\x00\n",
        b"\n",
    ],
    ids=ascii,
)
@pytest.mark.parametrize("resume", [False, True])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes, resume: bool) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    refused(tmp_path, "is no file of results, or damaged", resume=resume)


@pytest.mark.parametrize("damage", [b"\x00\x00\x00\n", b"{\n", b"[]\n", b"\n"], ids=ascii)
def test_a_file_that_is_damaged_in_its_midst_is_refused(folder: Path, damage: bytes) -> None:
    path = folder / "rows.jsonl"
    head, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(head + rest[0] + damage + b"".join(rest[2:]))
    refused(folder, "is no file of results, or damaged")


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=f"{tmp_path / 'file' / 'rows.jsonl'} cannot be written"):
        RowsFile(tmp_path / "file", SETTINGS, resume=False)


def test_a_folder_in_the_place_of_the_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").mkdir()
    with pytest.raises(InputError, match=f"{tmp_path / 'rows.jsonl'} cannot be written"):
        RowsFile(tmp_path, SETTINGS, resume=False)


# --- one run at a time ----------------------------------------------------------------------------------------------


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """A folder that a run is writing to."""
    with RowsFile(tmp_path, SETTINGS, resume=False) as file:
        file.append(results(0))
        yield tmp_path


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_on_the_same_folder_is_refused(running: Path, resume: bool) -> None:
    with pytest.raises(InputError, match=f"another run is writing to {running}; wait for it, or give another --out"):
        RowsFile(running, SETTINGS, resume=resume)


def test_the_run_at_work_goes_on_after_a_second_one_was_refused(tmp_path: Path, whole: bytes) -> None:
    with RowsFile(tmp_path, SETTINGS, resume=False) as file:
        for number in range(3):
            file.append(results(number))
            with pytest.raises(InputError):
                RowsFile(tmp_path, SETTINGS, resume=True)
    assert file.path.read_bytes() == whole


def test_a_second_process_on_the_same_folder_is_refused(running: Path) -> None:
    code = (
        "import sys, json; from kvlink.evaluation.rows import RowsFile\n"
        "RowsFile(sys.argv[1], json.loads(sys.argv[2]), resume=True)"
    )
    command = [sys.executable, "-c", code, str(running), json.dumps(SETTINGS)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "another run is writing to" in found.stderr


def test_a_run_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import os, sys, json; from kvlink.evaluation.rows import RowsFile\n"
        "RowsFile(sys.argv[1], json.loads(sys.argv[2]), resume=True); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), json.dumps(SETTINGS)], check=False)
    assert len(run(tmp_path, resume=True).read_bytes().splitlines()) == 1 + 3 * len(METHODS)


def test_a_run_that_is_over_leaves_the_folder_to_the_next(tmp_path: Path) -> None:
    run(tmp_path / "other")
    assert run(tmp_path / "other", resume=True).is_file()


def test_a_refused_run_holds_nothing(folder: Path) -> None:
    refused(folder, "holds results", resume=False)
    assert run(folder, resume=True).is_file()
