"""The weights of a target in a GGUF file, packed or dequantized, under the names of transformers' modules.

transformers (`modeling_gguf_pytorch_utils`) knows the tensors' names and how llama.cpp laid them out: rows of queries
and keys are permuted, norms are stored with 1 added, and so on. Only the file itself is read by eyas, which checks
every size before using it and is ten times as fast.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import inf, prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from eyas.errors import ModelError
from eyas.gguf import PLAIN_TYPES, Gguf
from eyas.gguf_config import ROPE_TENSORS, heads_of
from eyas.targets.gguf_layouts import TensorLayout, layout_of
from eyas.targets.native.experts import can_stay_packed
from eyas.targets.native.packed import GGML, GROUP, PackedWeight, WeightFormat, Weights, fit_float16, panels_of_rows
from eyas.targets.native.panel_files import cached_layout

_LOG = logging.getLogger("eyas")


def read_weights(
    file: Path, model_class: Any, config: Any, dtype: torch.dtype, *, first: bool = False, packs: bool = False
) -> Weights:
    """Read the weights of a `model_class` with `config`, in `dtype`, from a GGUF file.

    `first`: the config has fewer layers than the file; the rest aren't read. `packs`: weights of linear layers,
    experts and plain embeddings stay in formats that the kernels multiply by, if most of the file can. Raises
    ModelError for tensors that the model has no place for, CheckpointError for a damaged file.
    """
    opened, model, processor, names = _matched(file, model_class, config)
    layers = config.get_text_config().num_hidden_layers
    used = _of_model(opened, layers, first=first)
    _refuse_unknown(file, model_class, [name for name in used if _parameter(names, name) is None])
    used = [name for name in used if _parameter(names, name) is not None]
    check_parts(opened, {name: _parameter(names, name) or "" for name in used}, _shapes(model))
    packed = _packed(opened, used, model, processor, names) if packs else {}
    if packs and not first:
        _log_dequantized(opened, [name for name in used if _parameter(names, name) not in packed], dtype)
    read = read_tensors(opened, [name for name in used if _parameter(names, name) not in packed], processor, names)
    state = {
        name: weight.to(torch.float32 if name.endswith(KEPT_IN_FLOAT32) else dtype) for name, weight in read.items()
    }
    shapes = {name: torch.zeros((), dtype=dtype).expand(model.get_parameter(name).shape) for name in packed}
    return Weights(state | shapes, packed)


def _log_dequantized(opened: Gguf, names: Iterable[str], dtype: torch.dtype) -> None:
    """Log how much memory it takes that the tensors `names` can't stay packed, unless that is little."""
    blocks = [info for name in names if (info := opened.tensors[name]).type not in PLAIN_TYPES]
    before = sum(info.size for info in blocks)
    after = sum(prod(info.shape) for info in blocks) * dtype.itemsize
    if after - before > _NEGLIGIBLE_SHARE * sum(info.size for info in opened.tensors.values()):
        _LOG.warning(
            "the %s weights of %s are dequantized: they take %.1f GB of memory, %.1f in the file",
            " and ".join(sorted({info.type for info in blocks})),
            opened.path,
            after / 1e9,
            before / 1e9,
        )


def read_tensors(opened: Gguf, used: Iterable[str], processor: Any, names: dict[str, str]) -> dict[str, Tensor]:
    """Tensors of a file as the parameters that `names` says they are; blocks are dequantized.

    Raises ModelError for tensors that don't fit each other.
    """
    read: dict[str, Any] = {"tensors": {}}  # the processor assembles stacks of experts there
    for name in used:
        try:
            made = processor.process(
                weights=opened.load(name).float().numpy(), name=name, tensor_key_mapping=names, parsed_parameters=read
            )
        except (ValueError, IndexError, RuntimeError) as error:  # shapes that no model has
            raise ModelError(f"{opened.path}: the tensor {name} doesn't have llama.cpp's layout: {error}") from error
        if made.name is not None:
            read["tensors"][names[made.name]] = torch.from_numpy(np.array(made.weights))
    found: dict[str, Tensor] = read["tensors"]
    return found


def _of_model(opened: Gguf, layers: int, *, first: bool = False) -> list[str]:
    """The tensors of a file's model without those of its MTP heads; `first`: without any layer after `layers`."""
    last = inf if first else heads_of(opened).stop
    return [
        name
        for name in opened.tensors
        if not ((layer := LAYER.match(name)) is not None and layers <= int(layer[1]) < last)
    ]


def check_parts(opened: Gguf, placed: Mapping[str, str], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ModelError unless the tensors `placed` in a parameter have as many numbers as its shape.

    Otherwise one of several may be missing, or a size is not the model's.
    """
    parts: dict[str, list[str]] = {}
    for name, parameter in placed.items():
        parts.setdefault(parameter, []).append(name)
    for parameter, names in parts.items():
        size = sum(prod(opened.tensors[name].shape) for name in names)
        if size != prod(shapes[parameter]):
            raise ModelError(
                f"{opened.path}: {' and '.join(names)} hold {size} numbers, and {parameter} has "
                f"{prod(shapes[parameter])}, {list(shapes[parameter])}"
            )


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def check_names(file: Path, model_class: Any, config: Any) -> None:
    """Raise ModelError unless a GGUF file holds all weights of a model, and no others; only its header is read."""
    opened, model, _, names = _matched(file, model_class, config)
    used = _of_model(opened, config.get_text_config().num_hidden_layers)
    placed = {name: _parameter(names, name) for name in used}
    _refuse_unknown(file, model_class, [name for name, place in placed.items() if place is None])
    check_parts(opened, {name: place for name, place in placed.items() if place is not None}, _shapes(model))
    missing = sorted({name for name, _ in model.named_parameters()} - set(placed.values()))
    if missing:
        raise ModelError(f"{file} lacks {len(missing)} of the target's tensors ({', '.join(missing[:5])} ...)")


class _Matched(NamedTuple):
    """An open file, its model without weights, and what turns the one's tensors into the other's."""

    opened: Gguf
    model: nn.Module
    processor: Any
    names: dict[str, str]


def _matched(file: Path, model_class: Any, config: Any) -> _Matched:
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    opened = Gguf(file)
    architecture = opened.metadata.get("general.architecture", "")
    values = config.get_text_config().to_dict()
    processor = layout_of(architecture, values)
    if processor is None:
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=values)
    with torch.device("meta"):
        model = model_class(config)
    return _Matched(opened, model, processor, _module_names(model, processor))


def _refuse_unknown(file: Path, model_class: Any, names: Iterable[str]) -> None:
    if left := sorted(set(names).difference(ROPE_TENSORS)):
        raise ModelError(f"{file} holds {len(left)} tensors that {model_class.__name__} has no place for: {left[:3]}")


def _parameter(names: dict[str, str], tensor: str) -> str | None:
    """The model's parameter that a tensor is, or is a part of; parameters of experts don't end in `.weight`."""
    return names.get(tensor) or names.get(tensor.removesuffix(".weight"))


def _packed(
    opened: Gguf, used: Sequence[str], model: nn.Module, processor: Any, names: dict[str, str]
) -> dict[str, PackedWeight]:
    """The weights of linears, plain embeddings and experts that can stay packed; none if that is less than half.

    transformers may reorder a weight's rows, and stacks gate and up projections. Where each row goes is found by
    passing row numbers through it.
    """
    parts: dict[str, list[str]] = {}
    for name in used:
        key = _parameter(names, name)
        if key is not None and opened.tensors[name].type in GGML and len(opened.tensors[name].shape) > 1:
            parts.setdefault(key, []).append(name)
    found = {}
    for key, tensors in parts.items():
        order = _order(opened, tensors, processor, names)
        kinds = {opened.tensors[name].type for name in tensors}
        shape = model.get_parameter(key).shape
        module = model.get_submodule(key.rpartition(".")[0])
        kept = type(module) in (nn.Linear, nn.Embedding) if len(shape) == 2 else can_stay_packed(module)
        whole = order is not None and order.sort().values.equal(torch.arange(prod(shape[:-1])))
        # the kernel reads whole rows where they lie in the file
        wide = {opened.tensors[name].shape[-1] for name in tensors} == {shape[-1]}
        fits = all(fit_float16(opened.tensors[name].type, opened.blocks(name)) for name in tensors)
        if kept and whole and wide and fits and len(kinds) == 1 and order is not None:
            found[key] = PackedWeight(kinds.pop(), partial(_panels, opened, tensors, order))
    for key in [key for key in found if not key.endswith(".weight")]:
        layer = key.rpartition(".")[0]
        if not {f"{layer}.gate_up_proj", f"{layer}.down_proj"} <= set(found):
            found.pop(key)
    size = sum(opened.tensors[name].size for key in found for name in parts[key])
    return found if 2 * size > sum(opened.tensors[name].size for name in used) else {}


def _order(opened: Gguf, tensors: Sequence[str], processor: Any, names: dict[str, str]) -> Tensor | None:
    """The order in which the concatenated rows of some tensors make up their parameter; None if they don't.

    float64 holds all row numbers exactly.
    """
    read: dict[str, Any] = {"tensors": {}}
    first = 0
    for name in tensors:
        shape = (*opened.tensors[name].shape[:-1], 1)
        numbers = np.arange(float(prod(shape))).reshape(shape) + first
        first += numbers.size
        made = processor.process(weights=numbers, name=name, tensor_key_mapping=names, parsed_parameters=read)
    if made.name is None:  # a part of a stack
        stack = read["tensors"].get(_parameter(names, tensors[0]))
        return None if stack is None else stack.flatten().long()
    if len(tensors) > 1 or made.name != tensors[0] or made.weights.shape != shape:
        return None
    return torch.from_numpy(np.array(made.weights)).flatten().long()


def _panels(opened: Gguf, tensors: Sequence[str], order: Tensor) -> tuple[WeightFormat, Tensor]:
    """The panels of the concatenated rows of some tensors in this `order`; the file's pages are dropped afterwards."""
    info = opened.tensors[tensors[0]]
    kind = GGML[info.type]

    def pack() -> tuple[WeightFormat, Tensor]:
        addresses = torch.cat([opened.row_addresses(name) for name in tensors])[order]
        panels = panels_of_rows(info.kind, kind, addresses, info.shape[-1] // GROUP)
        for name in tensors:
            opened.drop_pages(name)
        return kind, panels

    return cached_layout(pack, len(order))


def model_by_transformers(file: Path, dtype: torch.dtype) -> Any:
    """Load the model of a GGUF file as transformers itself reads and dequantizes it: slowly, without `read_weights`.

    Raises ModelError if it can't.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    try:
        return AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),  # otherwise it may keep weights packed
            trust_remote_code=False,
        )
    except Exception as error:  # a bad file can make its reader raise anything
        raise ModelError(f"transformers can't read the model in {file}: {type(error).__name__}: {error}") from error


def _module_names(model: Any, processor: Any) -> dict[str, str]:
    """Names of a GGUF file's tensors -> names in `model`.

    transformers would walk all submodules and rebuild gguf's table of names for each, which takes seconds; the top
    module gives the names of every architecture that is read.
    """
    if isinstance(processor, TensorLayout):
        return processor.names(model.state_dict())
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    top = SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=dict)
    names: dict[str, str] = get_gguf_hf_weights_map(top, processor)
    return names


def stored_dtype(file: Path) -> torch.dtype:
    """The dtype in which a GGUF file's weights are run: that of most of its values, bfloat16 if these are quantized."""
    sizes: Counter[str] = Counter()
    for tensor in Gguf(file).tensors.values():
        sizes[tensor.dtype] += tensor.size
    most = max(sizes, key=lambda kind: sizes[kind], default="F32")
    return {"F32": torch.float32, "F16": torch.float16}.get(most, torch.bfloat16)


_NEGLIGIBLE_SHARE = 0.05
"""The share of a file's size up to which more memory isn't worth a warning."""
LAYER = re.compile(r"blk\.(\d+)\.")
"""Prefix of the names of a layer's tensors."""
KEPT_IN_FLOAT32 = "e_score_correction_bias"
"""The bias on a mixture of experts' routing scores: in half precision it would select other experts."""
