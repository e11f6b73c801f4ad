"""What decides a model's numbers, as digests; and rotary tables brought back to what the config says they are.

A name must not lie: if two models could give different keys and values, their digests differ. It knows no files.
"""

import inspect
import struct
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from blake3 import blake3
from torch import Tensor, nn

from kvlink.core.errors import ModelRefused

_OBSERVERS = {"use_cache", "output_attentions", "output_hidden_states", "return_dict"}
_NAMES = {"model_type", "hidden_act", "hidden_activation", "activation_function", "layer_types", "rope_type"}


def repair_rotary(model: nn.Module) -> list[str]:
    """Restore rotary frequencies that differ from those a fresh module makes of the config; say which.

    `model.to(torch.bfloat16)` rounds these float32 buffers, too: angles are then wrong by radians at position 1,000,
    and no cast brings them back.

    Raises:
        ModelRefused: A module with rounded frequencies cannot be built afresh.
    """
    repaired: list[str] = []
    for name, module in _rotary_modules(model):
        fresh = _fresh(module)
        if fresh is None:
            if rounded := [key for key, table in _tables(module).items() if table.element_size() < 4]:
                raise ModelRefused(
                    f"{name}.{rounded[0]} is no longer float32 and cannot be rebuilt: "
                    "load the model with from_pretrained(dtype=...) instead of casting it"
                )
            continue
        damaged = _damaged(module, fresh)
        for key, table in _tables(fresh).items() if damaged else ():
            setattr(module, key, table.to(_tables(module)[key].device))
        if damaged and hasattr(fresh, "max_seq_len_cached"):
            module.max_seq_len_cached = fresh.max_seq_len_cached  # a table that had grown begins anew
        repaired += [f"{name}.{key}: was wrong by {error:.2g} (relative)" for key, error in damaged.items()]
    return repaired


def model_digest(model: nn.Module) -> str:
    """Return BLAKE3 (hex) over all parameters and persistent buffers (name, shape, dtype, bytes) and the config.

    Of the config count numbers, and the few words that name a computation; paths, dtype and versions do not. Adapters
    count with their weights and settings.

    Raises:
        ModelRefused: Weights are not in memory.
    """
    hasher = blake3(max_threads=blake3.AUTO)
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):
            continue
        if tensor.is_meta:
            raise ModelRefused(f"{name} is not in memory, so the model cannot be named: load it without offloading")
        hasher.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}\n".encode())
        hasher.update(_bytes(tensor))
    lines = list(_numbers(_config(model), ()))
    for name, adapter in sorted(cast("dict[str, Any]", getattr(model, "peft_config", {})).items()):
        lines += _numbers(adapter.to_dict(), ("adapter", name))
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):  # an adapter can be switched and rescaled without a change of weights
            lines.append(f"{name}:{module.active_adapters}:{module.disable_adapters}:{module.scaling}")
    hasher.update("\n".join(lines).encode())
    return hasher.hexdigest()


def rope_digest(model: nn.Module) -> str:
    """Return BLAKE3 (hex) over the rotary frequencies at rest, the attention scaling and the config's RoPE fields."""
    hasher = blake3()
    for name, module in _rotary_modules(model):
        tables = _tables(module)
        for key, table in sorted(tables.items()):
            if _moves(module) and _original(key) in tables:
                continue
            hasher.update(f"{name}.{key}:{tuple(table.shape)}\n".encode())
            hasher.update(_bytes(table.float()))
        for key, value in sorted(vars(module).items()):
            if key.endswith("attention_scaling") and isinstance(value, int | float):
                hasher.update(f"{name}.{key}:".encode() + struct.pack("<d", value))
    config: Any = getattr(model, "config", None)
    fields = {} if config is None else config.get_text_config().to_dict()
    fields = {key: value for key, value in fields.items() if key.startswith(("rope_", "rotary_", "partial_rotary"))}
    hasher.update("\n".join(_numbers(fields, ())).encode())
    return hasher.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(cast("Any", flat.view(torch.uint8).numpy()))


def _config(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    return {} if config is None else config.to_dict()


def _numbers(node: object, path: tuple[str, ...]) -> Iterator[str]:
    """Yield `path=value` for all that can decide a number in a configuration, in a fixed order."""
    if isinstance(node, Mapping):
        for key, value in sorted(cast("Mapping[object, object]", node).items(), key=lambda item: str(item[0])):
            if key not in _OBSERVERS:
                yield from _numbers(value, (*path, str(key)))
    elif isinstance(node, list | tuple):
        for i, value in enumerate(cast("list[object]", node)):
            yield from _numbers(value, (*path, str(i)))
    elif isinstance(node, int | float):
        yield f"{'.'.join(path)}={float(node)!r}"
    elif isinstance(node, str) and _NAMES.intersection(path):
        yield f"{'.'.join(path)}={node}"


def _rotary_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return sorted((name, module) for name, module in model.named_modules() if _tables(module))


def _tables(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's frequency tables: `inv_freq`, `original_inv_freq`, and those of each type of layer."""
    own: dict[str, Any] = {**vars(module), **dict(module.named_buffers(recurse=False))}
    return {
        key: table
        for key, table in own.items()
        if key.endswith("inv_freq") and "long_" not in key and isinstance(table, Tensor)
    }


def _original(key: str) -> str:
    return key.removesuffix("inv_freq") + "original_inv_freq"


def _fresh(module: nn.Module) -> nn.Module | None:
    """Build the module anew on the CPU from its config, or return None where its class wants more than that."""
    needs = inspect.signature(type(module)).parameters
    if not hasattr(module, "config") or not needs.keys() <= {"config", "device"}:
        return None
    with torch.device("cpu"):
        return type(module)(module.config)


def _damaged(module: nn.Module, fresh: nn.Module) -> dict[str, float]:
    """Return the tables that differ from the fresh ones, with their largest relative error."""
    tables, errors = _tables(module), dict[str, float]()
    for key, right in _tables(fresh).items():
        table = tables[key].detach().to("cpu", torch.float64)
        if table.shape != right.shape:
            errors[key] = float("inf")
        elif not torch.equal(table, right.double()):
            errors[key] = float(((table - right).abs() / right.abs().clamp_min(1e-30)).max())
    if not _moves(module):
        return errors
    # a working copy that the model itself has changed is in order while its original is
    return {key: error for key, error in errors.items() if _original(key) not in tables or _original(key) in errors}


def _moves(module: nn.Module) -> bool:
    """Whether the model changes the working copy of its tables with the positions seen (dynamic NTK, LongRoPE)."""
    kind = str(getattr(module, "rope_type", ""))
    return "dynamic" in kind or "longrope" in kind
