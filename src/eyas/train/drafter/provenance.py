"""Where a trained drafter came from, written into its config.json. No paths: a checkpoint travels."""

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
    """What is the same for all checkpoints of a run."""

    identity: dict[str, Any]
    """What else than the recipe makes the weights what they are."""
    facts: dict[str, Any]

    @classmethod
    def of(
        cls,
        config: DrafterTrainConfig,
        fingerprint: str,
        taps: tuple[int, ...],
        batches: ChatBatches,
        vocabulary: DraftVocabulary,
    ) -> Origin:
        """The hash of the data is that of the rows trained on, wherever they were read from."""
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
            "loop": config.loop.model_dump(
                mode="json", include={"steps", "accumulate", "seed", "bf16", "optimizer", "schedule"}
            ),
            "versions": versions(),
        }
        return cls(identity, facts)

    def at(self, progress: TrainingProgress, validation: Mapping[str, float], chosen_by: str) -> dict[str, Any]:
        """The provenance of a checkpoint; `chosen_by` names the figure that makes a checkpoint the best."""
        return {
            **self.facts,
            "steps": progress.step,
            "seconds": round(progress.seconds, 1),
            "validation": {name: round(value, 4) for name, value in validation.items()},
            "chosen_by": chosen_by,
        }
