"""The JSON that `--json` writes: the fields that were agreed on, on standard output or in a file."""

import json
import math
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from kvlink import InputError
from kvlink.evaluation.results import finite, machine, require_writable, versions, write_results

ROWS = [{"arm": "full", "median_s": 0.5}, {"arm": "assembled", "median_s": 0.1}]


def written(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def test_a_result_file_has_the_agreed_fields(tmp_path: Path) -> None:
    write_results(tmp_path / "a.json", "bench ttft", ROWS, model={"name": "tiny", "digest": "ab"}, seed=7)
    found = written(tmp_path / "a.json")
    assert list(found) == ["schema", "command", "machine", "versions", "model", "seed", "results"]
    assert (found["schema"], found["command"], found["seed"]) == (1, "bench ttft", 7)
    assert found["model"] == {"name": "tiny", "digest": "ab"}
    assert found["results"] == ROWS


def test_without_a_model_or_seed_their_fields_are_null(tmp_path: Path) -> None:
    write_results(tmp_path / "a.json", "store ls", [])
    assert written(tmp_path / "a.json") | {"machine": 0, "versions": 0} == {
        "schema": 1,
        "command": "store ls",
        "machine": 0,
        "versions": 0,
        "model": None,
        "seed": None,
        "results": [],
    }


def test_a_dash_writes_json_and_nothing_else_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    write_results("-", "ask", ROWS)
    out, err = capsys.readouterr()
    assert json.loads(out)["results"] == ROWS
    assert err == ""


def test_no_path_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    write_results(None, "ask", ROWS)
    assert capsys.readouterr() == ("", "")


def test_folders_are_made_on_the_way(tmp_path: Path) -> None:
    write_results(tmp_path / "new" / "folder" / "a.json", "ask", ROWS)
    assert written(tmp_path / "new" / "folder" / "a.json")["results"] == ROWS


@pytest.mark.parametrize("place", ["file/a.json", "folder"])
def test_a_path_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=f"cannot be written to .*{place}"):
        write_results(tmp_path / place, "ask", ROWS)


@pytest.mark.parametrize("text", ["schläft", "猫", "a\ud800b", "nul\0", '"quoted"\n'], ids=ascii)
@pytest.mark.parametrize("path", ["-", "a.json"])
def test_any_text_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, text: str) -> None:
    target = path if path == "-" else str(tmp_path / path)
    write_results(target, "ask", [{"answer": text}])
    found = capsys.readouterr().out if path == "-" else Path(target).read_text("utf-8")
    assert json.loads(found)["results"] == [{"answer": text.replace("\ud800", "?")}]


@pytest.mark.parametrize("path", ["-", "a.json"])
def test_what_json_cannot_hold_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str) -> None:
    given = {"nll": math.nan, "samples_s": [0.5, math.inf, (-math.inf, 1)], "on_full": {"kl": math.nan, "n": 3}}
    write_results(path if path == "-" else tmp_path / path, "ask", [given])
    text = capsys.readouterr().out if path == "-" else (tmp_path / path).read_text("utf-8")
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["results"] == [{"nll": None, "samples_s": [0.5, None, [None, 1]], "on_full": {"kl": None, "n": 3}}]


@pytest.mark.parametrize("value", [0.5, 7, True, None, "nan", [], {}, [1.5, "x"], {"a": [None]}], ids=repr)
def test_everything_else_stays_as_it_is(value: object) -> None:
    assert finite(value) == value


# --- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["a.json", "new/folder/a.json", "there.json", "-"])
def test_a_place_that_can_be_written_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.json").write_text("kept")
    require_writable(place, "the results")
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]
    assert (tmp_path / "there.json").read_text() == "kept"


@pytest.mark.parametrize(
    ("place", "why"), [("folder", "it is a folder"), ("file/a.json", "file is no folder"), ("file/b/a.json", "file is")]
)
def test_a_place_that_cannot_be_written_is_an_error_that_says_why(tmp_path: Path, place: str, why: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=f"^the plot cannot be written to {tmp_path / place}: .*{why}"):
        require_writable(tmp_path / place, "the plot")


@pytest.mark.parametrize(("place", "asked"), [("new/a.json", "."), ("there.json", "there.json")])
def test_a_place_without_permission_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, asked: str
) -> None:
    (tmp_path / "there.json").write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / asked or mode != os.W_OK)
    with pytest.raises(InputError, match=f"no permission to write {tmp_path / asked}"):
        require_writable(tmp_path / place, "the results")


def test_the_machine_is_described_without_names_of_hosts_or_users() -> None:
    found = machine()
    assert {"processor", "architecture", "cores", "threads", "memory_bytes", "system", "python"} <= set(found)
    assert platform.node() not in json.dumps(found).split('"')


def test_the_versions_are_those_that_are_installed() -> None:
    found = versions()
    assert found["kvlink"] == version("kvlink")
    assert found["torch"] == version("torch")


def test_a_package_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlink.evaluation.results.PACKAGES", ("kvlink", "no-such-package"))
    assert list(versions()) == ["kvlink"]
