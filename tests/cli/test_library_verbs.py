"""`library add|update|watch|rm|ls|status` and `ask --library` on a folder of texts that changes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlink import InputError, StoreUnusable
from kvlink.cli import library as verbs

Run = Callable[..., Any]
QUESTION = "When does the office open?"


@pytest.fixture
def held(tmp_path: Path) -> Path:
    return tmp_path / "held"


@pytest.fixture
def kvl(run: Run, model: str, held: Path) -> Run:
    """A verb of the library, with its model where it needs one."""

    def invoke(verb: str, *arguments: object, **environment: str) -> Any:
        needs = ("-m", model) if verb in ("add", "update", "watch") else ()
        return run("library", verb, *arguments, *needs, "--library", held, **environment)

    return invoke


def rows_of(result: Any, command: str) -> list[dict[str, Any]]:
    found = json.loads(result.stdout)
    assert (found["schema"], found["command"]) == (1, command)
    return found["results"]


def outcomes(result: Any, command: str = "library update") -> dict[str, str]:
    return {row["id"]: row["outcome"] for row in rows_of(result, command)}


def paragraphs(count: int) -> str:
    return "\n\n".join(f"Paragraph {n} has {'words ' * (n % 5 + 20)}to the end, number {n}." for n in range(count))


def test_add_encodes_every_file_and_says_so(kvl: Run, corpus: Path) -> None:
    result = kvl("add", corpus, "--json", "-")
    assert outcomes(result, "library add") == {
        "bakery.md": "added",
        "blank.md": "skipped",
        "huts/hut.md": "added",
        "office.md": "added",
    }
    rows = rows_of(kvl("ls", "--json", "-"), "library ls")
    assert [(row["id"], row["state"], row["bytes"] > 0) for row in rows] == [
        (name, "ready", True) for name in ("bakery.md", "huts/hut.md", "office.md")
    ]


def test_add_shows_what_was_computed(kvl: Run, corpus: Path) -> None:
    result = kvl("add", corpus)
    assert "3 added" in result.stdout
    assert "1 skipped" in result.stdout
    assert "0 tokens kept" in result.stdout


def test_update_tells_added_changed_unchanged_and_gone_files(kvl: Run, corpus: Path) -> None:
    kvl("add", corpus)
    (corpus / "office.md").write_text("The office opens at eight.")
    (corpus / "new.md").write_text("A new one.")
    (corpus / "bakery.md").unlink()
    result = kvl("update", corpus, "--json", "-")
    assert outcomes(result) == {
        "bakery.md": "gone",
        "blank.md": "skipped",
        "huts/hut.md": "unchanged",
        "new.md": "added",
        "office.md": "changed",
    }
    office = next(row for row in rows_of(result, "library update") if row["id"] == "office.md")
    assert office["kept"] == len("The office opens at ")
    assert office["kept"] + office["computed"] == office["tokens"]
    assert "bakery.md" in kvl("ls").stdout


def test_update_prunes_only_when_told_to(kvl: Run, corpus: Path) -> None:
    kvl("add", corpus)
    (corpus / "bakery.md").unlink()
    assert "--prune removes those that are gone" in kvl("update", corpus).stdout
    assert outcomes(kvl("update", corpus, "--prune", "--json", "-"))["bakery.md"] == "removed"
    assert "bakery.md" not in kvl("ls").stdout


def test_update_of_one_file_leaves_the_others_alone(kvl: Run, corpus: Path) -> None:
    kvl("add", corpus)
    assert outcomes(kvl("update", corpus / "office.md", "--prune", "--json", "-")) == {"office.md": "unchanged"}
    assert "bakery.md" in kvl("ls").stdout


def test_a_file_that_becomes_blank_answers_nothing_any_more(kvl: Run, corpus: Path) -> None:
    kvl("add", corpus)
    (corpus / "office.md").write_text(" ")
    rows = rows_of(kvl("update", corpus, "--json", "-"), "library update")
    (office,) = (row for row in rows if row["id"] == "office.md")
    assert office["outcome"] == "skipped"
    assert "was removed" in office["reason"]
    assert "office.md" not in kvl("ls").stdout


def test_pieces_are_named_by_file_and_hash_and_only_touched_ones_change(kvl: Run, corpus: Path) -> None:
    text = paragraphs(60)
    (corpus / "long.md").write_text(text)
    first = outcomes(kvl("add", corpus, "--split", "--json", "-"), "library add")
    pieces = {name for name in first if name.startswith("long.md#")}
    assert len(pieces) > 4
    (corpus / "long.md").write_text(text.replace("number 31.", "number thirty-one."))
    again = outcomes(kvl("update", corpus, "--json", "-"))
    changes = [outcome for name, outcome in again.items() if name.startswith("long.md")]
    assert "long.md" not in again
    assert 1 <= changes.count("added") <= 2
    assert 1 <= changes.count("removed") <= 2
    assert changes.count("unchanged") >= len(pieces) - 2


def test_a_file_of_another_folder_does_not_replace_one_of_the_same_name(kvl: Run, corpus: Path, tmp_path: Path) -> None:
    kvl("add", corpus)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "office.md").write_text("Another office.")
    with pytest.raises(InputError, match="has one, too"):
        kvl("add", tmp_path / "other")
    assert outcomes(kvl("update", corpus, "--json", "-"))["office.md"] == "unchanged"


@pytest.mark.parametrize("name", ["[draft] a.md", "[/b].md", "caf\udce9.md"], ids=ascii)
def test_any_name_of_a_file_is_shown_and_removed(kvl: Run, corpus: Path, name: str) -> None:
    (corpus / name).parent.mkdir(exist_ok=True)
    (corpus / name).write_text("Some text.")
    kvl("add", corpus)
    shown = name.replace("\udce9", "?")
    assert shown in kvl("ls").stdout
    assert f"removed {shown}" in kvl("rm", name).stdout


def test_rm_removes_text_and_entries_without_a_model(kvl: Run, corpus: Path, held: Path) -> None:
    kvl("add", corpus)
    before = set(held.rglob("*.safetensors"))
    assert "removed office.md" in kvl("rm", "office.md").stdout
    assert len(set(held.rglob("*.safetensors")) & before) == len(before) - 1
    assert not any(b"opens at seven" in path.read_bytes() for path in held.rglob("*") if path.is_file())


def test_rm_of_a_file_removes_its_pieces(kvl: Run, corpus: Path, held: Path) -> None:
    (corpus / "long.md").write_text(paragraphs(30))
    kvl("add", corpus, "--split")
    kvl("rm", "long.md")
    assert "long.md" not in kvl("ls").stdout


def test_rm_of_what_is_not_there_says_so(kvl: Run, corpus: Path) -> None:
    kvl("add", corpus)
    with pytest.raises(InputError, match=r"has no nothing.md"):
        kvl("rm", "nothing.md")


def test_status_tells_counts_and_near_duplicates(kvl: Run, corpus: Path) -> None:
    (corpus / "a.md").write_text(paragraphs(12))
    (corpus / "b.md").write_text(paragraphs(12).replace("number 6.", "number six."))
    kvl("add", corpus)
    (found,) = rows_of(kvl("status", "--json", "-"), "library status")
    assert (found["documents"], found["ready"], found["pending"], found["jobs"]) == (5, 5, 0, 0)
    (near,) = found["near"]
    assert (near["one"], near["other"]) == ("a.md", "b.md")
    assert near["bytes"] > 0
    assert "near-duplicate" in kvl("status").stdout


@pytest.mark.parametrize("verb", ["ls", "status", "rm"])
def test_a_library_that_is_not_there_is_a_usage_error_and_is_not_made(kvl: Run, held: Path, verb: str) -> None:
    result = kvl(verb, *(["a"] if verb == "rm" else []))
    assert result.exit_code == 2
    assert "holds no library" in result.stderr
    assert not held.exists()


def test_a_foreign_folder_is_refused_and_left_alone(run: Run, model: str, corpus: Path) -> None:
    with pytest.raises(StoreUnusable, match=r"not a\s+library"):
        run("library", "add", corpus, "-m", model, "--library", corpus)
    assert not (corpus / "entries").exists()


def test_the_library_may_be_named_by_the_environment(run: Run, kvl: Run, corpus: Path, held: Path) -> None:
    kvl("add", corpus)
    assert "3 documents" in run("library", "ls", KVLINK_LIBRARY=str(held)).stdout


def test_entries_may_lie_in_a_store_of_ones_own(kvl: Run, corpus: Path, held: Path, tmp_path: Path) -> None:
    kvl("add", corpus, "--store", tmp_path / "own")
    assert not (held / "entries").exists()
    rows = rows_of(kvl("ls", "--store", tmp_path / "own", "--json", "-"), "library ls")
    assert {row["state"] for row in rows} == {"ready"}


def test_watch_updates_when_a_file_changes_and_ends_with_ctrl_c(
    kvl: Run, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            (corpus / "office.md").write_text("The office opens at nine o'clock.")
        if len(waits) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(verbs.time, "sleep", sleep)
    result = kvl("watch", corpus, "--every", 7)
    assert result.exit_code == 0
    assert waits == [7.0] * 4
    assert result.stdout.count(" computed\n") == 2
    assert "1 changed" in result.stdout
    assert "stopped" in result.stderr


# --- ask ------------------------------------------------------------------------------------------------------------


def ask(run: Run, model: str, held: Path, *more: object, **environment: str) -> dict[str, Any]:
    arguments = ("ask", QUESTION, "--library", held, "-m", model, "-n", 2, "--json", "-", *more)
    return rows_of(run(*arguments, **environment), "ask")[0]["usage"]["kvlink"]


def test_ask_reads_the_library_as_it_is(run: Run, kvl: Run, model: str, corpus: Path, held: Path) -> None:
    kvl("add", corpus)
    documents = ask(run, model, held)["documents"]
    assert [(row["id"], row["source"]) for row in documents] == [
        (name, "disk") for name in ("bakery.md", "huts/hut.md", "office.md")
    ]
    assert [row["id"] for row in ask(run, model, held, "--top", 1)["documents"]] == ["office.md"]


def test_ask_of_a_library_ignores_the_store_of_the_environment(
    run: Run, kvl: Run, model: str, corpus: Path, held: Path, tmp_path: Path
) -> None:
    kvl("add", corpus)
    documents = ask(run, model, held, KVLINK_STORE=str(tmp_path / "elsewhere"))["documents"]
    assert {row["source"] for row in documents} == {"disk"}
    assert not (tmp_path / "elsewhere").exists()


def test_ask_takes_a_library_or_a_folder(run: Run, model: str, corpus: Path, held: Path) -> None:
    result = run("ask", QUESTION, "--library", held, "--docs", corpus, "-m", model)
    assert result.exit_code == 2
    assert "choose one" in result.stderr
