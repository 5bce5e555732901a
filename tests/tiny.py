"""Tiny random models that disagree: targets of many architectures, drafters of every kind, and an oracle drafter.

Weights are scaled up so that greedy output varies instead of repeating one token: with models that agree, a broken
acceptance rule would pass.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Container, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from eyas.drafters.base import Drafter, SlotPairs
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.formats.fields import Fields
from eyas.drafters.kinds import KINDS as KINDS_OF_DRAFTERS
from eyas.drafters.kinds.eagle3 import Eagle3Network
from eyas.drafters.loading import drafter_of
from eyas.drafters.network import DraftNetwork, set_vocabulary
from eyas.targets import Target
from eyas.targets.graphs import CudaRecorder
from eyas.targets.loading import _prepack
from eyas.tree import DraftTree, TreeSpec
from eyas.verify import Coupling

VOCAB = 97
HIDDEN = 32
LAYERS = 4
WINDOW = 6
DEVICE = torch.device(os.environ.get("EYAS_TEST_DEVICE", "cpu"))
"""Device of shared targets, drafters and oracles: `make gpu` runs some tests with them on a GPU."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # a tied head mostly repeats the last token
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
_HYBRID = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW, "head_dim": 8}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": WINDOW,
            "head_dim": 8,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": WINDOW, "head_dim": 8, "layer_types": _HYBRID}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": WINDOW, "layer_types": _HYBRID}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "neox": ("GPTNeoXConfig", {}),
    "gpt2": ("GPT2Config", {"n_positions": 256}),
    "mixtral": ("MixtralConfig", _MOE),
    "qwen3moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8},
    ),
    "gptoss": (
        "GptOssConfig",
        {
            **_MOE,
            "sliding_window": WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
}
NATIVE_ONLY: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek2": (  # RoPE in complex numbers, queries from a single product, scores scaled by YaRN
        "DeepseekV2Config",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32,
            "v_head_dim": 16,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "granite": (
        "GraniteConfig",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 1, 0, 1]}),
    "neox_serial": ("GPTNeoXConfig", {"use_parallel_residual": False, "rotary_pct": 1.0, "hidden_act": "gelu_new"}),
    "phi": ("PhiConfig", {}),
    "stablelm": ("StableLmConfig", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW}),
    "cohere": ("CohereConfig", {}),  # runs its modules: RoPE rotates neighboring features
    "olmoe": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 16}),
    "qwen2moe": (  # one dense layer, and an expert that all tokens share
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 32,
            "mlp_only_layers": [1],
        },
    ),
    "glm4moe": (  # sigmoid scores with a correction bias
        "Glm4MoeConfig",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "head_dim": 8,
        },
    ),
}
"""Further architectures for the tests of native passes."""
_LINEAR = ["linear_attention", "full_attention"] * 2
_DELTA = {
    "layer_types": _LINEAR, "head_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_SSM = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_NEMOTRON = {
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 32, "head_dim": 8,
    "time_step_min": 1e-5, "time_step_max": 2.0,  # scans of many tokens clamp to the minimum, single steps don't
}  # fmt: skip
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA),
    "bamba": ("BambaConfig", {**_SSM, "attn_layer_indices": [1, 3]}),
    "lfm2": ("Lfm2Config", {"layer_types": ["full_attention", "conv"] * 2, "block_auto_adjust_ff_dim": False}),
    "mamba2": ("Mamba2Config", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2}),
    "jamba": ("JambaConfig", {**_EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}),
}
"""Architectures with recurrent layers."""
SELDOM_RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {**_SSM, "layer_types": _LINEAR, "num_local_experts": 4, "shared_intermediate_size": 32},
    ),
    "granite_dense": (
        "GraniteMoeHybridConfig",
        {
            **_SSM, "layer_types": _LINEAR, "num_local_experts": 0, "shared_intermediate_size": 64,
            "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3, "logits_scaling": 2.0,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            **_SSM, "mamba_d_ssm": 64, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.7,
            "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8, "ssm_in_multiplier": 0.9,
            "ssm_out_multiplier": 1.1, "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 0.7], "mlp_multipliers": [0.6, 1.3],
        },
    ),
    "falcon_h1_normed": (
        "FalconH1Config", {**_SSM, "mamba_d_ssm": 64, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
    ),
    "nemotron_h": ("NemotronHConfig", {**_NEMOTRON, "layers_block_type": [*_LINEAR[:2], "mlp", "moe"]}),
    "olmo_hybrid": ("OlmoHybridConfig", _DELTA),
    "lfm2_moe": ("Lfm2MoeConfig", {**_EXPERTS, "layer_types": ["full_attention", "conv"] * 2, "num_dense_layers": 1}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16}),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            "layer_types": _LINEAR, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
            "v_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 8,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            "layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 4, "mamba_d_state": 8,
            "mamba_ngroups": 2, "adapter_rank": 8,
        },
    ),
    "minimax": ("MiniMaxConfig", {"layer_types": _LINEAR, "head_dim": 8, "num_local_experts": 4, "block_size": 4}),
    "mamba": ("MambaConfig", {"state_size": 8}),
    "falcon_mamba": ("FalconMambaConfig", {"state_size": 8}),
}  # fmt: skip
"""Further recurrent architectures, tried by slow tests."""
_FITTING: dict[str, dict[str, int]] = {
    "olmoe": {"num_attention_heads": 2},  # its heads divide the hidden size, as in some below
    "deepseek3": {"qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 48},
    "deepseek2": {},
    **{name: {"num_attention_heads": 2} for name in ("neox", "neox_serial", "gpt2")},
    "stablelm": {"num_attention_heads": 2, "num_key_value_heads": 1},
}
WINDOWED = ("mistral", "gemma2", "gemma3", "olmo3", "gptoss")


def fitting(name: str) -> dict[str, int]:
    """Sizes that make an architecture's heads fit the vectors of native kernels."""
    return _FITTING.get(name, {"head_dim": 16})


def build_model(name: str, scale: float | None = None, seed: int = 0, **changes: Any) -> Any:
    """A random float32 model of one of these architectures, on `DEVICE`."""
    scale = (14.0 if name != "zamba2" else 5.0) if scale is None else scale  # with 14, its steps and scans differ
    class_name, settings = {**ARCHITECTURES, **NATIVE_ONLY, **RECURRENT, **SELDOM_RECURRENT}[name]
    torch.manual_seed(seed)
    config = getattr(tf, class_name)(**{**_COMMON, **settings, **changes})
    model = tf.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for key, parameter in model.named_parameters():
        if key.endswith("A_log"):  # scaled up, it would make states forget everything immediately
            continue
        if parameter.dim() > 1:
            parameter.mul_(scale)
        else:  # norms, biases, sinks: moved off their initial ones and zeros
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(DEVICE)


def sample(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of some parameters; all but a few are marked slow.

    With several axes, as few combinations as cover each value always run; with one axis, every third value.
    """
    longest = max(len(axis) for axis in axes)
    always = {tuple(step % len(axis) for axis in axes) for step in range(longest) if len(axes) > 1 or step % 3 == 0}
    made = []
    for at in product(*(range(len(axis)) for axis in axes)):
        marks = () if at in always else (pytest.mark.slow,)
        made.append(pytest.param(*(axis[index] for axis, index in zip(axes, at, strict=True)), marks=marks))
    return made


def every_other(*axes: Sequence[Any], seldom: Container[Any] = ()) -> list[Any]:
    """All combinations of some parameters; every other one is marked slow.

    With three or more axes, the others cover every pair of values, except values of the first that are `seldom` tried.
    """
    made = []
    for at in product(*(range(len(axis)) for axis in axes)):
        values = [axis[index] for axis, index in zip(axes, at, strict=True)]
        marks = (pytest.mark.slow,) if sum(at) % 2 or values[0] in seldom else ()
        made.append(pytest.param(*values, marks=marks))
    return made


@cache
def target(name: str = "llama") -> Target:
    """A shared target; on a GPU, its passes are recorded."""
    record = CudaRecorder(DEVICE) if DEVICE.type == "cuda" else None
    return Target(build_model(name), record=record)


_FITTING_RECURRENT: dict[str, dict[str, int]] = {
    **{
        name: {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
        for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")
    },
    "kimi_linear": {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "num_local_experts": 32},
    "nemotron_h": {"head_dim": 16, "moe_shared_expert_intermediate_size": 64},
    "minimax": {"head_dim": 16, "num_local_experts": 32},
    **{name: {} for name in ("mamba", "mamba2")},
}
"""Sizes that native attention and recurrences support."""
NATIVE_RECURRENT = ("qwen3_next", "qwen3_5", "bamba", "lfm2")
SELDOM_NATIVE_RECURRENT = (
    "qwen3_5_moe", "olmo_hybrid", "granitemoehybrid", "granite_dense", "falcon_h1", "falcon_h1_normed", "nemotron_h",
)  # fmt: skip
"""Those of `RECURRENT` and of `SELDOM_RECURRENT` that have native passes in these sizes."""
_WIDTHS = dict.fromkeys(
    ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 64
)
"""Widths that are multiples of the processor's vectors, as in real models."""


def fitting_recurrent(name: str) -> dict[str, int]:
    """Sizes that native passes of a recurrent architecture support."""
    return {**_WIDTHS, **_FITTING_RECURRENT.get(name, {"num_attention_heads": 2, "num_key_value_heads": 1})}


@cache
def as_loaded(name: str, kind: str, modules: bool = False, **changes: Any) -> Target:
    """A target with weights laid out as by the loader; `modules`: its passes aren't native."""
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    model = build_model(name, **{**fitting_recurrent(name), **changes}).to(dtype)
    native = _prepack(model, DEVICE, dtype, None, "int8" if kind == "int8" else None)
    return Target(model, decoder=None if modules else native)


def quick_target(name: str = "llama") -> Target:
    """A shared float32 target for tests whose subject isn't its passes, which are native where they can be."""
    return as_loaded(name, "float32") if DEVICE.type == "cpu" else target(name)


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Random prompts of the given lengths; no two begin with the same tokens."""
    draw = torch.Generator().manual_seed(seed)
    made = [torch.randint(3, VOCAB, (n,), generator=draw).tolist() for n in lengths]
    assert len({tuple(p[:3]) for p in made}) == len(made)
    return made


def continuation(model: Any, prompt: Sequence[int], tokens: int, **options: Any) -> list[int]:
    """The greedy continuation of `prompt` by `transformers` itself."""
    ids = torch.tensor([list(prompt)], device=model.device)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
    generated: list[int] = out[0, len(prompt) :].tolist()
    return generated


_SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "target_hidden_size": HIDDEN}
_LAYERED: dict[str, Any] = {**_SIZES, "intermediate_size": 48, "num_attention_heads": 4}
_BLOCK: dict[str, Any] = {
    **_LAYERED, "num_key_value_heads": 2, "num_aux_hidden_states": 3, "taps": (1, 2, 4), "block_size": 5,
    "mask_token_id": 1,
}  # fmt: skip
_LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
KINDS: dict[str, dict[str, Any]] = {
    "dflash": _BLOCK,
    "dflash2": {**_BLOCK, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 8},
    "domino": {**_BLOCK, "gru_hidden_dim": 7, "emb_dim": 6},
    "dspark": {**_BLOCK, "markov_rank": 6},
    "jetspec": {**_BLOCK, "is_causal": True},
    "lilicorr": {**_BLOCK, "lilicorr_hidden_size": 16, "lilicorr_factor_dim": 6},
    "xpress": {**_BLOCK, "xpress_rank": 6, "xpress_mlp_hidden": 9},
    "peagle": {
        **_LAYERED,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "draft_vocab_size": 60,
        "mask_token_id": 1,
    },
    "eagle1": {**_LAYERED, "num_key_value_heads": 2},
    "eagle3": {**_LAYERED, "num_key_value_heads": 2, "draft_vocab_size": 60},
    "mla": {**_LAYERED, **_LATENT, "draft_vocab_size": 60},
    "mlp": _SIZES,
    "medusa": {**_SIZES, "draft_vocab_size": 60, "num_heads": 5},
    "mtp": {**_LAYERED, "num_key_value_heads": 2},
}
"""Small settings of every drafter kind that is trained."""
TRAINED = [name for name, kind in KINDS_OF_DRAFTERS.items() if kind.trained]
"""The registered kinds among them; others read parts of a target that the targets here don't have."""


def network(kind: str, seed: int = 0, scale: float = 6.0, **settings: Any) -> DraftNetwork:
    """A random network of a kind; a reduced vocabulary gets a map that skips tokens irregularly."""
    made = KINDS_OF_DRAFTERS["dflash" if kind == "jetspec" else kind]
    values = {**KINDS[kind], **settings}
    values.setdefault("draft_vocab_size", values["vocab_size"])
    if kind in ("eagle1", "mlp", "mtp"):
        values["target_hidden_size"] = values["hidden_size"]
    config = made.read(Fields(values, "test"))
    config = config.model_copy(update={k: v for k, v in settings.items() if k in ("embedding", "head")})
    torch.manual_seed(seed)
    module = made.network(config).eval().requires_grad_(False)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5)
        elif "embed" not in name:
            parameter.normal_(std=scale * 0.05)
    set_vocabulary(module, torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values)
    return module.to(DEVICE)


def drafter(kind: str, seed: int = 0, **settings: Any) -> NetworkDrafter:
    """A random drafter for the targets here."""
    made = network(kind, seed, **settings)
    return drafter_of(made, made.config.taps or made.config.default_taps(LAYERS))


def eagle3_module(seed: int = 0, scale: float = 6.0, **settings: Any) -> Eagle3Network:
    """A random EAGLE-3 network."""
    made = network("eagle3", seed, scale, **{"num_aux_hidden_states": 3, **settings})
    assert isinstance(made, Eagle3Network)
    return made


def eagle3_drafter(taps: tuple[int, ...] = (1, 2, 4), seed: int = 0, **settings: Any) -> NetworkDrafter:
    """A random EAGLE-3 drafter."""
    return drafter_of(eagle3_module(seed, num_aux_hidden_states=len(taps), **settings), taps)


class OraclePairs(NamedTuple):
    """Pairs copied out of a slot."""

    tokens: list[int]
    taps: list[Tensor]
    unread: int = 0


class OracleDrafter(Drafter, SlotPairs):
    """Drafts the recorded continuations, at random ranks among wrong tokens, and sometimes leaves them out.

    So rounds accept nothing, a part or everything, on paths all over the tree. It also keeps every tap it observes, for
    comparison with the target's own states.
    """

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],
        taps: tuple[int, ...],
        omit: float = 0.15,
        vocab_size: int = VOCAB,
        device: torch.device = DEVICE,
        strict: bool = True,
    ) -> None:
        """`strict`: a sequence must not leave its recorded continuation; otherwise, its later drafts are wrong."""
        self._taps_read = taps
        self._device = device
        self._strict = strict
        self.seen: list[tuple[list[int], Tensor]] = []
        """(tokens after the first, their taps [n, A, Ht]) of every sequence that left its slot."""
        self._sequences = [list(s) for s in sequences]
        self._omit = omit
        self._vocab_size = vocab_size
        self._random = torch.Generator().manual_seed(7)
        self.pairs = self
        self.resize(0)

    def fresh(self) -> OracleDrafter:
        made = copy.copy(self)
        made.pairs = made
        made.resize(0)
        return made

    @property
    def taps(self) -> tuple[int, ...]:
        return self._taps_read

    @property
    def max_fanout(self) -> int:
        return self._vocab_size

    @property
    def slots(self) -> int:
        return len(self._tokens)

    def resize(self, slots: int) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._taps: list[list[Tensor]] = [[] for _ in range(slots)]

    def reshape(self, slots: int, columns: int) -> None:  # noqa: ARG002
        more = range(slots - len(self._tokens))
        self._tokens, self._taps = (kept[:slots] + [[] for _ in more] for kept in (self._tokens, self._taps))

    def length(self, slot: int) -> int:
        return len(self._tokens[slot])

    def observe(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        for row, (slot, count) in enumerate(zip(rows, counts, strict=True)):
            self._tokens[slot] += next_tokens[row, :count].tolist()
            self._taps[slot] += list(taps[row, :count].clone())

    defer = observe

    def save(self, slot: int, start: int, stop: int) -> OraclePairs:
        return OraclePairs(self._tokens[slot][start:stop], [tap.clone() for tap in self._taps[slot][start:stop]])

    def load(self, slot: int, saved: OraclePairs, count: int) -> None:
        self._tokens[slot] += saved.tokens[:count]
        self._taps[slot] += saved.taps[:count]

    def truncate(self, slot: int, length: int) -> None:
        if self._taps[slot]:
            self.seen.append((list(self._tokens[slot]), torch.stack(self._taps[slot])))
        del self._tokens[slot][length:]
        del self._taps[slot][length:]

    def move(self, source: int, target: int) -> None:
        self.truncate(target, 0)
        self._tokens[target] = self._tokens[source]
        self._tokens[source] = []
        self._taps[target] = self._taps[source]
        self._taps[source] = []

    def draft(
        self,
        rows: range,
        spec: TreeSpec,
        coupling: Coupling,  # noqa: ARG002
        drafting: Sequence[bool] | None = None,
    ) -> DraftTree:
        wanted = [True] * len(rows) if drafting is None else drafting
        alive = [want and bool(self._tokens[slot]) for want, slot in zip(wanted, rows, strict=True)]
        growth = spec.start(len(rows), self._device, alive)
        ahead = [[self._ahead(slot)] for slot in rows]  # per frontier node: the true continuation, None if off track
        while True:
            made = [[self._children(node, growth.fanout) for node in row] for row in ahead]
            tokens = torch.tensor([[node[0] for node in row] for row in made])
            steps = torch.rand(tokens.shape, generator=self._random).cumsum(2)
            frontier = growth.expand(-steps.to(self._device), tokens.to(self._device))
            if frontier is None:
                break
            grown = []
            for row, ids, parents in zip(ahead, frontier.tokens.tolist(), frontier.parents.tolist(), strict=True):
                above = [row[p] for p in parents]
                grown.append([a[1:] if a and a[0] == t else None for t, a in zip(ids, above, strict=True)])
            ahead = grown
        return growth.tree()

    def _ahead(self, slot: int) -> list[int] | None:
        known = self._tokens[slot]
        if not known:
            return None
        for sequence in self._sequences:
            if sequence[1 : 1 + len(known)] == known:
                return sequence[1 + len(known) :]
        assert not self._strict, f"slot {slot} holds tokens of no recorded sequence: {known}"
        return None

    def _children(self, ahead: list[int] | None, count: int) -> tuple[list[int]]:
        wrong = torch.randperm(self._vocab_size, generator=self._random).tolist()
        if not ahead:
            return (wrong[:count],)
        wrong.remove(ahead[0])
        children = wrong[:count]
        if torch.rand((), generator=self._random) >= self._omit:
            children[int(torch.randint(count, (), generator=self._random))] = ahead[0]
        return (children,)


def full_forward(model: nn.Module, tokens: Sequence[int]) -> Any:
    """`transformers`' own pass over one sequence, keeping all hidden states."""
    with torch.inference_mode():
        ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
        return model(ids, output_hidden_states=True, use_cache=False)
