"""`serve`: the API of OpenAI over one model and its documents, until a signal. `key`: a key for a tenant.

Every option of `serve` is also a variable and a key of the settings file; the nearer one wins: option, variable, file.
"""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlink.cli import options, show


def read_settings(context: Any, path: Path | None) -> Path | None:
    """Take a settings file's values for options that are given nowhere else."""
    if path is not None:
        found = settings_of(path)
        found.pop("keys", None)
        known = {one.name for one in context.command.params} - {"config", "help"}
        if unknown := found.keys() - known:
            raise typer.BadParameter(f"{path} sets {', '.join(sorted(unknown))}; may be: {', '.join(sorted(known))}")
        context.default_map = {**(context.default_map or {}), **found}
    return path


def settings_of(path: Path) -> dict[str, Any]:
    """Return what a settings file says."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read as TOML: {error}") from error


def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            envvar="KVLINK_CONFIG",
            is_eager=True,
            callback=read_settings,
            help="A settings file in TOML: options by name, and [[keys]] for tenants.",
            show_default=False,
        ),
    ] = None,
    library: Annotated[
        Path | None,
        typer.Option(
            "--library",
            envvar="KVLINK_LIBRARY",
            help="Folder of a library, made if it is not there: its documents can be asked about by id.",
            show_default=False,
        ),
    ] = None,
    journal: Annotated[
        str | None,
        typer.Option(
            "--journal",
            envvar="KVLINK_JOURNAL",
            help="URL of a Redis in which servers of one library share what its texts are now.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address; other machines need a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            envvar="KVLINK_API_KEY",
            help="A key that clients must send; several times for several. Better as a variable: others see options.",
            show_default=False,
        ),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve other machines without a key.")] = False,
    name: Annotated[
        str | None,
        typer.Option("--name", help="What clients call the model.", show_default="the last part of --model"),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Longest answer where a client does not say.")
    ] = 512,
    deadline: Annotated[
        float, typer.Option("--deadline", min=0.001, help="Seconds after which a request is given up.")
    ] = 600.0,
    elements: Annotated[
        bool, typer.Option("--elements", help="Read <document> elements in messages of users as documents.")
    ] = False,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option("--max-prompt-tokens", min=1, help="Longest prompt.", show_default="the model's context"),
    ] = None,
    max_body: Annotated[int, typer.Option("--max-body", min=1, help="Megabytes of the largest request.")] = 16,
    drain: Annotated[
        int, typer.Option("--drain", min=0, help="Seconds that requests under way have after SIGTERM.")
    ] = 30,
    shadow_rate: Annotated[
        float, typer.Option("--shadow-rate", min=0, max=1, help="Share of answers that is also scored in full.")
    ] = 0.0,
    shadow_agreement: Annotated[
        float,
        typer.Option(
            "--shadow-agreement",
            min=0,
            max=1,
            help="Reuse nothing any more once scored answers agree on fewer of their tokens; 0 for never.",
        ),
    ] = 0.0,
    traces: Annotated[
        bool, typer.Option("--traces", help="Send OpenTelemetry traces; needs the extra `traces`.")
    ] = False,
    model: options.Model = "demo",
    store: options.Store = None,
    remote: options.Remote = None,
    dtype: options.Dtype = None,
    budget: options.Budget = options.GIGABYTES,
    links: options.Links = "auto",
    foreign_links: options.ForeignLinks = False,
    max_running: options.MaxRunning = 64,
    max_queue: options.MaxQueue = 1024,
    prefill_rows: options.PrefillRows = 64,
    request_memory: options.RequestMemory = 1.0,
    device_memory: options.DeviceMemory = None,
) -> None:
    """Serve OpenAI's API, with documents: chat, completions, documents under ids, health and metrics.

    A library's entries lie in its folder unless --store says otherwise. Needs the extra `server`. Each option may also
    be set as a variable (--max-queue: KVLINK_MAX_QUEUE) or in the file of --config (max_queue = 100).

    Example: kvlink serve --library handbook.library --port 8000
    """
    from kvlink.core.errors import InputError

    try:
        from kvlink.server.auth import Keys, check_address
        from kvlink.server.listening import check_free, url_of
        from kvlink.server.opening import Settings, opened
        from kvlink.server.serve import serve as run
        from kvlink.server.tenants import granted
    except ImportError as error:
        raise InputError(f"serving needs {error.name}: pip install 'kvlink[server]'") from error
    rows = [] if config is None else settings_of(config).get("keys", [])
    keys = Keys(api_key or (), granted(rows, secret=options.secret()))
    check_address(host, keys, insecure=insecure)  # before a model is loaded
    check_free(host, port)
    if library is not None and store == os.environ.get("KVLINK_STORE"):
        store = None  # that one is for folders
    settings = Settings(
        model=model,
        library=library,
        journal=journal,
        store=store,
        remote=remote,
        dtype=dtype,
        budget=budget,
        links=links,
        foreign_links=foreign_links,
        name=name,
        max_new_tokens=max_new_tokens,
        deadline=deadline,
        elements=elements,
        max_prompt_tokens=max_prompt_tokens,
        max_body=max_body,
        shadow_rate=shadow_rate,
        shadow_agreement=shadow_agreement,
        traces=traces,
        max_running=max_running,
        max_queue=max_queue,
        prefill_rows=prefill_rows,
        request_memory=request_memory,
        device_memory=device_memory,
    )

    def engine_of(settings: Settings) -> Any:
        return show.open_engine(
            settings.model,
            settings.entries,
            settings.dtype,
            settings.budget,
            remote=settings.remote,
            links=settings.links,
            foreign_links=settings.foreign_links,
            limits=settings.limits,
            device_bytes=settings.device_bytes,
        )

    with opened(settings, keys=keys, engine_of=engine_of) as served:
        if served.engine.sessions is not None:
            room = show.size(served.engine.sessions.residency.stats().budget_bytes)
            show.err.print(
                f"documents may take {room} on the device; --device-memory sets it", highlight=False, soft_wrap=True
            )
        url = url_of(host, port)
        line = f"serving {served.model} on {url}/v1, a page of figures on {url}/dashboard"
        show.err.print(line, highlight=False, soft_wrap=True)
        run(served, host=host, port=port, keys=keys, insecure=insecure, drain_s=drain)


def key(tenant: Annotated[str, typer.Argument(help="Whose key it is.")]) -> None:
    """Make a key for a tenant: the key itself, once, on standard output; what a settings file keeps on standard error.

    Example: kvlink key acme
    """
    import secrets

    from kvlink.server.tenants import digest_of

    if not tenant.isprintable() or not tenant.strip():
        raise typer.BadParameter("a tenant is named by some printable characters", param_hint="TENANT")
    made = f"kv-{secrets.token_urlsafe(32)}"
    typer.echo(made)
    name = tenant.replace("\\", "\\\\").replace('"', '\\"')
    typer.echo(f'[[keys]]\ntenant = "{name}"\nsha256 = "{digest_of(made).hex()}"', err=True)
