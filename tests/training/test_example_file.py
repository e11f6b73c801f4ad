"""Examples come back as they were written; a file that is cut short goes on, a file of something else is refused."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvlink import Document, InputError
from kvlink.training.example import Example, Question
from kvlink.training.example_file import (
    ExampleFile,
    example_from_json,
    example_to_json,
    read_examples_file,
    write_examples,
)

FULL = Example(
    "a:0",
    (Document("One.\n\nTwo é \u2028.", "Title", "one.md"), Document("Three.")),
    (Question("Why?", "Because."), Question("How?", "So.")),
    None,
    "self-study",
)
PLAIN = Example("a:1", (Document("x"),), (Question("q", "a"),))
SETTINGS = {"seed": 0, "model": "abc"}


def started(path: Path, *examples: Example) -> bytes:
    with ExampleFile(path, SETTINGS) as file:
        for example in examples:
            file.append(example)
    return path.read_bytes()


def test_examples_come_back_as_they_were_written(tmp_path: Path) -> None:
    write_examples(tmp_path / "a.jsonl", [FULL, PLAIN])
    assert read_examples_file(tmp_path / "a.jsonl") == [FULL, PLAIN]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert read_examples_file(tmp_path / "a.jsonl.gz") == [FULL, PLAIN]


def test_writing_again_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write_examples(tmp_path / "a.jsonl", [FULL])
    write_examples(tmp_path / "a.jsonl", [PLAIN])
    assert read_examples_file(tmp_path / "a.jsonl") == [PLAIN]
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_run_that_dies_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    def dying() -> Any:
        yield PLAIN
        raise KeyboardInterrupt

    write_examples(tmp_path / "a.jsonl", [FULL])
    with pytest.raises(KeyboardInterrupt):
        write_examples(tmp_path / "a.jsonl", dying())
    assert read_examples_file(tmp_path / "a.jsonl") == [FULL]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_text_that_no_file_can_hold_is_written_cleaned(tmp_path: Path) -> None:
    write_examples(tmp_path / "a.jsonl", [Example("a\ud800", (Document("b\ud800"),), (Question("q", "c\ud800"),))])
    (read,) = read_examples_file(tmp_path / "a.jsonl")
    assert (read.id, read.documents[0].text, read.questions[0].answer) == ("a\ufffd", "b\ufffd", "c\ufffd")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InputError, match=r"file/a\.jsonl cannot be written: Not a directory"):
        write_examples(tmp_path / "file" / "a.jsonl", [])
    with pytest.raises(InputError, match=r"file/a\.jsonl cannot be written"):
        ExampleFile(tmp_path / "file" / "a.jsonl", {})


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"id": 1}, "id is int"),
    ({"source": None}, "source is NoneType"),
    ({"system": 3}, "system is int"),
    ({"documents": "x"}, "documents is no list of objects"),
    ({"documents": ["x"]}, "documents is no list of objects"),
    ({"documents": [{"text": "x", "title": ""}]}, r"documents\[0\].name is NoneType"),
    ({"questions": [{"text": "x"}]}, r"questions\[0\].answer is NoneType"),
]


@pytest.mark.parametrize(("fields", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_field_of_the_wrong_kind_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"a.jsonl:3: {message}"):
        example_from_json({**example_to_json(FULL), **fields}, "a.jsonl:3")


@pytest.mark.parametrize("text", ["", '{"id": "x"}\n', '{"schema": 2, "settings": {}}\n'])
def test_a_file_of_another_schema_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(InputError, match=r"a\.jsonl:1 is no file of examples of schema 1"):
        read_examples_file(tmp_path / "a.jsonl")


# --- written as they are made ---------------------------------------------------------------------------------------


def test_what_is_appended_is_there_at_once_and_when_the_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.jsonl"
    with ExampleFile(path, SETTINGS) as file:
        file.append(FULL)
        assert read_examples_file(path) == [FULL]
        file.append(PLAIN)
    with ExampleFile(path, SETTINGS) as file:
        assert file.examples == [FULL, PLAIN]


def test_a_file_cut_short_anywhere_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    whole = started(path, FULL, PLAIN)
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with ExampleFile(path, SETTINGS) as file:
            for example in [FULL, PLAIN][len(file.examples) :]:
                file.append(example)
        assert path.read_bytes() == whole


def test_settings_that_differ_are_refused_and_shown(tmp_path: Path) -> None:
    before = started(tmp_path / "a.jsonl", FULL)
    with pytest.raises(InputError, match=r'other settings: it says .*"seed": 0.* asked for is .*"seed": 1'):
        ExampleFile(tmp_path / "a.jsonl", {**SETTINGS, "seed": 1})
    assert (tmp_path / "a.jsonl").read_bytes() == before


@pytest.mark.parametrize("text", ["A letter.", "A letter.\nTwo lines.\n", "[1]\n", "{\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(InputError, match="give another file"):
        ExampleFile(tmp_path / "a.jsonl", SETTINGS)
    assert (tmp_path / "a.jsonl").read_text() == text


@pytest.mark.parametrize("line", ["[1]", "{}", json.dumps({**example_to_json(PLAIN), "id": 4})])
def test_a_damaged_line_is_named_and_nothing_is_cut_off(tmp_path: Path, line: str) -> None:
    whole = started(tmp_path / "a.jsonl", FULL) + f"{line}\n".encode()
    (tmp_path / "a.jsonl").write_bytes(whole)
    with pytest.raises(InputError, match=r"a\.jsonl:3"):
        ExampleFile(tmp_path / "a.jsonl", SETTINGS)
    assert (tmp_path / "a.jsonl").read_bytes() == whole


def test_one_run_at_a_time_owns_a_file(tmp_path: Path) -> None:
    with ExampleFile(tmp_path / "a.jsonl", SETTINGS), pytest.raises(InputError, match="another run is writing"):
        ExampleFile(tmp_path / "a.jsonl", SETTINGS)
    ExampleFile(tmp_path / "a.jsonl", SETTINGS).close()
