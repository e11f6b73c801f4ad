"""`store ls`, `verify` and `gc`: what a folder holds, whether it is sound, and what can go."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlink.core.errors import StoreUnusable

Run = Callable[..., Any]


@pytest.fixture
def store(run: Run, model: str, corpus: Path, tmp_path: Path) -> Path:
    """A store of three objects."""
    run("encode", corpus, "-m", model, "--store", tmp_path / "store")
    return tmp_path / "store"


def objects(store: Path) -> list[Path]:
    return sorted((store / "objects").rglob("*.safetensors"))


def damage(store: Path) -> Path:
    """Flip the last bit of one object."""
    file = objects(store)[0]
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return file


def rows_of(result: Any, command: str) -> list[dict[str, Any]]:
    found = json.loads(result.stdout)
    assert (found["schema"], found["command"], found["model"]) == (1, command, None)
    return found["results"]


def test_ls_lists_every_object(run: Run, store: Path) -> None:
    result = run("store", "ls", "--store", store)
    assert "3 objects" in result.stdout
    assert all(file.name[:16] in result.stdout for file in objects(store))


def test_ls_writes_whole_names_and_sizes(run: Run, store: Path) -> None:
    rows = rows_of(run("store", "ls", "--store", store, "--json", "-"), "store ls")
    assert {row["name"]: row["bytes"] for row in rows} == {
        file.name.split(".")[0]: file.stat().st_size for file in objects(store)
    }
    assert {row["codec"] for row in rows} == {"raw"}


def test_verify_of_a_sound_store_exits_with_0(run: Run, store: Path) -> None:
    result = run("store", "verify", "--store", store)
    assert (result.exit_code, "3 objects read, 0 damaged" in result.stdout) == (0, True)


def test_verify_of_a_damaged_store_exits_with_1_and_names_the_object(run: Run, store: Path) -> None:
    name = damage(store).name.split(".")[0]
    result = run("store", "verify", "--store", store)
    assert result.exit_code == 1
    assert f"damaged {name} raw: " in result.stdout
    assert "3 objects read, 1 damaged" in result.stdout


def test_verify_writes_a_verdict_for_each_object(run: Run, store: Path) -> None:
    name = damage(store).name.split(".")[0]
    result = run("store", "verify", "--store", store, "--json", "-")
    verdicts = {row["name"]: row["error"] for row in rows_of(result, "store verify")}
    assert result.exit_code == 1
    assert [key for key, error in verdicts.items() if error] == [name]


def test_verify_counts_files_that_are_no_objects_as_damaged(run: Run, store: Path) -> None:
    (store / "objects" / "thesis.txt").write_text("mine")
    result = run("store", "verify", "--store", store)
    assert (result.exit_code, "4 objects read, 1 damaged" in result.stdout) == (1, True)


def test_verify_shows_paths_as_they_are(run: Run, store: Path, tmp_path: Path) -> None:
    odd = tmp_path / "[red]" / "[" / "b]"
    odd.parent.mkdir(parents=True)
    store.rename(odd)
    file = objects(odd)[0]
    file.unlink()
    file.symlink_to("elsewhere")
    result = run("store", "verify", "--store", odd)
    assert f"{file} is a link" in result.stdout.replace("\n", "")


def test_verify_moves_nothing(run: Run, store: Path) -> None:
    damage(store)
    before = {file: file.read_bytes() for file in objects(store)}
    run("store", "verify", "--store", store)
    assert {file: file.read_bytes() for file in objects(store)} == before


def test_gc_of_a_sound_store_removes_nothing(run: Run, store: Path) -> None:
    (report,) = rows_of(run("store", "gc", "--store", store, "--json", "-"), "store gc")
    assert set(report.values()) == {0}
    assert len(objects(store)) == 3


def test_gc_removes_what_was_set_aside(run: Run, store: Path, model: str, corpus: Path) -> None:
    size = damage(store).stat().st_size
    run("ask", "When?", "--docs", corpus, "-m", model, "--store", store, "-n", 1)
    result = run("store", "gc", "--store", store)
    assert "1 quarantined" in result.stdout
    assert f"{size / 1000:.1f} kB freed" in result.stdout
    assert len(objects(store)) == 3


def test_gc_removes_what_exceeds_the_budget(run: Run, store: Path) -> None:
    result = run("store", "gc", "--store", store, "--budget", "5e-5", "--json", "-")
    (report,) = rows_of(result, "store gc")
    assert report["num_evicted"] == 1
    assert len(objects(store)) == 2


def test_a_store_may_be_named_by_the_environment(run: Run, store: Path) -> None:
    assert "3 objects" in run("store", "ls", KVLINK_STORE=str(store)).stdout


def test_a_folder_that_is_not_there_is_a_usage_error_and_is_not_made(run: Run, tmp_path: Path) -> None:
    result = run("store", "ls", "--store", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "is no folder" in result.stderr
    assert not (tmp_path / "nowhere").exists()


KEY = bytes(range(32)).hex()


def test_a_sealed_store_is_looked_after_with_its_key_and_refused_without(
    run: Run, model: str, corpus: Path, tmp_path: Path
) -> None:
    sealed = tmp_path / "sealed"
    run("encode", corpus, "-m", model, "--store", sealed, KVLINK_STORE_KEY=KEY)
    assert all(file.read_bytes().startswith(b"KVSEALED") for file in objects(sealed))
    for verb, said in (("ls", "3 objects"), ("verify", "3 objects read, 0 damaged"), ("gc", "0 quarantined")):
        assert said in run("store", verb, "--store", sealed, KVLINK_STORE_KEY=KEY).stdout
        with pytest.raises(StoreUnusable, match=r"opened without a key; pass .*KVLINK_STORE_KEY"):
            run("store", verb, "--store", sealed)
    assert len(objects(sealed)) == 3


def test_a_key_from_a_file_that_others_can_read_is_refused(run: Run, store: Path, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o644)
    with pytest.raises(StoreUnusable, match="chmod 600"):
        run("store", "ls", "--store", store, KVLINK_STORE_KEY_FILE=str(file))
