"""A source is known by what stands in it: rows, passages beside their questions, examples that were made before."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from lessons import example_of

from kvlink.core.errors import InputError
from kvlink.training.compose import Composition
from kvlink.training.example_file import write_examples
from kvlink.training.sources import LONG, interleave, read_examples

PLAIN = Composition(fewest=1, most=4, max_tokens=3000)


def written(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def row(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"r{number}",
        "question": f"Which is number {number}?",
        "documents": [{"title": f"T{at}", "text": f"Text {at} of {number}."} for at in range(3)],
        "answers": [f"answer {number}"],
        "gold": [1],
        **fields,
    }


def squad(folder: Path, *, passages: int = 6, split: str = "train", words: int = 40, name: str = "squad") -> str:
    """Write two articles of passages and a question about each of them; return the file of passages."""
    given = [
        {
            "pid": f"{article}-{at}",
            "title": f"Article_{article}",
            "text": f"Passage {at} of article {article}. " + "word " * words,
            "split": split,
        }
        for article in range(2)
        for at in range(passages)
    ]
    asked = [
        {"id": f"q{one['pid']}-{n}", "question": f"What {n} of {one['pid']}?", "answers": ["word"], "pid": one["pid"]}
        for one in given
        for n in range(2)
    ]
    written(folder / f"{name}_qa.jsonl.gz", asked)
    return written(folder / f"{name}_passages.jsonl.gz", given)


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.v2.jsonl"])
def test_rows_become_examples_under_the_name_of_their_file(tmp_path: Path, name: str) -> None:
    (found,) = read_examples(written(tmp_path / name, map(row, range(5))), composition=PLAIN)
    assert found.name == "rows"
    assert {example.source for example in found.examples} == {"rows"}
    assert sorted(example.id for example in found.examples) == [f"rows:r{number}" for number in range(5)]
    assert all(f"Text 1 of {e.id[-1]}." in [d.text for d in e.documents] for e in found.examples)  # the gold one


def test_a_limit_takes_the_beginning_and_a_seed_another_order(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", map(row, range(30)))

    def ids(**options: Any) -> list[str]:
        (found,) = read_examples(path, composition=PLAIN, **options)
        return [example.id for example in found.examples]

    assert ids(limit=4) == ids()[:4]
    assert ids(seed=1) != ids(seed=2)
    assert ids(seed=1) == ids(seed=1)


def test_rows_that_teach_nothing_are_counted(tmp_path: Path) -> None:
    rows = [row(1), row(2, answers=[]), row(3, documents=[], gold=None)]
    (found,) = read_examples(written(tmp_path / "rows.jsonl", rows), composition=PLAIN)
    assert len(found.examples) == 1
    assert found.left_out == {"no answer": 1, "no documents with text": 1}


def test_a_file_in_which_nothing_can_be_learned_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", [row(1, answers=[]), row(2, answers=[])])
    with pytest.raises(InputError, match=r"rows\.jsonl holds no row with documents and an answer: 2 no answer"):
        read_examples(path, composition=PLAIN)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no row"):
        read_examples(written(tmp_path / "rows.jsonl", []), composition=PLAIN)


@pytest.mark.parametrize("name", ["nowhere.jsonl", "nowhere.jsonl.gz", "nowhere"])
def test_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=name):
        read_examples(str(tmp_path / name), composition=PLAIN)


def test_a_file_that_is_no_json_is_an_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("hello\n")
    with pytest.raises(InputError, match=r"rows\.jsonl:1 is no JSON"):
        read_examples(str(tmp_path / "rows.jsonl"), composition=PLAIN)


@pytest.mark.parametrize(
    ("name", "refused"), [("nq.jsonl", True), ("hotpotqa_dev.jsonl", True), ("nq_train.jsonl", False)]
)
def test_sets_that_are_scored_are_refused_unless_that_is_allowed(tmp_path: Path, name: str, refused: bool) -> None:
    path = written(tmp_path / name, map(row, range(3)))
    if refused:
        with pytest.raises(InputError, match="a set that `kvlink evaluate` scores"):
            read_examples(path, composition=PLAIN)
    (found,) = read_examples(path, composition=PLAIN, allow_scored=refused)
    assert len(found.examples) == 3


# --- passages and their questions -----------------------------------------------------------------------------------


def test_passages_become_sets_of_questions_and_long_documents(tmp_path: Path) -> None:
    path = squad(tmp_path, passages=12, words=200)
    short, long = read_examples(path, composition=PLAIN, limit=10)
    assert (short.name, long.name) == ("squad", "squad_long")
    assert 0 < len(short.examples) <= 10
    assert 0 < len(long.examples) <= 10 // LONG
    tokens = [max(PLAIN.count(one.text) for one in example.documents) for example in long.examples]
    assert all(1024 < count <= 2560 for count in tokens)
    assert all(PLAIN.count(one.text) <= 1024 for example in short.examples for one in example.documents)


def test_long_documents_are_left_out_where_nobody_wants_them(tmp_path: Path) -> None:
    (found,) = read_examples(squad(tmp_path, passages=12, words=200), composition=PLAIN, long=False)
    assert found.name == "squad"


@pytest.mark.parametrize(("budget", "sources"), [(1024, 1), (1500, 2)])
def test_long_documents_keep_to_the_budget_of_an_example(tmp_path: Path, budget: int, sources: int) -> None:
    composition = Composition(fewest=1, most=4, max_tokens=budget)
    found = read_examples(squad(tmp_path, passages=12, words=200), composition=composition, limit=10)
    assert len(found) == sources
    for source in found:
        for example in source.examples:
            assert sum(composition.count(document.render()) for document in example.documents) <= budget


def test_passages_of_another_split_are_not_trained_on(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no passage whose split begins with `train`"):
        read_examples(squad(tmp_path, split="dev"), composition=PLAIN)


def test_passages_without_their_questions_are_an_error_that_names_the_missing_file(tmp_path: Path) -> None:
    path = squad(tmp_path)
    (tmp_path / "squad_qa.jsonl.gz").unlink()
    with pytest.raises(InputError, match=r"squad_qa\.jsonl\.gz cannot be read"):
        read_examples(path, composition=PLAIN)


# --- examples -------------------------------------------------------------------------------------------------------


def test_examples_that_were_made_before_stay_as_they_are(tmp_path: Path) -> None:
    examples = [example_of(number, questions=2) for number in range(3)]
    write_examples(tmp_path / "made.jsonl", examples)
    (found,) = read_examples(str(tmp_path / "made.jsonl"), composition=PLAIN)
    assert (found.name, list(found.examples)) == ("made", examples)
    (found,) = read_examples(str(tmp_path / "made.jsonl"), composition=PLAIN, limit=2)
    assert list(found.examples) == examples[:2]


# --- several --------------------------------------------------------------------------------------------------------


def test_each_source_is_spread_evenly_over_the_whole() -> None:
    one, other = ([example_of(number, source=name) for number in range(count)] for name, count in (("a", 8), ("b", 2)))
    found = interleave([one, other])
    assert [example.source for example in found] == [*"abaaaabaaa"]
    assert [example for example in found if example.source == "a"] == one
    assert [example for example in found if example.source == "b"] == other


def test_sources_without_examples_are_passed_over() -> None:
    one = [example_of(1)]
    assert interleave([]) == []
    assert interleave([[], one, []]) == one
