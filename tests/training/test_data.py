"""Rows are read as they stand; a row that is none is an error that names file, line and field."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvlink import Document, InputError
from kvlink.training import data
from kvlink.training.data import SYSTEM, Row, parse_row, read_rows

GIVEN: dict[str, Any] = {
    "id": "r1",
    "question": "Who opens?",
    "documents": [{"title": "Office", "text": "Anna opens."}, {"title": "Office", "text": "Ben \ufffd closes."}],
    "answers": ["Anna", "Ms Anna"],
    "task": "qa",
    "gold": [0],
}


def written(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows as JSON Lines; a text stands as it is."""
    text = "".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


# --- one row --------------------------------------------------------------------------------------------------------


def test_a_row_keeps_its_texts_as_they_are() -> None:
    row = parse_row(GIVEN, "a.jsonl:1")
    assert [(d.title, d.text) for d in row.documents] == [("Office", "Anna opens."), ("Office", "Ben \ufffd closes.")]
    assert (row.id, row.question, row.answers, row.gold) == ("r1", "Who opens?", ("Anna", "Ms Anna"), (0,))


def test_a_row_needs_a_question_alone() -> None:
    assert parse_row({"question": "Why?"}, "a.jsonl:3") == Row("a.jsonl:3", "Why?", (), ())


@pytest.mark.parametrize("title", [None, ""])
def test_a_document_may_have_no_title(title: str | None) -> None:
    row = parse_row({**GIVEN, "documents": [{"title": title, "text": "x"}], "gold": None}, "a")
    assert row.documents == (Document("x", "", "document 0"),)


@pytest.mark.parametrize(("given", "wanted"), [(7, "7"), (0, "0"), ("é", "é"), (None, "a:1"), ("", "a:1")])
def test_an_id_is_a_text_and_where_it_is_missing_the_place_stands_for_it(given: Any, wanted: str) -> None:
    assert parse_row({**GIVEN, "id": given}, "a:1").id == wanted


def test_an_id_can_be_written_to_a_file() -> None:
    assert parse_row({**GIVEN, "id": "a\ud800"}, "a:1").id.encode() == "a\ufffd".encode()


def test_the_question_of_a_row_is_asked_for_a_few_words() -> None:
    row = parse_row(GIVEN, "a")
    assert (row.system, row.text) == (SYSTEM, "Question: Who opens?\nAnswer in a few words.")


def test_a_summary_is_asked_for_in_the_rows_own_words() -> None:
    row = parse_row({**GIVEN, "task": "summarization", "question": "Sum it up."}, "a")
    assert (row.system, row.text) == ("Summarize the documents.", "Sum it up.")


@pytest.mark.parametrize("question", ["{0}", "{question}", "100 % {", "}"])
def test_braces_in_a_question_are_text(question: str) -> None:
    assert parse_row({**GIVEN, "question": question}, "a").text.startswith(f"Question: {question}\n")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"question": None}, "question is NoneType"),
    ({"question": 7}, "question is int"),
    ({"documents": {"title": "x"}}, "documents and answers are lists"),
    ({"documents": None}, "documents and answers are lists"),
    ({"documents": ["x"]}, r"documents\[0\] is str"),
    ({"documents": [{"text": "x"}, None]}, r"documents\[1\] is NoneType"),
    ({"documents": [{"title": "x"}]}, r"documents\[0\].text is NoneType"),
    ({"documents": [{"text": "x"}, {"text": 1.5}]}, r"documents\[1\].text is float"),
    ({"documents": [{"text": "x", "title": 3}]}, r"documents\[0\].title is int"),
    ({"answers": "Anna"}, "documents and answers are lists"),
    ({"answers": ["Anna", None]}, "answers is NoneType"),
    ({"answers": [1897]}, "answers is int"),
    ({"gold": [2]}, r"gold is \[2\].* among the 2 documents"),
    ({"gold": [-1]}, r"gold is \[-1\]"),
    ({"gold": ["0"]}, r"gold is \['0'\]"),
    ({"gold": 0}, "gold is 0"),
    ({"gold": "0"}, "gold is 0"),
    ({"gold": {"0": 1}}, "gold is {'0': 1}"),
    ({"gold": [0], "documents": []}, "among the 0 documents"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_a_field_of_the_wrong_kind_is_named_with_file_and_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^a.jsonl:12: .*{message}"):
        parse_row({**GIVEN, "gold": None, **fields}, "a.jsonl:12")


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_rows_are_read_from_json_lines_gzipped_or_not(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, [GIVEN, {**GIVEN, "id": "r2"}])
    assert [row.id for row in read_rows(path)] == ["r1", "r2"]


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{**GIVEN, "id": ""}, "", "  ", {**GIVEN, "id": ""}])
    assert [row.id for row in read_rows(path)] == ["a.jsonl:1", "a.jsonl:4"]


def test_lines_may_end_as_on_windows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json.dumps(GIVEN).encode() + b"\r\n" + json.dumps(GIVEN).encode())
    assert len(list(read_rows(tmp_path / "a.jsonl"))) == 2


@pytest.mark.parametrize("broken", ['{"question": "Wh', "[", "question", "{'question': 'Why?'}"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_broken_line_is_named_with_its_file(tmp_path: Path, name: str, broken: str) -> None:
    path = written(tmp_path / name, [GIVEN, GIVEN, broken])
    with pytest.raises(InputError, match=f"^{name}:3 is no JSON"):
        list(read_rows(path))


@pytest.mark.parametrize(("line", "kind"), [("[1]", "list"), ('"x"', "str"), ("null", "NoneType"), ("7", "int")])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: str, kind: str) -> None:
    with pytest.raises(InputError, match=f"^a.jsonl:2 is {kind}, an object is needed"):
        list(read_rows(written(tmp_path / "a.jsonl", [GIVEN, line])))


def test_rows_before_a_broken_line_are_read(tmp_path: Path) -> None:
    rows = read_rows(written(tmp_path / "a.jsonl", [GIVEN, "{"]))
    assert next(rows).id == "r1"


def test_a_field_of_the_wrong_kind_is_named_with_the_line_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^a.jsonl:2: gold is \[9\]"):
        list(read_rows(written(tmp_path / "a.jsonl", [GIVEN, {**GIVEN, "gold": [9]}])))


PACKED = gzip.compress(json.dumps(GIVEN).encode())


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", b'{"question": "\xff"}\n'),
        ("a.jsonl.gz", b"no gzip"),
        ("a.jsonl.gz", PACKED[:-12]),
        ("a.jsonl.gz", PACKED[:12] + b"\xff" * 40),
    ],
    ids=["latin-1", "no gzip", "cut short", "damaged"],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=f"{name} cannot be read"):
        list(read_rows(tmp_path / name))


@pytest.mark.parametrize("name", ["mine.jsonl", "sets/mine.jsonl.gz"])
def test_a_file_that_is_not_there_is_never_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(data, "hub_rows", lambda name: pytest.fail(f"{name} was asked of the hub"))
    with pytest.raises(InputError, match=f"there is no file {name}"):
        list(read_rows(name))


def test_a_name_that_is_no_file_is_one_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "hub_rows", lambda name: iter([(f"{name}:0", GIVEN), (f"{name}:1", {"question": 7})]))
    rows = read_rows("some/set")
    assert next(rows) == parse_row(GIVEN, "a")
    with pytest.raises(InputError, match=r"^some/set:1: question is int"):
        next(rows)


# --- the same row again ---------------------------------------------------------------------------------------------

CHANGES: list[dict[str, Any]] = [
    {"question": "Who closes?"},
    {"documents": GIVEN["documents"][:1]},
    {"documents": GIVEN["documents"][::-1]},
    {"documents": [{"title": "Office", "text": "Anna opens!"}, GIVEN["documents"][1]]},
    {"documents": [{"title": "Hut", "text": "Anna opens."}, GIVEN["documents"][1]]},
    {"answers": ["Ms Anna", "Anna"]},
    {"task": "summarization"},
    {"gold": [1]},
    {"gold": None},
]


@pytest.mark.parametrize("fields", CHANGES, ids=str)
def test_the_digest_of_a_row_changes_with_all_that_it_is_scored_on(fields: dict[str, Any]) -> None:
    assert parse_row({**GIVEN, **fields}, "a").digest != parse_row(GIVEN, "a").digest


def test_the_digest_of_a_row_is_that_of_its_content_wherever_it_comes_from() -> None:
    assert parse_row({**GIVEN, "id": "r2", "source": "elsewhere"}, "b").digest == parse_row(GIVEN, "a").digest
    assert parse_row(GIVEN, "a").digest == "22e9f6520c69ca6e"


def test_texts_with_lone_surrogates_have_a_digest() -> None:
    one, other = (parse_row({**GIVEN, "question": f"Why {c}?"}, "a").digest for c in ("\ud800", "\ud801"))
    assert one != other
