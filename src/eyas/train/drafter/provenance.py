"""The provenance in a drafter's config.json: target, data, settings, versions and validation figures.

It contains no paths, because checkpoints are moved and published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.data.store.manifest import rows_hash
from eyas.data.tokens.batches import ChatBatches, learnable
from eyas.runtime import versions
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.vocab_map import DraftVocabulary
from eyas.train.loop.checkpoint import TrainingProgress


@dataclass(frozen=True)
class Origin:
    """The provenance that all checkpoints of a run share."""

    identity: dict[str, Any]
    """Inputs besides the recipe that decide the weights; a run is resumed only if they are the same."""
    facts: dict[str, Any]
    """The entries of the provenance that all checkpoints share."""

    @classmethod
    def of(
        cls,
        config: DrafterTrainConfig,
        fingerprint: str,
        taps: tuple[int, ...],
        batches: ChatBatches,
        vocabulary: DraftVocabulary,
    ) -> Origin:
        """The origin of a run on `batches`, whose hash is that of their token rows, wherever these were read from."""
        rows = [row for row in batches.rows if learnable(row)]
        identity = {
            "target_fingerprint": fingerprint,
            "taps": list(taps),
            "data_hash": rows_hash(rows),
            "warm_start": None if config.warm_start is None else Path(config.warm_start).name,
        }
        data = config.store if config.source == "offline" else config.chats
        facts = {
            "target": Path(config.target).name if Path(config.target).exists() else config.target,
            **identity,
            "data": data.name if data is not None else "",
            "rows": len(rows),
            "covered": round(vocabulary.covered, 4),
            "shape": config.shape.model_dump(mode="json", exclude_none=True),
            "loss": config.loss.model_dump(mode="json"),
            "batch_tokens": config.batch_tokens,
            "max_length": config.max_length,
            **({} if config.segments is None else {"segments": config.segments.model_dump()}),
            "loop": config.loop.model_dump(
                mode="json", include={"steps", "accumulate", "seed", "bf16", "optimizer", "schedule"}
            ),
            "versions": versions(),
        }
        return cls(identity, facts)

    def at(self, progress: TrainingProgress, validation: Mapping[str, float], chosen_by: str) -> dict[str, Any]:
        """The provenance of a checkpoint; `chosen_by` names the validation figure by which the best is chosen."""
        return {
            **self.facts,
            "steps": progress.step,
            "seconds": round(progress.seconds, 1),
            "validation": {name: round(value, 4) for name, value in validation.items()},
            "chosen_by": chosen_by,
        }
