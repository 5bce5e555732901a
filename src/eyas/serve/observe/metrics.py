"""Prometheus metrics of a server, in a registry of their own. `docs/serve_metrics.md` lists them next to vLLM's.

Counters of rounds and drafts grow at every step by what the round reports. Totals that the engine keeps itself (prompt
tokens, preemptions, ...) are read from its state. Latencies are measured where tokens are delivered to clients.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Collection
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from eyas.serve.observe.observer import FinishedSequence, Observer, ReceivedSequence
from eyas.types import CONTEXT_BUCKETS, context_bucket

if TYPE_CHECKING:
    from eyas.engine.controller import ControllerState
    from eyas.engine.round import RoundOutput
    from eyas.types import EngineState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COMPLETE = frozenset({"stop", "length"})
"""Finish reasons of complete answers; other answers' total times aren't observed."""

PREFIX = "eyas:"
"""Prefix of every metric's name; the tables below leave it out."""

# Buckets of histograms: seconds, tokens, draft tokens.
_SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_LONG = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_ACCEPTED = tuple(range(17))

# Metrics by name, with their help texts.
GAUGES = {
    "num_requests_running": "Sequences that are decoding.",
    "num_requests_prefilling": "Sequences in a slot whose prompt isn't computed yet.",
    "num_requests_waiting": "Sequences that are waiting for a slot.",
    "kv_cache_usage_perc": "Share of the cache in use by sequences in slots; 1 = full.",
    "cached_tokens": "Tokens of sequences in slots.",
    "allocated_tokens": "Tokens the slot cache is allocated for.",
    "prefix_cached_tokens": "Tokens kept in the prefix cache.",
    "tree_depth": "Depth of the draft trees in use; 0 = plain decoding.",
    "tree_width": "Maximum nodes per level of the draft trees; 0 = plain decoding.",
    "tree_budget": "Maximum nodes per round for the whole batch; 0 = plain decoding.",
    "predicted_tokens_per_second": "The controller's prediction for the trees in use.",
    "predicted_plain_tokens_per_second": "The controller's prediction for plain decoding of the same batch.",
    "measured_tokens_per_second": "Tokens generated per second over the last rounds.",
}
COUNTERS = {
    "spec_decode_num_drafts": "Drafts that were verified: one for each sequence that had a tree in a round.",
    "spec_decode_num_draft_tokens": "Draft tokens that were verified: nodes of trees.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
    "spec_decode_draft_depth": "Sum of the drafts' depths: the most draft tokens that could have been accepted.",
    "target_pass_tokens": "Tokens computed by target passes while decoding: one for each sequence, plus draft tokens.",
    "draft_seconds": "Seconds spent drafting.",
    "pass_seconds": "Seconds spent verifying drafts.",
}
FROM_STATE = {  # counters: the attribute of EngineState that has the count, and the help text
    "num_preemptions": ("preempted_total", "Sequences that lost their slot and had to be computed again."),
    "prompt_tokens": ("prompt_tokens_total", "Prompt tokens of admitted sequences, cached ones included."),
    "prefix_cache_queries": ("prompt_tokens_total", "Prompt tokens that were looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hit_tokens_total", "Prompt tokens that were found in the prefix cache."),
    "generation_tokens": ("generated_tokens_total", "Tokens generated."),
}
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {  # the help text and the buckets
    "time_to_first_token_seconds": ("Seconds from receiving a request to its first token.", _SHORT),
    "inter_token_latency_seconds": ("Seconds of a round divided by the tokens it generated.", _PER_TOKEN),
    "request_time_per_output_token_seconds": ("Mean seconds per token after the first, per request.", _PER_TOKEN),
    "e2e_request_latency_seconds": ("Seconds from receiving a request to its end, for complete answers.", _LONG),
    "request_queue_time_seconds": ("Seconds from receiving a request to its slot.", _LONG),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a request.", _TOKENS),
    "spec_decode_accepted_tokens_per_draft": ("Draft tokens accepted per draft.", _ACCEPTED),
}
LABELED = {  # counters: the label in addition to the model's name, and the help text
    "spec_decode_num_accepted_tokens_per_pos": ("position", "Drafts accepted at this position; 0 = the first."),
    "spec_decode_num_drafts_by_context": ("context", "Drafts that were verified, by tokens before them."),
    "spec_decode_num_accepted_tokens_by_context": ("context", "Draft tokens accepted, by tokens before the draft."),
    "rounds": ("kind", "Decoding rounds by kind, speculative or plain."),
    "request_success": ("finished_reason", "Sequences by finish reason."),
}
REFUSED = "requests_refused"
"""The counter with labels for endpoint, status and code."""


class Metrics(Observer):
    """Counts what a server does; `page()` is the response of `/metrics`."""

    def __init__(self, model_name: str, endpoints: Collection[str] = ()) -> None:
        """`endpoints`: paths that may become labels; any other path becomes `other`, since clients can make them up."""
        self._model = model_name
        self._endpoints = frozenset(endpoints)
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
        self._labeled = {
            name: Counter(PREFIX + name, text, [*labels, label], registry=self._registry)
            for name, (label, text) in LABELED.items()
        }
        self._refused = Counter(
            PREFIX + REFUSED,
            "Requests that were answered with an error.",
            [*labels, "endpoint", "status", "code"],
            registry=self._registry,
        )
        self._seen = dict.fromkeys(FROM_STATE, 0)

    def add(self, series: Collector) -> None:
        """Add further series to the page."""
        self._registry.register(series)

    def page(self) -> bytes:
        """All metrics in Prometheus' text format (`CONTENT_TYPE`)."""
        return generate_latest(self._registry)

    def request_received(self, sequence: ReceivedSequence) -> None:
        """Observe the length of its prompt."""
        self._histograms["request_prompt_tokens"].observe(sequence.prompt_tokens)

    def first_token(self, sequence: ReceivedSequence, seconds: float) -> None:  # noqa: ARG002  # the protocol's signature
        """Observe the time to first token (TTFT)."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)

    def more_tokens(self, sequence: ReceivedSequence, count: int, seconds: float) -> None:  # noqa: ARG002
        """Observe the mean time per token of the tokens, which all came from one round."""
        self._histograms["inter_token_latency_seconds"].observe(seconds / count)

    def finished(self, finished: FinishedSequence) -> None:
        """Count the finish reason, and observe the times of complete answers."""
        self._labeled["request_success"].labels(self._model, finished.reason).inc()
        if finished.reason not in COMPLETE:
            return
        self._histograms["e2e_request_latency_seconds"].observe(finished.seconds)
        self._histograms["request_queue_time_seconds"].observe(finished.stats.queue_seconds)
        self._histograms["request_generation_tokens"].observe(finished.stats.tokens)
        if finished.seconds_per_token is not None:
            self._histograms["request_time_per_output_token_seconds"].observe(finished.seconds_per_token)

    def refused(self, endpoint: str, status: int, code: str, path: str) -> None:  # noqa: ARG002  # clients make paths up
        """Count a request that was answered with an error."""
        known = endpoint if endpoint in self._endpoints else "other"
        self._refused.labels(self._model, known, str(status), code).inc()

    def stepped(self, state: EngineState, controller: ControllerState | None, outcome: RoundOutput | None) -> None:
        """Set the gauges and count what the step's round did."""
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

    def _count(self, outcome: RoundOutput) -> None:
        drafts = [accepted for accepted, nodes in zip(outcome.accepted, outcome.nodes, strict=True) if nodes]
        for accepted, nodes, context in zip(outcome.accepted, outcome.nodes, outcome.contexts, strict=True):
            if nodes:
                labels = (self._model, CONTEXT_BUCKETS[context_bucket(context)])
                self._labeled["spec_decode_num_drafts_by_context"].labels(*labels).inc()
                self._labeled["spec_decode_num_accepted_tokens_by_context"].labels(*labels).inc(accepted)
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
        self._labeled["rounds"].labels(self._model, "plain" if outcome.draft is None else "speculative").inc()
        by_depth = Tally(depth for accepted in drafts for depth in range(accepted))
        for depth, count in by_depth.items():
            self._labeled["spec_decode_num_accepted_tokens_per_pos"].labels(self._model, str(depth)).inc(count)
        for accepted in drafts:
            self._histograms["spec_decode_accepted_tokens_per_draft"].observe(accepted)
