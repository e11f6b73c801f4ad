"""The state of a training run on disk: one safetensors file, written whole or not at all."""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvlink.core.errors import InputError

NAME = "state.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """Parameters now and at their best, the optimiser's state, the outcome so far, and the settings of the run."""

    now: dict[str, Tensor]
    best: dict[str, Tensor]
    optimiser: dict[str, Any]
    outcome: dict[str, Any]
    settings: dict[str, Any]


def write_state(folder: Path, state: State) -> None:
    """Keep a state; a kill at any time leaves the last one or this one.

    Raises:
        InputError: The folder cannot be written.
    """
    tensors = {f"now.{name}": tensor for name, tensor in state.now.items()}
    tensors |= {f"best.{name}": tensor for name, tensor in state.best.items()}
    for index, kept in state.optimiser["state"].items():
        tensors |= {f"optimiser.{index}.{name}": tensor for name, tensor in kept.items()}
    words = {
        "settings": json.dumps(state.settings),
        "outcome": json.dumps(state.outcome),
        "groups": json.dumps(state.optimiser["param_groups"]),
    }
    try:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            file = Path(temporary) / NAME
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata=words)
            os.replace(file, folder / NAME)  # noqa: PTH105 (one call, atomic)
    except (OSError, SafetensorError) as error:
        raise InputError(f"the state of the run cannot be written to {folder}: {error}") from error


def forget_state(folder: Path) -> None:
    """Remove a state, if there is one.

    Raises:
        InputError: The folder cannot be written.
    """
    try:
        (folder / NAME).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"the state of a run cannot be written to {folder}: {error}") from error


def read_state(folder: Path, settings: dict[str, Any]) -> State | None:
    """Return the state in a folder, or None if there is none.

    Raises:
        InputError: It belongs to another run, or cannot be read.
    """
    file = folder / NAME
    if not file.exists():
        return None
    try:
        with safe_open(str(file), framework="pt") as opened:  # pyright: ignore[reportUnknownVariableType]
            words: dict[str, str] = opened.metadata() or {}
            tensors: dict[str, Tensor] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        found, outcome, groups = (json.loads(words[name]) for name in ("settings", "outcome", "groups"))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error!r}); delete it, or train without --resume") from error
    wanted = json.loads(json.dumps(settings))
    if found != wanted:
        other = sorted(key for key in wanted | found if found.get(key) != wanted.get(key))
        raise InputError(
            f"{folder} holds a run with other settings ({', '.join(other)}); give the same ones, another folder, or no "
            "--resume"
        )
    kept: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimiser":
            index, _, field = rest.partition(".")
            kept.setdefault(int(index), {})[field] = tensor
    optimiser = {"state": kept, "param_groups": groups}
    return State(_part(tensors, "now."), _part(tensors, "best."), optimiser, outcome, found)


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
