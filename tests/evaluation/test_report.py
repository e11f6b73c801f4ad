"""`kvlink report` makes one page of results that needs nothing else, and shows no text that it may not show."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from benches import given_row, write_rows
from made_results import COSTS, MODEL, rows_of, write_files
from typer.testing import CliRunner

from kvlink import InputError
from kvlink.cli import app
from kvlink.evaluation.report import figures
from kvlink.evaluation.report.names import codecs, shares
from kvlink.evaluation.report.page import DRAWN, render, write_figures
from kvlink.evaluation.report.read import Overall, Results, overall, own_and_rival, read_results
from kvlink.evaluation.report.style import PAGE, colour_of
from kvlink.training.data import read_rows


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_files(tmp_path_factory.mktemp("run"), rows_of())


@pytest.fixture(scope="module")
def results(files: list[Path]) -> Results:
    return read_results(files)


@pytest.fixture(scope="module")
def page(results: Results) -> str:
    return render(results, title="A <title>")


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)], env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# --- the page -------------------------------------------------------------------------------------------------------


class _Balance(HTMLParser):
    """Notes elements that are not closed in the order of their opening, and all that is fetched from elsewhere."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and value and not value.startswith("#"):
                self.fetched.append(value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def test_the_page_is_whole_and_fetches_nothing(page: str) -> None:
    seen = _Balance()
    seen.feed(page)
    assert (seen.open, seen.wrong, seen.fetched) == ([], [], [])
    assert not re.search(r"url\(\s*['\"]?http|@import", page)


def test_the_page_holds_every_figure_every_method_and_the_pair(page: str) -> None:
    for name, (title, _, _) in DRAWN.items():
        assert f'<section id="{name}">' in page
        assert title in page
    assert page.count("<svg") == len(DRAWN)
    for method in COSTS:
        assert f"</i>{method}</td>" in page
    assert "Best rival that is no slower" in page
    assert "A &lt;title&gt;" in page


def test_figures_take_the_pages_colours_in_light_and_dark(page: str) -> None:
    assert "var(--ink)" in page
    assert not any(colour in page for colour in PAGE.values())
    assert "prefers-color-scheme: dark" in page


def test_the_same_results_give_the_same_page(results: Results, page: str) -> None:
    assert render(results, title="A <title>") == page


def test_a_method_has_one_colour_in_all_figures_and_no_two_share_one(results: Results) -> None:
    colours = [colour_of(method, results.methods) for method in results.methods]
    assert len(set(colours)) == len(colours)


# --- what may be shown ----------------------------------------------------------------------------------------------


def test_texts_of_made_up_tasks_are_shown_and_those_of_sets_are_not(page: str) -> None:
    assert "In which place does the keeper of the" in page
    assert page.count('<div class="answer">') == 3 * 4  # four rows of the made-up task, three methods
    assert "nq-3" in page


def test_texts_of_a_set_are_shown_where_its_folder_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data" / "hotpotqa.jsonl", [given_row(number, gold=[1]) for number in range(6)])
    known = list(read_rows(path))
    rows = rows_of(["full", "kvlink", "ape"], ["hotpotqa"], count=6)
    for row in rows:
        source = known[int(row["id"].rsplit("-", 1)[1])]
        row |= {"id": source.id, "digest": source.digest}
    rows[0]["digest"] = rows[1]["digest"] = rows[2]["digest"] = "f" * 16  # the first row is another one by now
    results = read_results(write_files(tmp_path, rows))
    hidden, shown = render(results, title="t"), render(results, title="t", texts=tmp_path / "data")
    assert "Text 1 of" not in hidden
    assert "Answer of" not in hidden
    assert "Text 1 of 5." in shown
    assert "holds the answer" in shown
    assert "Text 1 of 0." not in shown


def test_texts_are_escaped(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    path = write_rows(tmp_path / "data" / "hotpotqa.jsonl", [given_row(0, question=bad)])
    (source,) = read_rows(path)
    rows = rows_of(["full", "kvlink", "ape"], ["hotpotqa"], count=1)
    for row in rows:
        row |= {"id": source.id, "digest": source.digest, "answer": bad}
    shown = render(read_results(write_files(tmp_path, rows)), title=bad, texts=tmp_path / "data")
    assert bad not in shown
    assert "&lt;script&gt;alert(1)" in shown


# --- what is compared -----------------------------------------------------------------------------------------------


def compared(found: Sequence[Overall]) -> tuple[str, str]:
    own, rival = own_and_rival(found)
    assert own is not None
    assert rival is not None
    return own.method, rival.method


def test_ours_is_what_an_engine_does_and_the_rival_the_nearest_to_full_that_is_no_slower(results: Results) -> None:
    assert compared(overall(results)) == ("kvlink", "ape")


def test_a_codec_of_ours_is_not_ours_and_a_twentieth_of_the_time_is_no_difference(results: Results) -> None:
    found = overall(results)
    (own,) = (one for one in found if one.method == "kvlink")
    int8 = replace(own, method="int8(kvlink)", kl=own.kl / 2, ttft=own.ttft / 2)
    near, slow = (replace(own, method=f"epic(k={k})", kl=own.kl / 2, ttft=k * own.ttft) for k in (1.05, 1.2))
    assert compared([*found, int8, near, slow]) == ("kvlink", "epic(k=1.05)")
    best = replace(int8, method="kvlink(bundle=a)", kl=own.kl / 4)
    assert own_and_rival([int8, best, slow]) == (best, None)


def test_means_over_sets_are_those_of_the_rows(results: Results) -> None:
    (found,) = [one for one in overall(results) if one.method == "kvlink"]
    rows = [row for row in rows_of() if row["method"] == "kvlink"]
    assert found.kl == pytest.approx(sum(row["kl"] for row in rows) / len(rows))
    assert found.ttft == pytest.approx(0.075)
    assert found.computed == pytest.approx(0.05)


def test_a_method_that_missed_a_set_is_not_averaged_with_those_that_did_not(tmp_path: Path) -> None:
    rows = [row for row in rows_of() if not (row["method"] == "ape" and row["task"] == "nq")]
    found = overall(read_results(write_files(tmp_path, rows)))
    assert "ape" not in [one.method for one in found]
    assert "kvlink" in [one.method for one in found]


def test_two_methods_are_compared_as_asked(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "a.html"
    assert run(*files, "--out", out, "--compare", "cacheblend(r=0.3),prune(50, kvlink)").exit_code == 0
    text = out.read_text("utf-8")
    assert 'on which <span class="mono">cacheblend(r=0.3)</span>' in text
    assert 'with <span class="mono">prune(50, kvlink)</span>' in text


def test_names_that_differ_in_one_thing_are_a_sweep() -> None:
    found = codecs(["kvlink", "int8(kvlink)", "prune(25, kvlink)", "epic", "concat_reencoded(codec=int4)"])
    assert [(one.family, one.value) for one in found] == [("kvlink", "raw"), ("kvlink", "int8"), ("kvlink", "25 %")]
    found = shares(["cacheblend", "cacheblend(0.3)", "cacheblend(r=0.3, mask=released)", "epic(8)", "epic", "full"])
    assert [(one.family, one.value) for one in found] == [
        ("cacheblend", "0.15"),
        ("cacheblend", "0.3"),
        ("epic", "8"),
        ("epic", "16"),
    ]


# --- what there is not ----------------------------------------------------------------------------------------------


def test_results_without_rows_have_neither_gold_positions_nor_rows_side_by_side(files: list[Path]) -> None:
    text = render(read_results(files[:1]), title="t")
    assert '<section id="rows">' not in text
    assert '<section id="gold">' not in text
    assert '<section id="pareto">' in text


def test_rows_alone_are_summarised(files: list[Path], results: Results) -> None:
    alone = read_results(files[1:])
    assert [(row["task"], row["method"], row["nll"]) for row in alone.summary] == [
        (row["task"], row["method"], row["nll"]) for row in results.summary
    ]


def test_a_folder_stands_for_the_files_in_it(files: list[Path], results: Results) -> None:
    assert read_results([files[0].parent]).summary == results.summary


def test_a_row_that_a_kill_cut_short_is_left_out(files: list[Path], tmp_path: Path) -> None:
    torn = tmp_path / "rows.jsonl"
    torn.write_text(files[1].read_text("utf-8") + '{"task": "nq", "id"', "utf-8")
    assert len(read_results([torn]).rows) == len(rows_of())


def test_without_full_there_are_no_differences_but_a_page(tmp_path: Path) -> None:
    text = render(read_results(write_files(tmp_path, rows_of(["kvlink", "ape"]))), title="t")
    assert '<section id="pareto">' not in text
    assert '<section id="table">' in text


def test_a_method_with_errors_says_why(tmp_path: Path) -> None:
    rows = rows_of(["full", "kvlink"])
    rows += [{**row, "method": "paper", "error": "the vocabulary <ends>"} for row in rows if row["method"] == "full"]
    text = render(read_results(write_files(tmp_path, rows)), title="t")
    assert "the vocabulary &lt;ends&gt;" in text


def test_a_figure_without_anything_to_show_is_none(tmp_path: Path) -> None:
    bare = read_results(write_files(tmp_path, rows_of(["full"], ["hotpotqa"], answers=False)))
    assert [draw(bare) for _, _, draw in DRAWN.values()] == [None] * len(DRAWN)
    assert figures.gold_position(bare) is None


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{}", "is no file of results"),
        ("[1]", "cannot be read as results"),
        ("{", "cannot be read as results"),
        ('{"schema": 0, "command": "evaluate", "results": []}', "has schema 0, this version reads 1"),
        ('{"schema": 1, "command": "bench ttft", "results": []}', "is of `kvlink bench ttft`"),
        ('{"schema": 1, "command": "evaluate", "results": [{"task": "nq"}]}', "has a row without agreement, kl"),
        ('{"schema": 1, "command": "evaluate", "results": []}', "nothing was scored"),
    ],
)
def test_a_file_that_is_none_of_results_is_an_error_that_says_so(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(InputError, match=reason):
        render(read_results([path]), title="t")


def test_rows_of_an_older_schema_are_refused(files: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(files[1].read_text("utf-8").replace('"schema": 1', '"schema": 0', 1))
    with pytest.raises(InputError, match="has schema 0"):
        read_results([path])


def test_a_file_or_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_results([tmp_path / "nothing.json"])
    with pytest.raises(InputError, match=r"holds no \.json"):
        read_results([tmp_path])


def test_files_of_two_models_are_refused(files: list[Path], tmp_path: Path) -> None:
    other = json.loads(files[0].read_text("utf-8"))
    other["model"] = {**MODEL, "digest": "cd" * 32}
    (tmp_path / "other.json").write_text(json.dumps(other))
    with pytest.raises(InputError, match="of 2 models"):
        read_results([files[0], tmp_path / "other.json"])


def test_files_that_scored_other_rows_of_a_set_are_refused(files: list[Path], tmp_path: Path) -> None:
    other = write_files(tmp_path, rows_of(count=5))
    with pytest.raises(InputError, match="scored other rows of nq"):
        read_results([files[0], other[0]])


def test_what_cannot_be_done_is_told_before_anything_is_written(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "a.html"
    for more, reason in (
        (("--compare", "kvlink"), "names 1 methods"),
        (("--compare", "kvlink,nobody"), "'nobody' was not scored"),
        (("--texts", tmp_path / "nowhere"), "is no folder"),
    ):
        with pytest.raises(InputError, match=reason):
            run(*files, "--out", out, *more)
    assert not out.exists()


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_figures_are_written_as_files_in_colours_of_their_own(results: Results, suffix: str, tmp_path: Path) -> None:
    written = write_figures(results, tmp_path / "figures", suffix=suffix)
    assert [path.name for path in written] == [f"{name}{suffix}" for name in DRAWN]
    if suffix == ".svg":
        text = "".join(path.read_text("utf-8") for path in written)
        assert not any(colour in text for colour in PAGE.values())
        assert "var(--" not in text


def test_a_run_says_where_the_page_is(files: list[Path], tmp_path: Path) -> None:
    result = run(*files, "--out", tmp_path / "new" / "a.html", "--figures", tmp_path / "figures")
    assert result.exit_code == 0
    assert f"{len(DRAWN)} figures as files" in result.stdout
    assert (tmp_path / "new" / "a.html").read_text("utf-8").startswith("<!doctype html>")
