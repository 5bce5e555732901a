"""Hand-made values that an engine would pass to an observer."""

from __future__ import annotations

from typing import Any

import torch

from eyas.engine.controller import ControllerState
from eyas.engine.round import RoundOutput, VerifiedDraft
from eyas.serve.observe.observer import FinishedSequence, ReceivedSequence
from eyas.tree import DraftTree
from eyas.types import EngineState, Stats

REQUEST = ReceivedSequence("chatcmpl-7-0", "/v1/chat/completions", 12, 64)
CONTROLLER = ControllerState(5, 4, 40, 120.0, 50.0, 110.0, rounds=3, plain_rounds=1)


def state(**changes: Any) -> EngineState:
    values: dict[str, Any] = {
        "running": 2,
        "prefilling": 1,
        "waiting": 3,
        "cached_tokens": 50,
        "allocated_tokens": 100,
        "cache_limit": 200,
        "prefix_tokens": 7,
        "prefix_limit": 10,
        "preempted_total": 0,
        "prompt_tokens_total": 0,
        "prefix_hit_tokens_total": 0,
        "generated_tokens_total": 0,
        "rounds_total": 0,
        "finished_total": {},
    }
    return EngineState(**(values | changes))


def outcome(
    accepted: list[int], offered: list[int], nodes: list[int], contexts: list[int] | None = None
) -> RoundOutput:
    """A round of these rows; plain if no row has a node."""
    rows = len(accepted)
    drafted = VerifiedDraft(DraftTree.empty(rows, torch.device("cpu")), [[0]] * rows) if any(nodes) else None
    tokens = [[1] * (count + 1) for count in accepted]
    return RoundOutput(
        tokens, accepted, offered, nodes, {}, {}, drafted, rows + sum(nodes), 0.25, 0.5, 0.0, contexts or [9] * rows
    )


def finished(reason: str = "stop", tokens: int = 5, first: float | None = 0.5) -> FinishedSequence:
    stats = Stats(tokens=tokens, queue_seconds=0.125)
    stats.record(3, 4, 9)
    return FinishedSequence(REQUEST, reason, stats, 2.5, first)
