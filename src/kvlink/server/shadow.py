"""A share of requests is also scored in full after the answer: what reuse costs in quality, while the server runs.

Where the agreement falls below a threshold, nothing is reused any more, and every response says so.
"""

import asyncio
import logging
import random
from collections import deque
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING

from kvlink.core.errors import KVLinkError
from kvlink.engine.scoring import Scored, scoring
from kvlink.engine.task import Task

if TYPE_CHECKING:
    from kvlink.server.served import Served

log = logging.getLogger("kvlink.server")

WAITING = 8
"""Answers that wait to be scored; what comes beside them is not."""


@dataclass(eq=False, kw_only=True)
class Shadow:
    """Scores answers, one at a time, a forward between two steps of requests.

    Attributes:
        rate: Share of answers about documents that is scored.
        least_agreement: Below it, as a mean over `window` answers, documents are computed in full; 0 for never.
        window, least_scored: The latest answers that count, and how many there have to be.
    """

    rate: float
    least_agreement: float = 0.0
    window: int = 50
    least_scored: int = 20
    _waiting: deque[Task] = field(default_factory=deque[Task], init=False)
    _news: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _random: random.Random = field(default_factory=random.Random, init=False)

    def __post_init__(self) -> None:
        self._scored = deque[float](maxlen=self.window)

    def offer(self, task: Task) -> None:
        """Perhaps choose an answer to be scored."""
        if task.answer is None or task.answer.usage.mode != "documents":
            return
        if self._random.random() < self.rate and len(self._waiting) < WAITING:
            self._waiting.append(task)
            self._news.set()

    async def run(self, served: "Served") -> None:
        """Score what was chosen, until it is cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                try:
                    self._tell(served, await _score(served, self._waiting.popleft()))
                except KVLinkError as error:
                    served.metrics.shadow_failed.inc()
                    log.warning("an answer could not be scored: %s", type(error).__name__)

    def _tell(self, served: "Served", scored: Scored) -> None:
        served.metrics.observe_scored(scored)
        self._scored.append(scored.agreement)
        found = mean(self._scored)
        if not served.exact and len(self._scored) >= self.least_scored and found < self.least_agreement:
            served.exact = (
                f"nothing is reused: over {len(self._scored)} requests reuse agreed with full attention on {found:.3f} "
                f"of the tokens, and {self.least_agreement:g} is wanted"
            )
            served.metrics.exact.set(1)
            log.error("%s", served.exact)


async def _score(served: "Served", task: Task) -> Scored:
    steps, lock = scoring(task), task.shared.lock

    def step() -> Scored | None:
        try:
            with lock:
                next(steps)
        except StopIteration as end:
            return end.value
        return None

    def close() -> None:
        with lock:
            steps.close()

    try:
        while True:
            found = await asyncio.wrap_future(served.engine.call(step))
            if found is not None:
                return found
    finally:
        served.engine.call(close)
