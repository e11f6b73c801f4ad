"""The JSON that `--json` writes: the fields that were agreed on, on standard output or in a file."""

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from kvlink import InputError
from kvlink.evaluation.results import machine, versions, write_results

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
