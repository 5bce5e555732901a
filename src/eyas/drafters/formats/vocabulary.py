"""Reading the vocabulary map of a checkpoint: which target token each draft token stands for.

`d2t` holds offsets (target id = draft id + d2t); some exporters write the ids themselves. Shapes: V / Vd full / draft
vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.drafters.config import DrafterConfig
from eyas.errors import CheckpointError

ABSOLUTE = "d2t holds target ids themselves instead of offsets: read so, since only that names different tokens"


def complete_vocabulary(tensors: dict[str, Tensor], config: DrafterConfig, where: str) -> list[str]:
    """Fill in the map where `tensors` has none or a part of it; returns notes on how it was read.

    Raises CheckpointError for a map that is damaged or missing.
    """
    full, draft = config.vocab_size, config.draft_vocab_size
    if "d2t" not in tensors:
        if draft != full:
            raise CheckpointError(
                f"{where}: draft_vocab_size {draft} of {full}, but no d2t tensor maps it: re-export it"
            )
        tensors["d2t"] = torch.zeros(draft, dtype=torch.int64)
    ids, notes = read_map(tensors["d2t"], config, where)
    covered = torch.zeros(full, dtype=torch.bool)
    covered[ids] = True
    if not torch.equal(tensors.setdefault("t2d", covered).to(torch.bool), covered):
        raise CheckpointError(f"{where}: t2d and d2t name different tokens: the vocabulary map is damaged")
    tensors["d2t"], tensors["t2d"] = ids - torch.arange(draft), covered
    return notes


def read_map(d2t: Tensor, config: DrafterConfig, where: str) -> tuple[Tensor, list[str]]:
    """The target ids [Vd] of `d2t`, and notes on how it was read. Raises CheckpointError for a damaged map."""
    full, draft = config.vocab_size, config.draft_vocab_size
    if d2t.is_floating_point() or d2t.is_complex() or d2t.dtype == torch.bool:
        raise CheckpointError(f"{where}: d2t holds {str(d2t.dtype).removeprefix('torch.')}, not whole numbers")
    if d2t.shape != (draft,):
        raise CheckpointError(f"{where}: d2t is {list(d2t.shape)}, the config says draft_vocab_size {draft}")
    written = d2t.to(torch.int64)
    if not bool(((written >= -full) & (written < full)).all()):  # nothing may overflow below
        raise CheckpointError(f"{where}: d2t has numbers beyond the vocabulary of {full}")
    shifted = written + torch.arange(draft)
    if names_tokens(shifted, full):
        return shifted, []
    if names_tokens(written, full):
        return written, [ABSOLUTE]
    raise CheckpointError(f"{where}: d2t must map to {draft} different tokens below {full} (id = draft id + d2t)")


def names_tokens(ids: Tensor, full: int) -> bool:
    """Whether these are different tokens of a vocabulary of `full` tokens."""
    return int(ids.min()) >= 0 and int(ids.max()) < full and len(set(ids.tolist())) == len(ids)
