"""`kvlink doctor` ends with 0, 1 or 2, says why, and writes what it measured."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvlink.cli import app

Run = Callable[..., Any]


def doctor(model: str, corpus: Path, folder: Path, *more: object) -> tuple[int, str, dict[str, Any]]:
    """Return exit code, what was said, and the JSON."""
    line = ["doctor", "-m", model, "--corpus", corpus, "--json", folder / "a.json", "--top", 2, "--limit", 3, *more]
    result = CliRunner().invoke(app, [str(argument) for argument in line], env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output, json.loads((folder / "a.json").read_text("utf-8"))


def questions(folder: Path, *lines: str) -> Path:
    path = folder / "questions.txt"
    path.write_text("\n".join(lines))
    return path


def test_questions_of_ones_own_are_answered_both_ways(model: str, corpus: Path, tmp_path: Path) -> None:
    asked = questions(tmp_path, "When does the office open?", "", "Where is bread baked?")
    code, said, found = doctor(model, corpus, tmp_path, "--questions", asked)
    full, own, *_ = found["results"]
    assert code == (1 if own["verdict"] == "measurably worse" else 0)
    assert (full["method"], own["method"], own["n"]) == ("full", "concat_reencoded(sink=header, codec=raw)", 2)
    assert {"task", "nll", "kl", "agreement", "ttft_s", "against_full", "saves", "advice", "verdict"} <= {*own}
    assert found["settings"]["thresholds"] == {"agreement": 0.95, "nll": 0.02}
    assert found["settings"]["probe"]["supported"]
    assert "full attention" in said
    assert all(sentence in said.replace("\n", " ") or sentence[:60] in said for sentence in own["advice"])


def test_right_answers_of_json_lines_are_scored(model: str, corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"question": "When does the office open?", "answers": ["at seven"]}) + "\n")
    code, _, found = doctor(model, corpus, tmp_path, "--questions", path)
    assert code in (0, 1)
    assert found["results"][1]["n"] == 1


def test_without_questions_the_model_asks_itself(model: str, corpus: Path, tmp_path: Path) -> None:
    code, _, found = doctor(model, corpus, tmp_path)
    assert code in (0, 1)
    assert found["results"][1]["n"] >= 1


def test_one_file_is_a_corpus(model: str, corpus: Path, tmp_path: Path) -> None:
    asked = questions(tmp_path, "When does the office open?")
    code, _, _ = doctor(model, corpus / "office.md", tmp_path, "--questions", asked)
    assert code in (0, 1)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--codec", "zip"), "there is no codec 'zip'"),
        (("--sink", "system"), "no sink prefix 'system'"),
        (("--links", "nowhere.safetensors"), "is no bundle of link tokens"),
        (("--questions", "nowhere.txt"), "the questions cannot be read from nowhere.txt"),
    ],
)
def test_what_cannot_be_found_out_is_exit_2_with_the_reason(
    more: tuple[str, str], reason: str, model: str, corpus: Path, tmp_path: Path
) -> None:
    asked = () if "--questions" in more else ("--questions", questions(tmp_path, "When does the office open?"))
    code, said, found = doctor(model, corpus, tmp_path, *asked, *more)
    assert code == 2
    assert reason in said.replace("\n", " ")
    assert found["results"][0]["verdict"] == "cannot run"
    assert reason in found["results"][0]["reason"]


def test_an_empty_folder_an_empty_file_of_questions_and_a_refused_model_are_exit_2(
    model: str, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    assert doctor(model, tmp_path / "empty", tmp_path)[0] == 2
    assert doctor(model, corpus, tmp_path, "--questions", questions(tmp_path, " ", ""))[0] == 2
    assert doctor(str(tmp_path / "no-model"), corpus, tmp_path)[0] == 2
