"""What an export needs of the drafter's target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from eyas.cli.common.options import DrafterFileOptions
from eyas.hub import find_target

if TYPE_CHECKING:
    import torch

    from eyas.interop.export.drafter import ServedTarget


def served_target(target: str, drafter: Path, dtype: torch.dtype | None, files: DrafterFileOptions) -> ServedTarget:
    """The target's sizes, embedding, head and tokenizer; none of its other weights are read."""
    from eyas.drafters.checkpoint import open_checkpoint
    from eyas.interop.export.drafter import ServedTarget
    from eyas.targets import load_tokenizer
    from eyas.targets.loading import load_embedding_and_head

    found = find_target(target)
    checkpoint = open_checkpoint(drafter, weights=files.draft_weights, ignore=files.ignore_config_key)
    embedding_and_head = load_embedding_and_head(found, dtype=dtype or checkpoint.dtype, device="cpu")
    served = str(found.gguf or found.source)  # another engine reads a GGUF file itself
    return ServedTarget(served, embedding_and_head, load_tokenizer(found))
