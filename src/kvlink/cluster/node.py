"""One node of a simulation: a line of work, one of loads beside it, and a memory that forgets what rested longest."""

from collections import OrderedDict
from dataclasses import dataclass, field

from kvlink.cluster.costs import Costs


@dataclass(frozen=True, slots=True)
class Served:
    """What one request cost.

    Attributes:
        begun: Second of its first token.
        ended: Second of its last.
        hits, loaded, encoded: Tokens of its documents, by where they came from.
    """

    begun: float
    ended: float
    hits: int
    loaded: int
    encoded: int


@dataclass(slots=True)
class Node:
    """A server that does one thing after another, first come, first served.

    Attributes:
        room: Tokens of documents that it holds at once.
        work_s: Seconds that it has worked.
        life: How often it was lost; what was promised to an earlier life does not come.
        under_way: Requests that it has taken and not ended, each with the second of its first token.
    """

    room: int
    work_s: float = 0.0
    life: int = 0
    is_up: bool = True
    under_way: dict[int, float] = field(default_factory=dict[int, float])
    _free_at: float = 0.0
    _link_free_at: float = 0.0
    _held: OrderedDict[int, tuple[int, int]] = field(default_factory=OrderedDict[int, tuple[int, int]])
    _used: int = 0

    def serve(
        self,
        now: float,
        documents: list[tuple[int, int, int]],
        stored: dict[int, int] | None,
        costs: Costs,
        *,
        question: int,
        answer: int,
    ) -> Served:
        """Take a request, behind those that were taken before.

        Args:
            documents: Number, version and tokens of each.
            stored: Versions in the store that all nodes share; what is encoded joins them. None: there is no store.
        """
        hits = loaded = encoded = 0
        ready = now
        for number, version, tokens in documents:
            if self._has(number, version):
                hits += tokens
            elif stored is not None and stored.get(number) == version:
                loaded += tokens
                ready = max(ready, self._link_free_at) + costs.load_latency_s + tokens * costs.load_s
                self._link_free_at = ready
            else:
                encoded += tokens
                if stored is not None:
                    stored[number] = version
            self._keep(number, version, tokens)
        start = max(ready, self._free_at)
        prefill = costs.request_s + question * costs.prompt_s + encoded * costs.encode_s
        begun = start + prefill
        self._free_at = begun + answer * costs.row_s
        self.work_s += self._free_at - start
        return Served(begun, max(begun + answer * costs.step_s, self._free_at), hits, loaded, encoded)

    def lose(self) -> None:
        """Stop, and forget all."""
        self.is_up, self.life = False, self.life + 1
        self.under_way.clear()
        self._held.clear()
        self._used = 0

    def come_back(self, now: float) -> None:
        """Start anew, with nothing."""
        self.is_up, self._free_at, self._link_free_at = True, now, now

    def _has(self, number: int, version: int) -> bool:
        held = self._held.get(number)
        return held is not None and held[0] == version

    def _keep(self, number: int, version: int, tokens: int) -> None:
        before = self._held.pop(number, None)
        self._used += tokens - (before[1] if before else 0)
        self._held[number] = version, tokens
        while self._used > self.room and len(self._held) > 1:
            self._used -= self._held.popitem(last=False)[1][1]
