"""What Prometheus is told. The only file that knows prometheus_client; counters of the engine are read when asked."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvlink.engine.engine import Engine
from kvlink.engine.usage import Answer

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The counters of one server.

    Attributes:
        ttft, inter_token: Seconds to an answer's first token, and between two of its tokens, as the server has them.
        requests: Requests by route and status.
    """

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self.ttft = Histogram(
            "kvlink_ttft_seconds", "From a request's text to its first token", buckets=_SECONDS, registry=self._registry
        )
        self.inter_token = Histogram(
            "kvlink_inter_token_seconds", "Between two tokens of an answer", buckets=_SECONDS, registry=self._registry
        )
        self.requests = Counter("kvlink_http_requests", "HTTP requests", ("route", "status"), registry=self._registry)
        self._prompt = Counter(
            "kvlink_prompt_tokens", "Tokens of prompts, reused or computed", ("kind",), registry=self._registry
        )
        self._completion = Counter("kvlink_completion_tokens", "Tokens of answers", registry=self._registry)
        self._documents = Counter(
            "kvlink_documents", "Documents of prompts by where they came from", ("source",), registry=self._registry
        )
        self._registry.register(_OfEngine(engine))

    def observe_answer(self, answer: Answer) -> None:
        """Count what an answer took."""
        usage = answer.usage
        self._prompt.labels("reused").inc(usage.cached_tokens)
        self._prompt.labels("computed").inc(usage.computed_tokens)
        self._completion.inc(usage.completion_tokens)
        for row in usage.documents:
            self._documents.labels(row.source).inc()

    def text(self) -> bytes:
        """Return all of it in Prometheus' text format."""
        return generate_latest(self._registry)


class _OfEngine(Collector):
    """Reads what scheduler and store count."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        steps, store = self._engine.stats(), self._engine.store.stats()
        for name, text, value in (
            ("kvlink_requests_waiting", "Requests in the queue", steps.waiting),
            ("kvlink_requests_running", "Requests whose rows go through the model", steps.running),
            ("kvlink_own_bytes", "Keys and values of running requests", steps.own_bytes),
            ("kvlink_store_used_bytes", "Bytes in the store", store.used_bytes),
            ("kvlink_store_budget_bytes", "Bytes that the store may take", store.budget_bytes),
        ):
            yield GaugeMetricFamily(name, text, value)
        for name, text, value in (
            ("kvlink_steps", "Forwards", steps.steps),
            ("kvlink_rows", "Rows of forwards", steps.rows),
            ("kvlink_requests_finished", "Requests answered", steps.finished),
            ("kvlink_requests_failed", "Requests that failed", steps.failed),
            ("kvlink_requests_cancelled", "Requests given up by their callers", steps.cancelled),
            ("kvlink_requests_preempted", "Requests that gave their memory back for a while", steps.preempted),
            ("kvlink_store_hits", "Objects found in the store", store.hits),
            ("kvlink_store_misses", "Objects not found in the store", store.misses),
            ("kvlink_store_evictions", "Objects dropped to make room", store.evictions),
            ("kvlink_store_quarantined", "Objects that did not verify", store.quarantined),
        ):
            yield CounterMetricFamily(name, text, value)
