"""Weights of AWQ, GPTQ and compressed-tensors checkpoints: kept packed as integers, or dequantized.

Supported layouts: AutoAWQ (`gemm`), AutoGPTQ and GPTQModel (versions 1 and 2), and compressed-tensors
(`pack-quantized`, `int-quantized`). A weight is `(code - zero) * scale`, with a scale and a zero for each group of
inputs.

Shapes: O outputs, I inputs, G groups of inputs, W codes per 32-bit word, E experts.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from eyas.errors import ModelError
from eyas.targets.native.experts import can_stay_packed
from eyas.targets.native.library import PANEL
from eyas.targets.native.packed import GROUP, PIECE, PackedWeight, WeightBlocks, WeightFormat, Weights, joint_panels
from eyas.targets.native.panel_files import cached_layout

_LOG = logging.getLogger("eyas")
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Position of each of eight outputs' codes in a word of AWQ."""
_PARTS = {
    "awq": ("qweight", {"qzeros", "scales"}),
    "gptq": ("qweight", {"qzeros", "scales", "g_idx"}),
    "compressed-tensors": (
        "weight_scale",
        {"weight_packed", "weight", "weight_zero_point", "weight_g_idx", "weight_shape"},
    ),
}
"""Method -> name ending of the tensor that identifies a quantized weight, and endings of the weight's other tensors."""
_OF_INPUTS = re.compile(r"\.(input|output|k|v|q)_(scale|zero_point)$")
"""compressed-tensors' scales of inputs and caches, which eyas quantizes in its own way or not at all."""
_EXPERT = re.compile(r"\blayers\.(\d+)\..*\bexperts\.(\d+)\.(\w+)$")
_STACKS = {
    "gate_proj": ("gate_up_proj", 0), "w1": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
    "w3": ("gate_up_proj", 1), "down_proj": ("down_proj", 0), "w2": ("down_proj", 0),
}  # fmt: skip
"""Name of an expert's projection in checkpoints -> the stack that it is part of, and its index there."""
_LAYER = re.compile(r"\blayers\.(\d+)\.")

_Take = Callable[[str], Tensor | None]
"""Reads a tensor of a weight by the ending of its name; None if there is none."""


@dataclass(frozen=True)
class CodedWeight:
    """A weight in 4-bit or 8-bit codes."""

    bits: int
    codes: Callable[[], Tensor]
    """Reads the codes: [O, I] uint8."""
    scales: Tensor  # [O, G]
    zeros: Tensor  # [O, G] int16, the codes that stand for 0
    groups: Tensor  # [I] int64

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight, [O, I]."""
        return torch.Size((len(self.scales), len(self.groups)))

    @property
    def symmetric(self) -> bool:
        """Whether all zeros are the code in the middle of the range."""
        return bool((self.zeros == 1 << (self.bits - 1)).all())

    def floats(self) -> Tensor:
        """Dequantize the weight [O, I] to float32, which holds it exactly."""
        return (self.codes() - self.zeros[:, self.groups]).float() * self.scales.float()[:, self.groups]

    def why_not_packed(self) -> str | None:
        """The reason why the kernels can't multiply by this weight as it is; None if they can."""
        if not torch.equal(self.scales.half().double(), self.scales.double()):
            return f"float16 doesn't hold scales in {str(self.scales.dtype).removeprefix('torch.')} exactly"
        if self.bits == 8 and not self.symmetric:
            return "they have 8 bits and are asymmetric"
        last = F.pad(self.groups, (0, -len(self.groups) % GROUP), value=int(self.groups[-1])).view(-1, GROUP)
        if (last != last[:, :1]).any():
            return f"some blocks of {GROUP} inputs don't share a scale (desc_act, or smaller groups)"
        return None

    def blocks(self, symmetric: bool) -> WeightBlocks:
        """The weight in blocks, each with the scale of its group, and with the group's zero unless `symmetric`."""
        kinds = {(8, True): WeightFormat.SIGNED8, (4, True): WeightFormat.SIGNED4, (4, False): WeightFormat.ZERO4}
        codes = self.codes()
        of_blocks = self.groups[::GROUP]
        codes = F.pad(codes, (0, -codes.shape[1] % GROUP)).view(len(codes), -1, GROUP)
        zeros = None if symmetric else self.zeros.to(torch.uint8)[:, of_blocks]
        return WeightBlocks(kinds[self.bits, symmetric], codes, self.scales.half()[:, of_blocks], zeros)


def weight_files(name: str) -> Iterator[str]:
    """The safetensors files of a local directory or Hub id, sorted, each looked up only when it is requested."""
    index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    files = [SAFE_WEIGHTS_NAME]
    if index is not None:
        files = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    for file in files:
        yield cast(str, cached_file(name, file))


def read_quantized(
    name: str, model_class: Any, config: Any, settings: Mapping[str, Any], dtype: torch.dtype, *, packs: bool
) -> Weights:
    """Read the weights of a `model_class` with `config`, in `dtype`, from a checkpoint with quantization `settings`.

    Layers that the config doesn't have aren't read. `packs`: weights of linear layers and experts stay packed integers.
    Weights that can't stay packed are dequantized, with a warning that says why. Raises ModelError for weights whose
    tensors don't fit each other or the model, or aren't in the layout that the settings name.
    """
    with torch.device("meta"):
        model = model_class(config)
    reader = _Reader(name, settings, config.get_text_config().num_hidden_layers)
    packing = _Packing(model, reader.method, packs)
    for prefix in reader.quantized:
        packing.add(prefix, reader.coded(prefix))
    packing.finish()
    state = {key: _present(reader.take(key)) for key in reader.plain}
    for prefix in reader.quantized:
        _drop_empty_bias(name, state, prefix, _submodule(model, prefix))
    for prefix, coded in packing.left.items():
        state[f"{prefix}.weight"] = coded.floats().to(dtype)
    if packs and packing.left:
        why = next((why for why, _ in packing.reasons.most_common(1)), "they are in no linear layer of the model")
        _LOG.warning("%d weights of %s are dequantized: %s", len(packing.left), name, why)
    for key in packing.packed:
        state[key] = torch.zeros((), dtype=dtype).expand(model.get_parameter(key).shape)
    return Weights(state, packing.packed)


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _drop_empty_bias(name: str, state: dict[str, Tensor], prefix: str, module: nn.Module | None) -> None:
    """Drop the zero bias that older GPTQ files store for a linear without one. Raises ModelError if it isn't zero."""
    bias = state.get(f"{prefix}.bias")
    if bias is None or not isinstance(module, nn.Linear) or module.bias is not None:
        return
    if bias.any():
        raise ModelError(f"{name} holds a bias of {prefix}, which has none in this model")
    del state[f"{prefix}.bias"]


class _Packing:
    """Decides which weights stay packed, by the model's parameters, and which are left to be dequantized."""

    def __init__(self, model: nn.Module, method: str, packs: bool) -> None:
        self._model = model
        self._method = method
        self._packs = packs
        self.packed: dict[str, PackedWeight] = {}
        self.left: dict[str, CodedWeight] = {}
        self.reasons: Counter[str] = Counter()
        self._experts: dict[str, dict[tuple[int, int], str]] = {}
        """Stacked parameter -> {(expert, part): name of a weight}."""
        stacks = ((_LAYER.search(path), path) for path, module in model.named_modules() if can_stay_packed(module))
        self._stacks = {layer[1]: path for layer, path in stacks if layer}

    def add(self, prefix: str, coded: CodedWeight) -> None:
        """Add a weight; experts wait until `finish` has all experts of their layer."""
        self.left[prefix] = coded
        module = _submodule(self._model, prefix)
        expert = _EXPERT.search(prefix)
        if isinstance(module, nn.Linear):
            if module.weight.shape != coded.shape:
                raise ModelError(f"{prefix} is {list(coded.shape)}, and {list(module.weight.shape)} in the model")
            if type(module) is nn.Linear and self._packable([coded]):
                self._pack(f"{prefix}.weight", [prefix])
        elif expert and expert[1] in self._stacks and expert[3] in _STACKS:
            stack, part = _STACKS[expert[3]]
            self._experts.setdefault(f"{self._stacks[expert[1]]}.{stack}", {})[int(expert[2]), part] = prefix

    def finish(self) -> None:
        """Pack the experts of each layer in which all of them can stay packed."""
        for path in self._stacks.values():
            found = {
                f"{path}.{name}": self._experts.get(f"{path}.{name}", {}) for name in ("gate_up_proj", "down_proj")
            }
            parts = {key: [names[at] for at in sorted(names)] for key, names in found.items()}
            coded = [self.left[name] for names in parts.values() for name in names]
            if all(map(self._complete, parts, parts.values())) and self._packable(coded):
                for key, names in parts.items():
                    self._pack(key, names)

    def _complete(self, key: str, names: Sequence[str]) -> bool:
        """Whether these weights, in this order, make up the model's stack [E, O, I]."""
        experts, outputs, inputs = self._model.get_parameter(key).shape
        coded = [self.left[name] for name in names]
        return (
            sum(one.shape[0] for one in coded) == experts * outputs
            and all(one.shape[1] == inputs and one.shape[0] % PANEL == 0 for one in coded)
            and len({one.bits for one in coded}) == 1
        )

    def _packable(self, weights: Sequence[CodedWeight]) -> bool:
        """Whether all of these weights can stay packed; if not, count the reasons."""
        reasons = [coded.why_not_packed() for coded in weights] if self._packs else []
        self.reasons.update(why for why in reasons if why is not None)
        return self._packs and reasons.count(None) == len(weights)

    def _pack(self, key: str, names: Sequence[str]) -> None:
        weights = [self.left.pop(name) for name in names]
        self.packed[key] = PackedWeight(f"{self._method} int{weights[0].bits}", partial(_panels, weights))


def _panels(weights: Sequence[CodedWeight]) -> tuple[WeightFormat, Tensor]:
    """The panels of the concatenated outputs of some weights."""
    out = sum(len(coded.scales) for coded in weights)
    return cached_layout(lambda: joint_panels(_pieces(weights), out), out)


def _pieces(weights: Sequence[CodedWeight]) -> Iterator[WeightBlocks]:
    symmetric = all(coded.symmetric for coded in weights)
    for coded in weights:
        blocks = coded.blocks(symmetric)
        for rows in torch.arange(len(coded.scales)).split(PIECE):  # type: ignore[no-untyped-call]
            yield blocks.rows(rows)


class _Reader:
    """The tensors of a checkpoint, by the weight that they belong to."""

    def __init__(self, name: str, settings: Mapping[str, Any], layers: int) -> None:
        """Open the tensors of the first `layers` layers. Raises ModelError for scales without codes."""
        self._name = name
        self._settings = settings
        self._files: dict[str, Any] = {}
        self.method = str(getattr(settings["quant_method"], "value", settings["quant_method"]))
        for file in weight_files(name):
            opened = safe_open(file, framework="pt")
            for key in opened.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118  # not a mapping
                layer = _LAYER.search(key)
                if layer is None or int(layer[1]) < layers:
                    self._files[key] = opened
        main, others = _PARTS[self.method]
        self.quantized = sorted(key.removesuffix(f".{main}") for key in self._files if key.endswith(f".{main}"))
        """The names of all quantized weights."""
        belonging = {f"{prefix}.{part}" for prefix in self.quantized for part in (main, *others)}
        self.plain = [key for key in self._files if key not in belonging and not _OF_INPUTS.search(key)]
        """The names of all other tensors."""
        if unpaired := [key for key in self.plain if key.endswith((".scales", ".qzeros", ".weight_packed"))]:
            raise ModelError(f"{name} holds {unpaired[0]}, which belongs to no quantized weight: eyas can't run it")

    def take(self, key: str) -> Tensor | None:
        """The tensor with this name; None if there is none."""
        found: Tensor | None = self._files[key].get_tensor(key) if key in self._files else None
        return found

    def coded(self, prefix: str) -> CodedWeight:
        """The quantized weight with this name. Raises ModelError if its tensors don't fit each other."""
        try:
            return _LAYOUTS[self.method](lambda part: self.take(f"{prefix}.{part}"), self._settings)
        except (ValueError, TypeError, AttributeError, RuntimeError, IndexError, ZeroDivisionError) as error:
            raise ModelError(f"the tensors of {prefix} don't have {self.method}'s layout: {error}") from error


def _codes(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words [..., N / W] to codes [..., N] uint8; the first code is in the lowest bits."""
    if words.dtype != torch.int32:
        raise ValueError(f"words are {words.dtype}")
    raw = words.contiguous().view(torch.uint8)
    return raw if bits == 8 else torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)


def _checked(bits: int, codes: Callable[[], Tensor], scales: Tensor, zeros: Tensor, groups: Tensor) -> CodedWeight:
    """Make a weight of its parts. Raises ValueError if they don't fit each other."""
    if scales.shape != zeros.shape or not scales.is_floating_point():
        raise ValueError(f"scales {list(scales.shape)} in {scales.dtype}, zeros {list(zeros.shape)}")
    if sorted(set(groups.tolist())) != list(range(scales.shape[1])):
        raise ValueError(f"{len(groups)} inputs don't make {scales.shape[1]} groups")
    return CodedWeight(bits, codes, scales.contiguous(), zeros.to(torch.int16).contiguous(), groups.long())


def _in_order(inputs: int, settings: Mapping[str, Any]) -> Tensor:
    """The groups [I] of inputs in their original order."""
    size = settings.get("group_size") or -1
    return torch.arange(inputs) // (inputs if size == -1 else size)


def _awq(take: _Take, settings: Mapping[str, Any]) -> CodedWeight:
    """AutoAWQ's `gemm`: words [I, O / W] and [G, O / W] hold consecutive outputs, in AWQ's own order."""

    def ordered(words: Tensor | None) -> Tensor:
        codes = _codes(_present(words), 4)
        return codes.view(len(codes), -1, 8)[..., _AWQ_ORDER].flatten(1).T

    scales = _present(take("scales")).T
    words = _present(take("qweight"))
    if words.shape[1] * 8 != len(scales):
        raise ValueError(f"{words.shape[1]} words for {len(scales)} outputs")
    groups = _in_order(len(words), settings)
    return _checked(4, lambda: ordered(take("qweight")).contiguous(), scales, ordered(take("qzeros")), groups)


def _gptq(take: _Take, settings: Mapping[str, Any]) -> CodedWeight:
    """AutoGPTQ and GPTQModel: words of codes [I / W, O] hold consecutive inputs, words of zeros consecutive outputs.

    Version 1 stores each zero minus one, so it can't hold 0. Writers differ in how they encoded it, so it is refused.
    """
    scales, words, zeros = (_present(take(part)) for part in ("scales", "qweight", "qzeros"))
    bits, more = divmod(32 * zeros.shape[1], scales.shape[1])
    if bits not in (4, 8) or more or words.shape[1] != scales.shape[1]:
        raise ValueError(f"{bits} bits, words {list(words.shape)} for scales {list(scales.shape)}")
    inputs = len(words) * 32 // bits
    order = take("g_idx")
    read = _codes(zeros, bits).to(torch.int16)
    if settings.get("checkpoint_format", "gptq") != "gptq_v2":
        read = read + 1
        if (read == 1 << bits).any():
            raise ValueError("a zero point of 0, which version 1 of the format can't hold: convert the file to gptq_v2")
    groups = _in_order(inputs, settings) if order is None else order
    return _checked(bits, lambda: _codes(_present(take("qweight")).T, bits), scales.T, read.T, groups)


def _compressed(take: _Take, settings: Mapping[str, Any]) -> CodedWeight:  # noqa: ARG001  # shapes say it all
    """compressed-tensors' `pack-quantized`: words [O, I / W], and zeros in words [O / W, G]; or plain int8 weights."""
    packed = take("weight_packed")
    scales = _present(take("weight_scale"))
    if packed is None:
        shape = list(_present(take("weight")).shape)
        bits = 8
        if _present(take("weight")).dtype != torch.int8:
            raise ValueError(f"codes are {_present(take('weight')).dtype}")
    else:
        shape = _present(take("weight_shape")).tolist()
        fitting = [bits for bits in (4, 8) if packed.shape == (shape[0], -(-shape[1] * bits // 32))]
        if not fitting:
            raise ValueError(f"words {list(packed.shape)} for a weight {shape}")
        bits = fitting[0]
    outputs, inputs = shape
    scales = scales.expand(outputs, 1) if scales.numel() == 1 else scales.view(outputs, -1)
    zeros = take("weight_zero_point")
    order = take("weight_g_idx")
    if zeros is None:
        zeros = torch.full(scales.shape, 1 << (bits - 1))
    elif packed is not None and zeros.dtype == torch.int32:
        zeros = _codes(zeros.T, bits)[:, :outputs].T
    else:
        zeros = zeros.view(outputs, -1).to(torch.int16) + (1 << (bits - 1))
    if order is None or (order == -1).all():
        order = torch.arange(inputs) // (inputs // scales.shape[1])

    def codes() -> Tensor:
        if packed is None:
            return _present(take("weight")).view(torch.uint8) ^ 128
        return _codes(_present(take("weight_packed")), bits)[:, :inputs]

    return _checked(bits, codes, scales, zeros, order)


def _present(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError("a tensor is missing")
    return tensor


_LAYOUTS: dict[str, Callable[[_Take, Mapping[str, Any]], CodedWeight]] = {
    "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed,
}  # fmt: skip
