"""Every task gives rows whose documents, answers and gold positions belong together; what is missing is said."""

import gzip
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benches import given_row, write_rows

from kvlink import InputError
from kvlink.core.scores import normalise
from kvlink.evaluation.tasks import EXAMPLES, FILES, SHOTS, names, task_rows
from kvlink.training.data import Row
from kvlink.training.hub import parse_name

PAIRS = "train/samsum_validation.jsonl.gz"


def write_pairs(data: Path, rows: list[dict[str, Any]] | None = None) -> None:
    """Write the examples that stand before a samsum dialogue."""
    rows = rows or [given_row(n, 1, answers=[f"summary {n}"], task="summarization") for n in range(8)]
    (data / "train").mkdir(parents=True, exist_ok=True)
    (data / PAIRS).write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def loaded(data: Path, asked: str, rows: list[dict[str, Any]], *, limit: int | None = None) -> list[Row]:
    """Write a real set's file and load it under its name."""
    file = FILES[asked.partition("(")[0]][0]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (data / file).parent.mkdir(parents=True, exist_ok=True)
    (data / file).write_bytes(gzip.compress(text) if file.endswith(".gz") else text)
    return task_rows(asked, data=data, limit=limit)


def texts(row: Row) -> list[str]:
    return [document.text for document in row.documents]


# --- names ----------------------------------------------------------------------------------------------------------


def test_the_tasks_are_those_that_are_documented() -> None:
    assert names() == sorted([
        *("nq", "2wikimultihopqa", "hotpotqa", "musique", "triviaqa", "multi_news", "samsum"),
        *("cacheblend_musique", "cacheblend_wikimqa", "hops", "needle"),
    ])  # fmt: skip


def test_an_unknown_task_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"there is no task 'squad'; there are 2wikimultihopqa, .*samsum, triviaqa"):
        task_rows("squad", data=None, limit=1)


@pytest.mark.parametrize("asked", ["hops(colour=3)", "nq(depth=1)", "samsum(gold=1)", "hotpotqa(gold=0)"])
def test_an_unknown_parameter_is_an_error_that_names_it(tmp_path: Path, asked: str) -> None:
    write_rows(tmp_path / "nq.jsonl", [])
    write_rows(tmp_path / "samsum.jsonl", [])
    write_rows(tmp_path / "hotpotqa.jsonl", [])
    with pytest.raises(InputError, match=f"unexpected keyword argument '{asked[asked.index('(') + 1 : -3]}'"):
        task_rows(asked, data=tmp_path, limit=1)


@pytest.mark.parametrize("asked", ["hops(documents=many)", "hops(documents=2.5)", "needle(tokens=)"])
def test_a_parameter_that_is_no_number_is_an_error_that_repeats_the_task(asked: str) -> None:
    with pytest.raises(InputError) as caught:
        task_rows(asked, data=None, limit=1)
    assert repr(asked) in str(caught.value)


@pytest.mark.parametrize("asked", ["hops(documents)", "hops(", "hops)", "hops(documents=2", "ho ps", "", "hops()x"])
def test_what_is_no_name_with_parameters_is_an_error_that_shows_the_form(asked: str) -> None:
    with pytest.raises(InputError, match=r"is not of the form name or name\(parameter=value, ...\)"):
        task_rows(asked, data=None, limit=1)


# --- real sets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*FILES} - {"nq", "samsum"}))
def test_a_real_set_is_read_as_it_stands(tmp_path: Path, name: str) -> None:
    rows = loaded(tmp_path, name, [given_row(0, gold=[1]), given_row(1)])
    assert [(row.id, texts(row), row.answers, row.gold) for row in rows] == [
        ("r0", ["Text 0 of 0.", "Text 1 of 0.", "Text 2 of 0."], ("answer 0",), (1,)),
        ("r1", ["Text 0 of 1.", "Text 1 of 1.", "Text 2 of 1."], ("answer 1",), None),
    ]


@pytest.mark.parametrize("name", FILES)
def test_only_the_first_rows_are_read_if_so_asked(tmp_path: Path, name: str) -> None:
    write_pairs(tmp_path)
    assert [row.id for row in loaded(tmp_path, name, [given_row(n) for n in range(5)], limit=2)] == ["r0", "r1"]


@pytest.mark.parametrize("name", FILES)
def test_a_set_that_is_not_in_the_folder_is_named_and_the_option_too(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"{FILES[name][0]} is missing; .*--data or KVLINK_DATA"):
        task_rows(name, data=tmp_path, limit=1)


@pytest.mark.parametrize("name", [name for name, (_, hub) in FILES.items() if hub and name != "samsum"])
def test_without_a_folder_and_without_datasets_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=rf"'{re.escape(str(FILES[name][1]))}' is no file here; .*kvlink\[data\]"):
        task_rows(name, data=None, limit=1)


@pytest.mark.parametrize("name", ["cacheblend_musique", "cacheblend_wikimqa"])
def test_cacheblends_inputs_are_on_no_hub(name: str) -> None:
    with pytest.raises(InputError, match=f"{FILES[name][0]} is read from a folder only; give the folder"):
        task_rows(name, data=None, limit=1)


HUB = [name for name, (_, hub) in FILES.items() if hub]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, str]]:
    """Put a `datasets` in place whose sets all have eight rows of twelve documents; return what it is asked for."""
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(path: str, name: str | None, *, split: str) -> list[dict[str, Any]]:
        asked.append((path, name, split))
        return [given_row(n, 12, gold=[3], answers=[f"{split} {n}"]) for n in range(8)]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))  # type: ignore[arg-type]
    return asked


def parts(name: str) -> tuple[str, str | None, str]:
    found = parse_name(name)
    return found.dataset, found.config, found.split


@pytest.mark.parametrize("name", HUB)
def test_without_a_folder_a_set_is_read_from_the_hub(hub: list[tuple[str, str | None, str]], name: str) -> None:
    assert [row.id for row in task_rows(name, data=None, limit=2)] == ["r0", "r1"]
    assert parts(str(FILES[name][1])) in hub


def test_examples_before_a_samsum_dialogue_are_those_of_another_split(
    hub: list[tuple[str, str | None, str]],
) -> None:
    (row,) = task_rows("samsum(shots=2)", data=None, limit=1)
    assert [text.partition("Summary: ")[2] for text in texts(row)[:3]] == ["validation 0", "validation 1", ""]
    assert set(hub) == {parts(EXAMPLES[1]), parts(str(FILES["samsum"][1]))}


def test_without_datasets_the_examples_of_samsum_are_missed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=rf"examples before .*'{EXAMPLES[1]}' is no file here; .*; or shots=0"):
        task_rows("samsum", data=None, limit=1)


@pytest.mark.parametrize("asked", ["rajpurkar/squad", "mandarjoshi/trivia_qa/rc.web:train[:9]"])
def test_a_name_of_the_hub_is_a_task(hub: list[tuple[str, str | None, str]], asked: str) -> None:
    assert [row.id for row in task_rows(asked, data=Path("sets"), limit=2)] == ["r0", "r1"]
    assert hub == [parts(asked)]


ODD: dict[str, dict[str, Any]] = {
    "gold known": {"gold": [0]},
    "gold null": {"gold": None},
    "no documents": {"documents": [], "gold": []},
    "one document": {"documents": [{"title": "T", "text": "x"}], "gold": [0]},
    "no answers": {"answers": []},
    "same titles": {"documents": [{"title": "T", "text": "x"}, {"title": "T", "text": "x"}]},
    "replaced characters": {"documents": [{"title": "\ufffd", "text": "a\ufffdb"}], "answers": ["\ufffd"]},
    "blank document": {"documents": [{"title": "", "text": " "}, {"text": "x"}]},
}


@pytest.mark.parametrize("fields", ODD.values(), ids=list(ODD))
@pytest.mark.parametrize("name", FILES)
def test_any_row_keeps_its_documents_and_answers_and_its_gold_are_documents(
    tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    given = {**given_row(), **fields}
    write_pairs(tmp_path)
    (row,) = loaded(tmp_path, name, [given])
    assert row.answers == tuple(given["answers"])
    assert all(any(document["text"] in text for text in texts(row)) for document in given["documents"])
    assert all(0 <= at < len(row.documents) for at in row.gold or ())


# --- nq -------------------------------------------------------------------------------------------------------------


def test_gold_of_nq_stands_at_0_4_and_9_in_turn(tmp_path: Path) -> None:
    rows = loaded(tmp_path, "nq", [given_row(n, 20, gold=[0]) for n in range(4)])
    assert [row.gold for row in rows] == [(0,), (4,), (9,), (0,)]
    assert [texts(row).index(f"Text 0 of {n}.") for n, row in enumerate(rows)] == [0, 4, 9, 0]


@pytest.mark.parametrize("place", [0, 1, 4, 9])
def test_gold_of_nq_stands_where_it_is_asked_for(tmp_path: Path, place: int) -> None:
    rows = loaded(tmp_path, f"nq(gold={place})", [given_row(n, 20, gold=[0]) for n in range(3)])
    assert [(row.gold, texts(row)[place]) for row in rows] == [((place,), f"Text 0 of {n}.") for n in range(3)]


def test_an_nq_row_is_the_papers_row_of_ten_documents(tmp_path: Path) -> None:
    (row,) = loaded(tmp_path, "nq(gold=4)", [given_row(0, 20, gold=[0])])
    assert texts(row) == [f"Text {at} of 0." for at in (1, 2, 3, 4, 0, 5, 6, 7, 8, 9)]


@pytest.mark.parametrize("at", [1, 4, 9, 15, 19])
def test_gold_of_nq_is_moved_from_wherever_it_stands_in_the_set(tmp_path: Path, at: int) -> None:
    (row,) = loaded(tmp_path, "nq(gold=4)", [given_row(0, 20, gold=[at])])
    others = [n for n in range(20) if n != at][:9]
    assert texts(row) == [f"Text {n} of 0." for n in (*others[:4], at, *others[4:])]
    assert row.gold == (4,)


@pytest.mark.parametrize("gold", [None, []])
def test_without_a_gold_document_the_first_one_of_nq_is_moved(tmp_path: Path, gold: list[int] | None) -> None:
    (row,) = loaded(tmp_path, "nq(gold=4)", [given_row(0, 20, gold=gold)])
    assert (texts(row)[4], row.gold) == ("Text 0 of 0.", (4,))


@pytest.mark.parametrize(("documents", "gold"), [(9, 8), (4, 3), (2, 1), (1, 0)])
def test_with_fewer_documents_gold_of_nq_stands_last_at_most(tmp_path: Path, documents: int, gold: int) -> None:
    (row,) = loaded(tmp_path, "nq(gold=9)", [given_row(0, documents, gold=[0])])
    assert (len(row.documents), row.gold, texts(row)[gold]) == (documents, (gold,), "Text 0 of 0.")


def test_gold_of_nq_at_no_position_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gold=-1 is no position"):
        loaded(tmp_path, "nq(gold=-1)", [given_row()])


# --- samsum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "shots"), [("samsum", SHOTS), ("samsum(shots=2)", 2), ("samsum(shots=0)", 0)])
def test_pairs_of_dialogue_and_summary_stand_before_a_samsum_dialogue(tmp_path: Path, asked: str, shots: int) -> None:
    write_pairs(tmp_path)
    (row,) = loaded(tmp_path, asked, [given_row(77, 1, task="summarization")])
    pairs = [f"Dialogue:\nText 0 of {n}.\nSummary: summary {n}" for n in range(shots)]
    assert texts(row) == [*pairs, "Dialogue:\nText 0 of 77."]


def test_the_samsum_dialogue_itself_is_gold(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    (row,) = loaded(tmp_path, "samsum(shots=3)", [given_row(77, 1)])
    assert row.gold == (3,)


def test_missing_samsum_examples_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"the examples before a samsum dialogue: .*{PAIRS} is missing.*; or shots=0"):
        loaded(tmp_path, "samsum", [given_row(0, 1)])


def test_samsum_without_examples_needs_no_file_of_them(tmp_path: Path) -> None:
    assert len(loaded(tmp_path, "samsum(shots=0)", [given_row(0, 1)])) == 1


def test_an_example_without_a_dialogue_or_a_summary_is_passed_over(tmp_path: Path) -> None:
    blank = {**given_row(3), "documents": [{"text": " "}]}
    write_pairs(tmp_path, [given_row(0, 0), given_row(1, 1, answers=[]), blank, given_row(2, 1, answers=["sum"])])
    (row,) = loaded(tmp_path, "samsum(shots=1)", [given_row(77, 1)])
    assert texts(row)[0] == "Dialogue:\nText 0 of 2.\nSummary: sum"


# --- synthetic tasks ------------------------------------------------------------------------------------------------

SIZES = ["hops", "hops(documents=2)", "hops(documents=3)", "hops(documents=29)", "hops(documents=70,tokens=5)"]
SIZES += ["needle", "needle(documents=1)", "needle(documents=2)", "needle(documents=40,tokens=10)"]
SIZES += ["hops(tokens=0)", "hops(tokens=400)", "needle(tokens=0)", "needle(tokens=900)"]


@pytest.mark.parametrize("asked", SIZES)
def test_the_answer_stands_in_gold_documents_only(asked: str) -> None:
    for row in task_rows(asked, data=None, limit=12):
        holding = {at for at, text in enumerate(texts(row)) if normalise(row.answers[0]) in normalise(text)}
        assert holding
        assert row.gold is not None
        assert holding <= set(row.gold)


@pytest.mark.parametrize("asked", SIZES)
def test_the_same_seed_gives_the_same_rows(asked: str) -> None:
    assert task_rows(asked, data=None, limit=3, seed=5) == task_rows(asked, data=None, limit=3, seed=5)


@pytest.mark.parametrize("asked", ["hops", "needle"])
def test_another_seed_gives_other_documents(asked: str) -> None:
    one, other = (
        {text for row in task_rows(asked, data=None, limit=9, seed=seed) for text in texts(row)} for seed in (1, 2)
    )
    assert one.isdisjoint(other)


@pytest.mark.parametrize("asked", ["hops", "needle"])
def test_a_longer_run_begins_with_the_rows_of_a_shorter_one(asked: str) -> None:
    assert task_rows(asked, data=None, limit=9)[:4] == task_rows(asked, data=None, limit=4)


@pytest.mark.parametrize("asked", ["hops", "needle"])
def test_the_answer_stands_at_many_positions(asked: str) -> None:
    assert len({(row.gold or ())[0] for row in task_rows(asked, data=None, limit=60)}) >= 5


@pytest.mark.parametrize("documents", [2, 3, 10, 31, 64])
@pytest.mark.parametrize("task", ["hops", "needle"])
def test_a_synthetic_row_has_as_many_documents_as_are_asked_for(task: str, documents: int) -> None:
    (row,) = task_rows(f"{task}(documents={documents},tokens=5)", data=None, limit=1)
    assert len(row.documents) == documents


@pytest.mark.parametrize("tokens", [20, 100, 1000])
@pytest.mark.parametrize("task", ["hops", "needle"])
def test_a_synthetic_document_has_about_as_many_words_as_are_asked_for(task: str, tokens: int) -> None:
    (row,) = task_rows(f"{task}(tokens={tokens})", data=None, limit=1)
    assert all(tokens <= len(text.split()) < tokens + 30 for text in texts(row))


def keeper_and_home(row: Row) -> tuple[set[str], set[str]]:
    """Follow the two hops by reading: who keeps the thing, and where those people live."""
    thing = row.question.removeprefix("In which place does the keeper of the ").removesuffix(" live?")
    firsts = [text.split(".")[0] for text in texts(row)]
    keepers = {f.removeprefix(f"The {thing} is kept by ") for f in firsts if f.startswith(f"The {thing} is kept by ")}
    return keepers, {f.split(" lives in ")[1] for f in firsts if f.split(" lives in ")[0] in keepers}


@pytest.mark.parametrize("documents", [2, 3, 10, 29, 40, 70])
def test_two_hops_lead_to_the_answer_and_to_nothing_else(documents: int) -> None:
    for row in task_rows(f"hops(documents={documents},tokens=5)", data=None, limit=10):
        keepers, homes = keeper_and_home(row)
        assert (len(keepers), homes) == (1, set(row.answers))


def test_the_two_hops_are_two_documents() -> None:
    for row in task_rows("hops(tokens=5)", data=None, limit=10):
        assert row.gold is not None
        kinds = sorted("lives in" in texts(row)[at] for at in row.gold)
        assert kinds == [False, True]


@pytest.mark.parametrize("tokens", [0, 10, 200])
def test_a_needle_stands_between_whole_sentences(tokens: int) -> None:
    for row in task_rows(f"needle(tokens={tokens})", data=None, limit=10):
        assert row.gold is not None
        sentences = texts(row)[row.gold[0]].split(". ")
        thing = row.question.removeprefix("What is the number of the ").removesuffix("?")
        assert f"The number of the {thing} is {row.answers[0]}" in sentences


@pytest.mark.parametrize("asked", ["hops(documents=1)", "hops(documents=0)", "hops(documents=-3)"])
def test_two_hops_in_fewer_than_two_documents_are_an_error(asked: str) -> None:
    with pytest.raises(InputError, match=r"two hops needs two documents, not -?[013]"):
        task_rows(asked, data=None, limit=1)


def test_a_needle_in_no_document_is_an_error() -> None:
    with pytest.raises(InputError, match=r"task 'needle\(documents=0\)'"):
        task_rows("needle(documents=0)", data=None, limit=1)


def test_a_synthetic_task_has_fifty_rows_unless_others_are_asked_for() -> None:
    assert len(task_rows("hops(documents=2,tokens=5)", data=None, limit=None)) == 50


def test_ids_of_synthetic_rows_say_task_seed_and_number() -> None:
    assert [row.id for row in task_rows("hops", data=None, limit=2, seed=4)] == ["hops-4-0", "hops-4-1"]


# --- a user's file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.jsonl.gz"])
def test_a_users_file_is_a_task(tmp_path: Path, name: str) -> None:
    text = "".join(json.dumps(given_row(n)) + "\n" for n in range(3)).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert [row.id for row in task_rows(str(tmp_path / name), data=None, limit=2)] == ["r0", "r1"]


def test_a_users_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"there is no file {tmp_path / 'mine.jsonl'}"):
        task_rows(str(tmp_path / "mine.jsonl"), data=None, limit=1)


def test_a_broken_line_beyond_the_limit_is_not_met(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "mine.jsonl", [given_row(0)])
    with path.open("a") as file:
        file.write("{broken\n")
    assert len(task_rows(str(path), data=None, limit=1)) == 1


def test_rows_that_share_an_id_are_an_error_that_names_it(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "mine.jsonl", [given_row(0), given_row(1), given_row(0)])
    with pytest.raises(InputError, match=r"mine.jsonl has 1 ids more than once, such as 'r0'"):
        task_rows(str(path), data=None, limit=None)
