"""The shape of a drafter to train: its kind, sizes and options. Values that a recipe omits follow from the target."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, Protocol

import torch
from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator
from torch import Tensor, nn

from eyas.config import StrictModel, validated
from eyas.drafters.config import (
    PLAIN_ROPE,
    DrafterConfig,
    FeatureConfig,
    FusedTapsConfig,
    MaskedConfig,
    TransformerConfig,
)
from eyas.drafters.kind import Kind
from eyas.drafters.kinds import KINDS
from eyas.drafters.loading import TargetSizes
from eyas.drafters.network import DraftNetwork, set_vocabulary
from eyas.errors import ConfigError
from eyas.targets.architecture import FULL
from eyas.targets.passes import EmbeddingAndHead
from eyas.targets.taps import choose_taps, default_taps, spread_taps
from eyas.targets.transformers_names import config_value

DRAFT_VOCABULARY = 32_000
"""Maximum size of an `auto` draft vocabulary, as in the configs of SafeAILab/EAGLE, SpecForge and speculators."""


class _Preset(NamedTuple):
    """A name for a kind with certain options."""

    kind: str
    options: dict[str, bool] = {}  # noqa: RUF012  # nobody changes it
    loss: dict[str, Any] = {}  # noqa: RUF012
    """What its paper's loss has instead of the kind's."""


_PRESETS = {
    "eagle3.1": _Preset("eagle3", {"fc_norm": True, "norm_output": True}),
    "jetspec": _Preset("dflash", {"causal": True}, {"token": "kl", "decay": 1.0}),
}
_OF_EVERY_KIND = {
    "kind",
    "draft_vocab_size",
    "default_tree",
    "embedding",
    "head",
    "train_embedding",
    "train_head",
    "options",
}
_FIELD = {
    "layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "medusa_heads": "num_heads", "window": "draft_window",
}  # fmt: skip
"""Option of `DrafterShape` -> its name in a drafter's config, where the two differ."""
_THETA = 10000.0
_LONG = 32768
"""Positions of a drafter whose target's config gives no maximum length."""


class TargetModel(TargetSizes, Protocol):
    """What determines the sizes of a target's drafter: a `Target`, or an object made from a config alone."""

    @property
    def config(self) -> Any:
        """The transformers config of the text model."""

    @property
    def max_length(self) -> int | None:
        """The longest sequence that the target takes; None if its config doesn't say."""

    def check_taps(self, taps: tuple[int, ...]) -> None:
        """Raise RequestError for boundaries that the target doesn't have."""


class DrafterShape(StrictModel):
    """A drafter's kind, sizes and options. None = the target's size, or the kind's default.

    Options that the kind doesn't have are refused.
    """

    kind: str = "eagle3"  # a name in `eyas.drafters.kinds.KINDS`, or eagle3.1 or jetspec
    draft_vocab_size: Annotated[int, Field(ge=1)] | Literal["auto"] | None = (
        "auto"  # None: the target's whole vocabulary
    )
    taps: tuple[int, ...] | None = None
    default_tree: str | None = None
    # who owns embedding and head, and whether the drafter's own are trained
    embedding: Literal["own", "shared", "none"] | None = None
    head: Literal["own", "shared"] | None = None
    train_embedding: bool = False
    train_head: bool | None = None
    # decoder layers
    hidden_size: int | None = Field(default=None, ge=1)
    intermediate_size: int | None = Field(default=None, ge=1)
    layers: int | None = Field(default=None, ge=1)
    heads: int | None = Field(default=None, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2)
    window: int | None = Field(default=None, ge=1)  # attend to the sinks and the last `window` pairs; None = all
    # eagle3, peagle and block drafters: a window by layer (`drafters/window/layers.py`)
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None  # full_attention or sliding_attention; None = all have the window
    sliding_anchored: bool | None = None
    # eagle1
    bias: bool | None = None
    # eagle3 and mla
    fc_norm: bool | None = None
    norm_output: bool | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    # mla; q_lora_rank 0 = a plain query projection
    q_lora_rank: int | None = Field(default=None, ge=0)
    kv_lora_rank: int | None = Field(default=None, ge=1)
    qk_nope_head_dim: int | None = Field(default=None, ge=1)
    qk_rope_head_dim: int | None = Field(default=None, ge=2)
    v_head_dim: int | None = Field(default=None, ge=1)
    # medusa, where `layers` counts the layers of each head
    medusa_heads: int | None = Field(default=None, ge=1)
    # block drafters; `drafters/kinds/` explains their fields
    block_size: int | None = Field(default=None, ge=2)
    sample_from_anchor: bool | None = None
    causal: bool | None = None
    sliding_causal: bool | None = None
    # block drafters and peagle
    mask_token_id: int | None = Field(default=None, ge=0)
    # peagle
    num_depths: int | None = Field(default=None, ge=1)
    # dspark; markov_rank 0 = no Markov head
    markov_rank: int | None = Field(default=None, ge=0)
    markov_head_type: Literal["vanilla", "gated", "rnn"] | None = None
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
    # dflash2; lilicorr has the convolutions, too
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    # domino
    gru_hidden_dim: int | None = None
    emb_dim: int | None = None
    pure_draft_prefix_len: int | None = None
    # xpress
    xpress_rank: int | None = None
    xpress_mlp_hidden: int | None = None
    # lilicorr; lilicorr_hidden_size None = the drafter's
    lilicorr_hidden_size: int | None = None
    lilicorr_num_layers: int | None = None
    lilicorr_num_heads: int | None = None
    lilicorr_mlp_ratio: float | None = None
    lilicorr_candidate_topk: int | None = None
    lilicorr_factor_dim: int | None = None
    lilicorr_logit_scale: float | None = None
    # mlp
    depth: int | None = Field(default=None, ge=1)
    gate: bool | None = None
    dropout: float | None = Field(default=None, ge=0, lt=1)
    # further fields of the kind's config, by their names there
    options: dict[str, Any] = Field(default_factory=dict)

    @model_serializer(mode="wrap")
    def _without_empty_options(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Runs and sweeps that began before there were options keep their identity and can be resumed."""
        dumped: dict[str, Any] = serialize(self)
        if not dumped.get("options", True):
            del dumped["options"]
        return dumped

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind not in _PRESETS and kind not in KINDS:
            raise ValueError(f"unknown kind of drafter {kind!r}: use one of {', '.join((*KINDS, *_PRESETS))}")
        if kind in KINDS and not KINDS[kind].trained:
            raise ValueError(f"a drafter of kind {kind} comes with its target and isn't trained: use another kind")
        return kind

    @model_validator(mode="after")
    def _options_of_the_kind(self) -> DrafterShape:
        foreign = sorted(
            name
            for name in DrafterShape.model_fields.keys() - _OF_EVERY_KIND - _options(self.definition)
            if getattr(self, name) is not None
        )
        if foreign:
            raise ValueError(f"a drafter of kind {self.kind} has no {', '.join(foreign)}")
        known = _own_fields(self.definition)
        unknown = sorted(self.options.keys() - known)
        if unknown:
            named = ", ".join(unknown)
            why = f"no {named}, only {', '.join(sorted(known))}" if known else f"none: leave out {named}"
            raise ValueError(f"options: a drafter of kind {self.kind} has {why}")
        if self.embedding == "none" and issubclass(self.definition.config, TransformerConfig):
            raise ValueError(f"a drafter of kind {self.kind} needs a token embedding: use own or shared")
        if self.train_embedding and self.embedding_owner != "own":
            raise ValueError("train_embedding needs an embedding of the drafter's own (embedding: own)")
        if self.train_head and self.head_owner != "own":
            raise ValueError("train_head needs a head of the drafter's own (head: own)")
        return self

    @property
    def definition(self) -> Kind:
        """The registered kind; for a preset such as eagle3.1, the kind that it is based on."""
        return KINDS[self._preset.kind]

    @property
    def default_loss(self) -> dict[str, Any]:
        """The settings of the loss in its paper, where they differ from EAGLE-3's."""
        return {**self.definition.loss, **self._preset.loss}

    @property
    def _preset(self) -> _Preset:
        return _PRESETS.get(self.kind, _Preset(self.kind))

    @property
    def embedding_owner(self) -> str:
        """`own`, `shared` or `none`; by default `own` if other engines run the kind, because they expect one.

        A kind that reads no tokens has no embedding.
        """
        if self.embedding is None and self.definition.config.model_fields["embedding"].default == "none":
            return "none"
        config, family = self.definition.config, self.definition.family
        return self.embedding or ("own" if family is not None and not config.is_block else "shared")

    @property
    def head_owner(self) -> str:
        """`own` or `shared`; by default `shared` if the target's head can read the drafter's states."""
        config = self.definition.config
        return self.head or ("shared" if config.is_block or issubclass(config, FeatureConfig) else "own")

    def draft_vocabulary(self, vocab_size: int) -> int:
        """The number of the target's `vocab_size` tokens that the drafter can draft.

        `auto` is at most 32,000 with a head of its own, and the whole vocabulary with the target's head.
        """
        if self.draft_vocab_size == "auto":
            return min(DRAFT_VOCABULARY, vocab_size) if self.head_owner == "own" else vocab_size
        return self.draft_vocab_size or vocab_size


def _options(kind: Kind) -> set[str]:
    """The options of `DrafterShape` that are fields of this kind's config; other kinds may lack them."""
    special = DrafterShape.model_fields.keys() - _OF_EVERY_KIND
    names = {name for name in special if _FIELD.get(name, name) in kind.config.model_fields}
    fixed = {"taps"} if kind.fixed_taps else set()
    return names - fixed - ({"hidden_size"} if issubclass(kind.config, FeatureConfig) else set())


_DERIVED = {"norm", "rms_norm_eps", "num_aux_hidden_states"}
"""Fields of configs that follow from the target."""


def _own_fields(kind: Kind) -> set[str]:
    """Fields that only this kind's config has, and that are no options of `DrafterShape` themselves."""
    return set(kind.config.__annotations__) - {_FIELD.get(name, name) for name in DrafterShape.model_fields} - _DERIVED


def shape_of(config: DrafterConfig, kind: Kind, layers: int) -> DrafterShape:
    """The shape of an existing drafter, for continuing its training; its target has `layers` layers.

    `drafter_config` restores the config if everything that a shape doesn't contain (RoPE, norms) is the target's.
    """
    values: dict[str, Any] = {
        "kind": kind.name, "draft_vocab_size": config.draft_vocab_size, "default_tree": config.default_tree,
        "embedding": config.embedding, "head": config.head,
    }  # fmt: skip
    given = {name: getattr(config, _FIELD.get(name, name)) for name in _options(kind)}
    if "taps" in given:
        given["taps"] = config.taps_of(layers)
    if "q_lora_rank" in given:
        given["q_lora_rank"] = given["q_lora_rank"] or 0
    fields = kind.config.model_fields
    own = {name: getattr(config, name) for name in sorted(_own_fields(kind) & fields.keys())}
    options = {name: value for name, value in own.items() if value != fields[name].default}
    return DrafterShape(**values, **given, options=options)


def drafter_config(shape: DrafterShape, target: TargetModel) -> DrafterConfig:
    """The drafter's config: the shape's values, completed from the target's config, with explicit taps.

    Raises ConfigError for sizes that don't fit together.
    """
    cls = shape.definition.config
    width = shape.hidden_size or target.hidden_size
    values: dict[str, Any] = {
        "hidden_size": width,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": shape.draft_vocabulary(target.vocab_size),
        "target_hidden_size": target.hidden_size,
        "embedding": shape.embedding_owner,
        "head": shape.head_owner,
        "default_tree": shape.default_tree,
    }
    target_config = target.config
    if issubclass(cls, TransformerConfig):
        values |= decoder_sizes(target_config, target.max_length)
        heads = values["num_attention_heads"] = shape.heads or values["num_attention_heads"]
        latent = "kv_lora_rank" in cls.model_fields
        values |= latent_sizes(target_config) if latent else head_sizes(target_config, heads, width)
    given = {name: getattr(shape, name) for name in _options(shape.definition)}
    values |= shape._preset.options
    values |= {_FIELD.get(name, name): value for name, value in given.items() if value is not None}
    values |= shape.options
    if values.get("q_lora_rank") == 0:
        values["q_lora_rank"] = None
    taps = values.get("taps")
    if taps is None:
        taps = (target.final_boundary,)
        if issubclass(cls, FusedTapsConfig):
            taps = default_taps(target.num_layers)
        elif cls.is_block:
            taps = spread_taps(shape.layers or 1, target.num_layers)
    target.check_taps(taps)
    values["taps"] = tuple(taps)
    if "num_aux_hidden_states" in cls.model_fields:
        values["num_aux_hidden_states"] = len(taps)
    if cls.is_block:
        values.setdefault("block_size", 7 + (not cls.model_fields["sample_from_anchor"].default))
    if issubclass(cls, MaskedConfig):
        values.setdefault("mask_token_id", _spare_token(target_config, target.vocab_size))
    if "norm" in cls.model_fields:  # features from before the target's final norm need a norm in the drafter
        values["norm"] = tuple(taps) != (target.final_boundary,)
    if "rms_norm_eps" in cls.model_fields:
        values["rms_norm_eps"] = getattr(target_config, "rms_norm_eps", None) or 1e-6
    return validated(cls, values, f"the shape of the {shape.kind} drafter")


def check_parts(shape: DrafterShape, config: DrafterConfig, target: TargetModel) -> None:
    """Raise ConfigError for an embedding or a head that is the target's, but doesn't have the drafter's width."""
    for part, owner, trains in (
        ("embedding", config.embedding, shape.train_embedding),
        ("head", config.head, shape.train_head is not False),
    ):
        if config.hidden_size != target.hidden_size and (owner == "shared" or (owner == "own" and not trains)):
            raise ConfigError(
                f"the drafter is {config.hidden_size} wide and the target {target.hidden_size}, so the target's {part} "
                f"doesn't fit: set {part} to own and train_{part} to true"
            )


def fresh_network(shape: DrafterShape, target: EmbeddingAndHead, draft_ids: Tensor) -> DraftNetwork:
    """A network with fresh weights on the target's device.

    An embedding or head of its own is initialized from the target's if the widths agree. draft_ids [Vd] are the target
    tokens that the network can draft, ascending. Raises ConfigError for a shape that can't be trained.
    """
    config = drafter_config(shape, target)
    check_parts(shape, config, target)
    same_width = config.hidden_size == target.hidden_size
    if len(draft_ids) != config.draft_vocab_size:
        raise ConfigError(f"{len(draft_ids)} draft tokens for a draft vocabulary of {config.draft_vocab_size}")
    network = shape.definition.network(config)
    set_vocabulary(network, draft_ids)
    if config.embedding == "own":
        assert isinstance(network.embed_tokens, nn.Embedding)  # which nobody has replaced by the target's
        _start(network.embed_tokens, target.model.get_input_embeddings().weight, same_width, shape.train_embedding)
    for head in network.heads:
        rows = target.model.get_output_embeddings().weight[draft_ids.to(target.device)]
        _start(head, rows, same_width, shape.train_head is not False)
    network = network.to(target.device)
    if "shared" in (config.embedding, config.head):
        network.borrow(target)
    return network


@torch.no_grad()
def _start(part: nn.Embedding | nn.Linear, weight: Tensor, fits: bool, trains: bool) -> None:
    """Initialize an embedding or head with the target's rows [V or Vd, H] if they fit."""
    if fits:
        part.weight.copy_(weight)
    part.weight.requires_grad_(trains)


def _spare_token(config: Any, vocab_size: int) -> int:
    """The token for a block's masked slots: the padding token, else the last of the vocabulary."""
    padding = getattr(config, "pad_token_id", None)
    return padding if isinstance(padding, int) and 0 <= padding < vocab_size else vocab_size - 1


def decoder_sizes(config: Any, max_length: int | None) -> dict[str, Any]:
    """MLP width, heads, positions and RoPE for a decoder layer like the target's, whose text config is `config`."""
    return {
        "intermediate_size": mlp_width(config),
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": max_length or getattr(config, "max_position_embeddings", None) or _LONG,
        "rope_parameters": rope_of(config),
    }


def mlp_width(config: Any) -> int:
    """The width of the target's MLP.

    The config of a mixture of experts usually gives a dense layer's width, or else the width of one expert. A width
    below twice the hidden size is taken to be one expert's and multiplied by the number of active experts per token:
    gpt-oss has four active experts, each as wide as its hidden states.
    """
    stated = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    width: int = stated or 4 * config.hidden_size
    experts = getattr(config, "num_experts_per_tok", None)
    if experts and not getattr(config, "moe_intermediate_size", None) and width < 2 * config.hidden_size:
        width *= experts
    return width


def head_sizes(config: Any, heads: int, width: int) -> dict[str, int]:
    """Key-value heads and head size of grouped-query attention with `heads` heads, for a drafter `width` wide."""
    if getattr(config, "kv_lora_rank", None):  # latent attention: head_dim covers only the rotated part
        return {"num_key_value_heads": heads, "head_dim": config.v_head_dim + config.v_head_dim % 2}
    shared = config_value(config, "num_key_value_heads") or heads
    if heads % shared:
        shared = heads
    return {
        "num_key_value_heads": shared,
        "head_dim": config_value(config, "head_dim") or max(2, width // heads // 2 * 2),
    }


def latent_sizes(config: Any) -> dict[str, int | None]:
    """Sizes of multi-head latent attention: the target's if it has them, else in DeepSeek's proportions."""
    if getattr(config, "kv_lora_rank", None):
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return {name: getattr(config, name) for name in names}
    head = config_value(config, "head_dim") or config.hidden_size // config.num_attention_heads
    rotated = max(2, head // 4 * 2)
    return {
        "q_lora_rank": None, "kv_lora_rank": 4 * head, "qk_nope_head_dim": head, "qk_rope_head_dim": rotated,
        "v_head_dim": head,
    }  # fmt: skip


def rope_of(config: Any) -> dict[str, Any]:
    """The target's RoPE (of its full-attention layers if layers differ). Dynamic types keep only their theta."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if isinstance(rope.get(FULL), dict):
        rope = dict(rope[FULL])
    theta = rope.get("rope_theta") or getattr(config, "rope_theta", None) or _THETA
    rope.pop("partial_rotary_factor", None)  # drafters rotate whole heads
    if rope.get("rope_type", "default") not in PLAIN_ROPE:
        rope = {}
    return {"rope_type": "default", **rope, "rope_theta": theta}


def with_taps(shape: DrafterShape, target: EmbeddingAndHead, served: tuple[int, ...]) -> DrafterShape:
    """The shape with explicit taps: the recipe's, else those of `choose_taps`, or the store's if it lacks any of these.

    The shape of a kind that reads only the final state is unchanged. `served` is () without a store.
    """
    usual = drafter_config(shape, target).taps or ()
    if shape.taps is not None or usual == (target.num_layers + 1,):
        return shape
    chosen = choose_taps(target.config)
    stored = tuple(k for k in served if k <= target.num_layers)
    return shape.model_copy(update={"taps": chosen if not stored or set(chosen) <= set(stored) else stored})
