"""Console blocks name verbs, options and make targets that exist, and give each verb what it needs."""

import re
import shlex
from pathlib import Path

import pytest
from pages import DOCS, PAGES, ROOT, blocks, page_id
from typer import Exit
from typer.main import get_command

from kvlink.cli import app

WRITTEN = [page for page in PAGES if page != DOCS / "reference" / "cli.md"]
TARGETS = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def commands(page: Path) -> list[list[str]]:
    """Return the commands of a page's console blocks as words, without variables before and pipes behind them."""
    found: list[list[str]] = []
    for block in blocks(page):
        if block.language != "console":
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            if not line.startswith("$ "):
                continue
            words = shlex.split(line[2:], comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            ends = [i for i, word in enumerate(words) if word in {"|", ">", "2>", "&&", ";"}]
            found.append(words[: ends[0]] if ends else words)
    return found


def understand(words: list[str]) -> None:
    """Parse the words behind `kvlink` as the command line does, and run nothing."""
    command, path = get_command(app), ["kvlink"]
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words[0]]
        path.append(words.pop(0))
    if hasattr(command, "commands") and words and not words[0].startswith("-"):
        raise ValueError(f"{' '.join(path)} has no verb {words[0]}")
    command.make_context(" ".join(path), words).close()


@pytest.mark.parametrize("page", WRITTEN, ids=page_id)
def test_console_blocks_give_commands_that_exist(page: Path) -> None:
    for words in commands(page):
        if words[0] == "kvlink":
            try:
                understand(words[1:])
            except Exit:  # --help and --version leave at once
                continue
            except Exception as error:
                raise AssertionError(f"{page_id(page)}: {shlex.join(words)}: {error}") from error
        elif words[0] == "make":
            named = [word for word in words[1:] if "=" not in word]
            assert set(named) <= TARGETS, f"{page_id(page)}: {shlex.join(words)}"


@pytest.mark.parametrize(
    "words", ["ask", "ask why --top five", "encode", "encode a --speed 3", "stores ls", "store list", "bench ttft --k"]
)
def test_a_command_that_does_not_exist_is_found(words: str) -> None:
    with pytest.raises(Exception, match=r"\w"):
        understand(words.split())
