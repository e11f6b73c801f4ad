"""A tiny model as a folder, a small corpus, and a shell of one's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvlink.cli import app
from tiny import byte_tokenizer
from tiny_models import tiny_model

torch.set_num_threads(1)

Run = Callable[..., Any]

PAGES = {
    "bakery.md": "Bread is baked on Tuesdays.\nSalt is sold there, too.",
    "blank.md": " \n",
    "huts/hut.md": "The hut lies at 2,100 m, below the pass.",
    "office.md": "The office opens at seven.",
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model and a tokenizer of bytes."""
    tokenizer = byte_tokenizer()
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    for name, text in PAGES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(autouse=True)
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of whoever runs the tests: no store, no cache, no settings of a terminal."""
    ours = ("STORE", "REMOTE", "BUDGET", "SECRET", "STORE_KEY", "STORE_KEY_FILE", "RECOMPRESS")
    for name in (
        *(f"KVLINK_{name}" for name in ours),
        "NO_COLOR",
        "FORCE_COLOR",
        "GITHUB_ACTIONS",
        "PY_COLORS",
        "TERMINAL_WIDTH",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def run() -> Run:
    """Run a command line in this process and return its result; an error that is no exit is raised."""

    def invoke(*arguments: object, **environment: str) -> Any:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke
