"""How a model rotates its keys: learned by watching one forward, then repeated with the model's own function.

Nothing here knows a family by name. While a forward runs, the module-level rotary function of each attention
is wrapped, so that its key argument (the key *before* RoPE) is seen, and so is the module that made the tables.
A layer that never calls it has no rotary embedding (NoPE): its keys are stored as they are. Whether what was
seen is enough to be exact is not decided here but measured by the probe.
"""

import inspect
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from threading import Lock, get_ident
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

ROTARY_FUNCTION = "apply_rotary_pos_emb"
"""Name of the module-level function that all rotary families of transformers use."""

CHUNK_BYTES = 1 << 20
"""Scratch memory of one rotation step: small enough for a second-level cache."""

Tables = tuple[Float[Tensor, "1 tokens rotary"], Float[Tensor, "1 tokens rotary"]]


@dataclass(frozen=True, slots=True, eq=False)
class TableSource:
    """A module that turns positions into cosines and sines, and how a forward calls it.

    Attributes:
        like: Name of the argument whose dtype and device the tables take.
        options: Further arguments that are no tensors, such as a layer type.
    """

    module: nn.Module
    like: str
    options: Mapping[str, Any]

    @classmethod
    def seen(cls, module: nn.Module, arguments: Mapping[str, Any]) -> "TableSource":
        """Note a call without keeping its tensors."""
        rest = {name: value for name, value in arguments.items() if name != "position_ids"}
        like = next(name for name, value in rest.items() if isinstance(value, Tensor))
        return cls(module, like, {name: value for name, value in rest.items() if not isinstance(value, Tensor)})

    def __call__(self, like: Tensor, positions: Int[Tensor, " tokens"]) -> Tables:
        """Return the tables of these positions, in the dtype of `like`, attention scaling included."""
        return self.module(**{self.like: like, "position_ids": positions[None], **self.options})

    def same_as(self, other: "TableSource") -> bool:
        """Whether both give the same tables."""
        return self.module is other.module and self.options == other.options


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a rotary function, as seen while a layer ran.

    Attributes:
        keys: The key argument, before RoPE; `[batch, kv_heads, tokens, rotary]`.
        function: The model's own rotary function.
        options: Keyword arguments beyond the four tensors.
        source: Where the tables came from, or None if that could not be traced.
    """

    keys: Tensor
    function: Callable[..., tuple[Tensor, Tensor]]
    options: Mapping[str, Any]
    source: TableSource | None


@dataclass(slots=True)
class Watch:
    """What one thread's forward did since its last layer wrote its keys."""

    pending: Call | None = None
    _thread: int = field(default_factory=get_ident)
    _tables: list[tuple[Tensor, TableSource]] = field(default_factory=list)

    def take(self) -> Call | None:
        """Return the call of the layer that just ran, and forget it."""
        call, self.pending = self.pending, None
        return call

    def saw_table(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook of rotary modules."""
        if get_ident() != self._thread:
            return
        arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        self._tables.append((output[0], TableSource.seen(module, arguments)))

    def wrap(self, function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return `function` with its key argument noted on each call."""
        return partial(self._watched, function)

    def _watched(
        self,
        function: Callable[..., tuple[Tensor, Tensor]],
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        *args: Any,
        **options: Any,
    ) -> Any:
        if get_ident() == self._thread:  # other models of the family may run in other threads
            source = next((s for table, s in reversed(self._tables) if table is cos), None)
            self.pending = Call(k, function, options, source)
        return function(q, k, cos, sin, *args, **options)


def rotary_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that make rotary tables: those that hold inverse frequencies."""
    for module in model.modules():
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            yield module


@contextmanager
def watching(model: nn.Module) -> Generator[Watch]:
    """Watch the rotary functions and tables of a model while its forward runs in this block, in this thread.

    The wrapped functions are globals of transformers' modules, so the process has one watch at a time.
    """
    with _ONE_WATCH:
        yield from _watching(model)


_ONE_WATCH = Lock()


def _watching(model: nn.Module) -> Generator[Watch]:
    watch = Watch()
    hooks = [module.register_forward_hook(watch.saw_table, with_kwargs=True) for module in rotary_modules(model)]
    homes = {name: sys.modules[name] for name in {type(module).__module__ for module in model.modules()}}
    originals = {name: getattr(home, ROTARY_FUNCTION) for name, home in homes.items() if hasattr(home, ROTARY_FUNCTION)}
    try:
        for name, original in originals.items():
            setattr(homes[name], ROTARY_FUNCTION, watch.wrap(original))
        yield watch
    finally:
        for name, original in originals.items():
            setattr(homes[name], ROTARY_FUNCTION, original)
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True, slots=True)
class LayerRotary:
    """How the layers `start <= layer < stop` rotate; all alike.

    Attributes:
        rotary_dim: Channels that the function sees; those behind pass by unchanged. 0 for NoPE.
        halves: Whether the plain half-split formula gives the function's very bits.
    """

    start: int
    stop: int
    rotary_dim: int
    function: Callable[..., tuple[Tensor, Tensor]] | None = None
    source: TableSource | None = None
    halves: bool = False


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotary embedding of a whole model, as runs of layers that rotate alike."""

    runs: tuple[LayerRotary, ...]

    @classmethod
    def of(cls, calls: list[Call | None]) -> "Rotary":
        """Describe a model from one call (or None) per layer.

        Raises:
            ValueError: The tables of a layer could not be traced to a module, or the function takes options.
        """
        for layer, call in enumerate(calls):
            if call and (call.source is None or call.options):
                found = f"options {dict(call.options)}" if call.source else "tables that no rotary module made"
                raise ValueError(f"layer {layer} calls {ROTARY_FUNCTION} with {found}")

        def alike(pair: tuple[int, Call | None]) -> tuple[Any, ...]:
            call = pair[1]
            if call is None or call.source is None:
                return (None,)
            same = next(i for i, c in enumerate(calls) if c and c.source and c.source.same_as(call.source))
            return call.function, call.keys.shape[-1], same

        runs: list[LayerRotary] = []
        for _, group in groupby(enumerate(calls), alike):
            members = list(group)
            start, call = members[0]
            stop = start + len(members)
            if call is None or call.source is None:
                runs.append(LayerRotary(start, stop, 0))
                continue
            dim = call.keys.shape[-1]
            halves = _is_half_split(call)
            runs.append(LayerRotary(start, stop, dim, call.function, call.source, halves))
        return cls(tuple(runs))

    def tables(self, like: Tensor, positions: Int[Tensor, " tokens"]) -> list[Tables | None]:
        """Return the tables of these positions for each run (None for NoPE)."""
        return [run.source(like, positions) if run.source else None for run in self.runs]

    def rotate(
        self, keys: Float[Tensor, "layers kv_heads tokens head_dim"], positions: Int[Tensor, " tokens"]
    ) -> Float[Tensor, "layers kv_heads tokens head_dim"]:
        """Give unrotated keys the rotary embedding of their positions: the model's tables, function and dtype.

        The reference for every other way to rotate; bit-equal to what the model itself would have cached.
        """
        rotated = keys.clone()
        for run, tables in zip(self.runs, self.tables(keys, positions), strict=True):
            if run.function and tables:
                part = keys[run.start : run.stop, ..., : run.rotary_dim]
                rotated[run.start : run.stop, ..., : run.rotary_dim] = run.function(part[:1, :1], part, *tables)[1]
        return rotated

    def rotate_into(
        self,
        out: Float[Tensor, "layers kv_heads tokens head_dim"],
        keys: Float[Tensor, "layers kv_heads tokens head_dim"],
        tables: list[Tables | None],
        scratch: Float[Tensor, " elements"] | None = None,
    ) -> None:
        """Write rotated keys into `out`, the same bits as `rotate`, without memory of their size.

        Args:
            out: A view of the buffer that the model will read.
            keys: Unrotated keys; not changed.
            tables: `self.tables(...)` of the positions.
            scratch: Memory to work in, so that many documents share its pages; any size.
        """
        for run, table in zip(self.runs, tables, strict=True):
            source, target = keys[run.start : run.stop], out[run.start : run.stop]
            dim = run.rotary_dim
            if dim < source.shape[-1]:
                target[..., dim:] = source[..., dim:]
            if run.function is None or table is None:
                continue
            if run.halves:
                rotate_halves_into(target[..., :dim], source[..., :dim], *table, scratch=scratch)
            else:
                target[..., :dim] = run.function(source[:1, :1, :, :dim], source[..., :dim], *table)[1]


def rotate_halves_into(
    out: Float[Tensor, "layers kv_heads tokens head_dim"],
    keys: Float[Tensor, "layers kv_heads tokens head_dim"],
    cos: Float[Tensor, "1 tokens head_dim"],
    sin: Float[Tensor, "1 tokens head_dim"],
    *,
    scratch: Float[Tensor, " elements"] | None = None,
) -> None:
    """Rotate keys whose channels are paired as halves, a few layers at a time.

    Product and sum are rounded apart, as in the models' own `k * cos + rotate_half(k) * sin`; a fused
    multiply-add would be a little faster and give other bits.

    Source: Su et al. 2021 (RoFormer), in the half-split pairing of the Llama family.
    """
    layers, heads, tokens, dim = keys.shape
    half = dim // 2
    layer = heads * tokens * half
    if scratch is None or scratch.numel() < layer:
        scratch = keys.new_empty(max(layer, min(layers * layer, CHUNK_BYTES // keys.element_size())))
    step = scratch.numel() // layer
    for start in range(0, layers, step):
        source, target = keys[start : start + step], out[start : start + step]
        product = scratch[: len(source) * layer].view(len(source), heads, tokens, half)
        torch.mul(source, cos, out=target)
        target[..., :half].sub_(torch.mul(source[..., half:], sin[..., :half], out=product))
        target[..., half:].add_(torch.mul(source[..., :half], sin[..., half:], out=product))


def _is_half_split(call: Call) -> bool:
    """Whether `rotate_halves_into` gives the very bits of the model's own function, on random keys."""
    if call.source is None or call.keys.shape[-1] % 2:
        return False
    shape = (2, 2, 19, call.keys.shape[-1])
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(shape, generator=generator, dtype=torch.float32).to(call.keys)
    cos, sin = call.source(keys, torch.arange(5, 24, device=keys.device))
    if cos.shape[-1] != keys.shape[-1]:
        return False
    ours = torch.empty_like(keys)
    rotate_halves_into(ours, keys, cos, sin)
    return torch.equal(ours, call.function(keys[:1, :1], keys, cos, sin)[1])
