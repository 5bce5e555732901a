"""Passes of Llama-like decoders on a GPU, from kernels in Triton whose sums have one order for every number of tokens.

Importing a module of this package imports triton; `eyas.targets.triton` itself doesn't.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch


def why_unusable(device: torch.device) -> str | None:
    """Why kernels in Triton can't run on a device, in words; None if they can."""
    if device.type != "cuda":
        return f"kernels in Triton run on a GPU, not on {device}"
    if find_spec("triton") is None:
        return "triton isn't installed: pip install 'eyas[gpu]'"
    return None
