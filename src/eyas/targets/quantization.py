"""Quantized checkpoints: which are refused, and which are dequantized at load.

On a CPU, eyas itself reads the integers of AWQ, GPTQ and compressed-tensors (`quantized_weights.py`). Quantized layers
of other libraries stay as they are. But where transformers would multiply by float weights anyway, it is made to
dequantize at load instead of before the first pass. The model is then a plain one, with native passes, and that is the
model whose output speculation reproduces.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from eyas.errors import ModelError, UnsupportedModelError

_KERNELS_ON_GPUS = ("fp8", "mxfp8", "mxfp4")
_INTEGERS = ("pack-quantized", "int-quantized", "naive-quantized", None)
"""compressed-tensors' integer formats; None = the groups name no format of their own."""


def quantized_by(config: Any) -> str | None:
    """The method that a model's weights are quantized with; None if they aren't, or are dequantized at load."""
    settings = _quantization(config)
    return None if settings is None or settings.get("dequantize") else _method(settings)


def own_settings(config: Any) -> dict[str, Any] | None:
    """The settings of a checkpoint that eyas reads itself, as decided by `dequantize_at_load`; None for others."""
    settings = _quantization(config)
    return settings if settings is not None and settings.get("dequantize") and _has_known_layout(settings) else None


def _has_known_layout(settings: dict[str, Any]) -> bool:
    """Whether eyas knows the layout of a checkpoint's weights: 4 and 8 bits, without rotations or sparsity."""
    method = _method(settings)
    if method == "awq":
        layout = settings.get("version") or settings.get("format") or "gemm"
        return settings.get("bits") == 4 and str(getattr(layout, "value", layout)).lower() == "gemm"
    if method == "gptq":
        version = settings.get("checkpoint_format") or "gptq"
        return (
            settings.get("bits") in (4, 8) and version in ("gptq", "gptq_v2") and not settings.get("is_marlin_format")
        )
    groups = [group for group in (settings.get("config_groups") or {}).values() if isinstance(group, dict)]
    if method != "compressed-tensors" or not groups or settings.get("transform_config"):
        return False
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return False
    weights = [group.get("weights") or {} for group in groups]
    formats = {group.get("format") for group in groups} | {settings.get("format")} - {"mixed-precision"}
    return formats <= set(_INTEGERS) and all(
        str(each.get("type")) == "int" and each.get("num_bits") in (4, 8) for each in weights
    )


def dequantize_at_load(config: Any, device: torch.device) -> str | None:
    """Mark a checkpoint to be dequantized if transformers wouldn't run it as it is; return its method, or None.

    On a CPU, this applies to the integers that eyas reads itself, which may then stay packed, and to FP8 and MXFP4, for
    which there are no kernels. On any device it applies to compressed-tensors, which transformers decompresses before
    the first pass, but leaves the layers wrapped. Its checkpoints of several schemes can't be dequantized.
    """
    settings = _quantization(config)
    if settings is None:
        return None
    method = _method(settings)
    plain = device.type == "cpu" and (method in _KERNELS_ON_GPUS or _has_known_layout(settings))
    if not plain and not (method == "compressed-tensors" and len(settings.get("config_groups") or ()) == 1):
        return None
    config.quantization_config = {**settings, "dequantize": True}
    return method


def finish_dequantized(model: Any, config: Any, dtype: torch.dtype) -> None:
    """Convert all parameters of a model that was dequantized at load to its dtype.

    transformers leaves the unquantized parameters of FP8 checkpoints in the dtype they are stored in.
    """
    if (_quantization(config) or {}).get("dequantize") and own_settings(config) is None:
        for parameter in model.parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.to(dtype)


def refuse_quantization(model_class: type[Any], config: Any) -> None:
    """Raise UnsupportedModelError for a method that can't be run, ModelError if GPTQ's libraries are missing.

    transformers would ignore a method that it doesn't know. In LLM.int8, a token's results depend on the other tokens
    of its pass, so no pass reproduces another.
    """
    settings = _quantization(config)
    if settings is None or own_settings(config) is not None:
        return
    method = _method(settings)
    if settings.get("load_in_8bit") and settings.get("llm_int8_threshold", 6.0) > 0:
        raise UnsupportedModelError(
            "the checkpoint is quantized by bitsandbytes in 8 bits with outliers (LLM.int8): which columns stay in 16 "
            "bits depends on all tokens of a pass, so neither speculation nor batching reproduces plain decoding; use "
            "4 bits, torchao, or llm_int8_threshold 0"
        )
    if not AutoHfQuantizer.supports_quant_method(settings):
        raise UnsupportedModelError(
            f"the checkpoint is quantized by {method}, which this version of transformers can't read; use one "
            f"quantized by {', '.join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))}, or the unquantized model"
        )
    # transformers would name one library at a time, and ask for a GPU instead of gptqmodel
    missing = [library for library in ("gptqmodel", "optimum") if method == "gptq" and find_spec(library) is None]
    if missing:
        raise ModelError(f"the checkpoint is quantized by gptq: install {' and '.join(missing)}")
    _refuse_incomplete_blocks(model_class, config, settings)


def _refuse_incomplete_blocks(model_class: type[Any], config: Any, settings: dict[str, Any]) -> None:
    """Raise UnsupportedModelError for FP8 weights to dequantize that don't consist of whole blocks.

    transformers divides their rows by the number of blocks, and so gives some rows another block's scale.
    """
    blocks = settings.get("weight_block_size")
    if not blocks or not settings.get("dequantize"):
        return
    with torch.device("meta"):
        model = model_class(config)
    for name, module in model.named_modules():
        stored = type(module) is nn.Linear and module is not model.get_output_embeddings()
        if stored and should_convert_module(name, settings.get("modules_to_not_convert")):
            rows, columns = module.weight.shape
            if any(size > block and size % block for size, block in zip((rows, columns), blocks, strict=True)):
                raise UnsupportedModelError(
                    f"{name} is {rows} x {columns}, no multiple of its FP8 blocks of {blocks[0]} x {blocks[1]}: "
                    "transformers dequantizes such weights incorrectly; use the unquantized model"
                )


def _quantization(config: Any) -> dict[str, Any] | None:
    """The settings that a config gives for quantized weights; None if it gives none."""
    parts = (getattr(part, "quantization_config", None) for part in (config, config.get_text_config()))
    found = next((part for part in parts if part is not None), None)
    settings = found if found is None or isinstance(found, dict) else found.to_dict()
    return None if settings is None else {"quant_method": "a method that isn't named", **settings}


def _method(settings: dict[str, Any]) -> str:
    return str(getattr(settings["quant_method"], "value", settings["quant_method"]))
