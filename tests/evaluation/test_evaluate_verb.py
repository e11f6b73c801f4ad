"""`kvlink evaluate` from the command line to files: list, plan, run, go on, draw."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benches import METHODS, given_row, without_times, write_rows
from typer.testing import CliRunner

from kvlink import InputError
from kvlink.cli import app
from kvlink.evaluation.case import Case
from kvlink.evaluation.methods import available
from tiny import NO_SYSTEM, byte_tokenizer
from tiny_models import tiny_model

Run = Callable[..., Any]
TASKS = "hops(documents=2,tokens=5),needle(documents=2,tokens=5)"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model and a tokenizer of bytes."""
    tokenizer = byte_tokenizer()
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> Run:
    """Run `kvlink evaluate` with the tiny model and two rows per task; an error that is no exit is raised."""
    for name in ("KVLINK_STORE", "KVLINK_DATA", "NO_COLOR", "FORCE_COLOR", "GITHUB_ACTIONS", "TERMINAL_WIDTH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: object, tasks: object = TASKS, limit: int | None = 2, **environment: str) -> Any:
        line = ["evaluate", "--tasks", tasks, "-m", model, *(("--limit", limit) if limit else ()), *arguments]
        result = CliRunner().invoke(app, [str(argument) for argument in line], env=environment)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


def files(folder: Path) -> list[str]:
    """Return what was written; matplotlib's list of fonts is its own affair."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if path.parts[:2] != ("cache", "matplotlib"))


def results(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's file behind the first, without times."""
    return without_times(json.loads(line) for line in path.read_text("utf-8").splitlines()[1:])


# --- list -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("--tasks", "list"), ("--methods", "list")], ids=" ".join)
def test_list_shows_all_tasks_and_methods_and_runs_nothing(
    run: Run, tmp_path: Path, arguments: tuple[str, str]
) -> None:
    result = run(*arguments, "--out", "run", "--json", "a.json", "-m", "nowhere")
    assert result.exit_code == 0
    assert result.stdout == (
        "tasks: 2wikimultihopqa, cacheblend_musique, cacheblend_wikimqa, hops, hotpotqa, multi_news, musique, needle, "
        f"nq, samsum, triviaqa\nmethods: {', '.join(sorted(available()))}\n"
    )
    assert files(tmp_path) == []


# --- a run ----------------------------------------------------------------------------------------------------------


def test_a_run_shows_a_table_of_tasks_and_methods(run: Run) -> None:
    result = run(tasks="hops(documents=2,tokens=5)")
    assert result.exit_code == 0
    assert [method for method in METHODS if method not in result.stdout] == []
    assert "95 % intervals" in result.stdout


def test_a_run_without_out_or_json_writes_nothing(run: Run, tmp_path: Path) -> None:
    run()
    assert files(tmp_path) == []


def test_json_on_standard_output_is_alone_there(run: Run, model: str) -> None:
    found = json.loads(run("--json", "-", "--seed", 3).stdout)
    assert list(found) == ["schema", "command", "machine", "versions", "model", "seed", "settings", "results"]
    assert (found["schema"], found["command"], found["seed"], found["model"]["name"]) == (1, "evaluate", 3, model)


def test_the_results_are_rows_of_the_agreed_fields(run: Run) -> None:
    found = json.loads(run("--json", "-").stdout)["results"]
    assert [set(row) for row in found] == [
        {
            *("task", "method", "n", "rows", "em", "f1", "substring", "rouge_l", "nll", "kl", "agreement"),
            *("ttft_s", "tokens_computed", "bytes_loaded", "against_full"),
        }
    ] * (2 * len(METHODS))


def test_task_and_method_stand_as_they_were_asked_for(run: Run) -> None:
    found = json.loads(run("--json", "-", "--methods", "full,concat_reencoded(sink=none)").stdout)["results"]
    assert [(row["task"], row["method"], row["n"]) for row in found] == [
        (task, method, 2)
        for task in ("hops(documents=2,tokens=5)", "needle(documents=2,tokens=5)")
        for method in ("full", "concat_reencoded(sink=none)")
    ]


def test_a_method_that_is_asked_for_twice_runs_once(run: Run) -> None:
    found = json.loads(run("--json", "-", "--methods", "full,full", tasks="needle(documents=1)").stdout)["results"]
    assert [row["method"] for row in found] == ["full"]


def test_the_settings_of_the_run_stand_in_the_json(run: Run) -> None:
    found = json.loads(run("--json", "-", "--max-documents", 2, "--max-tokens-context", 900).stdout)["settings"]
    assert {key: found[key] for key in found if key not in {"model", "prompt_version"}} == {
        "methods": list(METHODS),
        "max_documents": 2,
        "max_tokens_context": 900,
        "generate": False,
        "seed": 0,
        "tasks": TASKS.replace(",n", " n").split(),
        "limit": 2,
    }


def test_the_same_seed_gives_the_same_results_and_another_gives_others(run: Run) -> None:
    one, same, other = (
        without_times(json.loads(run("--json", "-", "--seed", seed).stdout)["results"]) for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other


def test_limit_takes_the_first_rows(run: Run, tmp_path: Path) -> None:
    run("--out", "three", limit=3)
    run("--out", "one", limit=1)
    three, one = (results(tmp_path / name / "rows.jsonl") for name in ("three", "one"))
    assert [r for r in three if r["id"].endswith("-0")] == one


def test_generate_adds_answers(run: Run) -> None:
    found = json.loads(run("--json", "-", "--generate", limit=1).stdout)["results"]
    assert {row["method"] for row in found if row["f1"] is not None} == {*METHODS} - {"block_mask"}
    assert all("on_full" in row for row in found)


def test_rows_of_ones_own_are_a_task(run: Run, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "mine.jsonl", [given_row(n) for n in range(3)])
    found = json.loads(run("--json", "-", tasks=path, limit=None).stdout)["results"]
    assert [(row["task"], row["n"]) for row in found] == [(str(path), 3)] * len(METHODS)


@pytest.mark.parametrize("where", ["option", "environment"])
def test_the_folder_of_the_real_sets_is_an_option_or_a_variable(run: Run, tmp_path: Path, where: str) -> None:
    write_rows(tmp_path / "sets" / "nq.jsonl", [given_row(n, 12, gold=[0]) for n in range(3)])
    if where == "option":
        result = run("--data", "sets", "--json", "-", tasks="nq", limit=None)
    else:
        result = run("--json", "-", tasks="nq", limit=None, KVLINK_DATA="sets")
    assert [row["n"] for row in json.loads(result.stdout)["results"]] == [3] * len(METHODS)


def test_errors_of_rows_are_told_on_standard_error_and_the_run_goes_on(run: Run, tmp_path: Path) -> None:
    rows = [given_row(0), {**given_row(1), "documents": [{"text": "Long. " * 2000}], "gold": [0]}]
    path = write_rows(tmp_path / "mine.jsonl", rows)
    result = run("--json", "-", "--methods", "full", tasks=path, limit=None)
    (row,) = json.loads(result.stdout)["results"]
    assert (result.exit_code, row["n"]) == (0, 1)
    assert row["errors"][0] in result.stderr.replace("\n", " ")


def test_names_and_errors_that_look_like_markup_are_shown_as_they_are(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Case, *_: object, **__: object) -> None:
        raise InputError("the text holds '[/INST]'")

    name = "[b]mine[/b].jsonl"
    write_rows(tmp_path / name, [given_row(0, 2, gold=[0, 1])])
    result = run("--methods", "full", "--max-documents", 1, tasks=name)
    assert name in result.stdout
    assert f"{name}: 1 of 1 rows exceed" in result.stderr
    assert name in run("--methods", "full", "--plan", tasks=name).stdout
    monkeypatch.setattr(Case, "__init__", refuse)
    with pytest.raises(InputError, match=r"the text holds '\[/INST\]'"):
        run("--methods", "full", tasks=name)


def test_what_was_dropped_stands_in_the_rows(run: Run, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "mine.jsonl", [given_row(0, 5, gold=[4])])
    run("--out", "run", "--max-documents", 2, tasks=path)
    assert {(r["documents"], r["dropped"]) for r in results(tmp_path / "run" / "rows.jsonl")} == {(2, 3)}


def test_files_of_a_run_hold_no_texts_of_rows(run: Run, tmp_path: Path) -> None:
    row = {**given_row(0), "question": "Wherefore?", "documents": [{"title": "Xylophone", "text": "Quagmire."}]}
    path = write_rows(tmp_path / "mine.jsonl", [{**row, "answers": ["brouhaha"]}])
    run("--out", "run", "--json", "run/results.json", "--generate", tasks=path)
    written = "".join((tmp_path / "run" / name).read_text("utf-8") for name in ("rows.jsonl", "results.json"))
    assert [word for word in ("Wherefore", "Xylophone", "Quagmire", "brouhaha") if word in written] == []


def test_rows_that_exceed_the_limits_are_told_on_standard_error(run: Run, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "mine.jsonl", [given_row(0, 5, gold=[3, 4]), given_row(1, 5, gold=[4])])
    result = run("--out", "run", "--json", "-", "--max-documents", 1, tasks=path)
    assert f"{path.name}: 1 of 2 rows exceed the limits" in " ".join(result.stderr.split()).replace(f"{tmp_path}/", "")
    over = {(r["id"], json.dumps(r.get("over_limit"))) for r in results(tmp_path / "run" / "rows.jsonl")}
    assert over == {("r0", '{"documents": 1}'), ("r1", "null")}
    assert {row["over_limit"] for row in json.loads(result.stdout)["results"]} == {1}


def test_the_table_says_how_many_of_the_rows_were_scored(run: Run, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "mine.jsonl", [given_row(0), given_row(1, answers=[]), given_row(2)])
    assert "2 of 3" in run("--methods", "full", tasks=path, limit=None).stdout


@pytest.fixture
def without_system(tmp_path: Path) -> str:
    """A folder with a tiny model whose chat template refuses system prompts, as Gemma's does."""
    tokenizer = byte_tokenizer(NO_SYSTEM)
    folder = tmp_path / "no-system"
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_run_that_could_score_nothing_fails_with_the_reason_and_keeps_its_results(
    run: Run, tmp_path: Path, without_system: str
) -> None:
    with pytest.raises(InputError, match=r"nothing could be scored on hops\(.*\): a system prompt .* refuses it"):
        run("-m", without_system, "--json", "a.json", "--plot", "a.svg")
    found = json.loads((tmp_path / "a.json").read_text("utf-8"))["results"]
    assert {(row["n"], row["rows"]) for row in found} == {(0, 2)}
    assert (tmp_path / "a.svg").is_file()


def test_a_task_of_which_nothing_could_be_scored_fails_the_run_beside_others(run: Run, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "mine.jsonl", [given_row(0, answers=[])])
    with pytest.raises(InputError, match=r"scored on \S*mine.jsonl: no row has an answer, see --generate$"):
        run(tasks=f"{path},{NEEDLE}")
    assert run("--generate", "--methods", "full", tasks=f"{path},{NEEDLE}", limit=1).exit_code == 0


# --- going on -------------------------------------------------------------------------------------------------------


def test_out_and_json_write_their_files_and_no_others(run: Run, tmp_path: Path) -> None:
    run("--out", "run", "--json", "run/results.json", "--plot", "run/results.svg")
    assert files(tmp_path) == ["run/results.json", "run/results.svg", "run/rows.jsonl"]


def test_a_run_that_goes_on_ends_with_the_same_rows_and_summary(run: Run, tmp_path: Path) -> None:
    whole = json.loads(run("--out", "run", "--json", "-").stdout)["results"]
    path = tmp_path / "run" / "rows.jsonl"
    wanted, content = results(path), path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    found = json.loads(run("--out", "run", "--resume", "--json", "-").stdout)["results"]
    assert results(path) == wanted

    def numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: row[key] for key in ("task", "method", "n", "nll", "kl", "agreement")} for row in rows]

    assert numbers(found) == numbers(whole)


def shown(result: Any) -> list[tuple[str, int]]:
    """Return the tasks of a summary and how many rows of each were scored."""
    return [(row["task"], row["n"]) for row in json.loads(result.stdout)["results"] if row["method"] == "full"]


HOPS, NEEDLE = "hops(documents=2,tokens=5)", "needle(documents=2,tokens=5)"


def test_a_run_may_go_on_with_more_rows_and_more_tasks(run: Run, tmp_path: Path) -> None:
    run("--out", "run", tasks=HOPS, limit=1)
    before = results(tmp_path / "run" / "rows.jsonl")
    found = run("--out", "run", "--resume", "--json", "-", tasks=f"{NEEDLE},{HOPS}", limit=2)
    assert shown(found) == [(NEEDLE, 2), (HOPS, 2)]
    after = results(tmp_path / "run" / "rows.jsonl")
    assert (after[: len(before)], len(after)) == (before, 4 * len(METHODS))


def test_what_was_asked_for_earlier_stays_in_the_file_and_out_of_the_summary(run: Run, tmp_path: Path) -> None:
    run("--out", "run", limit=2)
    before = (tmp_path / "run" / "rows.jsonl").read_bytes()
    assert shown(run("--out", "run", "--resume", "--json", "-", tasks=NEEDLE, limit=1)) == [(NEEDLE, 1)]
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == before


def test_rows_of_the_same_ids_in_other_data_do_not_go_on(run: Run, tmp_path: Path) -> None:
    for folder, answer in (("a", "one"), ("b", "another")):
        write_rows(tmp_path / folder / "nq.jsonl", [given_row(n, answers=[answer]) for n in range(2)])
    run("--out", "run", "--data", "a", tasks="nq")
    before = (tmp_path / "run" / "rows.jsonl").read_bytes()
    with pytest.raises(InputError, match=r"run/rows.jsonl holds results of another row 'r0' of nq"):
        run("--out", "run", "--resume", "--data", "b", tasks="nq")
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == before
    (tmp_path / "a").rename(tmp_path / "c")
    assert shown(run("--out", "run", "--resume", "--json", "-", "--data", "c", tasks="nq")) == [("nq", 2)]


def test_results_are_not_overwritten_unasked(run: Run) -> None:
    run("--out", "run")
    with pytest.raises(InputError, match=r"run/rows.jsonl holds results; pass --resume"):
        run("--out", "run")


def test_a_run_with_other_settings_does_not_go_on(run: Run) -> None:
    run("--out", "run")
    with pytest.raises(InputError, match=r"other settings \(max_documents, seed\)"):
        run("--out", "run", "--resume", "--seed", 1, "--max-documents", 1)


# --- plan -----------------------------------------------------------------------------------------------------------


def test_a_plan_tells_minutes_per_task_and_that_nothing_ran(run: Run) -> None:
    result = run("--plan")
    assert result.exit_code == 0
    assert "minutes; nothing ran" in " ".join(result.stdout.split())


def test_a_plan_writes_nothing_but_itself(run: Run, tmp_path: Path) -> None:
    run("--plan", "--out", "run", "--json", "plan.json", "--plot", "plan.svg")
    assert files(tmp_path) == ["plan.json"]
    found = json.loads((tmp_path / "plan.json").read_text("utf-8"))
    assert found["command"] == "evaluate --plan"
    assert [set(row) for row in found["results"]] == [{"task", "rows", "methods", "tokens", "minutes"}] * 2


# --- errors before anything is loaded -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", "squad"), "there is no task 'squad'"),
        (("--methods", "magic"), "there is no method 'magic'"),
        (("--methods", "full,concat_reencoded(sink=x)"), "there is no sink prefix 'x'"),
        (("--methods", "full(k=1)"), "takes no arguments"),
        (("--tasks", ","), "no task or no method is named"),
        (("--methods", ""), "no task or no method is named"),
        (("--tasks", "mine.jsonl"), "there is no file mine.jsonl"),
        (("--tasks", "nq", "--data", "sets"), "sets/nq.jsonl is missing"),
        (("--tasks", "hops(documents=1)"), "two hops needs two documents"),
        (("--tasks", "empty.jsonl"), "empty.jsonl has no rows"),
        (("--tasks", "a/b/c/d"), "no name of the hub"),
        (("--json", "blocked/a.json"), "the results cannot be written to blocked/a.json: .*blocked is no folder"),
        (("--json", "folder"), "the results cannot be written to folder: it is a folder"),
        (("--plot", "blocked/a.svg"), "the plot cannot be written to blocked/a.svg: .*blocked is no folder"),
        (("--plot", "a.txt"), r"the plot cannot be written to a.txt: name it .svg or .png"),
        (("--plot", "plot"), r"the plot cannot be written to plot: name it .svg or .png"),
    ],
)
def test_what_cannot_be_run_is_an_error_before_the_model_is_loaded(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("blocked", "empty.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(InputError, match=message):
        run(*arguments, "--out", "run", "-m", "no/such/model")
    assert files(tmp_path) == ["blocked", "empty.jsonl"]


def test_a_folder_of_rows_that_cannot_be_made_is_an_error_before_the_model_is_loaded(run: Run, tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("")
    with pytest.raises(InputError, match=r"rows cannot be written to blocked/rows.jsonl"):
        run("--out", "blocked", "-m", "no/such/model")


@pytest.mark.parametrize("more", [(), ("--plan",)])
def test_going_on_needs_a_folder_to_go_on_with(run: Run, more: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="--resume goes on with the rows in --out, and no --out is given"):
        run("--resume", *more, "-m", "no/such/model")


def test_a_missing_matplotlib_is_noticed_before_the_model_is_loaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=re.escape("pip install 'kvlink[plot]'")):
        run("--plot", "a.svg", "-m", "no/such/model")


def test_a_missing_rouge_score_is_noticed_before_the_model_is_loaded_if_it_is_needed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)  # type: ignore[arg-type]
    path = write_rows(tmp_path / "mine.jsonl", [given_row(0, task="summarization")])
    with pytest.raises(InputError, match=re.escape("pip install 'kvlink[evaluate]'")):
        run("--generate", "-m", "no/such/model", tasks=path)
    for arguments, tasks in ((("--generate",), NEEDLE), ((), path)):  # no summaries, no answers
        assert run(*arguments, "--methods", "full", tasks=tasks, limit=1).exit_code == 0


@pytest.mark.parametrize("option", ["--limit", "--max-documents", "--max-tokens-context"])
def test_a_limit_of_none_is_a_usage_error(run: Run, option: str) -> None:
    assert run(option, 0).exit_code == 2
