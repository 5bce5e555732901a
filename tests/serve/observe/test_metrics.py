"""Metrics are what happened, exactly; the page, the documentation and the dashboard name the same ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eyas.serve.observe.metrics import COUNTERS, FROM_STATE, GAUGES, HISTOGRAMS, LABELED, PREFIX, REFUSED, Metrics

from .watched import CONTROLLER, REQUEST, finished, outcome, state

DOCS = Path(__file__).parents[3] / "docs"
NAMES = {*COUNTERS, *FROM_STATE, *GAUGES, *HISTOGRAMS, *LABELED, REFUSED}


def read(metrics: Metrics) -> dict[str, float]:
    """Sample name, and its labels but for the model's, to value."""
    found = {}
    for family in text_string_to_metric_families(metrics.page().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name", "demo") == "demo"
            rest = "".join(f",{key}={value}" for key, value in sorted(labels.items()))
            found[sample.name.removeprefix(PREFIX) + rest] = sample.value
    return found


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("demo", ["/v1/completions"])


def test_rounds_and_drafts_are_counted(metrics: Metrics) -> None:
    metrics.stepped(state(), CONTROLLER, outcome([2, 0, 0], [3, 4, 0], [6, 9, 0]))
    metrics.stepped(state(), CONTROLLER, outcome([1, 0, 3], [2, 2, 3], [2, 2, 3]))
    metrics.stepped(state(), CONTROLLER, outcome([0, 0], [0, 0], [0, 0]))
    metrics.stepped(state(), CONTROLLER, None)
    now = read(metrics)
    assert now["spec_decode_num_drafts_total"] == 5
    assert now["spec_decode_num_draft_tokens_total"] == 22
    assert now["spec_decode_num_accepted_tokens_total"] == 6
    assert now["spec_decode_draft_depth_total"] == 14
    per_position = [now[f"spec_decode_num_accepted_tokens_per_pos_total,position={i}"] for i in range(3)]
    assert per_position == [3, 2, 1]
    assert now["spec_decode_accepted_tokens_per_draft_bucket,le=0.0"] == 2
    assert now["spec_decode_accepted_tokens_per_draft_bucket,le=2.0"] == 4
    assert now["spec_decode_accepted_tokens_per_draft_count"] == 5
    assert (now["rounds_total,kind=plain"], now["rounds_total,kind=speculative"]) == (1, 2)
    assert now["target_pass_tokens_total"] == 18 + 10 + 2
    assert (now["draft_seconds_total"], now["pass_seconds_total"]) == (0.75, 1.5)


def test_drafts_are_counted_by_context(metrics: Metrics) -> None:
    metrics.stepped(state(), None, outcome([2, 1, 0], [3, 3, 3], [3, 3, 3], [1023, 1024, 40_000]))
    metrics.stepped(state(), None, outcome([3, 0, 1], [3, 0, 3], [3, 0, 3], [1026, 1025, 8191]))
    now = read(metrics)
    name = "spec_decode_num_{}_by_context_total,context={}"
    found = {
        context: (now[name.format("drafts", context)], now[name.format("accepted_tokens", context)])
        for context in ("0-1k", "1-2k", "4-8k", "16k+")
    }
    assert found == {"0-1k": (1, 2), "1-2k": (2, 4), "4-8k": (1, 1), "16k+": (1, 0)}  # a row without a draft is none
    assert name.format("drafts", "2-4k") not in now


def test_gauges_show_the_last_step(metrics: Metrics) -> None:
    metrics.stepped(state(), None, None)
    assert read(metrics)["tree_depth"] == 0
    metrics.stepped(state(running=4, waiting=0), CONTROLLER, None)
    now = read(metrics)
    assert [now[f"num_requests_{name}"] for name in ("running", "prefilling", "waiting")] == [4, 1, 0]
    assert [now[f"tree_{name}"] for name in ("depth", "width", "budget")] == [5, 4, 40]
    assert now["predicted_tokens_per_second"] == 120
    assert now["predicted_plain_tokens_per_second"] == 50
    assert now["measured_tokens_per_second"] == 110
    assert now["kv_cache_usage_perc"] == 0.25  # of the limit
    metrics.stepped(state(cache_limit=None), None, None)
    assert read(metrics)["kv_cache_usage_perc"] == 0.5  # of what is allocated
    metrics.stepped(state(cache_limit=None, allocated_tokens=0, cached_tokens=0), None, None)
    assert read(metrics)["kv_cache_usage_perc"] == 0


def test_the_engines_totals_are_followed(metrics: Metrics) -> None:
    metrics.stepped(state(prompt_tokens_total=10, generated_tokens_total=5), None, None)
    metrics.stepped(
        state(prompt_tokens_total=30, generated_tokens_total=6, preempted_total=2, prefix_hit_tokens_total=8),
        None,
        None,
    )
    now = read(metrics)
    assert (now["prompt_tokens_total"], now["generation_tokens_total"], now["num_preemptions_total"]) == (30, 6, 2)
    assert (now["prefix_cache_queries_total"], now["prefix_cache_hits_total"]) == (30, 8)


def test_latencies_of_requests(metrics: Metrics) -> None:
    metrics.request_received(REQUEST)
    metrics.first_token(REQUEST, 0.5)
    metrics.more_tokens(REQUEST, 4, 0.2)
    metrics.finished(finished())
    metrics.finished(finished("cancelled"))
    metrics.finished(finished("length", tokens=1))
    now = read(metrics)
    assert now["request_prompt_tokens_sum"] == 12
    assert now["time_to_first_token_seconds_sum"] == 0.5
    assert now["inter_token_latency_seconds_sum"] == pytest.approx(0.05)
    assert (now["e2e_request_latency_seconds_sum"], now["e2e_request_latency_seconds_count"]) == (5.0, 2)
    assert now["request_time_per_output_token_seconds_sum"] == pytest.approx(2.0 / 4)  # one token has none
    assert now["request_queue_time_seconds_sum"] == 0.25
    reasons = {
        reason: now[f"request_success_total,finished_reason={reason}"] for reason in ("stop", "cancelled", "length")
    }
    assert reasons == {"stop": 1, "cancelled": 1, "length": 1}


def test_refusals_have_labels_that_nobody_can_make_up(metrics: Metrics) -> None:
    metrics.refused("/v1/completions", 429, "queue_full", "/v1/completions")
    metrics.refused("/v1/\nmade-up", 404, "not_found", "/v1/\nmade-up")
    now = read(metrics)
    assert now["requests_refused_total,code=queue_full,endpoint=/v1/completions,status=429"] == 1
    assert now["requests_refused_total,code=not_found,endpoint=other,status=404"] == 1


def test_servers_side_by_side_have_registries_of_their_own() -> None:
    one = Metrics("demo")
    two = Metrics("demo")
    one.stepped(state(running=9), None, None)
    assert read(two)["num_requests_running"] == 0


def test_every_metric_is_documented() -> None:
    text = (DOCS / "serve_metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `eyas:(\w+)`", text, re.MULTILINE)) == NAMES


def test_the_dashboard_names_metrics_that_exist() -> None:
    """Counters by the name they are scraped under, histograms by their buckets, sums and counts."""
    scraped = {f"{name}_total" for name in (*COUNTERS, *FROM_STATE, *LABELED, REFUSED)} | set(GAUGES)
    scraped |= {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}
    board = json.loads((DOCS / "grafana_dashboard.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    asked = [variable["query"] for variable in board["templating"]["list"]]
    queries += [query["query"] for query in asked if isinstance(query, dict)]
    named = {name for query in queries for name in re.findall(r"eyas:(\w+)", query)}
    assert named
    assert named <= scraped
    assert {name for query in queries for name in re.findall(r"\b\w+:\w+", query)} == {f"eyas:{name}" for name in named}
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
