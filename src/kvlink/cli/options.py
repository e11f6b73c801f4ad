"""Options that several verbs share, and what they mean."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvlink.store.base import Store as AnyStore

GIGABYTES = 20.0
"""Default budget of a store on disk."""

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="A folder, a hub name, a .gguf file, or `demo` (SmolLM2-135M-Instruct)."),
]
Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="KVLINK_STORE",
        help="Folder of the store, or a URL: redis://..., s3://bucket/path.",
        show_default="in the user's cache folder",
    ),
]
Remote = Annotated[
    str | None,
    typer.Option(
        "--remote",
        envvar="KVLINK_REMOTE",
        help="URL of a store that machines share, behind memory and the folder of --store.",
        show_default=False,
    ),
]
Budget = Annotated[
    float,
    typer.Option("--budget", envvar="KVLINK_BUDGET", help="Gigabytes that the store may take on the disk."),
]
Links = Annotated[
    str,
    typer.Option(
        "--links",
        envvar="KVLINK_LINKS",
        help="Trained link tokens: a file, `auto` for those that ship for exactly this model, or `none`.",
    ),
]
ForeignLinks = Annotated[
    bool,
    typer.Option("--foreign-links", help="Take links of other weights of the same shape (another quantisation)."),
]
MaxRunning = Annotated[
    int,
    typer.Option("--max-running", envvar="KVLINK_MAX_RUNNING", min=1, help="Requests that go through one forward."),
]
MaxQueue = Annotated[
    int,
    typer.Option("--max-queue", envvar="KVLINK_MAX_QUEUE", min=0, help="Requests that wait; one more is refused."),
]
PrefillRows = Annotated[
    int,
    typer.Option(
        "--prefill-rows",
        envvar="KVLINK_PREFILL_ROWS",
        min=1,
        help="Tokens of prompts and new documents beside each token of running answers: fewer keep those faster.",
    ),
]
RequestMemory = Annotated[
    float,
    typer.Option(
        "--request-memory",
        envvar="KVLINK_REQUEST_MEMORY",
        min=0.001,
        help="GiB that running requests may take, documents not counted.",
    ),
]
DeviceMemory = Annotated[
    float | None,
    typer.Option(
        "--device-memory",
        envvar="KVLINK_DEVICE_MEMORY",
        min=0.001,
        help="GiB that documents and known beginnings may take on the device.",
        show_default="40 % of a GPU's, 25 % of a CPU's memory",
    ),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", help="Write the result as JSON to this file; `-` is standard output.", show_default=False),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="float32, bfloat16, float16 or float64.", show_default="float32 on CPU, bfloat16 on GPU"
    ),
]


def default_store() -> Path:
    """Return the store of a user who names none."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvlink" / "store"


def secret() -> bytes | None:
    """Return the secret that signs objects, or None."""
    found = os.environ.get("KVLINK_SECRET")
    return found.encode() if found else None


def recompresses() -> bool:
    """Return whether a store that fills up is recompressed into what the model's gate has passed."""
    found = os.environ.get("KVLINK_RECOMPRESS") or "1"
    if found not in ("0", "1"):
        raise typer.BadParameter(f"{found!r} is neither 0 nor 1", param_hint="KVLINK_RECOMPRESS")
    return found == "1"


def open_store(store: str | Path | None, budget: float, remote: str | None = None) -> "AnyStore":
    """Open a store, signed with the secret in KVLINK_SECRET and sealed with the key in KVLINK_STORE_KEY, if any.

    Args:
        store: A folder, or a URL.
        budget: Gigabytes that a folder may take.
        remote: URL of a tier below it; memory becomes the tier above.
    """
    from kvlink.store.address import is_address
    from kvlink.store.disk import DiskStore
    from kvlink.store.opening import open_store as opened
    from kvlink.store.sealed import store_key

    if remote is not None and not is_address(remote):
        raise typer.BadParameter(
            f"{remote} is no URL like redis://host:6379 or s3://bucket/path", param_hint="--remote"
        )
    if store is not None and is_address(store):
        if remote is not None:
            raise typer.BadParameter(
                f"{store} is a remote, too; name a folder beside --remote {remote}", param_hint="--store"
            )
        return opened(store, secret=secret(), store_key=store_key())
    key = store_key()
    disk = DiskStore(store or default_store(), budget_bytes=int(budget * 1e9), secret=secret(), store_key=key)
    return disk if remote is None else opened([disk, remote], secret=secret(), store_key=key)


def dtype_named(name: str | None):
    """Return torch's dtype of this name, or None."""
    import torch

    if name is None:
        return None
    found = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    if name not in found:
        raise typer.BadParameter(f"{name} is none of {', '.join(found)}", param_hint="--dtype")
    return found[name]
