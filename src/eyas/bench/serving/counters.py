"""A server's own counters of its speculation, read from the pages on which engines publish them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from eyas.errors import UsageError

_ENGINES = ("eyas", "vllm", "llamacpp")
_PREFIX = "spec_decode_num_"
_SGLANG_LENGTH = "sglang:spec_accept_length"


@dataclass(frozen=True)
class SpeculationCounts:
    """Counts since the server's start, or during a run; all 0 where the server publishes none."""

    drafts: float = 0.0
    """Drafts that were verified: target passes with at least one draft token."""
    draft_tokens: float = 0.0
    accepted: float = 0.0
    """Draft tokens that were accepted."""
    by_position: tuple[float, ...] = ()
    """`[i]` = drafts accepted at depth i + 1."""
    length: float | None = None
    """SGLang publishes a mean accept length in place of counts: its latest one, not that of the run."""

    def __add__(self, other: SpeculationCounts) -> SpeculationCounts:
        return self._with(other, 1.0)

    def __sub__(self, other: SpeculationCounts) -> SpeculationCounts:
        return self._with(other, -1.0)

    def _with(self, other: SpeculationCounts, sign: float) -> SpeculationCounts:
        positions = zip_longest(self.by_position, other.by_position, fillvalue=0.0)
        return SpeculationCounts(
            self.drafts + sign * other.drafts,
            self.draft_tokens + sign * other.draft_tokens,
            self.accepted + sign * other.accepted,
            tuple(mine + sign * theirs for mine, theirs in positions),
            self.length if other.length is None or sign < 0 else other.length,
        )

    @property
    def rates(self) -> list[float]:
        """`[i]` = share of the drafts that were accepted at depth i + 1."""
        return [count / self.drafts for count in self.by_position] if self.drafts else []

    @property
    def accept_length(self) -> float | None:
        """1 + accepted / drafts, or the server's own mean; None if it publishes neither."""
        return 1.0 + self.accepted / self.drafts if self.drafts else self.length


def read_metrics(page: str) -> SpeculationCounts | None:
    """The counts on a Prometheus page; None if the page holds none or is not in Prometheus' format.

    The counters of eyas, vLLM and llama.cpp are summed over their labels; of SGLang's gauge the mean is taken.
    """
    sums = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0.0)
    positions: dict[int, float] = {}
    lengths: list[float] = []
    known = False
    parse = _parser()
    try:
        samples = [sample for family in parse(page) for sample in family.samples]
    except ValueError:
        return None
    for sample in samples:
        engine, _, rest = sample.name.partition(":")
        name = rest.removeprefix(_PREFIX).removesuffix("_total")
        if sample.name == _SGLANG_LENGTH and sample.value > 0:  # 0: of a rank without work
            lengths.append(sample.value)
        elif engine not in _ENGINES or not rest.startswith(_PREFIX):
            continue
        elif name in sums:
            known = True
            sums[name] += sample.value
        elif name == "accepted_tokens_per_pos" and sample.labels.get("position", "").isdecimal():
            depth = int(sample.labels["position"])
            positions[depth] = positions.get(depth, 0.0) + sample.value
    if not known and not lengths:
        return None
    return SpeculationCounts(
        sums["drafts"],
        sums["draft_tokens"],
        sums["accepted_tokens"],
        tuple(positions.get(depth, 0.0) for depth in range(max(positions, default=-1) + 1)),
        sum(lengths) / len(lengths) if lengths else None,
    )


def _parser() -> Callable[[str], Iterable[Any]]:
    """Prometheus' own parser of its text format; UsageError where the client library isn't installed."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise UsageError(
            "reading a server's counters needs prometheus_client, which is part of an extra: pip install 'eyas[serve]'"
        ) from None
    return text_string_to_metric_families


def read_server_info(info: Any) -> SpeculationCounts | None:
    """SGLang's `/get_server_info`, for servers started without metrics; None if it holds no accept length."""
    states = info.get("internal_states") if isinstance(info, dict) else None
    lengths = [state.get("avg_spec_accept_length") for state in states or () if isinstance(state, dict)]
    known = [float(length) for length in lengths if isinstance(length, int | float) and length > 0]
    return SpeculationCounts(length=sum(known) / len(known)) if known else None
