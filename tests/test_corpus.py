"""Folders become documents, and the best of them are found for a question."""

from pathlib import Path

import pytest

from kvlink import Document, InputError
from kvlink.corpus import SUFFIXES, best_documents, read_corpus

HUTS = [
    Document("The hut lies below the pass; its lamp burns all night.", name="hut.md"),
    Document("Bread is baked on Tuesdays. Salt is sold there, too.", name="bakery.md"),
    Document("The weather station sends wind and snow to the valley.", name="station.md"),
    Document("The road to the pass is closed in winter.", name="road.md"),
]


def write(root: Path, **files: str | bytes) -> None:
    """Write files; `__` in a name stands for a slash."""
    for name, content in files.items():
        *folders, stem, suffix = name.split("__")
        path = root.joinpath(*folders, f"{stem}.{suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def names(documents: list[Document]) -> list[str]:
    return [document.name for document in documents]


# --- reading --------------------------------------------------------------------------------------------------------


def test_files_come_in_path_order_named_by_their_paths(tmp_path: Path) -> None:
    write(tmp_path, b__md="2", a__z__md="1", c__txt="4", b__x__md="3")
    assert names(read_corpus(tmp_path)) == ["a/z.md", "b/x.md", "b.md", "c.txt"]


def test_the_order_does_not_depend_on_the_order_of_writing(tmp_path: Path) -> None:
    for number in (3, 1, 2):
        write(tmp_path / "one", **{f"{number}__md": "x"})
        write(tmp_path / "other", **{f"{4 - number}__md": "x"})
    assert names(read_corpus(tmp_path / "one")) == names(read_corpus(tmp_path / "other"))


def test_a_file_has_its_text_as_it_stands_and_no_title(tmp_path: Path) -> None:
    write(tmp_path, a__md="# Leave\n\n28 days.\n")
    assert read_corpus(tmp_path) == [Document("# Leave\n\n28 days.\n", title="", name="a.md")]


def test_hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, a__md="1")
    write(tmp_path / ".git", b__md="2")
    (tmp_path / ".hidden.md").write_text("3")
    assert names(read_corpus(tmp_path)) == ["a.md"]


def test_a_folder_below_a_hidden_one_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path / ".notes" / "here", a__md="1")
    assert names(read_corpus(tmp_path / ".notes" / "here")) == ["a.md"]


@pytest.mark.parametrize("suffix", [*sorted(SUFFIXES), ".MD"])
def test_files_of_text_are_read(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a{suffix}").write_text("text")
    assert names(read_corpus(tmp_path)) == [f"a{suffix}"]


@pytest.mark.parametrize("name", ["a.png", "a.pdf", "a", "a.md.bak", "Makefile"])
def test_other_files_are_left_out(tmp_path: Path, name: str) -> None:
    write(tmp_path, b__md="text")
    (tmp_path / name).write_text("text")
    assert names(read_corpus(tmp_path)) == ["b.md"]


def test_bytes_that_are_not_utf_8_become_replacement_characters(tmp_path: Path) -> None:
    write(tmp_path, a__md=b"caf\xe9 \xff\xfe")
    assert read_corpus(tmp_path)[0].text == "caf\ufffd \ufffd\ufffd"


def test_an_empty_file_is_a_blank_document(tmp_path: Path) -> None:
    write(tmp_path, a__md="", b__md="text")
    assert [document.is_blank for document in read_corpus(tmp_path)] == [True, False]


def test_one_file_is_a_corpus_whatever_its_suffix(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("free")
    assert read_corpus(str(tmp_path / "LICENSE")) == [Document("free", name="LICENSE")]


def test_links_that_lead_nowhere_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, a__md="1")
    (tmp_path / "b.md").symlink_to(tmp_path / "nowhere.md")
    assert names(read_corpus(tmp_path)) == ["a.md"]


def test_a_folder_without_text_is_an_error_that_names_the_suffixes(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"no text files \(.*\.md"):
        read_corpus(tmp_path)


def test_a_path_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a folder nor a file"):
        read_corpus(tmp_path / "nowhere")


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.md").symlink_to("/proc/self/mem")  # a file that even its owner cannot read from the beginning
    with pytest.raises(InputError, match=r"a\.md cannot be read"):
        read_corpus(tmp_path)


# --- finding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "name"),
    [
        ("Which day is bread baked?", "bakery.md"),
        ("Where does the lamp burn?", "hut.md"),
        ("When is the road closed?", "road.md"),
        ("What does the station send?", "station.md"),
    ],
)
def test_the_document_with_the_questions_words_comes_first(question: str, name: str) -> None:
    assert best_documents(HUTS, question, top=1)[0].name == name


def test_a_document_is_found_by_its_name() -> None:
    assert best_documents(HUTS, "bakery", top=1)[0].name == "bakery.md"


def test_the_best_come_best_first() -> None:
    assert names(best_documents(HUTS, "the pass, the hut and its lamp", top=2)) == ["hut.md", "road.md"]


@pytest.mark.parametrize("question", ["Xylophone?", "", "the of and", "?!", "\0"], ids=ascii)
def test_a_question_without_any_known_word_gets_the_first_documents(question: str) -> None:
    assert best_documents(HUTS, question, top=2) == HUTS[:2]


def test_documents_that_fit_alike_keep_their_order() -> None:
    same = [Document("bread", name=f"{number}.md") for number in range(9)]
    assert best_documents(same, "bread", top=5) == same[:5]


@pytest.mark.parametrize("top", [4, 5, 1000])
def test_as_many_as_there_are_come_in_their_own_order(top: int) -> None:
    assert best_documents(HUTS, "bread", top=top) == HUTS


def test_no_documents_have_no_best_ones() -> None:
    assert best_documents([], "bread", top=3) == []


@pytest.mark.parametrize("top", [0, -1])
@pytest.mark.parametrize("documents", [HUTS, []], ids=["four", "none"])
def test_fewer_than_one_is_an_error(documents: list[Document], top: int) -> None:
    with pytest.raises(InputError, match="at least one"):
        best_documents(documents, "bread", top=top)


@pytest.mark.parametrize("text", ["", "a", "?", "the"])
def test_documents_in_which_no_word_can_be_found_keep_their_order(text: str) -> None:
    documents = [Document(text) for _ in range(3)]
    assert best_documents(documents, "bread", top=2) == documents[:2]


def test_words_in_other_scripts_are_found() -> None:
    documents = [Document("Katze schläft"), Document("кошка спит"), Document("γάτα κοιμάται")]
    assert best_documents(documents, "кошка", top=1) == documents[1:2]
