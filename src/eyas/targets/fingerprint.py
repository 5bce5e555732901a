"""Fingerprints of a model's weights, to check whether a drafter or a store was made for this target."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from eyas.targets.linears import PrepackedLinear

SAMPLE = 1024
"""Number of values that are read of every tensor, from its beginning."""


def fingerprint(model: nn.Module) -> str:
    """A hash of every weight's name, shape and first 1024 values, as 16 hexadecimal digits.

    Values are taken in bfloat16, so a bfloat16 checkpoint has the same fingerprint when loaded as float32; prepacked
    and fused linears make no difference.
    """
    return _digest(_samples(model))


def embedding_head_fingerprint(model: nn.Module, layers: nn.ModuleList) -> str:
    """The fingerprint of everything outside a model's decoder `layers`, and of the first of them.

    It can be computed of a model of which no more was loaded (`load_embedding_and_head`), and still tells most
    fine-tunings apart.
    """
    prefix = next(name for name, module in model.named_modules() if module is layers)
    later = tuple(f"{prefix}.{i}." for i in range(1, len(layers)))
    return _digest(found for found in _samples(model) if not found[0].startswith(later))


_Sample = tuple[str, tuple[int, ...], Tensor]
"""Name, shape and first values of a weight."""


def _digest(samples: Iterable[_Sample]) -> str:
    digest = hashlib.sha256()
    for name, shape, values in sorted(samples, key=lambda found: found[0]):
        digest.update(f"{name}{tuple(shape)}".encode())
        digest.update(values.to(device="cpu", dtype=torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _samples(model: nn.Module) -> Iterator[_Sample]:
    """The samples of every weight, a tied one once."""
    prepacked = {name: part for name, part in model.named_modules() if isinstance(part, PrepackedLinear)}
    for name, weight in model.named_parameters():
        yield name, tuple(weight.shape), weight.detach().flatten()[:SAMPLE]
    for name, linear in prepacked.items():
        if not linear.tied:
            yield f"{name}.weight", (linear.out_features, linear.in_features), linear.first(SAMPLE)
        if linear.bias is not None:
            yield f"{name}.bias", tuple(linear.bias.shape), linear.bias.flatten()[:SAMPLE]
