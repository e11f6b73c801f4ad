"""What Prometheus is told by a gateway."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvlink.cluster.backends import Backends


class RouteMetrics:
    """The counters of one gateway.

    Attributes:
        requests: Answered ones, by backend, reason of its choice, and status.
        retries: Requests that went on to another backend, by the one that was left and why.
    """

    def __init__(self, backends: Backends) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "kvlink_route_requests", "Requests answered", ("backend", "reason", "status"), registry=self._registry
        )
        self.retries = Counter(
            "kvlink_route_retries", "Requests that went on", ("backend", "why"), registry=self._registry
        )
        self._registry.register(_Up(backends))

    def text(self) -> bytes:
        """Return all of it in Prometheus' text format."""
        return generate_latest(self._registry)


class _Up(Collector):
    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    def collect(self) -> Iterable[Metric]:
        gauge = GaugeMetricFamily("kvlink_route_up", "Whether a backend is asked", labels=["backend"])
        up = self._backends.up
        for url in self._backends.urls:
            gauge.add_metric([url], float(url in up))
        yield gauge
