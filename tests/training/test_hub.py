"""Public sets are read in their own layouts, told by their fields; what is not known is refused, never misread."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvlink
from kvlink import InputError
from kvlink.training.data import Row, read_rows
from kvlink.training.hub import CONVERTED, LAYOUTS, HubName, hub_rows, parse_name

Given = dict[str, Any]
Asked = list[tuple[str, str | None, str, str | None]]

OWN: Given = {"id": "r1", "question": "Who?", "documents": [{"title": "T", "text": "Ada."}], "answers": ["Ada"]}


def hub(monkeypatch: pytest.MonkeyPatch, *answers: Sequence[Given] | Exception) -> Asked:
    """Put a `datasets` in place that gives these rows, or fails, one answer per call; return what it is asked for."""
    asked: Asked = []

    def load_dataset(path: str, name: str | None = None, *, split: str, revision: str | None = None) -> Sequence[Given]:
        asked.append((path, name, split, revision))
        answer = answers[len(asked) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))  # type: ignore[arg-type]
    return asked


def read(monkeypatch: pytest.MonkeyPatch, given: Given) -> Row:
    """Return the row that a set of this one row gives."""
    hub(monkeypatch, [given])
    (row,) = read_rows("some/set")
    return row


def documents(row: Row) -> list[tuple[str, str]]:
    return [(document.title, document.text) for document in row.documents]


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("owner/name", HubName("owner/name", None, "validation")),
        ("owner/name:train", HubName("owner/name", None, "train")),
        ("owner/name/config", HubName("owner/name", "config", "validation")),
        ("owner/name/rc.web:test", HubName("owner/name", "rc.web", "test")),
        ("owner/name:train[:2655]", HubName("owner/name", None, "train[:2655]")),
        ("name:test", HubName("name", None, "test")),
    ],
)
def test_a_name_says_set_config_and_split(name: str, wanted: HubName) -> None:
    assert parse_name(name) == wanted


@pytest.mark.parametrize("name", ["", "/", "owner/", "/name", "a/b/c/d", "owner//config", "owner/name:", ":train"])
def test_a_name_of_another_form_is_refused_with_the_form(name: str) -> None:
    with pytest.raises(InputError, match="no name of the hub: owner/name, owner/name/config, or either with :split"):
        parse_name(name)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("some/set", ("some/set", None, "validation", None)),
        ("some/set:test[:5]", ("some/set", None, "test[:5]", None)),
        ("some/set/rc:train", ("some/set", "rc", "train", None)),
    ],
)
def test_the_hub_is_asked_for_what_the_name_says(
    monkeypatch: pytest.MonkeyPatch, name: str, wanted: tuple[str, str | None, str, str | None]
) -> None:
    asked = hub(monkeypatch, [OWN])
    assert [row.id for row in read_rows(name)] == ["r1"]
    assert asked == [wanted]


# --- a hub that cannot be asked -------------------------------------------------------------------------------------


def test_without_datasets_installed_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"'some/set' is no file here; .* install kvlink\[data\], or give a path"):
        list(read_rows("some/set"))


class HttpError(Exception):
    """As those of HTTP clients: with no base that says what it is."""


@pytest.mark.parametrize(
    "error", [OSError("no network"), ValueError("Config name is missing"), RuntimeError("gone"), HttpError("502")]
)
def test_a_hub_that_cannot_be_asked_is_an_error_that_names_the_set(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    hub(monkeypatch, error)
    with pytest.raises(InputError, match=f"'some/set' cannot be read: {error}; name it owner/name/config:split, or"):
        list(read_rows("some/set"))


SCRIPT = RuntimeError("Dataset scripts are no longer supported, but found set.py")


def test_a_set_that_was_published_as_a_script_is_read_from_the_hubs_own_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(monkeypatch, SCRIPT, [OWN])
    assert [row.id for row in read_rows("some/set:test")] == ["r1"]
    assert asked == [("some/set", None, "test", None), ("some/set", None, "test", CONVERTED)]


def test_a_script_without_such_a_copy_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, SCRIPT, OSError("no such revision"))
    with pytest.raises(InputError, match="'some/set' cannot be read: no such revision"):
        list(read_rows("some/set"))


# --- layouts --------------------------------------------------------------------------------------------------------


def test_rows_in_the_form_of_files_are_read_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    row = read(monkeypatch, {**OWN, "gold": [0], "task": "summarization"})
    assert (row.id, row.answers, row.gold, row.task, documents(row)) == (
        "r1",
        ("Ada",),
        (0,),
        "summarization",
        [("T", "Ada.")],
    )


def test_documents_in_the_form_of_files_may_be_an_object_of_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    row = read(monkeypatch, {**OWN, "documents": {"title": ["A", None], "text": ["One.", "Two."]}})
    assert documents(row) == [("A", "One."), ("", "Two.")]


UNKNOWN: list[Given] = [
    {"question": "Who?", "answer": ["Ada"]},  # NQ-open: nothing to read
    {"question": "Who?", "context": "Ada.", "answer": "Ada"},
    {"article": "x", "highlights": "y"},
    {"text": "x"},
    {},
]


@pytest.mark.parametrize("given", UNKNOWN, ids=" ".join)
def test_an_unknown_layout_is_refused_with_the_fields_that_were_found(
    monkeypatch: pytest.MonkeyPatch, given: Given
) -> None:
    hub(monkeypatch, [OWN, given])
    rows = read_rows("some/set")
    next(rows)
    with pytest.raises(InputError, match=f"^some/set:1 has the fields {', '.join(sorted(given))}: no layout") as caught:
        next(rows)
    assert all(", ".join(layout.fields) in str(caught.value) for layout in LAYOUTS)


NQ: Given = {
    "question": "who got the first nobel prize in physics",
    "answers": ["Wilhelm Conrad Röntgen"],
    "ctxs": [
        {"id": "1", "title": "Nobel Prize", "text": "Asian laureates.", "hasanswer": False, "isgold": False},
        {"id": "2", "title": "Laureates", "text": "In 1901: Röntgen.", "hasanswer": True, "isgold": True},
        {"id": "3", "title": "Röntgen", "text": "Wilhelm Conrad Röntgen.", "hasanswer": True, "isgold": False},
    ],
    "nq_annotated_gold": {"title": "Laureates", "long_answer": "...", "short_answers": ["Röntgen"]},
}


def test_natural_questions_with_passages_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    row = read(monkeypatch, NQ)
    assert (row.id, row.question, row.answers) == ("some/set:0", NQ["question"], ("Wilhelm Conrad Röntgen",))
    assert documents(row)[1] == ("Laureates", "In 1901: Röntgen.")
    assert (len(row.documents), row.gold, row.task) == (3, (1,), "qa")


def without(records: Sequence[Given], *names: str) -> list[Given]:
    return [{key: value for key, value in record.items() if key not in names} for record in records]


@pytest.mark.parametrize(
    ("ctxs", "gold"),
    [
        (without(NQ["ctxs"], "isgold"), (1, 2)),
        (without(NQ["ctxs"], "isgold", "hasanswer"), None),
        ([{**passage, "isgold": False} for passage in NQ["ctxs"]], (1, 2)),
    ],
    ids=["only hasanswer", "no marks", "no gold one"],
)
def test_gold_of_retrieved_passages_is_the_marked_one_else_those_that_hold_the_answer(
    monkeypatch: pytest.MonkeyPatch, ctxs: list[Given], gold: tuple[int, ...] | None
) -> None:
    assert read(monkeypatch, {**NQ, "ctxs": ctxs}).gold == gold


MUSIQUE: Given = {
    "id": "2hop__482757_12019",
    "paragraphs": [
        {"idx": 0, "title": "Port Blair", "paragraph_text": "A capital.", "is_supporting": False},
        {"idx": 1, "title": "Green", "paragraph_text": "Steve Hillage made Green.", "is_supporting": True},
        {"idx": 2, "title": "Miquette", "paragraph_text": "Hillage's partner.", "is_supporting": True},
    ],
    "question": "Who is the spouse of the Green performer?",
    "question_decomposition": [
        {"id": 482757, "question": "Green >> performer", "answer": "Steve Hillage", "paragraph_support_idx": 1},
        {"id": 12019, "question": "#1 >> spouse", "answer": "Miquette Giraudy", "paragraph_support_idx": 2},
    ],
    "answer": "Miquette Giraudy",
    "answer_aliases": ["Miquette", "Miquette Giraudy"],
    "answerable": True,
}


def test_musique_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    row = read(monkeypatch, MUSIQUE)
    assert (row.id, row.answers, row.gold) == ("2hop__482757_12019", ("Miquette Giraudy", "Miquette"), (1, 2))
    assert documents(row)[1] == ("Green", "Steve Hillage made Green.")


def test_gold_of_musique_is_what_the_steps_name_where_no_paragraph_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**MUSIQUE, "paragraphs": without(MUSIQUE["paragraphs"], "is_supporting")}
    assert read(monkeypatch, given).gold == (1, 2)
    assert read(monkeypatch, {**given, "question_decomposition": None}).gold is None


def test_a_question_of_musique_that_cannot_be_answered_has_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, {**MUSIQUE, "answerable": False}).answers == ()


def test_both_rows_of_a_pair_that_shares_an_id_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, [MUSIQUE, {**MUSIQUE, "answerable": False}, {**MUSIQUE, "answerable": False}])
    own = MUSIQUE["id"]
    assert [row.id for row in read_rows("some/set")] == [own, f"{own}#2", f"{own}#3"]


TRIVIAQA: Given = {
    "question": "Cleeve Hill is the highest point in which range of English hills?",
    "question_id": "odql_10603",
    "question_source": "http://www.odquiz.org.uk/",
    "search_results": {
        "description": ["A hill near Cheltenham.", "Cotswold hill."],
        "filename": ["10/a.txt", "10/b.txt"],
        "rank": [0, 1],
        "title": ["Cleeve Hill - Wikipedia", "Walks"],
        "url": ["http://a", "http://b"],
        "search_context": ["The highest point of the COTSWOLDS, at 330 m.", ""],
    },
    "entity_pages": {
        "doc_source": ["TagMe"],
        "filename": ["Cleeve_Hill.txt"],
        "title": ["Cleeve Hill"],
        "wiki_context": ["It lies in the Cotswold Hills. No Cotswoldsman lives there."],
    },
    "answer": {
        "aliases": ["Cotswold Hills", "Cotswolds", "The Cotswolds"],
        "normalized_aliases": ["cotswold hills", "cotswolds"],
        "matched_wiki_entity_name": "",
        "type": "WikipediaEntity",
        "value": "Cotswolds",
    },
}


def test_triviaqa_is_read_with_its_value_first_and_its_aliases_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    row = read(monkeypatch, TRIVIAQA)
    assert (row.id, row.answers) == ("odql_10603", ("Cotswolds", "Cotswold Hills", "The Cotswolds"))


def test_documents_of_triviaqa_are_what_a_search_found_and_then_wikipedia(monkeypatch: pytest.MonkeyPatch) -> None:
    assert documents(read(monkeypatch, TRIVIAQA)) == [
        ("Cleeve Hill - Wikipedia", "The highest point of the COTSWOLDS, at 330 m."),
        ("Walks", "Cotswold hill."),  # no page was kept, so the line that the search showed
        ("Cleeve Hill", "It lies in the Cotswold Hills. No Cotswoldsman lives there."),
    ]


def test_gold_of_triviaqa_are_documents_that_hold_an_alias_in_whole_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, TRIVIAQA).gold == (0, 2)
    alone = {**TRIVIAQA, "answer": {"value": "Cotswoldsman", "aliases": []}}
    assert read(monkeypatch, alone).gold == (2,)
    assert read(monkeypatch, {**TRIVIAQA, "answer": {"value": "otswold", "aliases": ["!"]}}).gold == ()


@pytest.mark.parametrize("answer", [None, {"value": None, "aliases": []}, {"value": "!", "aliases": None}])
def test_without_an_answer_in_words_gold_of_triviaqa_is_not_known(
    monkeypatch: pytest.MonkeyPatch, answer: Given | None
) -> None:
    assert read(monkeypatch, {**TRIVIAQA, "answer": answer}).gold is None


def test_triviaqa_without_pages_has_no_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = {"title": [], "search_context": [], "description": []}
    row = read(monkeypatch, {**TRIVIAQA, "search_results": empty, "entity_pages": {"title": [], "wiki_context": []}})
    assert (row.documents, row.gold) == ((), ())


HOTPOTQA: Given = {
    "id": "5a7a06935542990198eaf050",
    "question": "Which magazine was started first?",
    "answer": "Arthur's Magazine",
    "type": "comparison",
    "level": "medium",
    "supporting_facts": {"title": ["First for Women", "Arthur's Magazine", "First for Women"], "sent_id": [0, 0, 1]},
    "context": {
        "title": ["Radio City", "First for Women", "Arthur's Magazine"],
        "sentences": [
            ["Radio City is a station.", " It plays songs."],
            ["First for Women is a magazine.", " Since 1989."],
            ["Arthur's Magazine was begun in 1844."],
        ],
    },
}
ARTICLES = [
    ("Radio City", "Radio City is a station. It plays songs."),
    ("First for Women", "First for Women is a magazine. Since 1989."),
    ("Arthur's Magazine", "Arthur's Magazine was begun in 1844."),
]
PAIRS = [[title, sentences] for title, sentences in zip(*HOTPOTQA["context"].values(), strict=True)]
BARE = [[title, [sentence.strip() for sentence in sentences]] for title, sentences in PAIRS]
FACTS = [["First for Women", 0], ["Arthur's Magazine", 0], ["First for Women", 1]]


def test_hotpotqa_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    row = read(monkeypatch, HOTPOTQA)
    assert (row.id, row.answers, row.gold) == (HOTPOTQA["id"], ("Arthur's Magazine",), (1, 2))
    assert documents(row) == ARTICLES


@pytest.mark.parametrize(
    ("context", "facts"),
    [
        (json.dumps(BARE), json.dumps(FACTS)),
        (BARE, FACTS),
        (PAIRS, FACTS),
        ([{"title": title, "content": sentences} for title, sentences in BARE], FACTS),
        ({"title": [title for title, _ in BARE], "content": [sentences for _, sentences in BARE]}, FACTS),
        ([{"title": t, "sentences": s} for t, s in PAIRS], [{"title": t, "sent_id": n} for t, n in FACTS]),
    ],
    ids=["JSON", "pairs", "pairs with spaces", "objects", "an object of lists", "lists of objects"],
)
def test_2wikimultihopqa_is_read_in_all_its_copies(monkeypatch: pytest.MonkeyPatch, context: Any, facts: Any) -> None:
    given = {**HOTPOTQA, "context": context, "supporting_facts": facts, "_id": "13f5ad2c088c11ebbd6fac1f6bf848b6"}
    del given["id"]
    row = read(monkeypatch, given)
    assert (row.id, documents(row), row.gold) == ("13f5ad2c088c11ebbd6fac1f6bf848b6", ARTICLES, (1, 2))


@pytest.mark.parametrize("facts", [{"title": [], "sent_id": []}, [], "[]", None])
def test_without_supporting_facts_gold_is_not_known(monkeypatch: pytest.MonkeyPatch, facts: Any) -> None:
    assert read(monkeypatch, {**HOTPOTQA, "supporting_facts": facts}).gold is None


def test_all_documents_of_a_title_that_a_fact_names_are_gold(monkeypatch: pytest.MonkeyPatch) -> None:
    context = [["Twin", ["One."]], ["Other", ["Two."]], ["Twin", ["Three."]]]
    assert read(monkeypatch, {**HOTPOTQA, "context": context, "supporting_facts": [["Twin", 0]]}).gold == (0, 2)


SQUAD: Given = {
    "id": "5733be284776f41900661182",
    "title": "University_of_Notre_Dame",
    "context": "Atop the Main Building's gold dome is a golden statue of the Virgin Mary.",
    "question": "What sits on top of the Main Building?",
    "answers": {"text": ["a golden statue", "a golden statue", "the Virgin Mary"], "answer_start": [43, 43, 63]},
}


def test_squad_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    row = read(monkeypatch, SQUAD)
    assert (row.id, row.answers, row.gold) == (SQUAD["id"], ("a golden statue", "the Virgin Mary"), (0,))
    assert documents(row) == [("University_of_Notre_Dame", SQUAD["context"])]


def test_a_question_of_squad_that_cannot_be_answered_has_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    row = read(monkeypatch, {**SQUAD, "answers": {"text": [], "answer_start": []}})
    assert (row.answers, row.gold, len(row.documents)) == ((), None, 1)


def test_multi_news_is_read_report_by_report(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"document": "One.\nMore of one. ||||| Two. |||||  ||||| Three.", "summary": "All three."}
    row = read(monkeypatch, given)
    assert documents(row) == [("", "One.\nMore of one."), ("", "Two."), ("", "Three.")]
    assert (row.id, row.answers, row.gold, row.task) == ("some/set:0", ("All three.",), None, "summarization")
    assert row.text == "Write a one-page summary of all news."


def test_samsum_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"id": "13862856", "dialogue": "Hannah: Hey?\r\nAmanda: Lemme check", "summary": "Hannah asks Amanda."}
    row = read(monkeypatch, given)
    assert (row.id, documents(row), row.answers) == ("13862856", [("", given["dialogue"])], ("Hannah asks Amanda.",))
    assert (row.task, row.text) == ("summarization", "Summarize the dialogue into a few short sentences.")


EVERY: dict[str, Given] = {
    "own": OWN,
    "nq": NQ,
    "musique": MUSIQUE,
    "triviaqa": TRIVIAQA,
    "hotpotqa": HOTPOTQA,
    "squad": SQUAD,
    "multi_news": {"document": "One. ||||| Two.", "summary": "Both."},
    "samsum": {"id": "1", "dialogue": "A: Hey", "summary": "A says hey."},
}
HOLDS = {
    "own": ("documents", "answers"),
    "nq": ("ctxs", "answers"),
    "musique": ("paragraphs", "answer"),
    "triviaqa": ("search_results", "answer"),
    "hotpotqa": ("context", "answer"),
    "squad": ("context", "answers"),
    "multi_news": ("document", "summary"),
    "samsum": ("dialogue", "summary"),
}
"""The fields of documents and answers."""


def test_every_layout_is_among_these_rows() -> None:
    assert len(EVERY) == len(LAYOUTS)


@pytest.mark.parametrize("name", EVERY)
def test_gold_of_every_layout_are_documents(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    row = read(monkeypatch, EVERY[name])
    assert row.documents
    assert row.answers
    assert all(0 <= at < len(row.documents) for at in row.gold or ())


@pytest.mark.parametrize("name", sorted({*EVERY} - {"own"}))
def test_a_missing_answer_is_none_at_all(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    given = {**EVERY[name], HOLDS[name][1]: None}
    if name == "musique":
        given["answer_aliases"] = None
    row = read(monkeypatch, given)
    assert row.answers == ()
    assert row.documents


@pytest.mark.parametrize("blank", ["", "  "])
@pytest.mark.parametrize("name", ["hotpotqa", "multi_news", "samsum"])
def test_a_blank_answer_is_none_at_all(monkeypatch: pytest.MonkeyPatch, name: str, blank: str) -> None:
    assert read(monkeypatch, {**EVERY[name], HOLDS[name][1]: blank}).answers == ()


def with_text(name: str, text: str) -> Given:
    """Return a row of a layout with a text in the place of all that a reader may see."""
    changes: dict[str, Given] = {
        "own": {"question": text, "documents": [{"title": text, "text": text}], "answers": [text]},
        "nq": {"question": text, "ctxs": [{"title": text, "text": text}], "answers": [text]},
        "musique": {"question": text, "paragraphs": [{"title": text, "paragraph_text": text}], "answer": text},
        "triviaqa": {
            "question": text,
            "search_results": {"title": [text], "search_context": [text]},
            "answer": {"value": text},
        },
        "hotpotqa": {"question": text, "context": [[text, [text]]], "answer": text},
        "squad": {"question": text, "title": text, "context": text, "answers": {"text": [text]}},
        "multi_news": {"document": text, "summary": text},
        "samsum": {"dialogue": text, "summary": text},
    }
    return {**EVERY[name], **changes[name]}


ODD = ["a\ud800b", "\ufeffmark", "a\ufffdb", "nul\0", "<|im_end|>", "שלום", "{question}", "e\u0301"]


@pytest.mark.parametrize("text", ODD, ids=ascii)
@pytest.mark.parametrize("name", EVERY)
def test_any_text_is_kept_as_it_is(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    row = read(monkeypatch, with_text(name, text))
    assert (row.documents[0].text, row.answers[0]) == (text, text)
    if row.task == "qa":
        assert (row.question, row.documents[0].title) == (text, text)
    assert row.digest


@pytest.mark.parametrize(("given", "wanted"), [(0, "0"), (7, "7"), (None, "some/set:0"), ("", "some/set:0")])
def test_an_id_is_a_text_and_where_it_is_missing_the_place_stands_for_it(
    monkeypatch: pytest.MonkeyPatch, given: Any, wanted: str
) -> None:
    assert read(monkeypatch, {**SQUAD, "id": given}).id == wanted


def test_ids_can_be_written_to_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, {**SQUAD, "id": "a\ud800"}).id == "a\ufffd"


MISSING: dict[str, Given] = {
    "nq": {"ctxs": [{"title": None, "text": None}]},
    "musique": {"paragraphs": [{"idx": 0}]},
    "triviaqa": {"search_results": {"title": [None], "search_context": [None], "description": [None]}},
    "hotpotqa": {"context": [[None, []]]},
    "squad": {"title": None, "context": None},
    "samsum": {"dialogue": None},
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_title_or_text_is_blank(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert documents(read(monkeypatch, {**EVERY[name], **MISSING[name]}))[0] == ("", "")


@pytest.mark.parametrize("document", [None, "", " ||||| "])
def test_news_without_reports_have_no_documents(monkeypatch: pytest.MonkeyPatch, document: str | None) -> None:
    assert read(monkeypatch, {"document": document, "summary": "x"}).documents == ()


WRONG: list[tuple[str, Given, str]] = [
    ("nq", {"ctxs": "no JSON"}, "ctxs is a text that is no JSON"),
    ("nq", {"ctxs": ["a", "b"]}, "ctxs is list, a list of objects or an object of lists is needed"),
    ("nq", {"answers": "Röntgen"}, "answers is str, a list is needed"),
    ("nq", {"answers": [1901]}, "answers is int, a text is needed"),
    ("nq", {"ctxs": [{"title": "x", "text": 7}]}, r"documents\[0\].text is int"),
    ("musique", {"paragraphs": 7}, "paragraphs is int"),
    ("musique", {"answer_aliases": 7}, "answer_aliases is int, a list is needed"),
    ("triviaqa", {"answer": "Cotswolds"}, "answer is str, an object is needed"),
    ("triviaqa", {"search_results": {"title": ["a"], "search_context": []}}, "search_results is dict, a list of"),
    ("triviaqa", {"entity_pages": {"title": "a"}}, "entity_pages is dict, a list of"),
    ("hotpotqa", {"context": "Radio City is a station."}, "context is a text that is no JSON"),
    ("hotpotqa", {"context": [["a", ["b"], "c"]]}, "context is list, a list of"),
    ("hotpotqa", {"context": [["a", ["b", 7]]]}, r"documents\[0\].text is int"),
    ("hotpotqa", {"context": [["a", [["b"]]]]}, r"documents\[0\].text is list"),
    ("hotpotqa", {"question": None}, "question is NoneType"),
    ("squad", {"context": 7}, r"documents\[0\].text is int"),
    ("squad", {"answers": ["a"]}, "answers is list, a list of"),
    ("multi_news", {"document": ["One."]}, r"documents\[0\].text is list"),
    ("samsum", {"dialogue": 7}, r"documents\[0\].text is int"),
    ("samsum", {"summary": 7}, "answers is int"),
]


@pytest.mark.parametrize(
    ("name", "fields", "message"), WRONG, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_field_of_the_wrong_kind_is_named_with_set_and_row(
    monkeypatch: pytest.MonkeyPatch, name: str, fields: Given, message: str
) -> None:
    hub(monkeypatch, [OWN, {**EVERY[name], **fields}])
    with pytest.raises(InputError, match=f"^some/set:1: {message}"):
        list(read_rows("some/set"))


def test_rows_are_told_by_their_own_fields_and_not_by_those_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, list(EVERY.values()))
    assert [len(row.documents) for row in read_rows("some/set")] == [1, 3, 3, 3, 3, 1, 2, 1]


def test_each_row_says_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, [OWN, SQUAD])
    assert [where for where, _ in hub_rows("some/set:train")] == ["some/set:train:0", "some/set:train:1"]


def test_no_other_module_knows_datasets() -> None:
    folder = Path(kvlink.__file__).parent
    knows = re.compile(r"""^\s*(import|from) datasets\b|import_module\(["']datasets""", re.MULTILINE)
    found = [path.relative_to(folder) for path in folder.rglob("*.py") if knows.search(path.read_text("utf-8"))]
    assert found == [Path("training/hub.py")]
