"""Files of the sets that are scored are refused, train splits of them are not, and the message says what to do."""

import json
from pathlib import Path

import pytest

from kvlink import InputError
from kvlink.evaluation.tasks import FILES
from kvlink.training.scored import ALL_SCORED, refuse_scored


def given(path: Path, dataset: str = "") -> Path:
    """Write a file with one row."""
    row = {"id": "1", "question": "q", "documents": [], "answers": [], **({"dataset": dataset} if dataset else {})}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(row) + "\n") if path.suffix == ".jsonl" else path.write_bytes(b"")
    return path


@pytest.mark.parametrize("file", sorted(file.removesuffix(".gz") for file, _ in FILES.values()))
def test_every_file_that_evaluate_reads_is_refused(tmp_path: Path, file: str) -> None:
    path = given(tmp_path / "sets" / file)
    with pytest.raises(InputError, match=f"{path.name} is of .*neither its name nor its folder's says `train`"):
        refuse_scored(path)


HUB = sorted({hub.partition(":")[0] for _, hub in FILES.values() if hub})


@pytest.mark.parametrize("hub", sorted(hub for _, hub in FILES.values() if hub))
def test_every_name_of_the_hub_that_evaluate_reads_is_refused(hub: str) -> None:
    with pytest.raises(InputError, match=r"a set that `kvlink evaluate` scores, .* on the hub, with :train"):
        refuse_scored(hub)


@pytest.mark.parametrize("name", [name for name in HUB if name.lower() not in ALL_SCORED])
def test_of_a_set_of_the_hub_the_train_split_alone_is_read(name: str) -> None:
    refuse_scored(f"{name}:train[:500]")
    with pytest.raises(InputError, match="its name says 'validation'"):
        refuse_scored(f"{name}:validation")
    with pytest.raises(InputError, match="it names no split"):
        refuse_scored(name)


def test_a_set_of_the_hub_that_is_all_scored_is_refused_whatever_its_split_is_called() -> None:
    with pytest.raises(InputError, match=r"MemGPT/qa_data:train is of nq, .* all of it is scored"):
        refuse_scored("MemGPT/qa_data:train")


@pytest.mark.parametrize(
    "file",
    ["hotpotqa_trainsplit.jsonl", "nq-train.jsonl", "train/musique.jsonl", "trainsets/triviaqa_extra.jsonl"],
)
def test_a_train_split_is_read(tmp_path: Path, file: str) -> None:
    refuse_scored(given(tmp_path / file))


@pytest.mark.parametrize(
    ("file", "word"),
    [
        ("train/hotpotqa_devsplit_extra.jsonl", "devsplit"),
        ("train/samsum_validation.jsonl", "validation"),
        ("train/samsum-test.jsonl", "test"),
        ("train/multi_news_evaluation.jsonl", "evaluation"),
        ("validation/Multi-News.jsonl", "validation"),
    ],
)
def test_a_name_that_says_another_split_counts_more_than_its_folder(tmp_path: Path, file: str, word: str) -> None:
    with pytest.raises(InputError, match=f"its name says '{word}'"):
        refuse_scored(given(tmp_path / file))


@pytest.mark.parametrize("dataset", ["natural_questions", "hotpotqa", "multi_news", "2wikimultihopqa", "samsum"])
def test_a_file_under_another_name_is_known_by_the_set_that_its_rows_name(tmp_path: Path, dataset: str) -> None:
    with pytest.raises(InputError, match="a set that `kvlink evaluate` scores"):
        refuse_scored(given(tmp_path / "mine" / "rows.jsonl", dataset))


@pytest.mark.parametrize("file", ["mine.jsonl", "xsum_test.jsonl", "squad_qa.jsonl", "nqx.jsonl", "dev/handbook.jsonl"])
def test_other_files_are_read(tmp_path: Path, file: str) -> None:
    refuse_scored(given(tmp_path / file, "xsum"))


@pytest.mark.parametrize("name", ["someone/handbook", "rajpurkar/squad:validation"])
def test_other_names_of_the_hub_are_read(name: str) -> None:
    refuse_scored(name)


def test_whoever_says_so_may_read_a_scored_set(tmp_path: Path) -> None:
    refuse_scored(given(tmp_path / "nq.jsonl"), allow=True)


def test_an_empty_file_is_told_by_its_name_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("")
    refuse_scored(tmp_path / "mine.jsonl")
