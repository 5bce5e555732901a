"""Which model this is: what stored states and trained drafters remember of their target."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def fingerprint(model: nn.Module) -> str:
    """A short hash of a model: every weight's name, shape and first 1024 values.

    Taken in bf16, so that bf16 files loaded as float32 give the same one.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        head = weight.detach().flatten()[:1024].to(device="cpu", dtype=torch.bfloat16)
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(head.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
