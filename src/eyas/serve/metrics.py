"""Prometheus metrics, in a registry of their own. `docs/serve_metrics.md` lists every name beside vLLM's.

Counters of rounds and drafts grow once a step, from what the round itself reports; what the engine has counted since it
was made (prompt tokens, preemptions, ...) is read from its state. Latencies come from the API, which knows when a
client got what.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Collection
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from eyas.serve.metric_names import COUNTERS, FROM_STATE, GAUGES, HISTOGRAMS, LABELLED, PREFIX, REFUSED
from eyas.serve.observer import Finished, Observer, Received

if TYPE_CHECKING:
    from eyas.engine.controller import ControllerState
    from eyas.engine.round import Outcome
    from eyas.engine.state import EngineState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COMPLETE = frozenset({"stop", "length"})
"""Reasons of answers that came to their end."""


class Metrics(Observer):
    """Counts; `page()` is what `/metrics` answers with."""

    def __init__(self, model_name: str, endpoints: Collection[str] = ()) -> None:
        """`endpoints`: paths that refusals are counted by; any other is `other`, so that nobody can make up labels."""
        self._model, self._endpoints = model_name, frozenset(endpoints)
        self._registry = CollectorRegistry()
        labels = ["model_name"]
        self._gauges = {
            name: Gauge(PREFIX + name, text, labels, registry=self._registry).labels(model_name)
            for name, text in GAUGES.items()
        }
        self._counters = {
            name: Counter(PREFIX + name, text, labels, registry=self._registry).labels(model_name)
            for name, text in (COUNTERS | {name: text for name, (_, text) in FROM_STATE.items()}).items()
        }
        self._histograms = {
            name: Histogram(PREFIX + name, text, labels, buckets=buckets, registry=self._registry).labels(model_name)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._labelled = {
            name: Counter(PREFIX + name, text, [*labels, label], registry=self._registry)
            for name, (label, text) in LABELLED.items()
        }
        self._refused = Counter(
            PREFIX + REFUSED,
            "Requests that were answered with an error.",
            [*labels, "endpoint", "status", "code"],
            registry=self._registry,
        )
        self._seen = dict.fromkeys(FROM_STATE, 0)

    def page(self) -> bytes:
        """The metrics as text, of `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def request_received(self, request: Received) -> None:
        """Its prompt's length."""
        self._histograms["request_prompt_tokens"].observe(request.prompt_tokens)

    def first_token(self, request: Received, seconds: float) -> None:  # noqa: ARG002  # the protocol's signature
        """TTFT."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)

    def more_tokens(self, request: Received, count: int, seconds: float) -> None:  # noqa: ARG002
        """A round's tokens came together: one observation of their mean."""
        self._histograms["inter_token_latency_seconds"].observe(seconds / count)

    def finished(self, finished: Finished) -> None:
        """The reason; times only of answers that came to their end."""
        self._labelled["request_success"].labels(self._model, finished.reason).inc()
        if finished.reason not in COMPLETE:
            return
        self._histograms["e2e_request_latency_seconds"].observe(finished.seconds)
        self._histograms["request_queue_time_seconds"].observe(finished.stats.queue_seconds)
        self._histograms["request_generation_tokens"].observe(finished.stats.tokens)
        if finished.seconds_per_token is not None:
            self._histograms["request_time_per_output_token_seconds"].observe(finished.seconds_per_token)

    def refused(self, endpoint: str, status: int, code: str) -> None:
        """One more."""
        known = endpoint if endpoint in self._endpoints else "other"
        self._refused.labels(self._model, known, str(status), code).inc()

    def stepped(self, state: EngineState, controller: ControllerState | None, outcome: Outcome | None) -> None:
        """What runs now, and what the round did."""
        limit = state.cache_limit or state.allocated_tokens
        now: dict[str, float] = {
            "num_requests_running": state.running,
            "num_requests_prefilling": state.prefilling,
            "num_requests_waiting": state.waiting,
            "kv_cache_usage_perc": state.cached_tokens / limit if limit else 0.0,
            "cached_tokens": state.cached_tokens,
            "allocated_tokens": state.allocated_tokens,
            "prefix_cached_tokens": state.prefix_tokens,
        }
        if controller is not None:
            now |= {
                "tree_depth": controller.depth,
                "tree_width": controller.width,
                "tree_budget": controller.budget,
                "predicted_tokens_per_second": controller.predicted_tokens_per_second,
                "predicted_plain_tokens_per_second": controller.plain_tokens_per_second,
                "measured_tokens_per_second": controller.measured_tokens_per_second,
            }
        for name, value in now.items():
            self._gauges[name].set(value)
        for name, (attribute, _) in FROM_STATE.items():
            total = getattr(state, attribute)
            self._counters[name].inc(total - self._seen[name])
            self._seen[name] = total
        if outcome is not None:
            self._count(outcome)

    def _count(self, outcome: Outcome) -> None:
        drafts = [accepted for accepted, nodes in zip(outcome.accepted, outcome.nodes, strict=True) if nodes]
        grown: dict[str, float] = {
            "spec_decode_num_drafts": len(drafts),
            "spec_decode_num_draft_tokens": sum(outcome.nodes),
            "spec_decode_num_accepted_tokens": sum(outcome.accepted),
            "spec_decode_draft_depth": sum(outcome.offered),
            "target_pass_tokens": outcome.pass_tokens,
            "draft_seconds": outcome.draft_seconds,
            "pass_seconds": outcome.pass_seconds,
        }
        for name, value in grown.items():
            self._counters[name].inc(value)
        self._labelled["rounds"].labels(self._model, "plain" if outcome.evidence is None else "speculative").inc()
        by_depth = Tally(depth for accepted in drafts for depth in range(accepted))
        for depth, count in by_depth.items():
            self._labelled["spec_decode_num_accepted_tokens_per_pos"].labels(self._model, str(depth)).inc(count)
        for accepted in drafts:
            self._histograms["spec_decode_accepted_tokens_per_draft"].observe(accepted)
