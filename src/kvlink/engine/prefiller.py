"""From a request's ids to a computed prompt: entries laid out and the rest computed, or everything in full.

One thread runs the model at a time; what a caller holds meanwhile is a buffer of its own. Knows no text.
"""

from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvlink.engine.assembled import Assembled
from kvlink.engine.loader import Ids, Loader, LoadTimes
from kvlink.engine.request import Order, Request
from kvlink.engine.sources import computed_rows, document_rows
from kvlink.engine.stream import Pieces, Prefilled, decoded
from kvlink.engine.task import Task
from kvlink.engine.usage import Timings, Usage
from kvlink.models.assembler import Assembler
from kvlink.models.cache import Prefix, SlotCache

KNOWN_SYSTEMS = 16
"""Different S whose keys and values are kept."""


class Prefiller:
    """Computes prompts of one model, whose entries a loader gets.

    Attributes:
        lock: Held by whoever runs the model.
    """

    def __init__(self, *, assembler: Assembler, loader: Loader, lock: Any = None) -> None:
        self.lock = lock or Lock()
        self._assembler = assembler
        self._runner = assembler.runner
        self._loader = loader
        self._systems: OrderedDict[Ids, Prefix] = OrderedDict()

    def forget_beginnings(self) -> None:
        """Forget keys and values of S; they are computed again when they are needed."""
        self._systems.clear()

    @contextmanager
    def prefilled(
        self,
        request: Request,
        *,
        room: int,
        labels: bool,
        last: bool = True,
        reuse: bool = True,
        order: Order = "given",
        times: Timings = Timings(),  # noqa: B008 (frozen)
    ) -> Generator[Prefilled]:
        """Compute a prompt and hold its buffer while the block lasts.

        Args:
            room: Rows for the answer.
            last: False leaves the prompt's last token to be computed by whoever continues.
            reuse: False computes everything in one causal forward.
            order: Of no effect: no beginning is known but S.
            times: What was spent before.
        """
        with self.lock, torch.inference_mode(mode=False):  # the buffer outlives the mode that a caller may be in
            if request.prompt.segments and reuse:
                prefilled = self._reuse(request, room=room, last=last, times=times)
            else:
                start = perf_counter()
                upto = None if last else request.prompt.num_tokens - 1
                cache, logits = self._assembler.prefill_plain(request.prompt, room=room, upto=upto)
                self._runner.synchronize()
                rows = computed_rows(request)
                usage = Usage(request.prompt.num_tokens, 0, 0, 0, "exact", documents=rows)
                prefilled = Prefilled(cache, logits, room, usage, replace(times, forward_s=perf_counter() - start))
        try:
            yield replace(prefilled, usage=replace(prefilled.usage, labels=labels))
        finally:
            self._assembler.release(prefilled.cache)

    def pieces(self, task: Task) -> Pieces:
        """Answer a task: its prompt is computed with the first piece."""
        prompt = self.prefilled(task.request, room=task.room, labels=task.labels, reuse=task.reuse, times=task.times)
        return decoded(prompt, task, decode=self.decode)

    def assembled(self, request: Request, *, labels: bool) -> Assembled:
        """Lay a prompt out, all but its last token, for the model's own `generate()`."""
        runner = self._runner
        with self.prefilled(request, room=0, labels=labels, last=False) as prefilled:
            stock, last = self._assembler.hand_over(prefilled.cache), prefilled.cache.length
            adapter = prefilled.cache.adapter
        inputs = {
            "input_ids": torch.tensor([[request.prompt.tail[-1]]], device=runner.device),
            runner.cache_argument: stock,
            "attention_mask": torch.ones((1, last + 1), dtype=torch.long, device=runner.device),
            "position_ids": torch.tensor([[last]], device=runner.device),
        }
        return Assembled(prefilled.usage, runner=runner, inputs=inputs, adapter=adapter)

    def decode(self, cache: SlotCache, token: int) -> Float[Tensor, " vocab"]:
        """Append a token to a buffer and return the next logits."""
        with self.lock:
            return self._runner.decode(cache, token)

    def _reuse(self, request: Request, *, room: int, last: bool, times: Timings) -> Prefilled:
        """Lay documents out from their entries and compute the rest."""
        prompt, runner = request.prompt, self._runner
        layout = prompt.layout(num_links=self._assembler.num_links)
        spent = LoadTimes()
        with self._loader.load(prompt.segments, spent) as loaded:
            start = perf_counter()
            prefix, known = self._system(prompt.system)
            runner.synchronize()
            system_s = perf_counter() - start
            start = perf_counter()
            entries = [segment.entry for segment in loaded]
            cache = self._assembler.assemble(layout, prefix=prefix, entries=entries, room=room)
            runner.synchronize()
            rotate_s = perf_counter() - start
            rows = document_rows(request, loaded)
            cached = sum(segment.entry.num_tokens for segment in loaded if segment.codec)
        start = perf_counter()
        logits = self._assembler.prefill(cache, prompt, layout, upto=None if last else len(layout) - 1)
        runner.synchronize()
        times = replace(
            times,
            load_s=spent.load_s,
            encode_s=spent.encode_s,
            rotate_s=rotate_s,
            forward_s=system_s + perf_counter() - start,
        )
        cached += known * len(prompt.system)
        usage = Usage(prompt.num_tokens, cached, layout.num_link_tokens, 0, "documents", documents=rows)
        return Prefilled(cache, logits, room, usage, times)

    def _system(self, ids: Ids) -> tuple[Prefix, bool]:
        """Return keys and values of S, and whether they were known."""
        known = ids in self._systems
        if not known:
            prefix = self._runner.prefix(ids)
            assert prefix is not None, "S is never empty"
            self._systems[ids] = prefix
            if len(self._systems) > KNOWN_SYSTEMS:
                self._systems.popitem(last=False)
        self._systems.move_to_end(ids)
        return self._systems[ids], known
