"""OpenTelemetry: one span per answer, with what it was made of. The only file that knows opentelemetry.

No prompt, document or id of one is in a span.
"""

from collections.abc import Mapping
from time import time_ns
from typing import Any

from kvlink.core.errors import InputError
from kvlink.engine.task import Task


class Traces:
    """Tells spans to a tracer; those of a client's trace hang in it (`traceparent`).

    Args:
        provider: Of OpenTelemetry's SDK.
    """

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("kvlink")
        self._propagator = TraceContextTextMapPropagator()

    def tell(self, task: Task, *, model: str, headers: Mapping[str, str], request_id: str) -> None:
        """Tell what an answer that has just ended was made of."""
        answer = task.answer
        if answer is None:
            return
        end, times, usage = time_ns(), answer.timings, answer.usage
        start = end - int(times.total_s * 1e9)
        span = self._tracer.start_span(
            f"chat {model}",
            context=self._propagator.extract(headers),
            start_time=start,
            attributes={
                "gen_ai.operation.name": "chat",
                "gen_ai.request.model": model,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.response.finish_reasons": [answer.finish_reason],
                "kvlink.request_id": request_id,
                "kvlink.mode": usage.mode,
                "kvlink.cached_tokens": usage.cached_tokens,
                "kvlink.documents": len(usage.documents),
                "kvlink.documents.encoded": sum(row.source == "encoded" for row in usage.documents),
            },
        )
        self._parts(span, start, end, times)
        span.end(end_time=end)

    def close(self) -> None:
        """Send what has not been sent yet."""
        self._provider.shutdown()

    def _parts(self, span: Any, start: int, end: int, times: Any) -> None:
        """Hang into a span what came before the first token, each part as long as it took, and the rest."""
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(span)
        first = start + int(times.ttft_s * 1e9)
        spent = {"tokenise": times.tokenise_s, "load": times.load_s, "encode": times.encode_s}
        at = start
        for name, seconds in spent.items():
            if seconds:
                part = self._tracer.start_span(name, context=context, start_time=at)
                at += int(seconds * 1e9)
                part.end(end_time=at)
        for name, begin, stop in (("wait and prefill", at, first), ("decode", first, end)):
            self._tracer.start_span(name, context=context, start_time=begin).end(end_time=max(begin, stop))


def exporting() -> Traces:
    """Return traces that are sent by OTLP to where `OTEL_EXPORTER_OTLP_ENDPOINT` says.

    Raises:
        InputError: What sends them is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter  # pyright: ignore[reportMissingImports]
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InputError(f"traces need {error.name}: pip install 'kvlink[traces]'") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "kvlink"}))
    provider.add_span_processor(BatchSpanProcessor(trace_exporter.OTLPSpanExporter()))
    return Traces(provider)
