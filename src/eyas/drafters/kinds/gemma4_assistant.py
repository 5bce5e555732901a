"""Gemma 4's assistants: small decoders whose attention reads the target's cache, without keys of their own.

    x = layers(pre_projection(cat(target's embedding of the last token, h)))
    logits = head(norm(x)),   next h = post_projection(norm(x))

The first h is the target's state after its final norm. A layer attends to the keys and values of the target's last
layer of its type, full or sliding, that has its own. All guesses of a draft see the same committed positions and stand
at the same position themselves, the root's: no guess attends to another. What distinguishes them are their token and
the h of their parent. So an assistant has no cache and reads no prompt, and trees need no mask.

The head is tied to the assistant's own embedding. With centroids, it scores only the tokens of the clusters that fit a
state best. A sliding layer sees `sliding_window` + 1 positions, as in transformers; llama.cpp's sees two fewer.

References: transformers' `gemma4_assistant` and `SinglePositionMultiTokenCandidateGenerator`; llama.cpp's
`gemma4-assistant`.

Shapes: R rows (a contiguous range of slots), W guesses, N heads, D head size, B target hidden, H hidden, V vocabulary,
K columns of the target's cache, C centroids, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.drafters.config import MAX_SIZE, TransformerConfig
from eyas.drafters.decoding import NetworkPairs, Proposer
from eyas.drafters.formats.fields import Fields
from eyas.drafters.kind import Kind
from eyas.drafters.levels import Levels
from eyas.drafters.network import MLP, DraftNetwork, RecordedView, RMSNorm, Rope, Rotary, rotate
from eyas.errors import CheckpointError, ConfigError, DrafterMismatchError, InvariantError, UnsupportedModelError
from eyas.runtime import to_device
from eyas.targets.architecture import FULL, SLIDING
from eyas.targets.attention import grouped_attention
from eyas.targets.passes import EmbeddingAndHead, Passes
from eyas.targets.slots import KVShape
from eyas.tree import Frontier

_MODEL_TYPE = "gemma4_assistant"
_ROPE: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
"""transformers' RoPE of each type of layer, for files that leave it out."""
_ABSENT: dict[str, Any] = {
    "hidden_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False,
}  # fmt: skip
"""Keys for parts that only targets have, and the values that say so."""
_TARGETS_ONLY = (
    "vocab_size_per_layer_input", "num_experts", "top_k_experts", "moe_intermediate_size", "final_logit_softcapping",
)  # fmt: skip
"""Keys that are about such parts, or about a target's logits."""


class AssistantConfig(TransformerConfig):
    """Sizes, the types of the layers, and the head. Layers of full attention may have other heads than sliding ones."""

    reads_target: ClassVar[bool] = True

    embedding: Literal["shared"] = "shared"
    """The target's, as the target itself reads tokens."""
    head: Literal["own"] = "own"
    hidden_act: str = "gelu_pytorch_tanh"
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = Field(min_length=1)
    sliding_window: int = Field(ge=1)
    head_dim: int = Field(ge=2, le=MAX_SIZE, multiple_of=2)
    """Of sliding layers."""
    num_key_value_heads: int = Field(ge=1, le=MAX_SIZE)
    """The target's, in sliding layers."""
    global_head_dim: int = Field(ge=2, le=MAX_SIZE, multiple_of=2)
    num_global_key_value_heads: int = Field(ge=1, le=MAX_SIZE)
    sliding_rope_parameters: dict[str, Any] = Field(default_factory=lambda: dict(_ROPE[SLIDING]))
    """RoPE of sliding layers; `rope_parameters` is that of the others."""
    num_centroids: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    """Into how many clusters the head sorts the vocabulary; None = it scores all tokens."""
    centroid_intermediate_top_k: int = Field(default=32, ge=1)
    """Clusters whose tokens are scored."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> AssistantConfig:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"{len(self.layer_types)} layer_types for {self.num_hidden_layers} layers")
        for kind in self.layer_types:
            if self.num_attention_heads % self.shared_shape(kind).heads:
                raise ValueError(
                    f"{self.num_attention_heads} heads can't share {self.shared_shape(kind).heads} key-value heads"
                )
        if self.num_centroids is not None and (
            self.vocab_size % self.num_centroids or self.centroid_intermediate_top_k > self.num_centroids
        ):
            raise ValueError(
                f"{self.num_centroids} centroids can't share {self.vocab_size} tokens evenly, or there are fewer than "
                f"{self.centroid_intermediate_top_k}"
            )
        if self.draft_vocab_size != self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size}: an assistant guesses the whole vocabulary")
        return self

    @property
    def embedding_size(self) -> int:
        return self.target_hidden_size

    @property
    def rope_size(self) -> int:
        return self.global_head_dim

    @property
    def of_sliding_layers(self) -> AssistantConfig:
        """The same config with the RoPE of sliding layers in place of that of full ones."""
        return self.model_copy(
            update={"global_head_dim": self.head_dim, "rope_parameters": self.sliding_rope_parameters}
        )

    def shared_shape(self, kind: str) -> KVShape:
        """The heads of keys and of values that layers of a type read from the target."""
        if kind == FULL:
            return KVShape(self.num_global_key_value_heads, self.global_head_dim)
        return KVShape(self.num_key_value_heads, self.head_dim)

    def window_refusal(self, pairs: int) -> str | None:  # noqa: ARG002
        return "it reads its target's cache, and keeps no pairs"


def read(fields: Fields) -> AssistantConfig:
    """The configuration in config.json, in `text_config` or next to it. Raises ConfigError, also for unknown keys."""
    if "taps" in fields.values:
        raise ConfigError(f"{fields.where}: taps: an assistant reads the state after the final norm, no other")
    text = fields.take("text_config", dict, default={})
    inner = Fields(text, f"{fields.where} (text_config)", fields.names, fields.keys_to_ignore, fields.layers)
    if twice := sorted(set(inner.values) & set(fields.values) - {"tie_word_embeddings"}):
        raise ConfigError(f"{fields.where}: {', '.join(twice)} is written twice, also in text_config")
    tied = [part.take("tie_word_embeddings", bool, default=True) for part in (inner, fields)]
    if not all(tied):
        raise ConfigError(f"{fields.where}: tie_word_embeddings is false, but an assistant's head is its embedding")
    fields.values = inner.values | fields.values
    _refuse_targets_parts(fields)
    for theirs, ours in (("backbone_hidden_size", "target_hidden_size"), ("hidden_activation", "hidden_act")):
        if (value := fields.values.pop(theirs, None)) is not None:
            fields.values[ours] = value
    if not fields.take("use_ordered_embeddings", bool, default=False):
        fields.values.pop("num_centroids", None)
        fields.values.pop("centroid_intermediate_top_k", None)
    elif fields.values.get("num_centroids") is None:
        raise ConfigError(f"{fields.where}: use_ordered_embeddings is true, and there is no num_centroids")
    _read_heads(fields)
    rope = fields.take("rope_parameters", dict, default=_ROPE)
    fields.values["rope_parameters"] = _rope(rope, FULL, fields.where)
    fields.values["sliding_rope_parameters"] = _rope(rope, SLIDING, fields.where)
    fields.default("draft_vocab_size", fields.values.get("vocab_size"))
    return fields.finish(AssistantConfig)


def _refuse_targets_parts(fields: Fields) -> None:
    """Take keys that don't matter to an assistant. Raises ConfigError where they say that it is something else."""
    for key, only in _ABSENT.items():
        if fields.values.pop(key, None) not in (None, only):
            raise ConfigError(f"{fields.where}: {key} isn't {only!r}: no assistant is known that has this part")
    for key in _TARGETS_ONLY:
        fields.ignore(key, "about targets")
    if fields.values.pop("use_bidirectional_attention", None) not in (None, "vision"):
        raise ConfigError(f"{fields.where}: use_bidirectional_attention is set, but the target reads one way")
    shared = fields.values.pop("num_kv_shared_layers", None)
    layers = fields.values.get("num_hidden_layers")
    if shared not in (None, 0, layers):
        raise ConfigError(f"{fields.where}: num_kv_shared_layers {shared}: all of its {layers} layers read the target")


def _read_heads(fields: Fields) -> None:
    """Convert the keys of layers with full attention, which have their own or are listed. Raises ConfigError."""
    values = fields.values
    kinds = fields.take("layer_types", list, default=[])
    if not all(isinstance(kind, str) for kind in kinds):
        raise ConfigError(f"{fields.where}: layer_types must name a type for each layer")
    values["layer_types"] = kinds
    equal = fields.take("attention_k_eq_v", bool, default=False)
    listed = fields.take("per_layer_config", dict)
    fields.default("head_dim", 256)
    if listed is None:
        fields.default("global_head_dim", 512)
        if not equal:  # the key counts only where keys are values, too, as transformers reads it
            values.pop("num_global_key_value_heads", None)
        fields.default("num_global_key_value_heads", values.get("num_key_value_heads"))
        return
    by_kind: dict[str, tuple[Any, Any]] = {}
    for index, kind in enumerate(kinds):
        own = listed.get(str(index), {})
        if not isinstance(own, dict) or set(own) - {"head_dim", "num_key_value_heads"}:
            raise ConfigError(f"{fields.where}: per_layer_config has more than head sizes for layer {index}")
        heads = (
            own.get("num_key_value_heads", values.get("num_key_value_heads")),
            own.get("head_dim", values["head_dim"]),
        )
        if by_kind.setdefault(kind, heads) != heads:
            raise ConfigError(f"{fields.where}: layers of the same type have different heads in per_layer_config")
    any_layers = next(iter(by_kind.values()), (None, None))
    for kind, names in (
        (FULL, ("num_global_key_value_heads", "global_head_dim")),
        (SLIDING, ("num_key_value_heads", "head_dim")),
    ):
        values |= zip(names, by_kind.get(kind, any_layers), strict=True)


def _rope(written: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    """The RoPE section of a type of layers. Raises ConfigError for one that eyas doesn't compute."""
    found = written.get(kind) or _ROPE[kind]
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: rope_parameters of {kind} is no object")
    rope = {key: value for key, value in found.items() if value is not None}
    parts = {"default": (), "proportional": ("partial_rotary_factor",)}.get(rope.get("rope_type", "default"))
    if parts is None:
        raise ConfigError(f"{where}: rope_type {rope['rope_type']!r} of {kind}: eyas reads default and proportional")
    if unknown := sorted(set(rope) - {"rope_type", "rope_theta", *parts}):
        raise ConfigError(f"{where}: unknown key {unknown[0]} in the RoPE of {kind}: eyas can't tell what it changes")
    numbers = {key: rope.get(key) for key in ("rope_theta", *parts)}
    for key, value in numbers.items():
        most = 1.0 if key in parts else 1e15
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            raise ConfigError(f"{where}: {key} of {kind} is {value!r}, not a positive number up to {most:g}")
    return {"rope_type": "default", **rope}


def write(config: AssistantConfig) -> dict[str, Any]:
    """The config.json that transformers reads."""
    values = config.model_dump(
        mode="json",
        exclude={"taps", "default_tree", "embedding", "head", "draft_vocab_size", "mlp_bias"},
        exclude_none=True,
    )
    values["hidden_activation"] = values.pop("hidden_act")
    values["rope_parameters"] = {FULL: values["rope_parameters"], SLIDING: values.pop("sliding_rope_parameters")}
    values |= {
        "model_type": "gemma4_text", "attention_k_eq_v": True, "num_kv_shared_layers": config.num_hidden_layers,
        **_ABSENT, "vocab_size_per_layer_input": 0,
    }  # fmt: skip
    centroids = values.pop("num_centroids", None)
    most = values.pop("centroid_intermediate_top_k")
    ordered = {} if centroids is None else {"num_centroids": centroids, "centroid_intermediate_top_k": most}
    made: dict[str, Any] = {
        "model_type": _MODEL_TYPE, "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": values.pop("target_hidden_size"), "use_ordered_embeddings": centroids is not None,
        **ordered, "tie_word_embeddings": True, "text_config": values,
    }  # fmt: skip
    return made if config.default_tree is None else made | {"default_tree": config.default_tree}


AttendTarget = Callable[[str, Tensor], Tensor]
"""(type of layer, q [R, N, W, D]) -> [R, N, W, D]: attention to the target's keys and values; scores aren't scaled."""


class AssistantAttention(nn.Module):
    """Attention with queries only."""

    def __init__(self, config: AssistantConfig, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.head_dim = config.shared_shape(kind).size
        size = config.num_attention_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, size, bias=config.attention_bias)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.o_proj = nn.Linear(size, config.hidden_size, bias=config.attention_bias)

    def forward(self, x: Tensor, rope: Rope, look: AttendTarget) -> Tensor:
        """x [R, W, H] -> [R, W, H]."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        out: Tensor = self.o_proj(look(self.kind, rotate(q, rope)).transpose(1, 2).flatten(2))
        return out


class AssistantLayer(nn.Module):
    """A decoder layer with norms before and after each part, multiplied by a scalar."""

    def __init__(self, config: AssistantConfig, kind: str) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = AssistantAttention(config, kind)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.pre_feedforward_layernorm = RMSNorm(size, eps=eps)
        self.post_feedforward_layernorm = RMSNorm(size, eps=eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, ropes: Mapping[str, Rope], look: AttendTarget) -> Tensor:
        """The residual stream [R, W, H] entering the layer -> the one leaving it."""
        mixed = self.self_attn(self.input_layernorm(x), ropes[self.self_attn.kind], look)
        x = x + self.post_attention_layernorm(mixed)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class Clusters(nn.Module):
    """The clusters into which a head sorts the vocabulary: C of V / C tokens each."""

    token_ordering: Tensor  # [V] int64: the tokens, cluster after cluster

    def __init__(self, config: AssistantConfig, count: int) -> None:
        super().__init__()
        self.top_k = config.centroid_intermediate_top_k
        self.centroids = nn.Linear(config.hidden_size, count, bias=False)
        self.register_buffer("token_ordering", torch.arange(config.vocab_size))

    def forward(self, states: Tensor, weight: Tensor) -> Tensor:
        """Logits [..., V] of states [..., H] and the tokens' rows `weight` [V, H].

        Tokens outside the best clusters have the least logit of those inside, minus 1, as in transformers.
        """
        best = self.centroids(states).topk(self.top_k, dim=-1).indices
        tokens = self.token_ordering.view(self.centroids.out_features, -1)[best].flatten(-2)  # [..., most * V / C]
        logits = (weight[tokens] @ states.unsqueeze(-1)).squeeze(-1)
        others = logits.amin(-1, keepdim=True) - 1
        return others.expand(*states.shape[:-1], len(weight)).scatter(-1, tokens, logits)


class AssistantNetwork(DraftNetwork):
    """The layers between two projections: from the target's width, and back to it."""

    config: AssistantConfig

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(AssistantLayer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_projection = nn.Linear(2 * config.target_hidden_size, config.hidden_size, bias=False)
        self.post_projection = nn.Linear(config.hidden_size, config.target_hidden_size, bias=False)
        self.masked_embedding = None if config.num_centroids is None else Clusters(config, config.num_centroids)
        self.rotaries = nn.ModuleDict({FULL: Rotary(config), SLIDING: Rotary(config.of_sliding_layers)})
        self.sources: dict[str, int] = {}
        """Type of layer -> the target's layer whose keys and values are read."""
        self._embedding: tuple[nn.Module, ...] = ()  # in a tuple: it is the target's, not a submodule

    def make_heads(self) -> None:
        """The head, under the name of the embedding that it is tied to; with clusters, only some rows are read."""
        size, tokens = self.config.hidden_size, self.config.vocab_size
        whole = self.config.num_centroids is None
        made: Any = nn.Linear(size, tokens, bias=False) if whole else nn.Embedding(tokens, size)
        self.embed_tokens = made

    @property
    def heads(self) -> list[nn.Linear]:
        return [self.embed_tokens] if isinstance(self.embed_tokens, nn.Linear) else []

    @property
    def state_size(self) -> int:
        return self.config.target_hidden_size

    def fill(self, tensors: Mapping[str, Tensor], target: EmbeddingAndHead | None = None) -> DraftNetwork:
        """See `DraftNetwork.fill`. Raises CheckpointError for clusters that don't hold every token once."""
        order = tensors.get("masked_embedding.token_ordering")
        if order is not None and not torch.equal(order.sort().values, torch.arange(self.config.vocab_size)):
            raise CheckpointError("masked_embedding.token_ordering doesn't name every token once: the file is damaged")
        return super().fill(tensors, target)

    def borrow(self, target: EmbeddingAndHead) -> None:
        """Use the target's embedding, and find the layers whose keys and values are read.

        Raises DrafterMismatchError if the target has no such layers.
        """
        if not isinstance(target, Passes):
            raise UnsupportedModelError("an assistant reads its target's cache: it needs the whole target")
        sources = target.last_layers()
        config = self.config
        theirs = getattr(target.config, "rope_parameters", None) or {}
        wrong = []
        for kind in sorted(set(config.layer_types)):
            shape = config.shared_shape(kind)
            rope = config.rope_parameters
            rope = rope if kind == FULL else config.sliding_rope_parameters
            if kind not in sources:
                wrong.append(f"it reads the keys of a {kind} layer, and the target has none")
                continue
            found = target.kv_shapes[sources[kind]]
            if found != (shape, shape):
                has = " and ".join(f"{each.heads} of {each.size}" for each in sorted({*(found or ())}))
                wrong.append(f"it reads {shape.heads} heads of {shape.size} in {kind}, the target has {has}")
            theta = (theirs[kind] if isinstance(theirs.get(kind), dict) else theirs).get("rope_theta")
            if theta != rope["rope_theta"]:
                wrong.append(f"its RoPE in {kind} has theta {rope['rope_theta']}, the target's {theta}")
        window = target.plan.windows.get(SLIDING)
        if SLIDING in sources and SLIDING in config.layer_types and window != config.sliding_window:
            wrong.append(f"it attends to a window of {config.sliding_window}, the target to one of {window}")
        if wrong:
            raise DrafterMismatchError(f"this assistant is of another model: {'; '.join(wrong)}. Use the target's own")
        self.sources = {kind: sources[kind] for kind in config.layer_types}
        self._embedding = (target.model.get_input_embeddings(),)

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings [R, W, B] of tokens [R, W], scaled as the target scales them."""
        if not self._embedding:
            raise CheckpointError("an assistant reads its target's embedding: give it one with borrow(target)")
        out: Tensor = self._embedding[0](tokens)
        return out.to(self.dtype)

    def look_ahead(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, look: AttendTarget
    ) -> tuple[Tensor, Tensor]:
        """One pass over tokens [R, W] and the states [R, W, B] before them, all of a row at position [R, 1].

        Returns the states to feed back [R, W, B] and those that `logits` takes [R, W, H].
        """
        x = self.pre_projection(torch.cat((self.embed(tokens), hidden), dim=-1))
        ropes = {kind: rotary(x, positions) for kind, rotary in self.rotaries.items()}
        for layer in self.layers:
            x = layer(x, ropes, look)
        normed = self.norm(x)
        return self.post_projection(normed), normed

    def logits(self, normed: Tensor) -> Tensor:
        if self.masked_embedding is None:
            out: Tensor = self.embed_tokens(normed)
            return out
        return self.masked_embedding(normed, self.embed_tokens.weight)  # type: ignore[no-any-return]  # of Clusters


class AssistantLevels:
    """The levels of one draft. All of them see the same columns of the target's cache, which are fetched once."""

    sure: Tensor | None = None

    def __init__(self, network: AssistantNetwork, pairs: NetworkPairs, rows: range) -> None:
        cache = pairs.target
        chosen = slice(rows.start, rows.stop)
        if cache is None:
            raise InvariantError("an assistant drafts from its target's cache, and was given none")
        known = cache.lengths[chosen]
        lengths = to_device(known, cache.device).unsqueeze(1)  # [R, 1]
        end = max(1, *known)
        window = network.config.sliding_window
        first = {FULL: 0, SLIDING: max(0, min(known) - 1 - window)}
        self._keys: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        for kind, layer in network.sources.items():
            columns = torch.arange(first[kind], end, device=cache.device)
            # an empty row, for which nothing is drafted, sees a column too: no softmax is over nothing
            seen = columns < lengths.clamp(min=1)
            if kind == SLIDING:
                seen = seen & (columns >= (lengths - 1 - window).clamp(min=0))
            self._keys[kind] = *cache.columns(layer, rows, first[kind], end), seen[:, None, None]
        self._network = network
        self._positions = lengths
        self._fed = pairs.fed[chosen].unsqueeze(1)  # [R, W, B]
        self._roots = (pairs.last[chosen, 1:] - 1).clamp(min=0)

    def first(self) -> Tensor:
        """The logits [R, 1, V] of what follows the roots."""
        return self._run(self._roots)

    def add(self, frontier: Frontier) -> Tensor:
        """Run the next level's nodes; returns the logits [R, W, V] of what follows them."""
        parents = frontier.parents.unsqueeze(2).expand(-1, -1, self._fed.shape[2])
        self._fed = self._fed.gather(1, parents)
        return self._run(frontier.tokens)

    def _run(self, tokens: Tensor) -> Tensor:
        def look(kind: str, queries: Tensor) -> Tensor:
            return grouped_attention(queries, *self._keys[kind], scale=1.0)

        self._fed, normed = self._network.look_ahead(tokens, self._fed, self._positions, look)
        return self._network.logits(normed)


class AssistantProposer(Proposer):
    """Keeps of each row its last token and the target's state before it; the rest is in the target's cache."""

    network: AssistantNetwork

    def levels(self, pairs: NetworkPairs, rows: range, depth: int, within: RecordedView | None = None) -> Levels:  # noqa: ARG002
        return AssistantLevels(self.network, pairs, rows)

    def read(self, pairs: NetworkPairs, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        known = [(slot, row, count - 1) for row, (slot, count) in enumerate(zip(rows, counts, strict=True)) if count]
        slots, row, last = to_device(known, taps.device).unbind(1)
        pairs.fed[slots] = taps[row, last, 0].to(pairs.fed.dtype)
        pairs.last[slots] = F.pad(next_tokens[row, last].unsqueeze(1) + 1, (1, 0))
        pairs.cache.commit(rows, [range(count) for count in counts])


KIND = Kind(
    _MODEL_TYPE,
    AssistantConfig,
    AssistantNetwork,
    read,
    write,
    architectures=frozenset({"Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"}),
    model_type=_MODEL_TYPE,
    fixed_taps=True,
    proposer=AssistantProposer,
    trained=False,
)
