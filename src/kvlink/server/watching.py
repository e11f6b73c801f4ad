"""What is told of an answer besides itself: metrics, facts of the log's line, a trace; and perhaps it is scored."""

from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Scope

from kvlink.engine.task import Task

if TYPE_CHECKING:
    from kvlink.server.served import Served


HELD = "kvlink.held"
"""Of a scope in which somebody wants to know the names of the entries that a request's documents are made of."""


class Watching:
    """Looks at the answers of one HTTP request."""

    def __init__(self, served: "Served", scope: Scope) -> None:
        self._served = served
        self._scope = scope
        self._facts: dict[str, Any] = scope["kvlink.facts"]

    def first(self, seconds: float) -> None:
        """Note how long a first token took."""
        self._served.metrics.ttft.observe(seconds)
        self._facts.setdefault("ttft_s", round(seconds, 4))

    def gap(self, seconds: float) -> None:
        """Note how long another token took."""
        self._served.metrics.inter_token.observe(seconds)

    def ended(self, task: Task) -> None:
        """Note an answer that has come to its end."""
        served = self._served
        assert task.answer is not None, "it has ended"
        usage = task.answer.usage
        served.metrics.observe_answer(task.answer)
        self._facts.update(
            mode=usage.mode,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=self._facts.get("completion_tokens", 0) + usage.completion_tokens,
            documents=len(usage.documents),
        )
        self._facts.setdefault("engine_ttft_s", round(task.answer.timings.ttft_s, 4))
        if HELD in self._scope:
            loader = task.shared.residency.loader
            self._scope[HELD] += [tuple(map(loader.name, ids)) for ids in task.request.prompt.documents]
        if served.shadow is not None:
            served.shadow.offer(task)
        if served.traces is not None:
            served.traces.tell(
                task, model=served.model, headers=Headers(scope=self._scope), request_id=self._scope["kvlink.id"]
            )
