"""`full`: one causal forward over everything. What all other methods are measured against."""

from kvlink.evaluation.case import Case, Ids
from kvlink.evaluation.methods.base import Method, Prefilled


class Full(Method):
    """The base model's own attention; nothing is reused."""

    def prefill(self, case: Case, tail: Ids, *, keep: int, room: int = 0) -> Prefilled:
        """Compute the whole prompt causally."""
        prompt = case.with_tail(tail)
        cache, logits = case.bench.assembler.prefill_plain(prompt, room=room, logits_to_keep=keep)
        return Prefilled(logits, prompt.num_tokens, 0, cache)
