"""`concat_reencoded`: entries laid side by side, their keys rotated to their places. KVLink with K = 0."""

from kvlink.core.layout import Layout
from kvlink.evaluation.case import Case, Ids
from kvlink.evaluation.methods.base import Method, Prefilled, sink_named
from kvlink.evaluation.methods.reading import Reading
from kvlink.models.cache import SlotCache


class ConcatReencoded(Method):
    """Entries encoded behind a sink prefix, reused at any place."""

    def __init__(self, *, sink: str = "header", codec: str = "raw") -> None:
        """Take parameters.

        Args:
            sink: The sink prefix.
            codec: What the entries go through before they are used, as if they came from a store.
        """
        self.sink = sink_named(sink)
        self._reading = Reading(codec)

    def prepare(self, case: Case) -> None:
        """Encode the documents behind the sink prefix, and S."""
        self._reading.entries(case, case.bench.sink_ids(self.sink))
        case.bench.prefix(case.prompt.system)

    def place(self, case: Case, layout: Layout, *, room: int) -> SlotCache:
        """Lay out S and the entries."""
        prefix = case.bench.prefix(case.prompt.system)
        assert prefix is not None, "S is never empty"
        entries, _ = self._reading.entries(case, case.bench.sink_ids(self.sink))
        return case.bench.assembler.assemble(layout, prefix=prefix, entries=entries, room=room)

    def prefill(self, case: Case, tail: Ids, *, keep: int, room: int = 0) -> Prefilled:
        """Lay out what is known and compute T."""
        prompt = case.with_tail(tail)
        layout = prompt.layout()
        _, num_bytes = self._reading.entries(case, case.bench.sink_ids(self.sink))
        cache = self.place(case, layout, room=room)
        logits = case.bench.assembler.prefill(cache, prompt, layout, logits_to_keep=keep)
        return Prefilled(logits, len(tail), num_bytes, cache)
