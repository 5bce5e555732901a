"""MTP modules (multi-token prediction) inside target checkpoints, which transformers leaves out when it loads a target.

A module is one more decoder layer of the target's, between norms and a projection (`drafters/kinds/mtp.py`). Three
layouts are published: those of DeepSeek-V3 (also GLM-4.5), of Qwen3-Next and of MiMo. They differ in names, in which
half of the projection reads the embedding, and in how norms are stored.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from eyas.drafters.checkpoint import check_numbers, check_tensors
from eyas.drafters.files import Headers, TensorInfo, read_headers
from eyas.drafters.formats.tensor_names import EMBEDDING, HEAD, VOCABULARY_MAP
from eyas.drafters.in_target._cascade import Cascade
from eyas.drafters.kinds.mtp import MtpModule, MtpModuleConfig
from eyas.drafters.network import Attend, DraftNetwork
from eyas.drafters.target_block import TargetBlock
from eyas.drafters.weightless import NAMES as WITHOUT_FILES
from eyas.errors import CheckpointError
from eyas.targets import Target
from eyas.targets.slots import KVShape

_BLOCK = "target_block.layer."
"""Where a network's block is among its tensors."""
_KEPT_IN_FLOAT32 = "e_score_correction_bias"
"""What a mixture of experts adds to its scores to choose by: in half precision it would choose others."""


@dataclass(frozen=True)
class Layout:
    """The names under which a family of models stores its modules."""

    family: str
    prefix: str
    """What a module's tensors begin with: `{layer}` counts on from the target's layers, `{module}` from 0."""
    names: Mapping[str, str]
    """Names in the file, `*` standing for the prefix -> the network's; what else has the prefix is of the block."""
    zero_first: bool = True
    state_first: bool = False
    """Whether the first half of the projection's columns reads the state, not the embedding."""
    norms_from_one: bool = False
    """Whether norms are stored as what is added to 1."""

    def prefixes(self, names: Collection[str], layers: int) -> list[str]:
        """The prefixes of the modules among tensors of these names, in order, for a target of so many layers."""
        found: list[str] = []
        while True:
            prefix = self.prefix.format(layer=layers + len(found), module=len(found))
            held = {native for name in names if (native := self.native(name, prefix)) is not None}
            if not {"eh_proj.weight", "norm.weight"} <= held or not any(name.startswith(_BLOCK) for name in held):
                return found
            found.append(prefix)

    def native(self, name: str, prefix: str) -> str | None:
        """The network's name of a tensor in the file; None = it isn't of the module with this prefix."""
        for theirs, ours in self.names.items():
            if name == theirs.replace("*", prefix):
                return ours
        return _BLOCK + name.removeprefix(prefix) if name.startswith(prefix) else None


LAYOUTS = (
    Layout(
        "DeepSeek-V3",
        "model.layers.{layer}.",
        {
            "*enorm.weight": "enorm.weight", "*hnorm.weight": "hnorm.weight", "*eh_proj.weight": "eh_proj.weight",
            "*shared_head.norm.weight": "norm.weight", "*shared_head.head.weight": HEAD,
            "*embed_tokens.weight": EMBEDDING,
        },
    ),
    Layout(
        "Qwen3-Next",
        "mtp.layers.{module}.",
        {
            "mtp.pre_fc_norm_embedding.weight": "enorm.weight", "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
            "mtp.fc.weight": "eh_proj.weight", "mtp.norm.weight": "norm.weight",
        },
        zero_first=False,
        norms_from_one=True,
    ),
    Layout(
        "MiMo",
        "model.mtp_layers.{module}.",
        {
            "*token_layernorm.weight": "enorm.weight", "*hidden_layernorm.weight": "hnorm.weight",
            "*input_proj.weight": "eh_proj.weight", "*final_layernorm.weight": "norm.weight",
        },
        state_first=True,
    ),
)  # fmt: skip


class Modules(NamedTuple):
    """The modules of a checkpoint."""

    layout: Layout
    prefixes: list[str]
    """What the tensors of each begin with."""


def find_modules(names: Collection[str], layers: int) -> Modules | None:
    """The modules in a checkpoint with tensors of these names, for so many layers of the target; None = it has none."""
    found = (Modules(layout, layout.prefixes(names, layers)) for layout in LAYOUTS)
    return next((modules for modules in found if modules.prefixes), None)


class TargetModule(MtpModule):
    """A module whose block is a decoder layer of the target's own class."""

    def __init__(self, config: MtpModuleConfig, target: Target) -> None:
        super().__init__(config)
        self.target_block = TargetBlock(target)

    @property
    def kv_shapes(self) -> list[tuple[KVShape, KVShape]]:
        return [self.target_block.kv_shape]

    def block(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        out: Tensor = self.target_block(x, positions, attend)
        return out


def load(path: Path, target: Target) -> DraftNetwork:
    """The modules in the checkpoint at `path`, which `target` was loaded from: one, or a cascade of several.

    Raises CheckpointError where there is none, and UnsupportedModelError for a block that eyas can't run.
    """
    headers = read_headers(path)
    found = find_modules(headers.tensors, target.num_layers)
    if found is None:
        raise CheckpointError(
            f"{path} has no MTP modules (of the layouts of {', '.join(layout.family for layout in LAYOUTS)}): give a "
            f"drafter with a draft model, or a method that needs none, such as {', '.join(WITHOUT_FILES)}"
        )
    modules = [_module(path, headers, found.layout, prefix, target) for prefix in found.prefixes]
    return modules[0] if len(modules) == 1 else Cascade(modules).to(target.device).eval().requires_grad_(False)


def _module(path: Path, headers: Headers, layout: Layout, prefix: str, target: Target) -> TargetModule:
    """The module whose tensors begin with `prefix`."""
    names = {name: native for name in headers.tensors if (native := layout.native(name, prefix)) is not None}
    tensors = {names[name]: tensor for name, tensor in headers.read_some(names).items()}
    check_numbers(tensors, str(path))
    _drop_copies(tensors, headers)
    _restore(tensors, layout, layout.norms_from_one and _adds_one(target.layers[-1]))
    config = MtpModuleConfig(
        hidden_size=target.hidden_size, target_hidden_size=target.hidden_size, vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size, rms_norm_eps=getattr(target.config, "rms_norm_eps", 1e-6),
        embedding="own" if EMBEDDING in tensors else "shared", head="own" if HEAD in tensors else "shared",
        zero_first=layout.zero_first, default_tree="chain:3",
    )  # fmt: skip
    with torch.device("meta"):
        network = TargetModule(config, target)
    expected = {name: shape for name, shape in network.shapes.items() if name not in VOCABULARY_MAP}
    _join_experts(tensors, expected)
    infos = {name: TensorInfo(tuple(tensor.shape), str(tensor.dtype), path) for name, tensor in tensors.items()}
    check_tensors(infos, expected, f"the MTP module {prefix}* of {path}")
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(torch.float32 if name.endswith(_KEPT_IN_FLOAT32) else target.dtype)
    every = torch.arange(target.vocab_size)
    tensors |= {"d2t": torch.zeros_like(every), "t2d": torch.ones_like(every, dtype=torch.bool)}
    network.fill(tensors, target)
    return network.to(target.device)


def _drop_copies(tensors: dict[str, Tensor], headers: Headers) -> None:
    """Leave out an embedding or head that is the target's own, which the module then shares."""
    embedding = "model.embed_tokens.weight"
    head = "lm_head.weight" if "lm_head.weight" in headers.tensors else embedding
    for part, original in ((EMBEDDING, embedding), (HEAD, head)):
        both = part in tensors and original in headers.tensors
        if both and torch.equal(tensors[part], headers.read_some([original])[original]):
            del tensors[part]


@torch.no_grad()
def _adds_one(layer: nn.Module) -> bool:
    """Whether the norms of a target's layer multiply by one more than their weights, as Gemma's and Qwen3-Next's do."""
    norm = next(part for name, part in layer.named_modules() if name.endswith("norm"))
    ones, zeros = copy.deepcopy(norm), copy.deepcopy(norm)
    ones.weight.fill_(1.0)
    zeros.weight.fill_(0.0)
    x = torch.linspace(-3, 5, norm.weight.numel(), device=norm.weight.device, dtype=norm.weight.dtype).cos()
    return bool(torch.allclose(ones(x), 2 * zeros(x), rtol=1e-2))


def _restore(tensors: dict[str, Tensor], layout: Layout, block_adds_one: bool) -> None:
    """Bring norms and projection of a layout into the network's form; the block's may add one to its norms itself."""
    if layout.state_first:
        tensors["eh_proj.weight"] = torch.cat(tensors["eh_proj.weight"].chunk(2, dim=1)[::-1], dim=1)
    if layout.norms_from_one:
        for name, tensor in tensors.items():
            if name.endswith("norm.weight") and not (block_adds_one and name.startswith(_BLOCK)):
                tensors[name] = tensor.float() + 1


def _join_experts(tensors: dict[str, Tensor], expected: Collection[str]) -> None:
    """Stack the weights of experts that the file has one by one, as transformers' modules have them."""
    for joined in [name for name in expected if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        stem, _, part = joined.rpartition(".")
        parts = part.replace("gate_up", "gate up").replace("_proj", "").split()
        count = sum(1 for name in tensors if re.fullmatch(rf"{re.escape(stem)}\.\d+\.{parts[0]}_proj\.weight", name))
        names = [[f"{stem}.{expert}.{each}_proj.weight" for each in parts] for expert in range(count)]
        if count and all(name in tensors for several in names for name in several):
            tensors[joined] = torch.stack([torch.cat([tensors.pop(name) for name in several]) for several in names])
