"""A store named by a URL, alone or behind a folder: verbs say where things are, and refuse with a reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/shared"


def encode(run: Run, model: str, corpus: Path, *arguments: object, **environment: str) -> Any:
    result = run("encode", corpus, "-m", model, *arguments, "--json", "-", **environment)
    assert result.exit_code == 0
    return json.loads(result.stdout)["results"][0], result.stderr.replace("\n", " ")


def test_what_is_encoded_goes_to_the_folder_and_to_the_remote(
    run: Run, model: str, corpus: Path, tmp_path: Path, url: str
) -> None:
    row, said = encode(run, model, corpus, "--store", tmp_path / "kv", "--remote", url)
    assert row["encoded"] == 3
    for folder in ("kv", "shared"):
        assert len(list((tmp_path / folder).rglob("*.safetensors"))) == 3
    assert "in its host 0 B of at most" in said
    assert "in its disk " in said
    assert "in its remote what a server keeps account of" in said


def test_another_machine_finds_it_in_the_remote(run: Run, model: str, corpus: Path, tmp_path: Path, url: str) -> None:
    encode(run, model, corpus, "--store", tmp_path / "kv", "--remote", url)
    row, said = encode(run, model, corpus, "--store", tmp_path / "other", KVLINK_REMOTE=url)
    assert (row["encoded"], row["remote"]) == (0, 3)
    assert "3 already in the store" in said
    asked = run("ask", "When?", "--docs", corpus, "-m", model, "--store", tmp_path / "other", "--remote", url, "-n", 1)
    assert "remote 3" in asked.stderr


def test_a_remote_alone_is_a_store(run: Run, model: str, corpus: Path, url: str) -> None:
    assert encode(run, model, corpus, "--store", url)[0]["encoded"] == 3
    row, said = encode(run, model, corpus, "--store", url)
    assert row["remote"] == 3
    assert "the store holds what a server keeps account of" in said


def test_what_the_remote_could_not_keep_is_told(run: Run, model: str, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").write_text("no folder")
    row, said = encode(run, model, corpus, "--store", tmp_path / "kv", "--remote", f"file://{tmp_path}/shared")
    assert row["encoded"] == 3
    assert "the remote failed" in said


def test_objects_of_a_remote_are_listed(run: Run, model: str, corpus: Path, url: str) -> None:
    encode(run, model, corpus, "--store", url)
    result = run("store", "ls", "--store", url)
    assert "3 objects" in result.stdout
    assert "the store holds what a server keeps account of" in result.stdout
    assert len(json.loads(run("store", "ls", "--store", url, "--json", "-").stdout)["results"]) == 3


@pytest.mark.parametrize(("verb", "why"), [("verify", "whenever they are read"), ("gc", "by its own rules")])
def test_what_needs_a_folder_is_refused_with_the_reason(run: Run, verb: str, why: str) -> None:
    result = run("store", verb, "--store", "redis://me:word@host/0")
    said = " ".join(result.stderr.replace("│", " ").split())
    assert (result.exit_code, why in said, "word" in said) == (2, True, False)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--remote", "somewhere"), "is no URL"),
        (("--store", "redis://host", "--remote", "redis://other"), "name a folder beside"),
    ],
)
def test_places_that_make_no_stack_are_usage_errors(
    run: Run, model: str, corpus: Path, arguments: tuple[str, ...], why: str
) -> None:
    result = run("encode", corpus, "-m", model, *arguments)
    assert (result.exit_code, why in " ".join(result.stderr.replace("│", " ").split())) == (2, True)
