"""The pages of the documentation as files, and the code blocks in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block and the line of its page that it begins behind."""

    language: str
    text: str
    line: int


def page_id(page: Path) -> str:
    """Return how tests call a page."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in their order."""
    text = page.read_text("utf-8")
    return [Block(m[1], m[2], text.count("\n", 0, m.start()) + 1) for m in _BLOCK.finditer(text)]


def inline_code(page: Path) -> set[str]:
    """Return every `word in backticks` outside the blocks of a page."""
    return set(re.findall(r"`([^`\n]+)`", _BLOCK.sub("", page.read_text("utf-8"))))
