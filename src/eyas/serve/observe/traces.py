"""OpenTelemetry spans, one for each sequence, by the semantic conventions for generative AI.

A span begins when a request is received and ends with its answer. Its parent is the client's span, if the request has
a `traceparent`. No text is recorded. Names that the conventions lack are vLLM's (`gen_ai.latency.*`) or our own.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

import eyas
from eyas.errors import UsageError
from eyas.serve.observe.observer import FinishedSequence, Observer, ReceivedSequence

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own variables, which also turn traces on."""
_MISSING = "traces need the extra: pip install 'eyas[otel]'"
_COMPLETIONS = ("/v1/completions", "/completion", "/infill", "/api/generate")


def traces_to(endpoint: str | None, model: str) -> Traces | None:
    """The observer that sends spans by OTLP over HTTP to a URL, or where the environment says; None for neither.

    Raises UsageError for an endpoint without the libraries; if only the environment asks, that is logged.
    """
    if endpoint is None and not any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        if endpoint is not None:
            raise UsageError(f"{_MISSING} ({error.name} is missing)") from error
        log.warning("%s; the environment names an endpoint for them", _MISSING)
        return None
    provider = TracerProvider(resource=Resource({SERVICE_NAME: "eyas"}).merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return Traces(provider, model)


class Traces(Observer):
    """Makes a span of each sequence."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        """`model`: the name of the model that is served."""
        self._provider = provider
        self._model = model
        self._tracer = provider.get_tracer("eyas", eyas.__version__)
        self._spans: dict[int, Span] = {}  # by the identity of the sequence: clients choose ids, even the same one

    def request_received(self, sequence: ReceivedSequence) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        operation = "text_completion" if sequence.endpoint in _COMPLETIONS else "chat"
        self._spans[id(sequence)] = self._tracer.start_span(
            f"{operation} {self._model}",
            context=TraceContextTextMapPropagator().extract(dict(sequence.trace_headers)),
            kind=SpanKind.SERVER,
            start_time=time.time_ns() - round(1e9 * (time.monotonic() - sequence.received)),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "eyas",
                "gen_ai.request.model": self._model,
                "gen_ai.request.id": sequence.id,
                "gen_ai.request.temperature": sequence.temperature,
                "gen_ai.request.top_p": sequence.top_p,
                "gen_ai.request.top_k": sequence.top_k,
                "gen_ai.request.seed": sequence.seed,
                "gen_ai.request.stream": sequence.stream,
                **({} if sequence.max_tokens is None else {"gen_ai.request.max_tokens": sequence.max_tokens}),
            },
        )

    def finished(self, finished: FinishedSequence) -> None:
        from opentelemetry.trace import Status, StatusCode

        span = self._spans.pop(id(finished.sequence))
        stats = finished.stats
        found: dict[str, Any] = {
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": finished.sequence.id,
            "gen_ai.response.finish_reasons": [finished.reason],
            "gen_ai.usage.input_tokens": finished.sequence.prompt_tokens,
            "gen_ai.usage.output_tokens": stats.tokens,
            "gen_ai.usage.cache_read.input_tokens": stats.reused_tokens,
            "gen_ai.latency.e2e": finished.seconds,
            "gen_ai.latency.time_in_queue": stats.queue_seconds,
            "gen_ai.latency.time_in_model_prefill": stats.prefill_seconds,
            "gen_ai.latency.time_in_model_decode": stats.decode_seconds,
            "gen_ai.latency.time_in_model_inference": stats.prefill_seconds + stats.decode_seconds,
            "eyas.target_passes": stats.target_passes,
            "eyas.draft_tokens": stats.drafted_depth,
            "eyas.accepted_draft_tokens": stats.walked,
            "eyas.accept_length": stats.accept_length,
        }
        if finished.first_token_seconds is not None:
            found["gen_ai.latency.time_to_first_token"] = finished.first_token_seconds
        if finished.reason in ("error", "deadline"):
            found["error.type"] = finished.reason
            span.set_status(Status(StatusCode.ERROR))
        span.set_attributes(found)
        span.end()

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
