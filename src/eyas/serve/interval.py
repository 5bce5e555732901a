"""What the engine did since the last statistics line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eyas.types import Stats

if TYPE_CHECKING:
    from eyas.engine.controller import ControllerState
    from eyas.engine.round import Outcome
    from eyas.engine.state import EngineState


class Interval:
    """Steps between two lines."""

    def __init__(self, since: EngineState | None = None) -> None:
        """`since`: the engine's state at the beginning; None = a new engine's."""
        self._since = since
        self._state: EngineState | None = None
        self._controller: ControllerState | None = None
        self._drafts = Stats()  # of rows that got a tree
        self._rows = self._rounds = self._plain = 0

    def add(self, state: EngineState, controller: ControllerState | None, outcome: Outcome | None) -> None:
        """Count a step."""
        self._state, self._controller = state, controller
        if outcome is None:
            return
        self._rounds += 1
        self._plain += outcome.evidence is None
        self._rows += len(outcome.accepted)
        for accepted, offered, nodes in zip(outcome.accepted, outcome.offered, outcome.nodes, strict=True):
            if nodes:
                self._drafts.record(accepted, offered)

    def next(self) -> Interval:
        """The interval that follows."""
        return Interval(self._state or self._since)

    def fields(self, seconds: float) -> dict[str, Any] | None:
        """The line's fields, for an interval so long; None if the engine made no step."""
        state, since, controller = self._state, self._since, self._controller
        if state is None:
            return None
        generated = state.generated_tokens_total - (since.generated_tokens_total if since else 0)
        prompt = state.prompt_tokens_total - (since.prompt_tokens_total if since else 0)
        reused = state.prefix_hit_tokens_total - (since.prefix_hit_tokens_total if since else 0)
        preempted = state.preempted_total - (since.preempted_total if since else 0)
        fields: dict[str, Any] = {
            "running": state.running + state.prefilling,
            "waiting": state.waiting,
            "tokens_per_second": round(generated / seconds, 1),
            "prompt_tokens_per_second": round(prompt / seconds, 1),
            "cached_tokens": state.cached_tokens,
        }
        if reused:
            fields["prefix_hit_rate"] = round(reused / prompt, 3) if prompt else 1.0
        if preempted:
            fields["preempted"] = preempted
        if self._drafts.target_passes:
            fields["accept_length"] = round(1 + self._drafts.walked / self._rows, 2)
            fields["acceptance_by_position"] = [round(rate, 2) for rate in self._drafts.accepted_by_position]
            fields["accepted_histogram"] = self._drafts.accepted_histogram
            fields["plain_rounds"] = round(self._plain / self._rounds, 3)
        if controller is not None:
            fields["tree"] = f"{controller.depth},{controller.width},{controller.budget}"
        return fields
