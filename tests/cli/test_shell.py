"""How the command line behaves as a program: help that teaches, errors in a line, and no colours where none belong."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import kvlink
from kvlink import cli

Run = Callable[..., Any]


def verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every verb with its command."""
    for name, child in command.commands.items():
        if hasattr(child, "commands"):
            yield from verbs(child, (*path, name))
        else:
            yield (*path, name), child


VERBS = dict(verbs(typer.main.get_command(cli.app)))


def main(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int | str | None:
    """Run the program in this process and return what it exits with."""
    monkeypatch.setattr(sys, "argv", ["kvlink", *map(str, arguments)])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    return leaving.value.code


# --- help -----------------------------------------------------------------------------------------------------------


def test_the_verbs_are_those_that_are_documented() -> None:
    assert {" ".join(path) for path in VERBS} >= {
        *("encode", "ask", "plan", "probe", "demo", "store ls", "store verify", "store gc"),
        *("bench ttft", "bench assembly", "bench encode"),
    }


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_help_says_what_a_verb_does_and_what_each_option_means(run: Run, path: tuple[str, ...]) -> None:
    result = run(*path, "--help")
    assert result.exit_code == 0
    assert VERBS[path].help.split("\n")[0] in result.stdout
    unexplained = [parameter.name for parameter in VERBS[path].params if not getattr(parameter, "help", "")]
    assert unexplained == []


@pytest.mark.parametrize("verb", ["encode", "ask", "plan", "probe"])
def test_help_of_a_verb_that_takes_something_has_an_example_that_is_a_command(run: Run, verb: str) -> None:
    help_ = " ".join(run(verb, "-h").stdout.split())
    assert f"Example: kvlink {verb} " in help_


@pytest.mark.parametrize("group", [(), ("store",), ("bench",)], ids=["kvlink", "store", "bench"])
def test_a_group_without_a_verb_shows_its_help(run: Run, group: tuple[str, ...]) -> None:
    out = run(*group).output
    below = [path[len(group)] for path in VERBS if path[: len(group)] == group]
    assert all(verb in out for verb in below)


def test_version_is_the_packages(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, "kvlink 0.1.0\n")


def test_python_m_kvlink_is_the_same_program() -> None:
    out = subprocess.run([sys.executable, "-m", "kvlink", "--version"], capture_output=True, text=True, check=True)
    assert out.stdout == "kvlink 0.1.0\n"


def test_help_and_version_need_no_torch() -> None:
    code = "import sys, kvlink.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_kvlink_imports_nothing_heavy_and_knows_its_names() -> None:
    code = "import sys, kvlink; kvlink.InputError; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert dir(kvlink) == sorted(kvlink.__all__)
    assert all(getattr(kvlink, name).__name__ == name for name in kvlink.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = kvlink.no_such_name


# --- errors ---------------------------------------------------------------------------------------------------------


def test_an_error_is_one_line_that_says_who_speaks(
    monkeypatch: pytest.MonkeyPatch, model: str, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "a.txt").write_text("mine")
    for arguments in (
        ("encode", tmp_path / "nowhere", "-m", model),
        ("ask", " ", "-m", model),
        ("ask", "Why?", "--docs", corpus, "--top", "0", "-m", model),
        ("ask", "Why?", "-n", "99999", "-m", model),
        ("encode", corpus, "-m", model, "--store", tmp_path / "thesis"),
        ("ask", "Why?", "-m", tmp_path / "nowhere"),
        ("probe", model, "--json", tmp_path),
    ):
        found = main(monkeypatch, *arguments)
        assert isinstance(found, str)
        assert re.fullmatch(r"kvlink: .+", found)


def test_a_message_of_an_error_is_on_standard_error_without_a_traceback(model: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(
        [sys.executable, "-m", "kvlink", "encode", tmp_path / "nowhere", "-m", model],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr == f"kvlink: {tmp_path / 'nowhere'} is neither a folder nor a file\n"


@pytest.mark.parametrize("arguments", [("ask",), ("fly",), ("ask", "Why?", "-n", "0"), ("ask", "Why?", "--wings")])
def test_a_command_line_that_makes_no_sense_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    assert main(monkeypatch, *arguments) == 2


def test_an_unknown_dtype_exits_with_2_and_names_the_known_ones(run: Run, model: str) -> None:
    result = run("ask", "Why?", "-m", model, "--dtype", "int4")
    assert result.exit_code == 2
    assert "float32, bfloat16, float16, float64" in result.stderr


def test_ctrl_c_exits_with_130_and_says_that_what_was_finished_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], corpus: Path
) -> None:
    def interrupted(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvlink.corpus.read_corpus", interrupted)
    assert main(monkeypatch, "encode", corpus) == 130
    assert capsys.readouterr().err.strip() == "kvlink: interrupted; what was finished is kept"


def test_success_exits_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(monkeypatch, "--version") in (0, None)


# --- colours --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}], ids=["plain", "NO_COLOR"])
def test_output_to_a_file_holds_no_escape_codes(
    run: Run, model: str, corpus: Path, environment: dict[str, str]
) -> None:
    for arguments in (
        ("encode", corpus, "-m", model),
        ("plan", "--corpus", corpus, "-m", model),
        ("ask", "Why?", "--docs", corpus, "-m", model, "-n", 1),
        ("store", "verify"),
        ("--help",),
    ):
        assert "\x1b" not in run(*arguments, **environment).output


def on_a_terminal(*arguments: object, **environment: str) -> str:
    """Run the program on a terminal of its own and return what that shows."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvlink", *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            shown += chunk
    except OSError:  # how Linux says that the other side is closed
        pass
    finally:
        os.close(ours)
    process.wait()
    return shown.decode("utf-8", "replace")


def test_a_terminal_gets_colours() -> None:
    assert "\x1b[" in on_a_terminal("ask", "--help")


@pytest.mark.parametrize("arguments", [("--help",), ("ask", "--help"), ("fly",)], ids=" ".join)
def test_no_color_leaves_no_escape_codes_on_a_terminal(arguments: tuple[str, ...]) -> None:
    assert "\x1b" not in on_a_terminal(*arguments, NO_COLOR="1")


def test_no_color_leaves_no_escape_codes_in_results_on_a_terminal(
    run: Run, model: str, corpus: Path, tmp_path: Path
) -> None:
    run("encode", corpus, "-m", model, "--store", tmp_path / "store")
    shown = on_a_terminal("store", "verify", "--store", tmp_path / "store", NO_COLOR="1")
    assert shown == "3 objects read, 0 damaged\r\n"
