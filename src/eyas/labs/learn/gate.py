"""The gate: a candidate is promoted only if it is better than the drafter in service beyond noise, and forgets nothing.

Both are replayed on rows with stored states, so the target isn't run: at every answer token, the replay counts how many
of the drafter's next guesses a greedy round would accept (`eyas.train.loss.draft_loss.accept_lengths`). The two are
compared on the same rows. The bootstrap resamples rows, not tokens, because the tokens of a row aren't independent
(Efron and Tibshirani 1993, chapter 16: paired).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from eyas.data.store.reader import FeatureStore, StoreSource
from eyas.data.tokens.batches import ChatBatches
from eyas.drafters.checkpoint import load_network
from eyas.drafters.network import DraftNetwork
from eyas.errors import EyasError
from eyas.targets.passes import EmbeddingAndHead
from eyas.train.loop.optimizer import computes_in_bf16
from eyas.train.loss.config import LossConfig
from eyas.train.loss.objective import DraftObjective

_DRAWS = 4000
"""Bootstrap samples."""
DEPTH = 6
"""Length of the replayed chains of guesses, for drafters that guess one token after another."""


@dataclass(frozen=True)
class GateConfig:
    """What a candidate must show to be promoted."""

    confidence: float = 0.99
    tolerance: float = 0.02
    """The share of the accept length on the reference rows that may be lost."""
    min_rows: int = 32
    """Minimum number of recent traffic rows for a promotion."""


_Replay = tuple[NDArray[np.float64], NDArray[np.float64]]


class Comparison(NamedTuple):
    """Accept lengths of the two on the same rows, and the bootstrap's lower bound of their ratio."""

    incumbent: float
    candidate: float
    lower: float
    """candidate / incumbent is above this with the configured confidence."""
    rows: int


class Judgment(NamedTuple):
    """Whether a candidate is promoted, and why."""

    promoted: bool
    reason: str
    figures: dict[str, float]
    forgets: bool = False
    """Whether it failed on the reference rows alone."""


class Gate:
    """Compares drafter folders with the drafter in service, which is replayed only once."""

    def __init__(
        self,
        incumbent: Path,
        target: EmbeddingAndHead,
        recent: FeatureStore,
        split: str,
        reference: FeatureStore | None,
        config: GateConfig,
    ) -> None:
        """Compare on the held-out `split` of `recent`, and on all of `reference`."""
        self._served = load_network(incumbent, target)
        self._target = target
        self._config = config
        self._recent = recent
        self._split = split
        self._reference = reference
        self._replays: dict[tuple[Path, str], _Replay] = {}  # of the incumbent

    def judge(self, candidate: Path) -> Judgment:
        """Judge whether `candidate` is better on recent traffic and forgets nothing.

        A candidate that can't be loaded, or has another form than the incumbent, isn't promoted either.
        """
        try:
            learned = load_network(candidate, self._target)
        except EyasError as error:
            return Judgment(False, f"it can't be loaded: {error}", {})
        if learned.config != self._served.config:
            return Judgment(False, "it has another form than the drafter in service (sizes, taps or vocabulary)", {})
        now = self._compared(learned, self._recent, self._split)
        figures = {
            "rows": now.rows, "recent_incumbent": now.incumbent, "recent_candidate": now.candidate,
            "recent_lower": now.lower,
        }  # fmt: skip
        if now.rows < self._config.min_rows:
            return Judgment(False, f"{now.rows} held-out rows are too few, {self._config.min_rows} are needed", figures)
        if not now.lower > 1.0:
            return Judgment(False, f"no win beyond noise on recent traffic: {_shown(now)}", figures)
        said = f"recent traffic: {_shown(now)}"
        for name in self._reference.settings.splits if self._reference is not None else ():
            assert self._reference is not None
            then = self._compared(learned, self._reference, name)
            figures |= {"reference_incumbent": then.incumbent, "reference_candidate": then.candidate}
            figures["reference_lower"] = then.lower
            if then.lower < 1.0 - self._config.tolerance:
                return Judgment(False, f"it forgets: on the reference rows {_shown(then)}", figures, forgets=True)
            said += f"; reference: {_shown(then)}"
        return Judgment(True, said, figures)

    def _compared(self, candidate: DraftNetwork, store: FeatureStore, split: str) -> Comparison:
        """Replay a candidate on all rows of a split."""
        key = store.folder, split
        if key not in self._replays:
            self._replays[key] = replayed(self._served, self._target, store, split)
        before, same = self._replays[key]
        lengths, counts = replayed(candidate, self._target, store, split)
        assert np.array_equal(counts, same)
        draws = np.random.default_rng(0).integers(0, len(counts), (_DRAWS, len(counts)))  # [D, N]
        ratios = lengths[draws].sum(1) / before[draws].sum(1)
        total = counts.sum()
        lower = float(np.quantile(ratios, 1.0 - self._config.confidence))
        return Comparison(float(before.sum() / total), float(lengths.sum() / total), lower, len(counts))


def _shown(found: Comparison) -> str:
    return (
        f"accept length {found.candidate:.3f} against {found.incumbent:.3f}, ratio above {found.lower:.3f} "
        f"({found.rows} rows)"
    )


@torch.no_grad()
def replayed(network: DraftNetwork, target: EmbeddingAndHead, store: FeatureStore, split: str) -> _Replay:
    """[N] the sum of accept lengths of each row that has an answer, and [N] the number of positions in each sum."""
    network = network.to(device=target.device, dtype=torch.float32).eval()
    rows = store.rows(split)
    batches = ChatBatches(rows, 1, store.settings.longest, seed=0)  # a row is a batch
    source = StoreSource(store, batches, network.config.taps_of(target.num_layers), target.device)
    loss = LossConfig(unroll=network.config.guesses or DEPTH)
    fast = target.dtype == torch.bfloat16 and computes_in_bf16(target.device)
    objective = DraftObjective(network, target.head, target.vocab_size, source, loss, bf16=fast)
    found = [objective.score(source(number)).metrics["accept_length"] for number in range(batches.per_epoch)]
    sums, counts = np.array(found, dtype=np.float64).T
    return sums, counts
