"""MTP modules (multi-token prediction) inside target checkpoints, which transformers skips when it loads a target.

A module is one more decoder layer of the target's kind (`TargetBlock`) with norms and a projection
(`drafters/kinds/mtp.py`). Nemotron-H's layers have one part each, so its module has several. The supported layouts are
DeepSeek-V3's (also GLM-4.5), Qwen3-Next's (also Qwen3.5), MiMo's and Nemotron-H's. They differ in tensor names, in the
half of the projection that reads the embedding, and in how norms are stored.

Of several modules, each guesses one token further (DeepSeek-V3, arXiv 2412.19437, section 2.2). Module k reads a token
and the output of module k - 1 at the token before it; the first module reads the target's state there. So true pairs
pass through all modules in turn, and a guess at depth d through modules d + 1 and later. At greater depths the last
module is fed its own output. Each module has its own layer of the slot cache. The modules' outputs are kept there as
well, as the keys and values of one more layer: the next token needs them, even after a prefix was reused.

Shapes: B batch, S positions, N heads, D / Dv head size of keys / values, R rows (a contiguous range of slots), Q pairs,
K modules, W frontier nodes, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from eyas.drafters.checkpoint import check_numbers, check_tensors
from eyas.drafters.decoding import NetworkPairs, Proposer
from eyas.drafters.files import Headers, TensorInfo, read_headers
from eyas.drafters.formats.gguf_heads import find_heads, read_heads
from eyas.drafters.formats.tensor_names import EMBEDDING, HEAD, VOCABULARY_MAP
from eyas.drafters.kinds.mtp import MtpModule, MtpModuleConfig
from eyas.drafters.network import Attend, DraftNetwork, StagedPass, shapes_of, staged_attention
from eyas.drafters.weightless import METHODS
from eyas.errors import CheckpointError, UnsupportedModelError
from eyas.gguf_config import FULL, LINEAR
from eyas.targets import Target
from eyas.targets.architecture import text_decoder
from eyas.targets.attention import RaggedLayout
from eyas.targets.gguf_weights import KEPT_IN_FLOAT32
from eyas.targets.slots import KVShape, SlotCache, Staging
from eyas.targets.transformers_names import rotation

_ATTENTION = "eyas_drafter"
_NOT_COMPUTED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Options of attention functions that change the result and that `Attend` doesn't support."""


def _attention(
    module: nn.Module,
    query: Tensor,  # [B, N, S, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  # `attend` does the masking
    *,
    attend: Attend,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """A transformers attention function that delegates to `attend`; returns [B, S, N, Dv]."""
    odd = [name for name in _NOT_COMPUTED if options.get(name) is not None]
    if odd:
        raise UnsupportedModelError(
            f"{type(module).__name__} has {', '.join(odd)}, which eyas's drafters don't compute"
        )
    if scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)  # `attend` scales by D ** -0.5
    return attend(0, query, key, value).transpose(1, 2).contiguous(), None


class TargetBlock(nn.Module):
    """A blank decoder layer on the meta device, like the target's last one, with the next layer index.

    It has several layers if the target's config names their types. The layers run unpatched: attention is plugged in
    through transformers' own interface, which passes rotated queries and keys to the caller's `attend`. So any block
    with plain attention works: the layer itself handles experts, latent attention, partial rotation and norms of heads.
    """

    def __init__(self, target: Target) -> None:
        """Create the layer. Raises UnsupportedModelError if its attention can't run as a drafter's."""
        super().__init__()
        AttentionInterface.register(_ATTENTION, _attention)
        cls = type(target.layers[-1])
        index = target.num_layers
        kinds: Sequence[str] | None = getattr(target.config, "mtp_layers_block_type", None)
        config = _longer(target.config, kinds)
        rotary: Any = getattr(text_decoder(target.model), "rotary_emb", None)
        self._rotary = (rotary,)  # in a tuple: it is the target's, not a submodule
        try:
            turned = "position_embeddings" in signature(cls.forward).parameters
            if turned != (rotary is not None) or (turned and "layer_type" in signature(rotary.forward).parameters):
                raise UnsupportedModelError("it has no RoPE, or several")
            with torch.device("meta"):
                made = [cls(config, index + i) for i in range(1 if kinds is None else len(kinds))]
            self.layer: nn.Module = made[0] if kinds is None else nn.ModuleList(made)
            self._layers = made
            self.kv_shape = self._probe(target)
        except (UnsupportedModelError, AttributeError, TypeError, ValueError, LookupError) as error:
            raise UnsupportedModelError(f"a drafter can't be made of a {cls.__name__}: {error}") from error

    def _probe(self, target: Target) -> tuple[KVShape, KVShape]:
        """The shapes of the keys and values of one position."""
        found: list[KVShape] = []

        def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found.extend((KVShape(k.shape[1], k.shape[3]), KVShape(v.shape[1], v.shape[3])))
            return q.new_zeros(*q.shape[:3], v.shape[3])

        position = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
        rope = self.rope(torch.zeros(1, 1, target.hidden_size, device=target.device), position)
        attentions = [part for part in self.layer.modules() if hasattr(part, "o_proj")]
        if len(attentions) != 1:
            raise UnsupportedModelError(f"{len(attentions)} of its layers attend")
        given = {name: tuple(table.to("meta") for table in tables) for name, tables in rope.items()}
        attentions[0](torch.zeros(1, 1, target.hidden_size, device="meta"), **given, attention_mask=None, attend=attend)
        keys, values = found
        return keys, values

    def rope(self, x: Tensor, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """The cosines and sines of the target's RoPE at positions [B, S], in the dtype of x; empty without RoPE."""
        return {} if self._rotary[0] is None else {"position_embeddings": rotation(self._rotary[0], x, positions)}

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The residual stream [B, S, H] entering the layer -> the one leaving it."""
        rope = self.rope(x, positions)
        for layer in self._layers:
            out = layer(x, **rope, attention_mask=None, attend=attend)
            x = out[0] if isinstance(out, tuple) else out
        return x


def _longer(config: Any, kinds: Sequence[str] | None) -> Any:
    """A copy of a text config with one more layer like the last, or layers of `kinds`, that runs `_attention`."""
    longer = copy.deepcopy(config)
    layers = longer.num_hidden_layers
    for key, value in longer.to_dict().items():
        other = key == "architectures" or key.startswith("mtp_")
        if isinstance(value, list | tuple) and len(value) == layers and not other:
            last = [FULL] if value[-1] == LINEAR and FULL in value else value[-1:]  # modules attend
            setattr(longer, key, [*value, *(kinds or last)])
    longer.num_hidden_layers = layers + 1
    longer._attn_implementation = _ATTENTION
    return longer


_BLOCK = "target_block.layer."
"""The prefix of the block's tensors in a network."""
_ZERO_FIRST = frozenset({"glm4_moe", "glm4_moe_lite"})
"""Types of models whose modules read zeros in place of the embedding at position 0, as in DeepSeek-V3's layout."""
_STACKED = ("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")
"""Weights that transformers stacks over experts; files have them per expert."""


@dataclass(frozen=True)
class Layout:
    """The names under which a family of models stores its modules."""

    family: str
    prefix: str
    """The prefix of a module's tensors: `{layer}` continues the target's layer numbers, `{module}` starts at 0."""
    names: Mapping[str, str]
    """Names in the file (`*` = the prefix) -> the network's names. Other names with the prefix belong to the block."""
    zero_first: bool = True
    state_first: bool = False
    """Whether the first half of the projection's columns reads the state, not the embedding."""
    norms_from_one: bool = False
    """Whether norm weights are stored as offsets from 1."""

    def prefixes(self, names: Collection[str], layers: int) -> list[str]:
        """The prefixes of the modules among tensors with these names, in order, for a target of `layers` layers."""
        found: list[str] = []
        while True:
            prefix = self.prefix.format(layer=layers + len(found), module=len(found))
            if prefix in found:  # a prefix without a number: only one module
                return found
            held = {native for name in names if (native := self.native(name, prefix)) is not None}
            if not {"eh_proj.weight", "norm.weight"} <= held or not any(name.startswith(_BLOCK) for name in held):
                return found
            found.append(prefix)

    def native(self, name: str, prefix: str) -> str | None:
        """The network's name of a tensor in the file; None = it isn't part of the module with this prefix."""
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
    Layout(
        "Nemotron-H",
        "mtp.layers.",  # a single module; numbers in names are its layers
        {
            "*0.enorm.weight": "enorm.weight", "*0.hnorm.weight": "hnorm.weight", "*0.eh_proj.weight": "eh_proj.weight",
            **{f"*{last}.final_layernorm.weight": "norm.weight" for last in range(4)},
        },
        zero_first=False,
    ),
)  # fmt: skip


class Modules(NamedTuple):
    """The modules of a checkpoint."""

    layout: Layout
    prefixes: list[str]
    """The prefix of each module's tensors."""


def find_modules(names: Collection[str], layers: int) -> Modules | None:
    """The modules in a checkpoint with these tensor names, for a target of `layers` layers; None = it has none."""
    found = (Modules(layout, layout.prefixes(names, layers)) for layout in LAYOUTS)
    return next((modules for modules in found if modules.prefixes), None)


class TargetModule(MtpModule):
    """An MTP module whose block is a decoder layer of the target's own class."""

    fixed_tree = "chain:3"

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
    """Load the modules in the checkpoint at `path`, which `target` was loaded from: one, or a cascade of several.

    Raises CheckpointError if there is none, and UnsupportedModelError for a block that eyas can't run.
    """
    file = find_heads(path)
    modules = _of_folder(path, target) if file is None else _of_gguf(file, target)
    return modules[0] if len(modules) == 1 else Cascade(modules).to(target.device).eval().requires_grad_(False)


def _of_gguf(file: Path, target: Target) -> list[TargetModule]:
    """The MTP heads of a GGUF file, whose norms are stored as they are."""
    block = {_BLOCK + name: tuple(each.shape) for name, each in TargetBlock(target).layer.state_dict().items()}
    read = read_heads(file, target, {name.removeprefix(_BLOCK): shape for name, shape in block.items()})
    zero_first = target.config.model_type in _ZERO_FIRST
    modules = []
    for number, tensors in enumerate(read):
        named = {_BLOCK + name if _BLOCK + name in block else name: tensor for name, tensor in tensors.items()}
        modules.append(_built(named, f"MTP head {number} of {file}", zero_first, target))
    return modules


def _of_folder(path: Path, target: Target) -> list[TargetModule]:
    """The modules in the safetensors files of a folder."""
    headers = read_headers(path)
    found = find_modules(headers.tensors, target.num_layers)
    if found is None:
        raise CheckpointError(
            f"{path} has no MTP modules (of the layouts of {', '.join(layout.family for layout in LAYOUTS)}): give a "
            f"drafter with `draft_model=`, or a `method=` that needs none, such as {', '.join(METHODS.own)}"
        )
    return [_module(path, headers, found.layout, prefix, target) for prefix in found.prefixes]


def _module(path: Path, headers: Headers, layout: Layout, prefix: str, target: Target) -> TargetModule:
    """Load the module whose tensors begin with `prefix`."""
    names = {name: native for name in headers.tensors if (native := layout.native(name, prefix)) is not None}
    tensors = {names[name]: tensor for name, tensor in headers.read_some(names).items()}
    check_numbers(tensors, str(path))
    _drop_copies(tensors, headers)
    _restore(tensors, layout, layout.norms_from_one and _adds_one(target.layers[-1]))
    return _built(tensors, f"the MTP module {prefix}* of {path}", layout.zero_first, target)


def _built(tensors: dict[str, Tensor], where: str, zero_first: bool, target: Target) -> TargetModule:
    """The module with these tensors, by native names; `where` they are from, for messages."""
    check_numbers(tensors, where)
    config = MtpModuleConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        rms_norm_eps=_epsilon(target.config),
        embedding="own" if EMBEDDING in tensors else "shared",
        head="own" if HEAD in tensors else "shared",
        zero_first=zero_first,
    )
    with torch.device("meta"):
        network = TargetModule(config, target)
    expected = {name: shape for name, shape in shapes_of(network).items() if name not in VOCABULARY_MAP}
    _join_experts(tensors, expected)
    infos = {name: TensorInfo(tuple(tensor.shape), str(tensor.dtype), Path(where)) for name, tensor in tensors.items()}
    check_tensors(infos, expected, where)
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(torch.float32 if name.endswith(KEPT_IN_FLOAT32) else target.dtype)
    every = torch.arange(target.vocab_size)
    tensors |= {"d2t": torch.zeros_like(every), "t2d": torch.ones_like(every, dtype=torch.bool)}
    network.fill(tensors, target)
    return network.to(target.device)


def _epsilon(config: Any) -> float:
    """The epsilon of a model's norms."""
    return float(getattr(config, "rms_norm_eps", getattr(config, "layer_norm_epsilon", 1e-6)))


def _drop_copies(tensors: dict[str, Tensor], headers: Headers) -> None:
    """Drop an embedding or head that equals the target's own, which the module then shares."""
    embedding = "model.embed_tokens.weight"
    head = "lm_head.weight" if "lm_head.weight" in headers.tensors else embedding
    for part, original in ((EMBEDDING, embedding), (HEAD, head)):
        both = part in tensors and original in headers.tensors
        if both and torch.equal(tensors[part], headers.read_some([original])[original]):
            del tensors[part]


@torch.no_grad()
def _adds_one(layer: nn.Module) -> bool:
    """Whether the norms of a target's layer scale by 1 + their weights, as Gemma's and Qwen3-Next's do."""
    norm = next(part for name, part in layer.named_modules() if name.endswith("norm"))
    ones = copy.deepcopy(norm)
    zeros = copy.deepcopy(norm)
    ones.weight.fill_(1.0)
    zeros.weight.fill_(0.0)
    x = torch.linspace(-3, 5, norm.weight.numel(), device=norm.weight.device, dtype=norm.weight.dtype).cos()
    return bool(torch.allclose(ones(x), 2 * zeros(x), rtol=1e-2))


def _restore(tensors: dict[str, Tensor], layout: Layout, block_adds_one: bool) -> None:
    """Convert a layout's norms and projection to the network's form; `block_adds_one`: the block's norms add 1."""
    if layout.state_first:
        tensors["eh_proj.weight"] = torch.cat(tensors["eh_proj.weight"].chunk(2, dim=1)[::-1], dim=1)
    if layout.norms_from_one:
        for name, tensor in tensors.items():
            if name.endswith("norm.weight") and not (block_adds_one and name.startswith(_BLOCK)):
                tensors[name] = tensor.float() + 1


def _join_experts(tensors: dict[str, Tensor], expected: Collection[str]) -> None:
    """Stack the per-expert weights of the file as transformers' modules expect them."""
    for joined in [name for name in expected if name.endswith(_STACKED)]:
        stem, _, part = joined.rpartition(".")
        parts = part.replace("gate_up", "gate up").replace("_proj", "").split()
        count = sum(1 for name in tensors if re.fullmatch(rf"{re.escape(stem)}\.\d+\.{parts[0]}_proj\.weight", name))
        names = [[f"{stem}.{expert}.{each}_proj.weight" for each in parts] for expert in range(count)]
        if count and all(name in tensors for several in names for name in several):
            tensors[joined] = torch.stack([torch.cat([tensors.pop(name) for name in several]) for several in names])


class Cascade(DraftNetwork):
    """The modules of a checkpoint, in the order of their guesses."""

    def __init__(self, modules: Sequence[MtpModule]) -> None:
        """Combine K >= 2 filled modules."""
        # each module has or borrows its own embedding and head
        super().__init__(modules[0].config.model_copy(update={"embedding": "none", "head": "shared"}))
        self.fixed_tree = f"chain:{max(3, len(modules))}"
        self.steps = nn.ModuleList(modules)

    @property
    def in_order(self) -> list[MtpModule]:
        """The K modules, starting with the one that guesses the next token."""
        return [step for step in self.steps if isinstance(step, MtpModule)]

    @property
    def state_size(self) -> int:
        return self.config.hidden_size * len(self.steps)

    @property
    def kv_shapes(self) -> list[tuple[KVShape, KVShape]]:
        """One layer per module, then the outputs [H] of all modules but the last, half as keys and half as values."""
        half = KVShape(len(self.steps) - 1, self.config.hidden_size // 2)
        return [*(shapes for step in self.in_order for shapes in step.kv_shapes), (half, half)]

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [..., V] of the first module's states [..., H]."""
        return self.in_order[0].logits(normed)


class CascadeProposer(Proposer):
    """Runs several modules; the state kept of a token is the K outputs, concatenated."""

    network: Cascade

    def run_pairs(
        self,
        pairs: NetworkPairs,
        rows: range,
        tokens: Tensor,
        hidden: Tensor,
        width: int,
        layout: RaggedLayout | None = None,
    ) -> tuple[Tensor, Tensor]:
        cache = pairs.cache
        if layout is not None:  # outputs are shifted by one token within each row
            tokens = layout.pad(tokens)
            hidden = layout.pad(hidden)
        lengths = cache.device_lengths(rows)
        steps = torch.arange(width, device=tokens.device)
        positions = lengths.unsqueeze(1) + steps  # [R, Q]
        before = self._before(cache, rows, lengths)
        cache.reserve(cache.start(rows) + width)
        causal = (steps.unsqueeze(1) >= steps).expand(len(rows), -1, -1)
        outputs: list[Tensor] = []
        for index, module in enumerate(self.network.in_order):
            # the first `index` pairs of a row have no output of the module before this one
            seen = causal & (positions >= index).unsqueeze(1) | torch.eye(width, dtype=torch.bool, device=tokens.device)
            stage = StagedPass(lengths, seen, layer=index, first=index)
            out, _ = module.step(tokens, hidden, positions, staged_attention(cache, rows, stage))
            outputs.append(out)
            if index < len(before):
                hidden = torch.cat((before[index].unsqueeze(1), out[:, :-1]), dim=1)
        _stage_outputs(cache, rows, outputs)
        fed = torch.cat(outputs, dim=-1)
        if layout is not None:
            return layout.gather(fed).flatten(0, 1), layout.gather(outputs[0]).flatten(0, 1)
        return fed.flatten(0, 1), outputs[0].flatten(0, 1)

    def _before(self, cache: SlotCache, rows: range, lengths: Tensor) -> list[Tensor]:
        """The K - 1 outputs [R, H] at each row's last committed pair; undefined and unseen for empty rows."""
        count = len(self.network.steps) - 1
        size = self.network.config.hidden_size // 2
        nothing = torch.zeros(len(rows), count, 0, size, dtype=self.network.dtype, device=lengths.device)
        views = cache.write(count + 1, nothing, nothing, Staging(rows, *(max(1, cache.start(rows)),) * 2, None))
        last = (lengths - 1).clamp(min=0).view(-1, 1, 1, 1).expand(-1, count, 1, size)
        both = torch.cat([view.gather(2, last) for view in views], dim=-1)  # [R, K - 1, 1, H]
        return list(both[:, :, 0].unbind(1))

    def run_level(
        self, cache: SlotCache, rows: range, tokens: Tensor, fed: Tensor, positions: Tensor, stage: StagedPass
    ) -> tuple[Tensor, Tensor]:
        modules = self.network.in_order
        last = len(self.network.steps) - 1
        outputs = list(fed.chunk(len(modules), dim=-1))  # [R, W, H] each
        above = [outputs[0], *outputs[:-1]] if stage.level < last else outputs
        first = min(stage.level + 1, last)
        for index in range(first, len(modules)):
            attend = staged_attention(cache, rows, stage._replace(layer=index, first=index))
            outputs[index], _ = modules[index].step(tokens, above[index], positions, attend)
        return torch.cat(outputs, dim=-1), modules[first].logits(outputs[first])


def _stage_outputs(cache: SlotCache, rows: range, outputs: Sequence[Tensor]) -> None:
    """Stage the modules' outputs, [R, Q, H] each."""
    stacked = torch.stack(list(outputs[:-1]), dim=1)  # [R, K - 1, Q, H]
    first, second = stacked.chunk(2, dim=-1)
    cache.write(len(outputs), first, second, cache.staging(rows, first.shape[2]))
