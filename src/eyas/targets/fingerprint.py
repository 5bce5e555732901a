"""Fingerprints of a model's weights, to check whether a drafter or a store was made for a target."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from eyas.cache.entries import content_hash
from eyas.targets.linears import PrepackedLinear
from eyas.targets.native.packed_linears import PackedEmbedding

_KEPT = "_eyas_fingerprints"
SAMPLE = 1024
"""Number of leading values that are read of every tensor."""


def fingerprint(model: nn.Module) -> str:
    """A hash of every weight's name, shape and first 1024 values, as 16 hexadecimal digits.

    Values are read as bfloat16, so a bfloat16 checkpoint has the same fingerprint when loaded as float32. Prepacked
    linears make no difference. For a model that was changed after loading, it is the one that `keep_fingerprints` kept.
    """
    kept: tuple[str, ...] | None = getattr(model, _KEPT, None)
    return _digest(_samples(model)) if kept is None else kept[0]


def weight_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of every weight as in the checkpoint (a tied one once), wherever native layers keep it."""
    return {name: tuple(shape) for name, shape, _ in _samples(model)}


def weights_hash(model: nn.Module) -> str:
    """A hash of all values of every tensor below a model, packed ones included. ValueError for tensors of libraries."""
    found = hashlib.sha256()
    for name, part in model.named_modules():
        if isinstance(part, PackedEmbedding):
            part = part.table
        held = {**part._parameters, **part._buffers, **vars(part)}
        for key, tensor in held.items():
            if isinstance(tensor, Tensor):
                data = tensor.detach()
                if type(data) is not Tensor or data.device.type != "cpu" or data.layout != torch.strided:
                    raise ValueError(f"{name}.{key} isn't a plain tensor")
                values = content_hash(data.contiguous().reshape(-1).view(torch.uint8).numpy())
                found.update(f"{name} {key} {tuple(data.shape)} {data.dtype} {values}".encode())
    return found.hexdigest()


def keep_fingerprints(model: nn.Module, layers: nn.ModuleList, change: bytes | None = None) -> None:
    """Fix both fingerprints of a model: the current ones, hashed together with a `change` that is about to be made.

    Fingerprints of the changed weights would depend on the dtype in which they were changed. Without a change, both
    are kept as they are: for weights that are about to be sharded, after which no process can read all of them.
    """
    found: tuple[str, ...] = (fingerprint(model), embedding_head_fingerprint(model, layers))
    if change is not None:
        found = tuple(hashlib.sha256(one.encode() + change).hexdigest()[:16] for one in found)
    setattr(model, _KEPT, found)


def keep_fingerprint(drafter: nn.Module) -> None:
    """Fix the fingerprint of a drafter's network as its files have it: its matrices are about to be quantized."""
    setattr(drafter, _KEPT, (fingerprint(drafter),))


def embedding_head_fingerprint(model: nn.Module, layers: nn.ModuleList) -> str:
    """The fingerprint of everything outside a model's decoder `layers`, and of the first layer.

    It can be computed from a partially loaded model (`load_embedding_and_head`), and still tells most fine-tuned
    models apart.
    """
    kept: tuple[str, str] | None = getattr(model, _KEPT, None)
    if kept is not None:
        return kept[1]
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


def _parts(name: str, weight: Tensor) -> Iterator[_Sample]:
    """The samples of a weight; for a quantized one (a tensor subclass), the samples of its component tensors."""
    if hasattr(weight, "__tensor_flatten__") and type(weight) is not nn.Parameter:
        for part in weight.__tensor_flatten__()[0]:
            yield from _parts(f"{name}.{part}", getattr(weight, part))
    else:
        yield name, tuple(weight.shape), weight.flatten()[:SAMPLE]


def _scales(model: nn.Module) -> Iterator[_Sample]:
    """The samples of the float buffers that checkpoints hold: the scales of GPTQ's and AWQ's layers.

    Their integer buffers are left out: they are laid out for a kernel, which depends on dtype and machine.
    """
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if buffer.is_floating_point() and name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield from _parts(name, buffer)


def _samples(model: nn.Module) -> Iterator[_Sample]:
    """The samples of every weight (a tied one once)."""
    prepacked = {name: part for name, part in model.named_modules() if isinstance(part, PrepackedLinear)}
    for name, weight in model.named_parameters():
        yield from _parts(name, weight.detach())
    for name, part in model.named_modules():
        if isinstance(part, PackedEmbedding):
            table = part.table
            yield f"{name}.weight", (table.out_features, table.in_features), table.first(SAMPLE)
    if getattr(model, "is_quantized", False):
        yield from _scales(model)
    for name, linear in prepacked.items():
        if linear.stacked is not None:
            yield name, linear.stacked, linear.first(SAMPLE)
        elif not linear.tied:
            shape = (linear.out_features, linear.in_features)
            yield f"{name}.weight", shape[::-1] if linear.transposed else shape, linear.first(SAMPLE)
        if linear.bias is not None and linear.stacked is None:
            yield f"{name}.bias", tuple(linear.bias.shape), linear.bias.flatten()[:SAMPLE]
