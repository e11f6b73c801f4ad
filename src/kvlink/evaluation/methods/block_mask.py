"""`block_mask`: the reference mask in one forward, without any entry. The oracle of `concat_reencoded`."""

from kvlink.evaluation.case import Case, Ids
from kvlink.evaluation.methods.base import Method, Prefilled, sink_named
from kvlink.models.reference import reference_logits


class BlockMask(Method):
    """Documents see themselves and their own copy of the sink prefix; nothing is reused."""

    generates = False

    def __init__(self, *, sink: str = "header") -> None:
        self.sink = sink_named(sink)

    def prefill(self, case: Case, tail: Ids, *, keep: int, room: int = 0) -> Prefilled:
        """Compute everything under the reference mask; there is no cache to decode from."""
        prompt = case.with_tail(tail)
        sink = case.bench.sink_ids(self.sink)
        logits = reference_logits(case.bench.assembler, prompt, sink_ids=sink)[-keep:]
        return Prefilled(logits, prompt.num_tokens + len(sink) * len(prompt.segments), 0)
