"""What Prometheus is told. The only file that knows prometheus_client; counters of the engine are read when asked."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvlink.engine.engine import Engine
from kvlink.engine.rebuild import REBUILDING
from kvlink.engine.scoring import Scored
from kvlink.engine.usage import Answer, DocumentUsage
from kvlink.store.base import StoreStats
from kvlink.store.remote_stats import RemoteStats
from kvlink.store.tier import TieredStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_NATS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class Metrics:
    """The counters of one server.

    Attributes:
        ttft, inter_token: Seconds to an answer's first token, and between two of its tokens, as the server has them.
        requests: Requests by route and status.
        rebuilds_failed: Documents that could not be encoded when there was time.
        shadow_failed: Answers that could not be scored.
        exact: 1 once nothing is reused any more.
    """

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._token_bytes = engine.runner.geometry.bytes_per_token(engine.runner.dtype)
        self.ttft = self._histogram("kvlink_ttft_seconds", "From a request's text to its first token", _SECONDS)
        self.inter_token = self._histogram("kvlink_inter_token_seconds", "Between two tokens of an answer", _SECONDS)
        self.requests = self._counter("kvlink_http_requests", "HTTP requests", "route", "status")
        self._prompt = self._counter("kvlink_prompt_tokens", "Tokens of prompts, reused or computed", "kind")
        self._completion = self._counter("kvlink_completion_tokens", "Tokens of answers")
        self._documents = self._counter("kvlink_documents", "Documents of prompts by where they came from", "source")
        self._tokens = self._counter("kvlink_document_tokens", "Tokens of documents by where they came from", "source")
        self._bytes = self._counter(
            "kvlink_document_bytes", "Keys and values of documents, uncompressed, by where they came from", "source"
        )
        self._rebuilds = self._counter("kvlink_rebuilds", "Documents encoded since they had changed, and when", "when")
        self.rebuilds_failed = self._counter("kvlink_rebuilds_failed", "Documents that could not be encoded")
        self._agreement = self._histogram(
            "kvlink_shadow_agreement", "Share of an answer's tokens on which reuse and full attention agree", _SHARES
        )
        self._kl = self._histogram("kvlink_shadow_kl", "KL(full || reuse) of an answer, in nats per token", _NATS)
        self.shadow_failed = self._counter("kvlink_shadow_failed", "Answers that could not be scored")
        self.exact = Gauge(
            "kvlink_exact", "1 once nothing is reused, since reuse agreed too little", registry=self._registry
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
            self._tokens.labels(row.source).inc(row.tokens)
            self._bytes.labels(row.source).inc(row.tokens * self._token_bytes)
            if REBUILDING in row.reason:
                self._rebuilds.labels("request").inc()

    def observe_rebuilt(self, row: DocumentUsage) -> None:
        """Count a document that was encoded when there was time."""
        if row.source == "encoded":
            self._rebuilds.labels("background").inc()

    def observe_scored(self, scored: Scored) -> None:
        """Count an answer that was scored in full, too."""
        self._agreement.observe(scored.agreement)
        self._kl.observe(scored.kl)

    def text(self) -> bytes:
        """Return all of it in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)


@dataclass(frozen=True, slots=True)
class _Tier:
    """What one tier tells; what a remote's server does not tell is None."""

    name: str
    hits: int
    misses: int
    evictions: int
    used_bytes: int
    budget_bytes: int
    failures: int = 0
    quarantined: int = 0
    is_open: bool = False


class _OfEngine(Collector):
    """Reads what scheduler, device tier and store count."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        steps = self._engine.stats()
        for name, text, value in (
            ("kvlink_requests_waiting", "Requests in the queue", steps.waiting),
            ("kvlink_requests_running", "Requests whose rows go through the model", steps.running),
            ("kvlink_own_bytes", "Keys and values of running requests", steps.own_bytes),
            ("kvlink_leased_bytes", "Keys and values of documents and beginnings that requests read", self._leased()),
            ("kvlink_beginnings_bytes", "Keys and values of known beginnings", self._beginnings()),
        ):
            yield GaugeMetricFamily(name, text, value)
        for name, text, value in (
            ("kvlink_steps", "Forwards", steps.steps),
            ("kvlink_rows", "Rows of forwards", steps.rows),
            ("kvlink_requests_finished", "Requests answered", steps.finished),
            ("kvlink_requests_failed", "Requests that failed", steps.failed),
            ("kvlink_requests_cancelled", "Requests given up by their callers", steps.cancelled),
            ("kvlink_requests_preempted", "Requests that gave their memory back for a while", steps.preempted),
        ):
            yield CounterMetricFamily(name, text, value)
        yield from self._of_tiers([*self._tiers()])

    def _of_tiers(self, tiers: list[_Tier]) -> Iterator[Metric]:
        for field, text in (("used_bytes", "Bytes in a tier"), ("budget_bytes", "Bytes that a tier may take")):
            gauge = GaugeMetricFamily(f"kvlink_tier_{field}", text, labels=["tier"])
            for one in tiers:
                gauge.add_metric([one.name], getattr(one, field))
            yield gauge
        opened = GaugeMetricFamily("kvlink_breaker_open", "1 while a tier is left alone", labels=["tier"])
        for one in tiers:
            opened.add_metric([one.name], one.is_open)
        yield opened
        for field, text in (
            ("hits", "Entries found in a tier"),
            ("misses", "Entries not found in a tier"),
            ("evictions", "Entries dropped from a tier to make room"),
            ("failures", "Calls of a tier that failed"),
            ("quarantined", "Objects of a tier that did not verify"),
        ):
            counter = CounterMetricFamily(f"kvlink_tier_{field}", text, labels=["tier"])
            for one in tiers:
                counter.add_metric([one.name], getattr(one, field))
            yield counter

    def _tiers(self) -> Iterator[_Tier]:
        sessions = self._engine.sessions
        if sessions is not None:
            held = sessions.residency.stats()
            yield _Tier("device", held.hits, held.misses, held.evictions, held.used_bytes, held.budget_bytes)
        stats = self._engine.store.stats()
        if isinstance(stats, TieredStats):
            for tier in stats.tiers:
                yield _tier(tier.source, tier.stats, tier.failures)
        else:
            yield _tier(self._engine.store.source, stats, 0)

    def _leased(self) -> int:
        sessions = self._engine.sessions
        return sessions.residency.stats().leased_bytes + sessions.beginnings.stats().leased_bytes if sessions else 0

    def _beginnings(self) -> int:
        sessions = self._engine.sessions
        return sessions.beginnings.stats().used_bytes if sessions else 0


def _tier(name: str, stats: StoreStats, failures: int) -> _Tier:
    remote = stats if isinstance(stats, RemoteStats) else None
    return _Tier(
        name,
        stats.hits,
        stats.misses,
        stats.evictions,
        stats.used_bytes,
        stats.budget_bytes,
        failures=remote.errors if remote else failures,
        quarantined=stats.quarantined,
        is_open=remote is not None and remote.is_open,
    )
