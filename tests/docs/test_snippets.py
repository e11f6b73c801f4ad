"""Every Python block of README and documentation runs, page by page, in a folder of its own."""

import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
from pages import PAGES, blocks, page_id
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from kvlink.engine import build
from kvlink.models import checkpoint

WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
SKIP = re.compile(r"<!--.*skip:(?P<rest>.*)-->")

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(checkpoint.DEMO_PACKAGE) is None,
    reason=f"the demo's weights are not here: `make setup` installs {checkpoint.DEMO_PACKAGE}",
)


@pytest.fixture(scope="module")
def one_model() -> Iterator[None]:
    """Load and probe the demo model once for all pages; everything else happens as the pages say."""
    load, require, reports = functools.cache(checkpoint.load), build.require, {}

    def required(runner: Any, *, context: int | None = None) -> Any:
        key = (id(runner.model), context)
        if key not in reports:
            reports[key] = (runner.model, require(runner, context=context))  # held, so that no id comes again
        return reports[key][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "load", load)
        patch.setattr(build, "require", required)
        yield


@needs_weights
@pytest.mark.demo
@pytest.mark.usefixtures("one_model")
@pytest.mark.parametrize("page", WITH_PYTHON, ids=page_id)
def test_every_python_block_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for example in Sybil([PythonCodeBlockParser(), SkipParser()]).parse(page).examples():
        try:
            example.evaluate()
        except SkipTest:
            continue


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_block_that_does_not_run_says_why(page: Path) -> None:
    for found in SKIP.finditer(page.read_text("utf-8")):
        assert re.fullmatch(r' next ".{10,}" ', found["rest"]), f"{page_id(page)}: {found[0]} gives no reason"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_pages_that_a_page_links_to_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)#\s]+\.md)(?:#[^)]*)?\)", text):
        assert (page.parent / target).is_file(), f"{page_id(page)} links to {target}"
