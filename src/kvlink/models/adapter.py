"""Low-rank changes of a model's attention that act on chosen rows only (LoRA on the request's side).

A bundle may hold one besides its link tokens. It acts on rows behind the first document, never on S, never while a
document is encoded, so every stored entry stays valid. Whether a row is changed is a factor per row, not a switch of
the model: rows of several kinds may stand in one forward.

Source: Hu et al. 2021 (LoRA); acting on a part of the rows only: Greenewald et al. 2025 (activated LoRA).
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvlink.core.errors import ModelRefused

RANK = 8
"""Rank of an adapter where nobody asks for another one."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Factors of low-rank changes, by the name of the linear layer that each belongs to.

    Attributes:
        down: `[rank, in]` for each layer.
        up: `[out, rank]` for each layer; zeros change nothing.
        scale: What the changes are multiplied with (alpha / rank).
    """

    down: Mapping[str, Tensor]
    up: Mapping[str, Tensor]
    scale: float

    @property
    def rank(self) -> int:
        """Rank of the changes, the same in all layers."""
        return next(iter(self.down.values())).shape[0]

    @classmethod
    def fresh(cls, model: nn.Module, *, rank: int = RANK, scale: float = 2.0, seed: int = 0) -> "Adapter":
        """Begin with changes of zero on all linear layers of the attention.

        Raises:
            ModelRefused: The model's attention has no linear layers of torch's kind.
        """
        generator = torch.Generator().manual_seed(seed)
        down, up = dict[str, Tensor](), dict[str, Tensor]()
        for name, layer in attention_layers(model):
            drawn = torch.randn(rank, layer.in_features, generator=generator) / layer.in_features**0.5
            down[name] = drawn.to(layer.weight.device)
            up[name] = torch.zeros(layer.out_features, rank, device=layer.weight.device)
        if not down:
            raise ModelRefused(
                f"{type(model).__name__} has no torch.nn.Linear in its attention, so no low-rank change can act there; "
                "train links alone"
            )
        return cls(down, up, scale)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Adapter":
        """Return the same changes on a device, in a dtype."""
        down = {name: tensor.to(device, dtype) for name, tensor in self.down.items()}
        return Adapter(down, {name: tensor.to(device, dtype) for name, tensor in self.up.items()}, self.scale)

    @contextmanager
    def acting(self, model: nn.Module, factor: Float[Tensor, "batch rows"] | None = None) -> Generator[None]:
        """Let the changes act on the forwards of a model while the block lasts.

        Args:
            factor: What each row's change is multiplied with: 1 behind the first document, else 0; None for 1 on all
                rows of whatever forwards come.
        """
        if factor is not None and not bool(factor.any()):
            yield
            return
        with ExitStack() as hooks:
            for name, layer in attention_layers(model):
                if name in self.down:
                    hook = layer.register_forward_hook(self._change(name, factor))
                    hooks.callback(hook.remove)
            yield

    def _change(self, name: str, factor: Float[Tensor, "batch rows"] | None) -> Any:
        def change(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            rows = inputs[0]
            down, up = self.down[name].to(rows), self.up[name].to(rows)
            low = (rows @ down.T) * self.scale  # [batch, rows, rank]
            return output + (low if factor is None else low * factor[..., None].to(rows)) @ up.T

        return change


def attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers of the attention modules with their names, in the model's order."""
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0].rpartition(".")[2]
        if isinstance(module, nn.Linear) and "att" in parent:
            yield name, module
