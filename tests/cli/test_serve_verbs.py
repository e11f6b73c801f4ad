"""`serve`, `key` and `chat`: settings from file, variable and option, as the page says; a talk over a library."""

import hashlib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvlink.cli import app
from kvlink.engine.library import Library
from kvlink.server.served import Served
from tiny import byte_tokenizer
from tiny_models import tiny_model

pytestmark = pytest.mark.enable_socket
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Served, dict[str, Any]]]:
    """What would be served; the loop of the server itself is not begun."""
    found: list[tuple[Served, dict[str, Any]]] = []
    monkeypatch.setattr("kvlink.server.serve.serve", lambda served, **options: found.append((served, options)))
    return found


def invoke(*arguments: object, text: str = "", **variables: str) -> Any:
    return CliRunner().invoke(app, [str(one) for one in arguments], input=text, env=variables)


def test_an_option_beats_a_variable_which_beats_the_file_which_beats_the_default(
    model: Path, tmp_path: Path, started: list[Any]
) -> None:
    digest = hashlib.sha256(b"a").hexdigest()
    config = tmp_path / "kvlink.toml"
    config.write_text(
        f"""
        model = "{model}"
        library = "{tmp_path / "library"}"
        port = 1111
        drain = 11
        max_queue = 7
        elements = true
        api_key = ["one", "two"]
        shadow_rate = 0.5

        [[keys]]
        tenant = "acme"
        sha256 = "{digest}"
        quota_mb = 5
        """
    )
    found = invoke(
        "serve", "--config", config, "--port", 3333, KVLINK_PORT="2222", KVLINK_DRAIN="22", KVLINK_SECRET="s"
    )
    assert found.exit_code == 0, found.output
    ((served, options),) = started
    assert (options["port"], options["drain_s"], options["host"]) == (3333, 22, "127.0.0.1")
    assert served.elements
    assert served.library is not None
    assert served.shadow is not None
    assert served.shadow.rate == 0.5
    tenants = {one.name: one for one in options["keys"].tenants}
    assert tenants["acme"].quota_bytes == 5_000_000
    assert options["keys"].check("Bearer two").is_operator
    assert set(tenants.values()) <= {*served.tenants}


@pytest.mark.parametrize(
    ("text", "said"),
    [("pork = 1", "pork"), ("port = ", "TOML"), ("port = 'x'", "port"), ("[[keys]]\ntenant = 'a'", "sha256")],
)
def test_a_settings_file_that_says_something_else_is_refused(tmp_path: Path, text: str, said: str) -> None:
    config = tmp_path / "kvlink.toml"
    config.write_text(text)
    found = invoke("serve", "--config", config, KVLINK_SECRET="s")
    assert found.exit_code != 0
    assert said in found.output + str(found.exception)


def test_the_table_of_settings_is_that_of_the_code() -> None:
    command = get_command(app)
    rows = PAGE.read_text("utf-8").splitlines()
    for one in command.commands["serve"].params:  # type: ignore[attr-defined]
        if one.name == "help":
            continue
        flag, variable = max(one.opts, key=len), one.envvar or f"KVLINK_{one.name.upper()}"
        wanted = f"| `{flag}` | `{variable}` | {'' if one.name == 'config' else f'`{one.name}`'} |"
        assert any(line.startswith(wanted) for line in rows), wanted
        if isinstance(one.default, int | float) and not isinstance(one.default, bool):
            (line,) = (line for line in rows if line.startswith(wanted))
            assert f"| {one.default:g} |" in line, line


def test_a_key_is_shown_once_and_its_digest_is_what_the_file_keeps() -> None:
    found = invoke("key", 'ac"me')
    key, row = found.stdout.strip(), tomllib.loads(found.stderr)["keys"][0]
    assert row == {"tenant": 'ac"me', "sha256": hashlib.sha256(key.encode()).hexdigest()}
    assert len(key) > 40
    assert invoke("key", "acme").stdout.strip() != key
    assert invoke("key", "a\n[[keys]]").exit_code == 2


def talk(model: Path, lines: Sequence[str], *options: object) -> Any:
    arguments = ("chat", "--model", model, "--links", "none", "-n", 4, *options)
    found = invoke(*arguments, text="".join(f"{line}\n" for line in lines))
    assert found.exit_code == 0, found.output + str(found.exception)
    return found


def test_a_talk_over_a_library_brings_documents_and_says_what_it_cost(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "library"
    with Library(folder) as library:
        assert library.rows() == []
    from kvlink import Engine

    with (
        Engine.from_pretrained(str(model), store=folder / "entries", links=None) as engine,
        Library(folder, engine) as library,
    ):
        library.put("office.md", "The office opens at seven.", "Office")
        library.put("bread.md", "Bread is baked on Tuesdays.")
    lines = [
        "When does the office open?",
        "",
        "/docs",
        "And again?",
        "/drop office.md",
        "/drop none",
        "/what",
        "/quit",
        "x",
    ]
    found = talk(model, lines, "--library", folder, "--top", 1)
    assert found.stderr.count("prompt tokens") == 2
    assert "2 documents" in found.stderr
    assert "office.md Office" in found.stderr
    assert "not in this conversation" in found.stderr
    assert "/drop NAME" in found.stderr


def test_a_talk_ends_with_its_input_and_survives_a_question_that_is_too_long(model: Path) -> None:
    found = talk(model, ["word " * 3000, "Hello?"])
    assert "more than the context" in found.stderr
    assert found.stderr.count("prompt tokens") == 1
