"""The weights of a target in a GGUF file, dequantised under the names that transformers' modules have for them.

What a tensor is called there, and how llama.cpp laid it out (rows of queries and keys are permuted, norms are stored
with 1 added, ...), is transformers' knowledge (`modeling_gguf_pytorch_utils`); only the file is read by eyas, which
checks every size before it is used, and is ten times as fast.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from eyas.errors import ModelError
from eyas.gguf import Gguf


def read_weights(
    file: Path, model_class: Any, config: Any, dtype: torch.dtype, *, partial: bool = False
) -> dict[str, Tensor]:
    """The state dict of a `model_class` with `config`, in `dtype`, from a GGUF file.

    `partial`: the config has fewer layers than the file; the others aren't read. Raises ModelError for tensors that
    the model has no place for, CheckpointError for a damaged file.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    opened = Gguf(file)
    architecture = opened.metadata.get("general.architecture", "")
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    with torch.device("meta"):
        names = _module_names(model_class(config), processor)
    read: dict[str, Any] = {"tensors": {}}  # experts' parts are put together there
    unknown = []
    layers = config.get_text_config().num_hidden_layers
    for name in opened.tensors:
        layer = _LAYER.match(name)
        if partial and layer is not None and int(layer[1]) >= layers:
            continue
        made = processor.process(
            weights=opened.load(name).float().numpy(), name=name, tensor_key_mapping=names, parsed_parameters=read
        )
        if made.name is None:
            continue
        if made.name not in names:
            unknown.append(made.name)
            continue
        read["tensors"][names[made.name]] = torch.from_numpy(made.weights.copy()).to(dtype)
    if left := sorted(name for name in unknown if name not in _COMPUTED):
        raise ModelError(f"{file} holds {len(left)} tensors that {model_class.__name__} has no place for: {left[:3]}")
    return {name: weight.to(dtype) for name, weight in read["tensors"].items()}


def model_by_transformers(file: Path, dtype: torch.dtype) -> Any:
    """The model of a GGUF file as transformers itself reads and dequantises it: slowly, and without `read_weights`.

    Raises ModelError if it can't.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    try:
        return AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),  # else it may keep the weights packed
            trust_remote_code=False,
        )
    except Exception as error:  # its reader raises whatever a file makes it stumble over
        raise ModelError(f"transformers can't read the model in {file}: {type(error).__name__}: {error}") from error


def _module_names(model: Any, processor: Any) -> dict[str, str]:
    """What the tensors of a GGUF file are called in `model`.

    transformers goes through all submodules and makes gguf's table of names anew for each, which takes seconds. Only a
    model whose names aren't all found at the top, such as Bloom's, needs that.
    """
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    top = SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=dict)
    names: dict[str, str] = get_gguf_hf_weights_map(top, processor)
    if model.state_dict().keys() <= set(names.values()):
        return names
    names = get_gguf_hf_weights_map(model, processor)
    return names


def stored_dtype(file: Path) -> torch.dtype:
    """What a GGUF file's weights are run in: the dtype of most of its values, bfloat16 where they are quantised."""
    return _stored_dtype(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _stored_dtype(file: Path, _: int) -> torch.dtype:
    """Kept for as long as the file is the same: a load asks twice, and a tokenizer takes long to go through."""
    sizes: Counter[str] = Counter()
    for tensor in Gguf(file).tensors.values():
        sizes[tensor.dtype] += tensor.size
    most = max(sizes, key=lambda kind: sizes[kind], default="F32")
    return {"F32": torch.float32, "F16": torch.float16}.get(most, torch.bfloat16)


_LAYER = re.compile(r"blk\.(\d+)\.")
"""What the names of a layer's tensors begin with."""
_COMPUTED = frozenset({"rope_freqs.weight"})
"""Tensors that transformers computes from the config."""
