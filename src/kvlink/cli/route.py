"""`route`: several plain servers as one, each request where its documents are, until a signal."""

from enum import StrEnum
from typing import Annotated

import typer

from kvlink.cli import show


class Policies(StrEnum):
    """By documents; the shorter queue of two; one after another; any; by documents, however uneven that is."""

    AFFINITY = "affinity"
    TWO_CHOICES = "two-choices"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    UNEVEN = "uneven"


def route(
    backends: Annotated[
        str, typer.Option("--backends", help="Servers of one model, `http://...` each, separated by commas.")
    ],
    host: Annotated[str, typer.Option("--host", help="Address; other machines need a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port.")] = 8080,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            envvar="KVLINK_API_KEY",
            help="A key that clients must send; backends get it, too. Better as a variable: others see options.",
            show_default=False,
        ),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve other machines without a key.")] = False,
    policy: Annotated[
        Policies, typer.Option("--policy", help="How a backend is chosen; all but the first are there to compare with.")
    ] = Policies.AFFINITY,
    gap: Annotated[
        int,
        typer.Option("--gap", min=0, help="Requests by which a backend's queue may be longer, for documents' sake."),
    ] = 8,
    check: Annotated[float, typer.Option("--check", min=0.05, help="Seconds between two checks of a backend.")] = 2.0,
    max_body: Annotated[int, typer.Option("--max-body", min=1, help="Largest body in MiB.")] = 16,
    drain: Annotated[int, typer.Option("--drain", min=0, help="Seconds that requests have after a signal.")] = 30,
) -> None:
    """Pass requests to several `kvlink serve`, each where most of its documents are and the queue is not too long.

    Needs the extra `cluster`.

    Example: kvlink route --backends http://10.0.0.2:8000,http://10.0.0.3:8000
    """
    from kvlink.core.errors import InputError

    try:
        from kvlink.cluster.route import route as run
        from kvlink.server.auth import Keys
    except ImportError as error:
        raise InputError(f"routing needs {error.name}: pip install 'kvlink[cluster]'") from error
    urls = [url.strip() for url in backends.split(",") if url.strip()]
    show.err.print(f"routing to {len(urls)} backends on http://{host}:{port}/v1", highlight=False)
    run(
        urls,
        host=host,
        port=port,
        keys=Keys(api_key or ()),
        insecure=insecure,
        policy=policy.value,
        gap=gap,
        check_s=check,
        max_bytes=max_body << 20,
        drain_s=drain,
    )
