"""The page of the command line is what its generator gives now."""

from pages import DOCS
from typer import Context
from typer.cli import get_docs_for_click
from typer.core import MARKUP_MODE_KEY
from typer.main import get_command

from kvlink.cli import app

PAGE = DOCS / "reference" / "cli.md"
GENERATE = (
    "env -u NO_COLOR .venv/bin/python -m typer kvlink.cli utils docs --name kvlink --title 'Command line' "
    "--output docs/reference/cli.md"
)


def test_the_page_of_the_command_line_is_up_to_date() -> None:
    command = get_command(app)
    context = Context(command, obj={MARKUP_MODE_KEY: "rich"})
    wanted = get_docs_for_click(obj=command, ctx=context, name="kvlink", title="Command line")
    assert PAGE.read_text("utf-8").strip() == wanted.strip(), f"the command line has changed; run\n\n    {GENERATE}\n"
