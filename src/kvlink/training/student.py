"""Students: who is trained, and how a lesson becomes logits with gradients.

`RequestSide` trains what acts at request time only, link tokens and perhaps an adapter: documents come from the
store, so a step is one small forward and backward over links, questions and answers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from kvlink.core.entry import CacheEntry
from kvlink.core.layout import Kind
from kvlink.models.adapter import Adapter
from kvlink.models.branches import Past, Rows, branch_logits
from kvlink.models.cache import Prefix
from kvlink.models.links import LinkTokens
from kvlink.models.runner import Runner
from kvlink.training.lesson import Ids, Lesson


class Loaded(Protocol):
    """One segment's entry."""

    @property
    def entry(self) -> CacheEntry:
        """Its keys and values."""
        ...


Load = Callable[[Sequence[Ids]], AbstractContextManager[Sequence[Loaded]]]
"""Holds the entries of segments while a block lasts; encodes those that no store has."""


class Student(ABC):
    """What a trainer trains.

    Attributes:
        trained: The parameters by name; float32 leaves.
    """

    trained: dict[str, Tensor]

    @abstractmethod
    def logits(self, lesson: Lesson) -> Float[Tensor, "rows vocab"]:
        """Return logits at all rows behind the documents (`Lesson.rows`), branch by branch. Gradients flow."""

    @abstractmethod
    def links(self) -> LinkTokens:
        """Return the link tokens as they are now, without gradients."""

    def adapter(self) -> Adapter | None:
        """Return the request-side adapter as it is now, without gradients; None if there is none."""
        return None


def leaves_of(adapter: Adapter | None) -> dict[str, Tensor]:
    """Return an adapter's factors as parameters to be trained, by `down.` or `up.` and the layer's name."""
    pairs = [(name, adapter.down[name], adapter.up[name]) for name in adapter.down] if adapter else []
    return {
        f"{side}.{name}": tensor.detach().clone().requires_grad_()
        for name, down, up in pairs
        for side, tensor in (("down", down), ("up", up))
    }


def adapter_of(trained: Mapping[str, Tensor], scale: float) -> Adapter | None:
    """Return the adapter among parameters, or None if there is none."""
    down = {name.removeprefix("down."): tensor for name, tensor in trained.items() if name.startswith("down.")}
    up = {name.removeprefix("up."): tensor for name, tensor in trained.items() if name.startswith("up.")}
    return Adapter(down, up, scale) if down else None


class RequestSide(Student):
    """Link tokens, and perhaps a low-rank adapter on the rows behind the first document. The model is frozen."""

    def __init__(self, runner: Runner, load: Load, *, links: Tensor, adapter: Adapter | None = None) -> None:
        """Take the model, where entries come from, and what training begins with."""
        self._runner = runner
        self._load = load
        self._systems: dict[Ids, Prefix] = {}
        self._scale = adapter.scale if adapter else 0.0
        self.trained = {"links": links.detach().clone().requires_grad_()}
        self.trained |= leaves_of(adapter)
        runner.model.requires_grad_(False)

    @property
    def num_links(self) -> int:
        """K."""
        return self.trained["links"].shape[1]

    def logits(self, lesson: Lesson) -> Float[Tensor, "rows vocab"]:
        """Place the stored documents and compute links, questions and answers behind them."""
        layout = lesson.prompt.layout(num_links=self.num_links)
        with self._load(lesson.prompt.segments) as loaded:
            entries = [segment.entry for segment in loaded]
            past = Past.of_entries(self._runner, layout, prefix=self._system(lesson.prompt.system), entries=entries)
        tail, spans = lesson.rows(), layout.of(Kind.LINK)
        links = torch.cat([self.trained["links"][span.level or 0] for span in spans]) if spans else None
        embeds = self._runner.embedding(tail.ids.to(self._runner.device))
        slots = [torch.arange(span.start, span.stop) for span in spans]
        start = layout.spans[-1].start
        count = sum(map(len, spans))
        rows = Rows(
            embeds if links is None else torch.cat((links.to(embeds), embeds)),
            torch.cat((*slots, tail.offsets + start)),
            torch.cat((torch.zeros(count, dtype=torch.long), tail.branches)),
        )
        keep = torch.arange(len(tail.ids)) + count
        return branch_logits(self._runner, past, rows, keep=keep, adapter=adapter_of(self.trained, self._scale))

    def links(self) -> LinkTokens:
        """Return the link tokens as they are now."""
        return LinkTokens(self.trained["links"].detach().clone())

    def adapter(self) -> Adapter | None:
        """Return the adapter as it is now."""
        return adapter_of({name: tensor.detach().clone() for name, tensor in self.trained.items()}, self._scale)

    def _system(self, ids: Ids) -> Prefix:
        if ids not in self._systems:
            prefix = self._runner.prefix(ids)
            assert prefix is not None, "S is never empty"
            self._systems[ids] = prefix
        return self._systems[ids]
