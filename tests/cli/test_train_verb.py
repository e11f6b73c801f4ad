"""`kvlink train` from a file of rows to a bundle that `ask` and `evaluate` use; what cannot work is told at once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from kvlink import Engine, InputError
from kvlink.cli import app
from kvlink.core.errors import BundleRefused
from kvlink.models.bundle import read_bundle
from kvlink.training.teacher import Teacher
from kvlink.training.trainer import HeldOut, Trainer

Run = Callable[..., Any]

SMALL = (
    *("--min-documents", 1, "--max-documents", 2, "--num-links", 2, "--held-out", 2),
    *("--epochs", 1, "--batch", 2, "--every", 1),
)
"""Seconds on the tiny model."""

FOUR_STEPS = ("--epochs", 2)


def row(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"r{number}",
        "question": f"Which is {number}?",
        "documents": [{"title": f"T{at}", "text": f"Text {at} of {number}."} for at in range(2)],
        "answers": [f"{number}"],
        **fields,
    }


def rows_file(folder: Path, count: int = 6, **fields: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row(number, **fields)) + "\n" for number in range(count)))
    return path


def train(folder: Path, model: str, mode: str, *more: object, out: str = "a.safetensors", count: int = 6) -> Result:
    """Run `kvlink train` on six rows; an error that is no exit is raised."""
    line = ["train", mode, "-m", model, "--data", rows_file(folder, count), "--out", folder / out, *SMALL, *more]
    result = CliRunner().invoke(app, [str(argument) for argument in line], env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def results(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text("utf-8"))
    assert (found["schema"], found["command"]) == (1, "train")
    return found["results"]


@pytest.fixture(scope="module")
def made(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A folder in which links were trained once, and what was shown."""
    folder = tmp_path_factory.mktemp("links")
    more = ("--json", folder / "a.json", "--plot", folder / "a.svg", *FOUR_STEPS)
    return folder, train(folder, model, "links", *more)


# --- links ----------------------------------------------------------------------------------------------------------


def test_a_bundle_for_this_very_model_is_written(made: tuple[Path, Result], model: str) -> None:
    folder, result = made
    assert result.exit_code == 0
    bundle = read_bundle(folder / "a.safetensors")
    engine = Engine.from_pretrained(model, links=None)
    assert bundle.card.digest == engine.model_info["digest"]
    assert bundle.card.sink_ids == engine.prompter.sink_ids("header")
    assert (bundle.card.mode, bundle.card.data, bundle.adapter) == ("links", {"rows": 4}, None)
    assert tuple(bundle.links.embeddings.shape) == (2, 2, 64)


def test_the_result_stands_in_a_table_and_in_json(made: tuple[Path, Result]) -> None:
    folder, result = made
    (found,) = results(folder / "a.json")
    assert [word for word in ("links", "separator", "a.safetensors", "finished") if word not in result.stdout] == []
    assert (found["mode"], found["num_links"], found["bundle"], found["lessons"]) == ("links", 2, "a.safetensors", 4)
    assert (found["steps"], found["reason"], found["bad_steps"]) == (4, "finished", 0)
    assert [seen["step"] for seen in found["curve"]] == [0, 1, 2, 3, 4]
    assert found["scores"]["kl"] == min(seen["kl"] for seen in found["curve"])
    assert found["scores"] == read_bundle(folder / "a.safetensors").card.scores
    assert (found["recipe"]["lr"], found["recipe"]["init"]) == (0.01, "separator")


def test_a_figure_is_drawn(made: tuple[Path, Result]) -> None:
    assert "<svg" in (made[0] / "a.svg").read_text()


def test_entries_predictions_metrics_and_the_state_are_kept_beside_it(made: tuple[Path, Result]) -> None:
    work = made[0] / "a.safetensors.work"
    assert sorted(path.name for path in work.iterdir()) == ["entries", "run", "teacher"]
    assert sorted(path.name for path in (work / "run").iterdir()) == ["metrics.jsonl", "state.safetensors"]
    assert len(list((work / "teacher").glob("*.safetensors"))) == 6
    assert len(list((work / "entries").rglob("*.safetensors"))) > 6


def test_ask_uses_it(made: tuple[Path, Result], run: Run, model: str, corpus: Path, tmp_path: Path) -> None:
    def usage(*more: object) -> dict[str, Any]:
        asked = ("ask", "When?", "--docs", corpus / "office.md", "-m", model, "--store", tmp_path / "store", "-n", 2)
        return json.loads(run(*asked, "--json", "-", *more).stdout)["results"][0]["usage"]

    assert usage("--links", made[0] / "a.safetensors")["kvlink"]["links"] == 2
    assert usage("--links", "none")["kvlink"]["links"] == 0
    assert usage()["kvlink"]["links"] == 0


def test_evaluate_scores_it(made: tuple[Path, Result], run: Run, model: str) -> None:
    folder, _ = made
    asked = f"kvlink(bundle={folder / 'a.safetensors'})"
    line = ("evaluate", "--tasks", folder / "rows.jsonl", "--limit", 2, "-m", model, "--methods", f"full,{asked}")
    found = json.loads(run(*line, "--json", "-").stdout)["results"]
    assert [(one["method"], one["n"]) for one in found] == [("full", 2), (asked, 2)]
    assert found[1]["kl"] > 0


def test_what_was_computed_is_used_again(
    made: tuple[Path, Result], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("the teacher was asked once more")

    folder, _ = made
    encoded: list[Any] = []
    monkeypatch.setattr(Teacher, "compute", never)
    monkeypatch.setattr("kvlink.engine.loader.Loader.encode", lambda self, ids, **_: encoded.extend(ids) or iter(()))
    result = train(tmp_path, model, "links", "--work", folder / "a.safetensors.work", *FOUR_STEPS)
    assert result.exit_code == 0
    assert encoded == []
    assert read_bundle(tmp_path / "a.safetensors").digest == read_bundle(folder / "a.safetensors").digest


def test_json_on_standard_output_is_alone_there(model: str, tmp_path: Path) -> None:
    found = json.loads(train(tmp_path, model, "links", "--json", "-").stdout)
    assert list(found) == ["schema", "command", "machine", "versions", "model", "seed", "results"]


def test_folders_on_the_way_are_made(model: str, tmp_path: Path) -> None:
    train(tmp_path, model, "links", out="new/deep/a.safetensors")
    assert read_bundle(tmp_path / "new" / "deep" / "a.safetensors").card.mode == "links"


def test_examples_that_are_left_out_are_told(model: str, tmp_path: Path) -> None:
    more = tmp_path / "more.jsonl"
    more.write_text(json.dumps(row(90)) + "\n" + json.dumps(row(91, answers=[])) + "\n")
    result = train(tmp_path, model, "links", "--data", more)
    assert "left out 1 of more: no answer" in result.stderr
    assert set(read_bundle(tmp_path / "a.safetensors").card.data) <= {"rows", "more"}


def test_a_bundle_is_a_beginning(made: tuple[Path, Result], model: str, tmp_path: Path) -> None:
    folder, _ = made
    more = ("--start", folder / "a.safetensors", "--init", "random", "--json", tmp_path / "b.json")
    train(tmp_path, model, "links", *more)
    (found,) = results(tmp_path / "b.json")
    assert found["curve"][0]["kl"] == pytest.approx(read_bundle(folder / "a.safetensors").card.scores["kl"], rel=1e-5)


def test_a_folder_of_documents_is_enough(
    model: str, run: Run, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = (
        "train",
        "links",
        "-m",
        model,
        "--corpus",
        corpus,
        "--out",
        tmp_path / "a.safetensors",
        "--limit",
        6,
        *SMALL,
    )
    assert run(*line).exit_code == 0
    card = read_bundle(tmp_path / "a.safetensors").card
    assert list(card.data) == ["self-study"]
    assert 2 <= card.data["self-study"] <= 4
    written = (tmp_path / "a.safetensors.work" / "self-study.jsonl").read_text().splitlines()
    assert len(written) == 1 + 6

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was asked once more")

    monkeypatch.setattr(Engine, "generate", never)
    assert run(*line).exit_code == 0


# --- killed and resumed ---------------------------------------------------------------------------------------------


def killed(folder: Path, model: str, *more: object) -> None:
    """Train and interrupt behind the second state."""
    keep, states = Trainer._keep, list[None]()

    def interrupt(trainer: Trainer, *arguments: Any) -> None:
        keep(trainer, *arguments)
        states.append(None)
        if len(states) == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_keep", interrupt)
        assert train(folder, model, "links", *FOUR_STEPS, *more).exit_code == 130
    assert not (folder / "a.safetensors").exists()


def test_a_run_that_was_interrupted_comes_to_the_same_bundle(
    made: tuple[Path, Result], model: str, tmp_path: Path
) -> None:
    killed(tmp_path, model)
    train(tmp_path, model, "links", *FOUR_STEPS, "--resume", "--json", tmp_path / "a.json")
    (found,), (wanted,) = results(tmp_path / "a.json"), results(made[0] / "a.json")
    assert found["curve"] == wanted["curve"]
    assert read_bundle(tmp_path / "a.safetensors").digest == read_bundle(made[0] / "a.safetensors").digest
    lines = [(one / "a.safetensors.work" / "run" / "metrics.jsonl").read_bytes() for one in (tmp_path, made[0])]
    assert lines[0] == lines[1]


@pytest.mark.parametrize(("more", "told"), [(("--lr", 0.5), "recipe"), (("--init", "mean"), "plan")])
def test_it_does_not_go_on_with_other_settings(model: str, tmp_path: Path, more: tuple[object, ...], told: str) -> None:
    killed(tmp_path, model)
    with pytest.raises(
        InputError, match=rf"other settings \({told}\); give the same ones, another folder, or no --res"
    ):
        train(tmp_path, model, "links", *FOUR_STEPS, "--resume", *more)


# --- the other modes ------------------------------------------------------------------------------------------------


def test_links_and_an_adapter_are_one_file(model: str, run: Run, corpus: Path, tmp_path: Path) -> None:
    result = train(tmp_path, model, "links+lora", "--rank", 3)
    assert result.exit_code == 0
    bundle = read_bundle(tmp_path / "a.safetensors")
    assert bundle.adapter is not None
    assert (bundle.card.mode, bundle.adapter.rank) == ("links+lora", 3)
    asked = ("ask", "When?", "--docs", corpus, "-m", model, "--links", tmp_path / "a.safetensors", "-n", 2)
    assert run(*asked, "--store", tmp_path / "store").exit_code == 0


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_model_of_its_own_is_a_folder_that_serves(
    mode: str, model: str, run: Run, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(range(9, 0, -1))
    monkeypatch.setattr(Trainer, "look", lambda _: HeldOut(float(next(looks)), 0.5))  # so that the last is the best
    assert train(tmp_path, model, mode, "--lr-adapter", 0.01, out="model").exit_code == 0
    links = tmp_path / "model" / "links.safetensors"
    assert read_bundle(links).card.mode == mode
    engine = Engine.from_pretrained(tmp_path / "model", links=links)
    base = Engine.from_pretrained(model, links=None)
    name = "model.layers.0.self_attn.q_proj.weight"
    before, after = (one.runner.model.get_parameter(name) for one in (base, engine))
    assert not torch.equal(before, after)
    asked = ("ask", "When?", "--docs", corpus, "-m", tmp_path / "model", "--links", links, "-n", 2)
    assert run(*asked, "--store", tmp_path / "store").exit_code == 0
    with pytest.raises(BundleRefused, match="other weights"):
        run("ask", "When?", "--docs", corpus, "-m", model, "--links", links, "--store", tmp_path / "store")


def test_a_sweep_keeps_the_best_of_several_numbers_and_says_which_to_take(model: str, tmp_path: Path) -> None:
    more = ("--counts", "1,2", "--init", "mean, random", "--json", tmp_path / "a.json", "--plot", tmp_path / "a.png")
    result = train(tmp_path, model, "sweep", *more)
    assert result.exit_code == 0
    found = results(tmp_path / "a.json")
    assert [(one["num_links"], one["recipe"]["init"]) for one in found] == [
        *((1, "mean"), (1, "random"), (2, "mean"), (2, "random")),
    ]
    assert {one["mode"] for one in found} == {"links"}
    advice = {one["advice"] for one in found}
    assert len(advice) == 1
    assert f"take {advice.pop()} links: {found[0]['advised']}" in result.stderr
    (kept,) = [one for one in found if one["bundle"] == "a.safetensors"]
    own = [one for one in found if one["num_links"] == found[0]["advice"]]
    assert min(seen["kl"] for seen in kept["curve"]) == min(seen["kl"] for one in own for seen in one["curve"])
    bundle = read_bundle(tmp_path / "a.safetensors")
    assert bundle.links.num_links == kept["num_links"] == kept["advice"]
    assert bundle.card.recipe["init"] == kept["recipe"]["init"]
    others = [one["bundle"] for one in found if one is not kept]
    assert all((tmp_path / name).exists() for name in others)
    assert len(set(others)) == 3
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_sweep_over_rows_learns_from_more_and_more_of_them(model: str, tmp_path: Path) -> None:
    more = ("--rows", "1,3", "--sweep-mode", "links+lora", "--json", tmp_path / "a.json", "--plot", tmp_path / "a.svg")
    result = train(tmp_path, model, "sweep", *more)
    assert result.exit_code == 0
    found = results(tmp_path / "a.json")
    assert [(one["mode"], one["rows"], one["recipe"]["rows"]) for one in found] == [
        ("links+lora", 1, 1),
        ("links+lora", 3, 3),
    ]
    assert found[0]["curve"][0] == found[1]["curve"][0]  # the same beginning, looked at on the same examples
    assert f"take {found[0]['advice']} rows: {found[0]['advised']}" in result.stderr
    assert "rows learned from" in (tmp_path / "a.svg").read_text()
    assert read_bundle(tmp_path / "a.safetensors").adapter is not None


def test_each_source_may_have_a_limit_of_its_own(model: str, tmp_path: Path) -> None:
    more = tmp_path / "more.jsonl"
    more.write_text("".join(json.dumps(row(number)) + "\n" for number in range(20, 30)))
    train(tmp_path, model, "links", "--data", more, "--limit", "6,3", "--json", tmp_path / "a.json")
    (found,) = results(tmp_path / "a.json")
    assert sum(found["data"].values()) == found["rows"] == 6 + 3 - 2
    assert found["data"]["more"] <= 3


def test_entries_are_kept_as_the_codec_says(model: str, tmp_path: Path) -> None:
    train(tmp_path, model, "links", "--codec", "half")
    kept = (tmp_path / "a.safetensors.work" / "entries").rglob("*.safetensors")
    assert {path.suffixes[0] for path in kept} == {".half"}


# --- what cannot work -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "more", "told"),
    [
        ("link", (), r"there is no mode 'link'; there are links, links\+lora, lora, full, sweep"),
        ("links", ("--init", "zeros"), "there is no initialisation 'zeros'; there are mean, state, separator, random"),
        ("links", ("--init", "mean,state"), "names 2 beginnings, which sweep alone compares"),
        ("sweep", ("--counts", "four"), "--counts 'four' is no list of numbers"),
        ("sweep", ("--rows", "all"), "--rows 'all' is no list of numbers of rows such as 250,500"),
        ("links", ("--rows", "250,500"), "names 2 numbers, which sweep alone compares"),
        ("sweep", ("--sweep-mode", "full"), "'full' cannot be compared; there are links and links"),
        ("links", ("--limit", "5,5"), "--limit '5,5': one number for all, or one for each of the 1 sources"),
        ("links", ("--limit", "0"), "--limit '0': one number for all"),
        ("links", ("--json", "rows.jsonl/a.json"), "the result cannot be written to"),
        ("links", ("--plot", "a.txt"), r"a\.txt"),
    ],
)
def test_what_is_asked_for_wrongly_is_told_before_the_model_is_loaded(
    mode: str, more: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=told):
        train(tmp_path, "nowhere/at/all", mode, *more)
    fonts = {"cache"}  # matplotlib makes it where it has not been imported before
    assert {path.name for path in tmp_path.iterdir()} - fonts == {"rows.jsonl"}


@pytest.mark.parametrize(("mode", "out"), [("links", "rows.jsonl/a"), ("links", "."), ("full", "rows.jsonl")])
def test_a_place_that_cannot_be_written_is_told_before_the_model_is_loaded(mode: str, out: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the (bundle|model) cannot be written to"):
        train(tmp_path, "nowhere/at/all", mode, "--work", tmp_path / "work", out=out)


def test_nothing_to_learn_from_is_an_error_that_says_what_to_give(run: Run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to learn from: give --data PATH, or --corpus FOLDER"):
        run("train", "links", "--out", tmp_path / "a.safetensors", "-m", "nowhere/at/all")


def test_too_few_examples_are_told_before_anything_is_encoded(model: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="3 lessons, 2 of them held out: at least twice as many are needed"):
        train(tmp_path, model, "links", count=3)
    work = tmp_path / "a.safetensors.work"
    assert list(work.rglob("*.safetensors")) == []


def test_a_file_that_is_not_there_is_an_error_that_names_it(model: str, run: Run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file .*nowhere\.jsonl"):
        run("train", "links", "-m", model, "--data", tmp_path / "nowhere.jsonl", "--out", tmp_path / "a.safetensors")


def test_rows_without_answers_are_an_error_with_the_reason(model: str, run: Run, tmp_path: Path) -> None:
    path = rows_file(tmp_path, answers=[])
    with pytest.raises(InputError, match=r"rows\.jsonl holds no row with documents and an answer: 6 no answer"):
        run("train", "links", "-m", model, "--data", path, "--out", tmp_path / "a.safetensors")


def test_a_beginning_with_other_numbers_of_links_is_told_before_anything_is_encoded(
    made: tuple[Path, Result], model: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="has 2 links in 2 levels, asked for are 3 in 2"):
        train(tmp_path, model, "links", "--start", made[0] / "a.safetensors", "--num-links", 3)
    assert list((tmp_path / "a.safetensors.work" / "teacher").iterdir()) == []


def test_a_beginning_that_is_no_bundle_is_refused(model: str, tmp_path: Path) -> None:
    (tmp_path / "b.safetensors").write_bytes(b"garbage")
    with pytest.raises(BundleRefused, match=r"b\.safetensors is no bundle"):
        train(tmp_path, model, "links", "--start", tmp_path / "b.safetensors")


def test_the_bundle_of_another_model_is_refused_by_ask(
    made: tuple[Path, Result], run: Run, corpus: Path, model: str, tmp_path: Path
) -> None:
    line = ("ask", "When?", "--docs", corpus, "-m", model, "--dtype", "float64", "--store", tmp_path / "store", "-n", 1)
    with pytest.raises(BundleRefused, match=r"another dtype or quantisation.*\(--foreign-links\)"):
        run(*line, "--links", made[0] / "a.safetensors")
    result = run(*line, "--links", made[0] / "a.safetensors", "--foreign-links")
    assert "used as asked, so check its scores" in result.stderr


@pytest.mark.parametrize("mode", ["packet", "packet+sink"])
def test_soft_tokens_of_packets_are_trained_and_scored_as_a_method(mode: str, tmp_path: Path, model: str) -> None:
    trained = train(tmp_path, model, mode, "--json", tmp_path / "train.json")
    assert trained.exit_code == 0
    asked = f"full,kv_packet(2, 2, file={tmp_path / 'a.safetensors'})"
    line = ["evaluate", "-m", model, "--tasks", str(tmp_path / "rows.jsonl"), "--limit", "2", "--methods", asked]
    scored = CliRunner().invoke(app, [*line, "--json", str(tmp_path / "scores.json")], env={"COLUMNS": "200"})
    assert scored.exit_code == 0
    found = json.loads((tmp_path / "scores.json").read_text("utf-8"))["results"][1]
    assert (found["n"], found["header"], found["trailer"]) == (2, 2, 2)
