"""Multimodal checkpoints as targets: their text decoder is run, by the whole model's forward pass, on text alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eyas.errors import UnsupportedModelError
from eyas.targets.architecture import logits_agree
from eyas.targets.native.decoder import NativeDecoder
from eyas.targets.target import Target
from eyas.tree import DraftTree


def text_target(model: Any, ragged: bool, native: NativeDecoder | None) -> Target:
    """A multimodal model as a target; UnsupportedModelError if it generates other text than it does here."""
    name = type(model).__name__
    try:
        target = Target(model, ragged=ragged, native=native)
        own, here = _text_logits(target)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise UnsupportedModelError(f"{name} is multimodal and can't run text alone: {error}") from error
    if not logits_agree(here, own, target.dtype):
        raise UnsupportedModelError(
            f"{name} is multimodal and computes something else of text than its decoder does with a causal mask and "
            "plain positions; use a text model"
        )
    return target


@torch.inference_mode()
def _text_logits(target: Target) -> tuple[Tensor, Tensor]:
    """Logits [2, V] of the two tokens that follow six: those of `transformers.generate`, and a verified tree's."""
    first = target.vocab_size // 2
    tokens = (torch.arange(6, device=target.device).unsqueeze(0) + first) % target.vocab_size
    out = target.model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=2, min_new_tokens=2, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    target.resize(1)
    for _ in target.prefill(range(1), tokens.tolist(), ()):
        pass
    drafted = out.sequences[:, 6:7]
    valid = torch.ones_like(drafted, dtype=torch.bool)
    tree = DraftTree(drafted, torch.full_like(drafted, -1), valid.float(), valid, 1, counted=1)
    logits = target.verify(range(1), tokens[:, -1], tree, ()).logits.rows
    target.resize(target.cache_slots)
    return torch.cat(out.logits), logits
