"""A student that reads the whole prompt in every step: documents are encoded afresh, in one forward with gradients.

    S | P D_1 L_1 | P D_2 L_2 | T_1 A_1        P is a copy of the sink prefix, which its own document alone sees
                              | T_2 A_2        each question sees S, all documents, all links, and itself

What is trained may therefore act on documents, too: a low-rank change of the attention on all rows (`lora`), or the
weights themselves (`full`). The outcome is another model with link tokens of its own; entries of the base model are
of no use to it.
"""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kvlink.core.errors import InputError
from kvlink.core.layout import ReferenceOrder, reference_mask
from kvlink.models import checkpoint
from kvlink.models.adapter import Adapter, attention_layers
from kvlink.models.assembler import Assembler
from kvlink.models.attention import grouped
from kvlink.models.bundle import Bundle, Card
from kvlink.models.links import LinkTokens
from kvlink.models.runner import Runner
from kvlink.training.lesson import Ids, Lesson
from kvlink.training.student import Student, adapter_of, leaves_of

MULTIPLE = 8
"""Rows are padded to a multiple of this: kernels for masked attention on a GPU want whole blocks."""

LINKS = "links.safetensors"
"""Name of the bundle beside a trained model."""


@dataclass(frozen=True, slots=True, eq=False)
class WholeRows:
    """All rows of a lesson, spelled out for one forward without any reuse.

    Attributes:
        ids: `-1 - level` in the slots of link tokens.
        positions: Shifted by the length of the sink prefix where S is shorter than that.
        groups: As in `core.layout.ReferenceOrder`; -1 is padding, which nobody sees and which sees nobody.
        branches: 0 for rows that all questions see, else the number of the question that a row belongs to.
        copies: Whether a row is of a copy of the sink prefix.
    """

    ids: Int[Tensor, " rows"]
    positions: Int[Tensor, " rows"]
    groups: Int[Tensor, " rows"]
    branches: Int[Tensor, " rows"]
    copies: Bool[Tensor, " rows"]

    @classmethod
    def of(cls, lesson: Lesson, *, num_links: int, sink_ids: Ids = (), multiple: int = MULTIPLE) -> "WholeRows":
        """Spell out S, documents behind their copies, links, then the rows of `lesson.rows()`, then padding."""
        layout, tail = lesson.prompt.layout(num_links=num_links), lesson.rows()
        order, start = ReferenceOrder.of(layout, len(sink_ids)), layout.spans[-1].start
        shift = order.positions[0]
        common = order.source < start  # T of the first question stands in the layout; all questions follow below
        source, copies = order.source[common], order.source[common] < 0
        sink = torch.tensor([0, *sink_ids])[(-source).clamp(0, len(sink_ids))]
        ids = torch.where(copies, sink, lesson.prompt.ids(layout)[source.clamp(min=0)])
        padding = torch.zeros(-(len(ids) + len(tail.ids)) % multiple, dtype=torch.long)
        return cls(
            torch.cat((ids, tail.ids, padding)),
            torch.cat((order.positions[common], tail.offsets + start + shift, padding)),
            torch.cat((order.groups[common], torch.zeros_like(tail.ids), padding - 1)),
            torch.cat((torch.zeros_like(ids), tail.branches, padding)),
            torch.cat((copies, torch.zeros_like(tail.scored), padding > 0)),
        )

    def __len__(self) -> int:
        return len(self.ids)

    def mask(self, *, window: int | None = None) -> Bool[Tensor, "rows rows"]:
        """Return who sees whom: the reference mask, where a question sees no other one and group 0 no copies."""
        visible = reference_mask(self.positions, self.groups, self.positions, self.groups, window=window)
        copies = self.copies[None, :] & (self.groups == 0)[:, None]
        own = (self.branches[None, :] == 0) | (self.branches[None, :] == self.branches[:, None])
        return visible & own & ~copies


class WholePrompt(Student):
    """Link tokens, with a low-rank change of the attention on all rows, or with all weights, or alone.

    In `full` the weights of the runner's model change in place, so a teacher of the same model must have learned all
    lessons (`Teacher.learn`) before the first step.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        links: Float[Tensor, "levels num_links hidden"],
        sink_ids: Ids = (),
        adapter: Adapter | None = None,
        full: bool = False,
    ) -> None:
        """Take the model and what training begins with.

        Args:
            sink_ids: Ids of the sink prefix, which documents will be encoded behind when the result serves.
            adapter: The low-rank change to be trained; None for none.
            full: Whether the model's own weights are trained.

        Raises:
            InputError: Both are asked for, or the weights that shall be trained have 16 bits.
        """
        if full and adapter is not None:
            raise InputError("a low-rank change and the weights themselves cannot be trained in one run: choose one")
        self._runner = runner
        self._sink_ids = sink_ids
        self._scale = adapter.scale if adapter else 0.0
        self.trained = {"links": links.detach().clone().requires_grad_()}
        self.trained |= leaves_of(adapter)
        runner.model.requires_grad_(False)
        for name, parameter in runner.model.named_parameters() if full else ():  # a tied one comes once
            if parameter.is_floating_point():
                if parameter.itemsize < 4:
                    raise InputError(
                        f"{name} is {parameter.dtype}, in which small steps are lost: load the model in float32 "
                        "(--dtype float32) to train all of it"
                    )
                self.trained[f"model.{name}"] = parameter.requires_grad_()
        self._assembler = Assembler(runner, links=LinkTokens(self.trained["links"]))

    @property
    def num_links(self) -> int:
        """K."""
        return self._assembler.num_links

    def logits(self, lesson: Lesson) -> Float[Tensor, "rows vocab"]:
        """Compute everything, documents included, under the reference mask."""
        runner = self._runner
        rows = WholeRows.of(lesson, num_links=self.num_links, sink_ids=self._sink_ids)
        embeds = self._assembler.embed(rows.ids)[None]  # [1, rows, hidden]
        visible = {window: rows.mask(window=window.size) for window in runner.windows}
        with grouped(runner.config, runner.device):
            return runner.forward(
                cache=None,
                adapter=adapter_of(self.trained, self._scale),
                factor=embeds.new_ones(1, len(rows)),
                inputs_embeds=embeds,
                position_ids=rows.positions[None].to(runner.device),
                attention_mask=runner.masks(visible),
                logits_to_keep=torch.nonzero(rows.branches)[:, 0].to(runner.device),
            )[0]

    def links(self) -> LinkTokens:
        """Return the link tokens as they are now."""
        return LinkTokens(self.trained["links"].detach().clone())

    def merged(self) -> nn.Module:
        """Return the model with what was learned: a copy with the low-rank change in its weights, or itself."""
        change, runner = adapter_of(self.trained, self._scale), self._runner
        if change is None:
            return runner.model
        model = copy.deepcopy(runner.model)
        wide = torch.promote_types(runner.dtype, torch.float32)
        change = change.to(runner.device, wide)
        with torch.no_grad():
            for name, layer in attention_layers(model):
                if name in change.down:
                    layer.weight.copy_(layer.weight.to(wide) + change.scale * (change.up[name] @ change.down[name]))
        return model

    def save(self, folder: str | Path, *, tokenizer: Any, card: Card) -> Bundle:
        """Write the trained model as transformers keeps it, and beside it the bundle that serves exactly this model.

        `Engine.from_pretrained(folder, links=folder / LINKS)` answers with both. The bundle is written last.

        Args:
            tokenizer: Written beside the weights; None for none.
            card: What the bundle is; its digest is replaced by that of the model as it is loaded from the folder, in
                the dtype that a model is loaded in where nobody asks for another one.

        Raises:
            InputError: The folder cannot be written.
        """
        place = Path(folder)
        model: Any = self.merged()
        try:
            place.mkdir(parents=True, exist_ok=True)
            (place / LINKS).unlink(missing_ok=True)
            model.save_pretrained(place)
            if tokenizer is not None:
                tokenizer.save_pretrained(place)
        except OSError as error:
            raise InputError(f"the trained model cannot be written to {place}: {error}") from error
        del model
        bundle = Bundle(self.links(), replace(card, digest=checkpoint.load(place).digest))
        bundle.save(place / LINKS)
        return bundle
