"""Where a trained drafter came from, written into its config.json."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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


def file_hash(path: Path) -> str:
    """A short hash of a data file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def versions() -> dict[str, Any]:
    """Versions of what computed the weights."""
    found = {}
    for name in ("eyas", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a source tree that was never installed
            found[name] = "unknown"
    return found
