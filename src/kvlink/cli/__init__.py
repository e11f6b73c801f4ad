"""The command line: one verb, one function; each imports what it needs when it is called."""

import os
import sys

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import typer

from kvlink.cli import (
    bench,
    chat,
    cluster,
    demo,
    doctor,
    documents,
    evaluate,
    library,
    model,
    report,
    route,
    serve,
    store,
    store_codecs,
    train,
)
from kvlink.core.errors import KVLinkError

INTERRUPTED = 130
"""Exit code that typer makes of Ctrl-C."""

app = typer.Typer(
    name="kvlink",
    help="Compute each document's keys and values once; reuse them in any prompt, in any order, at any place.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None if os.environ.get("NO_COLOR") else "rich",  # rich would keep bold
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(documents.encode)
app.command()(documents.ask)
app.command()(documents.plan)
app.command()(model.probe)
app.command()(evaluate.evaluate)
app.command()(report.report)
app.command(context_settings={"auto_envvar_prefix": "KVLINK"})(serve.serve)
app.command()(serve.key)
app.command()(chat.chat)
app.command()(route.route)
app.command()(doctor.doctor)
app.command()(train.train)
app.command()(demo.demo)
app.add_typer(library.app, name="library")
store.app.command()(store_codecs.recompress)
store.app.command()(store_codecs.calibrate)
app.add_typer(store.app, name="store")
app.add_typer(cluster.app, name="cluster")
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Show the version and leave.")) -> None:
    """Show the version, or run a verb."""
    if version:
        from importlib.metadata import version as of

        typer.echo(f"kvlink {of('kvlink')}")
        raise typer.Exit


def main() -> None:
    """Run the command line; errors of KVLink become one message and exit code 1, an interrupt 130."""
    try:
        app()
    except KVLinkError as error:
        sys.exit(f"kvlink: {error}")
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED:
            typer.echo("\nkvlink: interrupted; what was finished is kept", err=True)
        raise
