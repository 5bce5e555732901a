"""What the engine tells the controller after a round, and what the controller tells the world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.engine.evidence import Evidence
from eyas.tree import TreeSpec


@dataclass(frozen=True)
class RoundRecord:
    """One decoding round as it was measured; R rows."""

    rows: int
    lengths: Sequence[int]
    """[R] committed tokens of each row before the round."""
    spec: TreeSpec | None
    """What `plan` gave; None = a plain round."""
    evidence: Evidence | None
    """The draft and the path of each row; None after a plain round."""
    draft_seconds: float
    """Drafting, catching up on deferred tokens included."""
    pass_seconds: float
    """The target pass, the walk and the host's wait for them."""
    tokens: int
    """T, the tokens of the target pass: rows + nodes."""
    emitted: int
    """Tokens the round added over all rows."""
    seconds: float | None = None
    """The whole round, the drafter's observation included; None = draft_seconds + pass_seconds."""
    live: Sequence[bool] | None = None
    """[R] the rows that were drafted for; None = all."""


@dataclass(frozen=True)
class ControllerState:
    """What the controller does now; a plain round is depth, width and budget 0."""

    depth: int = 0
    width: int = 0
    budget: int = 0
    """Nodes a round for the whole batch."""
    predicted_tokens_per_second: float = 0.0
    """Of the shape in use, by the models."""
    plain_tokens_per_second: float = 0.0
    """Of plain decoding with the same rows, by the models."""
    measured_tokens_per_second: float = 0.0
    """Running average over the last rounds."""
    mean_depth: float = 0.0
    """Levels, width and nodes of a round so far, plain ones counted as 0."""
    mean_width: float = 0.0
    mean_nodes: float = 0.0
    rounds: int = 0
    plain_rounds: int = 0
    probes: int = 0
    """Rounds spent on other shapes to learn."""
