"""`concat_local`: entries laid side by side with the positions they were encoded at. What naive reuse does."""

import torch

from kvlink.core.layout import Kind, Layout
from kvlink.evaluation.case import Case
from kvlink.evaluation.methods.concat_reencoded import ConcatReencoded
from kvlink.models.cache import SlotCache


class ConcatLocal(ConcatReencoded):
    """Every document keeps the positions from 0 on (behind its sink prefix, if any)."""

    def __init__(self, *, sink: str = "none") -> None:
        super().__init__(sink=sink)

    def place(self, case: Case, layout: Layout, *, room: int) -> SlotCache:
        """Lay out S and the entries, keys at their local positions."""
        cache = super().place(case, layout, room=room)
        sink = case.bench.sink_ids(self.sink)
        rotary, device = case.bench.runner.rotary, case.bench.runner.device
        for span, entry in zip(layout.of(Kind.SEGMENT), case.entries(sink), strict=True):
            positions = torch.arange(len(span), device=device) + len(sink)
            cache.keys[:, :, span.start : span.stop] = rotary.rotate(entry.keys.to(device), positions)
        return cache
