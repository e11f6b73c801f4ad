"""What is removed is gone: from the catalogue's pages and log, from the store in every codec, from quarantine."""

import sqlite3
from pathlib import Path

import pytest
from engines import engine_of
from libraries import edited, library_of, names_of, text_of, traces

from kvlink import Document, InputError, StoreUnusable
from kvlink.engine.library import Library

TEXTS = {f"doc {number}": text_of(60 + 37 * number, seed=number) for number in range(8)}


@pytest.fixture
def library(tmp_path: Path) -> Library:
    made = library_of(tmp_path)
    for name, text in TEXTS.items():
        made.put(name, text, f"Title of {name}", {"note": f"secret of {name}"})
    made.work()
    return made


def left(library: Library, *documents: Document) -> list[str]:
    """Return where anything of documents lies in the files of library and store."""
    engine = library.engine
    return [place for document in documents for place in traces(engine, document, library.folder)]


def test_before_removal_its_text_its_ids_and_its_name_lie_in_the_files(library: Library) -> None:
    """A negative control of the search."""
    assert any(place.endswith(".safetensors") for place in left(library, library.get("doc 3").document))
    assert any("library.db" in place for place in left(library, library.get("doc 3").document))


@pytest.mark.parametrize("name", ["doc 0", "doc 3", "doc 7"])
def test_after_removal_no_file_holds_text_ids_or_name(library: Library, name: str) -> None:
    removed = library.get(name).document
    assert library.remove(name)
    assert left(library, removed) == []
    assert f"secret of {name}".encode() not in (library.folder / "library.db").read_bytes()
    assert [row.id for row in library.rows()] == [one for one in TEXTS if one != name]
    assert all(row.state == "ready" for row in library.rows())


def test_all_versions_are_gone(library: Library) -> None:
    versions = [library.get("doc 5").document]
    for number in range(12):
        text = edited(TEXTS["doc 5"], 0.9 - number / 20, to=f"{number:03}")
        library.put("doc 5", text, "Title of doc 5")
        versions.append(library.get("doc 5").document)
        if number % 3:
            library.work()
    library.remove("doc 5")
    parts = [version.text.encode()[at : at + 40] for version in versions for at in range(0, 300, 40)]
    data = b"".join(path.read_bytes() for path in library.folder.iterdir() if path.is_file())
    assert not any(part in data for part in parts)
    engine = library.engine
    assert len(library.store.names()) == len(TEXTS) - 1
    assert not any(left(library, Document(version.text, "Title of doc 5")) for version in versions[-2:])
    assert engine.store.names() == {name for row in library.rows() for name in names_of(library, row.id)}


def test_an_entry_that_another_document_uses_survives(library: Library) -> None:
    library.put("twin", TEXTS["doc 2"], "Title of doc 2")
    library.work()
    (name,) = names_of(library, "twin")
    library.remove("doc 2")
    assert library.store.stat(name)
    library.remove("twin")
    assert not library.store.stat(name)


def test_an_earlier_version_that_another_document_uses_survives_a_rebuild(library: Library) -> None:
    library.put("twin", TEXTS["doc 2"], "Title of doc 2")
    (name,) = names_of(library, "twin")
    library.put("doc 2", edited(TEXTS["doc 2"], 0.5), "Title of doc 2")
    library.work()
    assert library.store.stat(name)
    assert [row.state for row in library.rows()] == ["ready"] * 9


def test_every_codec_goes(tmp_path: Path) -> None:
    library = Library(tmp_path / "library", engine_of(store=tmp_path / "entries"))
    library.put("a", TEXTS["doc 1"])
    library.work()
    (name,) = names_of(library, "a")
    (file,) = (tmp_path / "entries" / "objects").rglob("*.safetensors")
    file.with_name(f"{name}.int8.safetensors").write_bytes(b"an object in another codec")
    (tmp_path / "entries" / "quarantine" / f"{name}.raw.safetensors").write_bytes(b"a damaged one")
    library.remove("a")
    assert [path for path in (tmp_path / "entries").rglob("*") if name in path.name] == []


def test_unknown_ids_are_named_and_the_others_removed(library: Library) -> None:
    with pytest.raises(InputError, match="has no nothing, never"):
        library.remove("nothing", "doc 1", "never")
    assert "doc 1" not in [row.id for row in library.rows()]


def test_a_reader_delays_the_end_of_a_removal_and_the_next_opening_completes_it(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = library.get("doc 3").document
    library._catalogue._database.execute("PRAGMA busy_timeout = 0")
    reader = sqlite3.connect(library.folder / "library.db", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM document").fetchone()
    assert not library.remove("doc 3")
    assert "doc 3" not in [row.id for row in library.rows()]
    reader.execute("COMMIT")
    reader.close()
    again = Library(library.folder, engine_of(store=library.store))
    assert left(again, removed) == []


def test_a_store_that_cannot_delete_now_is_asked_again(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = names_of(library, "doc 3")

    def refuse(*_: object) -> int:
        raise StoreUnusable("not now")

    with monkeypatch.context() as patch:
        patch.setattr(type(library.store), "delete", refuse)
        with pytest.raises(StoreUnusable):
            library.remove("doc 3")
        assert library.status().removing == 1
        Library(library.folder, engine_of(store=library.store)).close()  # opens all the same
    assert library.store.stat(name)
    with Library(library.folder, engine_of(store=library.store)) as again:
        assert again.status().removing == 0
    assert not library.store.stat(name)


def test_a_text_that_is_put_again_before_its_entry_is_deleted_keeps_it(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Library, "_sweep", lambda _: False)
        library.remove("doc 3")
        library.put("doc 9", TEXTS["doc 3"], "Title of doc 3")
    assert [worked.computed for worked in library.work()] == [0]
    assert [row.state for row in library.rows()] == ["ready"] * 8
