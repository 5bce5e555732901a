"""Tiny checkpoints in published quantization formats, written from the formats' descriptions, without their libraries.

Each is a Llama (MXFP4: a GPT-OSS) with weights in few bits and the `quantization_config` of its format, together with
the float model that it stands for, so that the weights that a library reads can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from . import tiny

# O output features, I input features, G weights with one scale, W weights in a word of 32 bits
GROUP = 32
SIZES = {"hidden_size": 64, "intermediate_size": 128}
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors of a linear, by the suffix of its name, and the weight [O, I] that they stand for."""


def _words(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes [..., N] packed in words of 32 bits [..., N / W], the first in the lowest bits."""
    shifts = torch.arange(0, 32, bits)
    words = (codes.long().unflatten(-1, (-1, 32 // bits)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _scales(least: Tensor) -> Tensor:
    """Varying scales of at least `least`: powers of two, so that every dtype represents the weights exactly."""
    exponents = least.log2().ceil()
    return (exponents + torch.arange(least.numel()).view_as(least) % 3).exp2()


def _codes(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Unsigned codes [O, I] with zero in the middle, and float16 scales [O, I / G] of a weight."""
    half = 2 ** (bits - 1)
    grouped = weight.unflatten(1, (-1, group))
    scales = _scales(grouped.abs().amax(-1) / (half - 1)).half()
    codes = (grouped / scales.float().unsqueeze(-1)).round().clamp(-half, half - 1) + half
    return codes.flatten(1).long(), scales


def _with_zeros(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned codes [O, I], arbitrary float16 scales and unsigned zeros [O, I / G], never 0 nor all in the middle."""
    grouped = weight.unflatten(1, (-1, group))
    most = grouped.amax(-1).clamp(min=0)
    least = grouped.amin(-1).clamp(max=0)
    scales = ((most - least) / (2**bits - 1)).half()
    zeros = (-least / scales.float()).round().clamp(1, 2**bits - 1)
    codes = (grouped / scales.float().unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return codes.clamp(0, 2**bits - 1).flatten(1).long(), scales, zeros.long()


def _decoded(codes: Tensor, scales: Tensor, zeros: Tensor | int) -> Tensor:
    grouped = codes.unflatten(1, (scales.shape[1], -1)) - (zeros if isinstance(zeros, int) else zeros.unsqueeze(-1))
    return (grouped * scales.float().unsqueeze(-1)).flatten(1)


def _compressed_int(weight: Tensor, bits: int, group: int) -> _Stored:
    """compressed-tensors' pack-quantized."""
    codes, scales = _codes(weight, bits, group)
    shape = torch.tensor(weight.shape)
    stored = {"weight_packed": _words(codes, bits), "weight_scale": scales, "weight_shape": shape}
    return stored, _decoded(codes, scales, 2 ** (bits - 1))


def _compressed_fp8(weight: Tensor) -> _Stored:
    """compressed-tensors' float-quantized, with a scale per output."""
    scale = _scales(weight.abs().amax(1, keepdim=True) / 448)
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def _fp8_blocks(weight: Tensor) -> _Stored:
    """DeepSeek's and Qwen's FP8, with a scale per square block."""
    padding = [part for size in reversed(weight.shape) for part in (0, -size % GROUP)]
    padded = nn.functional.pad(weight, padding)
    blocks = padded.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))  # [O / G, G, I / G, G]
    scales = _scales(blocks.abs().amax((1, 3)) / 448)
    wide = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    wide = wide[: weight.shape[0], : weight.shape[1]]
    values = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scales}, values.float() * wide


def _compressed_zeros(weight: Tensor) -> _Stored:
    """compressed-tensors' pack-quantized with zeros, which are packed along the outputs."""
    codes, scales, zeros = _with_zeros(weight, 4, GROUP)
    stored = {
        "weight_packed": _words(codes, 4),
        "weight_scale": scales,
        "weight_zero_point": _words(zeros.T, 4).T.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, _decoded(codes, scales, zeros)


def _int_quantized(weight: Tensor) -> _Stored:
    """compressed-tensors' int-quantized, W8A8, with a scale per output; inputs are quantized per token."""
    codes, scales = _codes(weight, 8, weight.shape[1])
    return {"weight": (codes - 128).to(torch.int8), "weight_scale": scales.bfloat16()}, _decoded(codes, scales, 128)


def _gptq(weight: Tensor, bits: int = 4, group: int = GROUP, zeros: bool = False, less: int = 1) -> _Stored:
    """GPTQ (version 1 stores zeros minus `less`): codes are packed along the inputs, zeros along the outputs."""
    if zeros:
        codes, scales, middle = _with_zeros(weight, bits, group)
    else:
        codes, scales = _codes(weight, bits, group)
        middle = torch.full(scales.shape, 1 << (bits - 1))
    stored = {
        "qweight": _words(codes, bits).T.contiguous(),
        "qzeros": _words(middle.T - less, bits),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // group).to(torch.int32),
        "bias": torch.zeros(len(weight), dtype=torch.float16),  # as in old files
    }
    return stored, _decoded(codes, scales, middle)


def _act_order(weight: Tensor) -> _Stored:
    """GPTQ with inputs in permuted groups (desc_act)."""
    stored, meant = _gptq(weight)
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    codes = meant.unflatten(1, (-1, GROUP)) / stored["scales"].T.float().unsqueeze(-1) + 8
    stored["qweight"] = _words(codes.flatten(1)[:, order].long(), 4).T.contiguous()
    stored["g_idx"] = stored["g_idx"][order].contiguous()
    return stored, meant[:, order]


def _awq(weight: Tensor, group: int = GROUP) -> _Stored:
    """AWQ (gemm): codes are packed along the outputs, in an order of their own."""
    codes, scales, zeros = _with_zeros(weight, 4, group)

    def ordered(values: Tensor) -> Tensor:
        return _words(values.T.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1), 4)

    stored = {"qweight": ordered(codes), "qzeros": ordered(zeros), "scales": scales.T.contiguous()}
    return stored, _decoded(codes, scales, zeros)


def _compressed(kind: str, activations: bool = False, **weights: Any) -> dict[str, Any]:
    """The config of compressed-tensors; 8-bit activations are quantized per token."""
    common = {"symmetric": True, "dynamic": False, "observer": "minmax", **weights}
    inputs = {**common, "strategy": "token", "dynamic": True, "observer": None} if activations else None
    group = {"targets": ["Linear"], "weights": common, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
FORMATS: dict[str, tuple[Callable[[Tensor], _Stored], dict[str, Any]]] = {
    "compressed-int4": (lambda w: _compressed_int(w, 4, GROUP), _compressed("pack-quantized", **_INT4)),
    "compressed-int8": (lambda w: _compressed_int(w, 8, w.shape[1]), _compressed("pack-quantized", **_INT8)),
    # older files call the status frozen
    "compressed-fp8": (_compressed_fp8, {**_compressed("float-quantized", **_FP8), "quantization_status": "frozen"}),
    "compressed-fp8-dynamic": (_compressed_fp8, _compressed("float-quantized", activations=True, **_FP8)),
    "fp8-blocks": (
        _fp8_blocks,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [GROUP, GROUP],
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "compressed-int4-zeros": (_compressed_zeros, _compressed("pack-quantized", **{**_INT4, "symmetric": False})),
    "compressed-w8a8": (_int_quantized, _compressed("int-quantized", activations=True, **_INT8)),
    "gptq": (_gptq, _GPTQ),
    "gptq-zeros": (partial(_gptq, zeros=True), {**_GPTQ, "sym": False}),
    "gptq-v2": (partial(_gptq, zeros=True, less=0), {**_GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}),
    "gptq-8": (partial(_gptq, bits=8, group=64), {**_GPTQ, "bits": 8, "group_size": 64}),
    "gptq-act-order": (_act_order, {**_GPTQ, "desc_act": True}),
    "awq": (_awq, _AWQ),
    "awq-64": (partial(_awq, group=64), {**_AWQ, "group_size": 64}),
}
"""Format -> the function that stores a weight, and the config."""
INTEGERS = [name for name in FORMATS if "fp8" not in name]
"""Integer formats in 4 and 8 bits that eyas reads itself."""


def write(folder: Path, name: str, mlp: str | None = None, family: str = "llama", **sizes: int) -> Any:
    """Write a model in one of `FORMATS`, optionally its MLP in another; returns the float model that it stands for.

    Experts are stored one by one. Unquantized tensors are in bfloat16, which is as exact as float16 here.
    """
    store, settings = FORMATS[name]
    others = store
    if mlp is not None:
        others, (first, second) = FORMATS[mlp][0], (FORMATS[one][1]["config_groups"]["group_0"] for one in (name, mlp))
        groups = {"attention": {**first, "targets": ["re:.*attn.*"]}, "mlp": {**second, "targets": ["re:.*mlp.*"]}}
        settings = {**settings, "config_groups": groups}
    model = tiny.build_model(family, **{**SIZES, **sizes})
    tensors = {}
    for key, weight in model.state_dict().items():
        if key.endswith(("gate_up_proj", "down_proj")):
            names = ("gate_proj", "up_proj") if key.endswith("gate_up_proj") else ("down_proj",)
            for expert, whole in enumerate(weight):
                for part, own in zip(names, whole.chunk(len(names)), strict=True):
                    stored, meant = others(own)
                    prefix = f"{key.rpartition('.')[0]}.{expert}.{part}."
                    tensors.update({prefix + end: tensor for end, tensor in stored.items()})
                    own.copy_(meant)
        elif key.endswith("proj.weight") or "kv_a_proj" in key:
            stored, meant = (others if ".mlp." in key else store)(weight)
            tensors.update({key.removesuffix("weight") + part: tensor for part, tensor in stored.items()})
            weight.copy_(meant)
        else:
            tensors[key] = weight.to(torch.bfloat16)
            weight.copy_(tensors[key])
    _save(folder, model, tensors, settings)
    return model


def write_mxfp4(folder: Path) -> Any:
    """Write a GPT-OSS with experts in MXFP4, as OpenAI's; returns the float model that it stands for."""
    model = tiny.build_model("gptoss", hidden_size=64, intermediate_size=64)
    tensors = {}
    for key, weight in model.state_dict().items():
        if key.endswith(("gate_up_proj", "down_proj")):
            grouped = weight.transpose(1, 2).unflatten(2, (-1, 32))  # [E, O, I / 32, 32]
            exponents = (grouped.abs().amax(-1) / 6).log2().ceil()
            scaled = grouped / exponents.exp2().unsqueeze(-1)
            codes = (scaled.abs().unsqueeze(-1) - _FP4).abs().argmin(-1)
            meant = _FP4[codes] * scaled.sign() * exponents.exp2().unsqueeze(-1)
            nibbles = (codes + 8 * (scaled < 0)).unflatten(-1, (-1, 2))
            tensors[f"{key}_blocks"] = (nibbles[..., 0] + 16 * nibbles[..., 1]).to(torch.uint8)
            tensors[f"{key}_scales"] = (exponents + 127).to(torch.uint8)
            weight.copy_(meant.flatten(2).transpose(1, 2))
        else:
            tensors[key] = weight.to(torch.bfloat16)
            weight.copy_(tensors[key])
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _save(folder, model, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": plain})
    return model


def _save(folder: Path, model: Any, tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        **json.loads(model.config.to_json_string()),
        "architectures": [type(model).__name__],
        "dtype": "bfloat16",
        "quantization_config": settings,
    }
    (folder / "config.json").write_text(json.dumps(config))
