"""The figure of quality is drawn from the rows that the JSON holds."""

from pathlib import Path
from typing import Any

import pytest
from benches import results_of, row_of, rows_of

from kvlink import InputError
from kvlink.evaluation.evaluate import summarise
from kvlink.evaluation.plot import plot_quality, require_plot


@pytest.fixture(scope="module")
def summary() -> list[dict[str, Any]]:
    return summarise(results_of(rows_of(2)))


def drawn(rows: list[dict[str, Any]], path: Path) -> str:
    plot_quality(rows, path, title="tiny")
    return path.read_text("utf-8")


def test_quality_is_drawn_as_svg(summary: list[dict[str, Any]], tmp_path: Path) -> None:
    assert "</svg>" in drawn(summary, tmp_path / "new" / "quality.svg")


def test_quality_is_drawn_as_png(summary: list[dict[str, Any]], tmp_path: Path) -> None:
    plot_quality(summary, tmp_path / "quality.png", title="tiny")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_rows_draw_the_same_figure(summary: list[dict[str, Any]], tmp_path: Path) -> None:
    assert drawn(summary, tmp_path / "a.svg") == drawn(summary, tmp_path / "b.svg")


def test_other_rows_draw_another_figure(summary: list[dict[str, Any]], tmp_path: Path) -> None:
    other = [{**row, "kl": row["kl"] * 2} for row in summary]
    assert drawn(summary, tmp_path / "a.svg") != drawn(other, tmp_path / "b.svg")


def test_several_tasks_are_drawn_in_one_figure(summary: list[dict[str, Any]], tmp_path: Path) -> None:
    both = [*summary, *({**row, "task": "another"} for row in summary)]
    assert len(drawn(both, tmp_path / "a.svg")) > len(drawn(summary, tmp_path / "b.svg"))


def test_a_task_whose_rows_have_no_answers_is_drawn_without_bars(summary: list[dict[str, Any]], tmp_path: Path) -> None:
    unscored = summarise([{**result, "task": "unscored"} for result in results_of([row_of(answers=[])])])
    assert "</svg>" in drawn([*summary, *unscored], tmp_path / "a.svg")


def test_tasks_of_which_nothing_was_scored_are_drawn_without_bars(tmp_path: Path) -> None:
    assert "</svg>" in drawn(summarise(results_of([row_of(answers=[])])), tmp_path / "a.svg")


@pytest.mark.parametrize("name", ["a.svg", "new/folder/a.png", "a.PNG", "a.pdf"])
def test_a_figure_that_can_be_written_is_not_written_yet(tmp_path: Path, name: str) -> None:
    require_plot(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["file/a.svg", "folder.svg", "a.txt", "a"])
def test_a_figure_that_cannot_be_written_is_noticed_before_anything_is_drawn(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(InputError, match=f"^the plot cannot be written to {tmp_path / place}: "):
        require_plot(tmp_path / place)


@pytest.mark.parametrize("place", ["file/a.svg", "folder.svg", "a.txt"])
def test_a_figure_that_cannot_be_written_is_an_error_that_names_it(
    summary: list[dict[str, Any]], tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(InputError, match=f"cannot be written to .*{place}"):
        plot_quality(summary, tmp_path / place, title="tiny")


def test_results_without_full_are_drawn_without_a_comparison(summary: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = [{**row, "against_full": {}} for row in summary if row["method"] != "full"]
    assert "</svg>" in drawn(alone, tmp_path / "alone.svg")
