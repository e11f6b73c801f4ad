"""The JSON that `--json` writes: what ran, on what, with which versions, and every sample."""

import json
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from kvlink.core.errors import InputError

SCHEMA = 1
"""Version of the result files."""

PACKAGES = ("kvlink", "torch", "transformers", "tokenizers", "safetensors", "blake3", "numpy")


def write_results(
    path: str | Path | None,
    command: str,
    results: Sequence[Mapping[str, Any]],
    *,
    model: Mapping[str, Any] | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write a result file; `-` is standard output, None writes nothing.

    Raises:
        InputError: The file cannot be written.
    """
    if path is None:
        return
    content = {
        "schema": SCHEMA,
        "command": command,
        "machine": machine(),
        "versions": versions(),
        "model": dict(model) if model else None,
        "seed": seed,
        **({"settings": dict(settings)} if settings else {}),
        "results": list(results),
    }
    text = json.dumps(finite(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    text = text.encode("utf-8", "replace").decode()  # names of files may hold lone surrogates
    if str(path) == "-":
        sys.stdout.write(text)
        return
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
    except OSError as error:
        raise InputError(f"the results cannot be written to {target}: {error.strerror}") from error


def finite(value: Any) -> Any:
    """Return a value with None for every number in it that JSON cannot hold: not a number, infinite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in cast("Sequence[Any]", value)]
    return value


def require_writable(path: str | Path, what: str) -> None:
    """Find out before a long run whether a file could be written in the end; nothing is created.

    Args:
        path: The file; `-`, which is standard output, always can.
        what: What it is, for the error.

    Raises:
        InputError: It, or the nearest folder above it that exists, cannot be written.
    """
    target = Path(path)
    if str(path) == "-":
        return
    if target.is_dir():
        raise InputError(f"{what} cannot be written to {target}: it is a folder; name a file")
    nearest = next(place for place in (target, *target.absolute().parents) if place.exists())
    if nearest != target and not nearest.is_dir():
        raise InputError(f"{what} cannot be written to {target}: {nearest} is no folder; name another place")
    if not os.access(nearest, os.W_OK):
        raise InputError(f"{what} cannot be written to {target}: no permission to write {nearest}; name another place")


def machine() -> dict[str, Any]:
    """Return what the figures depend on; no names of hosts or users."""
    import torch

    found: dict[str, Any] = {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.system(),
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found


def versions() -> dict[str, str]:
    """Return the versions of what did the work."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
