"""Every metric by name, without its prefix: what it means, and a histogram's buckets."""

from __future__ import annotations

PREFIX = "eyas:"

_SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_LONG = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_ACCEPTED = tuple(range(17))

GAUGES = {
    "num_requests_running": "Sequences that decode.",
    "num_requests_prefilling": "Sequences in a slot whose prompt isn't read yet.",
    "num_requests_waiting": "Sequences that wait for a slot.",
    "kv_cache_usage_perc": "Share of the cache in use by sequences in slots; 1 = full.",
    "cached_tokens": "Tokens of sequences in slots.",
    "allocated_tokens": "Tokens the slot cache is allocated for.",
    "prefix_cached_tokens": "Tokens kept for requests that begin alike.",
    "tree_depth": "Levels of the draft trees in use; 0 = plain decoding.",
    "tree_width": "Nodes a level may keep; 0 = plain decoding.",
    "tree_budget": "Nodes a round for the whole batch; 0 = plain decoding.",
    "predicted_tokens_per_second": "The controller's prediction for the shape in use.",
    "predicted_plain_tokens_per_second": "The controller's prediction for plain decoding with the same rows.",
    "measured_tokens_per_second": "Emitted tokens a second over the last rounds.",
}
COUNTERS = {
    "spec_decode_num_drafts": "Drafts that were verified: one for each row and round that got a tree.",
    "spec_decode_num_draft_tokens": "Draft tokens that were verified: nodes of trees.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
    "spec_decode_draft_depth": "Sum of the drafts' depths: what could have been accepted.",
    "target_pass_tokens": "Tokens of target passes while decoding: rows and draft tokens.",
    "draft_seconds": "Time of drafting.",
    "pass_seconds": "Time of verifying and walking.",
}
FROM_STATE = {
    "num_preemptions": ("preempted_total", "Sequences that lost their slot and were read again."),
    "prompt_tokens": ("prompt_tokens_total", "Prompt tokens of admitted sequences, reused ones included."),
    "prefix_cache_queries": ("prompt_tokens_total", "Prompt tokens that were looked up."),
    "prefix_cache_hits": ("prefix_hit_tokens_total", "Prompt tokens that were not read again."),
    "generation_tokens": ("generated_tokens_total", "Tokens emitted."),
}
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Received to first token.", _SHORT),
    "inter_token_latency_seconds": ("A round's time over the tokens it brought.", _PER_TOKEN),
    "request_time_per_output_token_seconds": ("Mean time of a token after the first, by request.", _PER_TOKEN),
    "e2e_request_latency_seconds": ("Received to end, of answers that came to their end.", _LONG),
    "request_queue_time_seconds": ("Received to a slot.", _LONG),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Tokens emitted for a request.", _TOKENS),
    "spec_decode_accepted_tokens_per_draft": ("Draft tokens accepted of one draft: 0, 1, 2, ...", _ACCEPTED),
}  # fmt: skip
LABELLED = {
    "spec_decode_num_accepted_tokens_per_pos": ("position", "Drafts accepted at this depth; 0 = first."),
    "rounds": ("kind", "Decoding rounds, speculative or plain."),
    "request_success": ("finished_reason", "Ended sequences by reason."),
}  # fmt: skip
REFUSED = "requests_refused"
"""Labels: endpoint, status, code."""
