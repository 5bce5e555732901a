"""Spans of requests: their names, parents, times and figures; none without an endpoint."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from eyas.errors import UsageError
from eyas.serve.observe.traces import ENDPOINT_VARIABLES, Traces, traces_to

from ..conftest import client_of, run
from ..fakes import FakeEngine

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}


def spans(path: str, *bodies: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[ReadableSpan, ...]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = Traces(provider, "tiny")

    async def ask() -> None:
        async with client_of(FakeEngine(), traces) as client:
            for body in bodies:
                answer = await client.post(path, json=body, headers=headers or {})
                assert answer.status_code == 200, answer.text

    run(ask())
    traces.close()
    return exporter.get_finished_spans()


def test_a_request_is_a_span_of_the_client_s_trace() -> None:
    (span,) = spans("/v1/chat/completions", CHAT | {"top_p": 0.9, "seed": 3}, headers={"traceparent": PARENT})
    assert (span.name, span.kind.name) == ("chat tiny", "SERVER")
    assert span.parent is not None
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    found = dict(span.attributes or {})
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "tiny"
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.top_p"], found["gen_ai.request.seed"]) == (
        9,
        0.9,
        3,
    )
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert found["gen_ai.usage.output_tokens"] == 9
    assert found["eyas.accept_length"] == 2.0
    assert span.start_time is not None
    assert span.end_time is not None
    elapsed = (span.end_time - span.start_time) / 1e9
    assert 0 <= found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"] <= elapsed + 0.01
    assert not [value for value in found.values() if "Hi" in str(value)]


def test_every_choice_has_a_span_even_if_ids_repeat() -> None:
    body = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 3}
    found = spans("/v1/completions", body, body, headers={"X-Request-Id": "same"})
    assert [span.name for span in found] == ["text_completion tiny"] * 4
    assert all(span.parent is None for span in found)


def test_a_failure_is_an_error() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = FakeEngine()
    engine.ending = "error"

    async def ask() -> None:
        async with client_of(engine, Traces(provider, "tiny")) as client:
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 500

    run(ask())
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code.name == "ERROR"
    assert dict(span.attributes or {})["error.type"] == "error"


def test_without_an_endpoint_there_are_no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert traces_to(None, "tiny") is None
    made = traces_to("http://127.0.0.1:9/v1/traces", "tiny")
    assert made is not None
    made.close()


def test_without_the_libraries_only_the_option_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name=name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UsageError, match=r"pip install 'eyas\[otel\]'"):
        traces_to("http://127.0.0.1:9/v1/traces", "tiny")
    assert traces_to(None, "tiny") is None
    assert "eyas[otel]" in caplog.text
