"""The figures on the page of settings are those of the code."""

import inspect

from pages import DOCS, ROOT

import kvlink
from kvlink.cli import documents, options
from kvlink.demo import corpus, questions
from kvlink.engine import engine, loader, prefiller
from kvlink.store import disk, recompressing, room

PAGE = DOCS / "reference" / "settings.md"
NUMBERS = {6: "six", 8: "Eight", 14: "fourteen", 20: "twenty"}


def default(function: object, name: str) -> object:
    """Return the default of an argument."""
    return inspect.signature(function).parameters[name].default


def row(name: str) -> str:
    """Return the row of a setting."""
    (found,) = (line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| `{name}` |"))
    return found


def test_defaults_of_the_engine_are_those_of_the_code() -> None:
    for name in (
        "model",
        "sink",
        "store",
        "tokenizer",
        "dtype",
        "device",
        "context",
        "secret",
        "store_key",
        "recompress",
    ):
        assert f"| `{default(kvlink.Engine.from_pretrained, name)!r}` |".replace("'", '"') in row(name)


def test_defaults_of_a_request_are_those_of_the_code() -> None:
    for name in ("system", "labels", "max_new_tokens", "stop", "on_overflow"):
        assert f"| `{default(kvlink.Engine.job, name)!r}` |".replace("'", '"') in row(name)
    assert default(documents.ask, "max_new_tokens") == engine.MAX_NEW_TOKENS


def test_budgets_and_constants_are_those_of_the_code() -> None:
    text = PAGE.read_text("utf-8")
    assert default(kvlink.DiskStore.__init__, "budget_bytes") == 20 * 2**30
    assert "20 GiB" in text
    assert f"{prefiller.KNOWN_SYSTEMS} system prompts" in text
    assert f"{loader.BATCH_TOKENS:,} tokens" in text
    assert f"begins and ends at | {recompressing.HIGH:.0%} and {recompressing.LOW:.0%}".replace("%", " %") in text
    assert f"{disk._TOUCH_S:.0f} s" in text
    assert f"{room.SCAN_S:.0f} s" in text


def test_every_environment_variable_of_the_command_line_is_on_the_page() -> None:
    assert options.Store.__metadata__[0].envvar == "KVLINK_STORE"
    for name in (
        "KVLINK_STORE",
        "KVLINK_STORE_KEY",
        "KVLINK_STORE_KEY_FILE",
        "KVLINK_RECOMPRESS",
        "XDG_CACHE_HOME",
        "HF_HUB_OFFLINE",
        "OMP_NUM_THREADS",
    ):
        assert row(name)


def test_the_demo_has_as_many_documents_and_questions_as_the_pages_say() -> None:
    asked = questions()
    assert f"{NUMBERS[len(corpus())]} documents, {NUMBERS[len(asked)]} questions" in (ROOT / "README.md").read_text(
        "utf-8"
    )
    text = (DOCS / "how-to" / "measure.md").read_text("utf-8")
    hops = [sum(question.hops == number for question in asked) for number in (1, 2)]
    assert f"{NUMBERS[hops[0]]} of the questions can be answered from one document; {NUMBERS[hops[1]]} need two" in text
