"""Who reads exported drafters: what each can represent, and the form it reads.

Facts are those of the versions named here; docs/formats.md says which were run and which are by specification only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from eyas.drafters.formats.taps import BOUNDARIES, OUTPUTS
from eyas.interop.export import forms
from eyas.interop.export.drafter import DrafterToExport
from eyas.interop.export.rules import (
    FUSED,
    GROUPED,
    NEEDS_LENT_EMBEDDING,
    NEEDS_LENT_HEAD,
    NEEDS_OWN_EMBEDDING,
    NEEDS_OWN_HEAD,
    NEEDS_OWN_REDUCED_HEAD,
    Need,
    Refusal,
    Rule,
    arranged,
    identity_map,
    off,
    only,
    refusals,
    rising_taps,
    rotations,
)

_MLA = ("mla",)
_E1, _E3 = ("eagle1",), ("eagle3",)
_PLAIN_YARN = frozenset("factor original_max_position_embeddings beta_fast beta_slow".split())
_LATENT_YARN = _PLAIN_YARN | {"mscale", "mscale_all_dim"}


def _keys(drafter: DrafterToExport) -> set[str]:
    """What a YaRN section says; nothing for another."""
    rope = drafter.get("rope_parameters")
    said = {key for key, value in rope.items() if value is not None} - {"rope_type", "rope_theta"}
    return said if rope["rope_type"] == "yarn" else set()


def _latent_yarn(drafter: DrafterToExport) -> bool:
    keys = _keys(drafter)
    return keys <= _LATENT_YARN and ("mscale" in keys) == ("mscale_all_dim" in keys)


@dataclass(frozen=True)
class Consumer:
    """One engine."""

    name: str
    title: str
    version: str
    kinds: tuple[str, ...]
    rules: tuple[Rule, ...]
    needs: tuple[Need, ...]
    convention: str
    """How it numbers layers."""
    form: Callable[[DrafterToExport], forms.Form] | None
    """None = it reads a single file."""
    target_needed: str = ""
    """Why it can't be written without --target."""

    def prepare(self, drafter: DrafterToExport) -> tuple[DrafterToExport, list[Refusal]]:
        """The drafter as this consumer can read it, or what stands in the way."""
        if self.target_needed and drafter.target is None:
            return drafter, [Refusal("target", f"{self.target_needed}: give --target")]
        broken = refusals(drafter, self.kinds, self.rules)
        if broken and broken[0].field == "kind":
            return drafter, broken
        drafter, unmet = arranged(drafter, self.needs)
        return drafter, broken + unmet


_SILU = only("hidden_act", "silu", why="it computes SiLU only")
_ONE_LAYER = only("num_hidden_layers", 1, why="it has one decoder layer", kinds=FUSED)
_THREE = only("num_aux_hidden_states", 3, why="it reads three taps", kinds=FUSED)
_YARN = Rule("rope_parameters", lambda s: _keys(s) <= _PLAIN_YARN, "its YaRN takes factor, original length and betas",
             GROUPED)  # fmt: skip
_LATENT = (
    Rule("rope_parameters", _latent_yarn, "its YaRN takes mscale and mscale_all_dim together, or none", _MLA),
    only("rope_interleave", True, why="its rotated pairs lie side by side", kinds=_MLA),
    *off("attention_bias", "mlp_bias", why="its latent attention and MLP have no", kinds=_MLA),
)
_QUERY_LATENT = Rule("q_lora_rank", lambda s: s.get("q_lora_rank") is not None, "it needs a query latent", _MLA)
_QWEN3 = (
    Rule("attention_bias", lambda s: not (s.get("qk_norm") and s.get("attention_bias")),
         "its Qwen3 drafter has no attention_bias", _E3),
    Rule("mlp_bias", lambda s: not (s.get("qk_norm") and s.get("mlp_bias")),
         "its Qwen3 drafter has no mlp_bias", _E3),
)  # fmt: skip
_HEADS_DIVIDE = Rule(
    "head_dim",
    lambda s: s.get("head_dim") * s.get("num_attention_heads") == s.config.hidden_size,
    "its heads have hidden_size / num_attention_heads channels",
    _E1,
)
_FULL = Rule("draft_vocab_size", lambda s: not s.reduced, "it drafts the whole vocabulary only")
_FULL_E1 = Rule("draft_vocab_size", lambda s: not s.reduced, "its EAGLE-1 drafts the whole vocabulary only", _E1)
_LENT_HEAD_E1 = replace(NEEDS_LENT_HEAD, kinds=_E1)


def _usual_taps(drafter: DrafterToExport) -> bool:
    taps = drafter.config.taps
    n = (taps[2] + 3 if taps and len(taps) == 3 else 7) if drafter.layers is None else drafter.layers
    return n >= 7 and taps in (None, (2, n // 2, n - 3))


_ALL = (
    Consumer(
        "safeailab", "SafeAILab/EAGLE", "main, 2026-08", GROUPED,
        (
            _ONE_LAYER, _THREE, _FULL_E1, _HEADS_DIVIDE, identity_map(), rotations("default", "linear", "dynamic"),
            *off("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "qk_norm", why="it has no"),
            *off("attention_bias", "mlp_bias", why="it has no"),
            Rule("taps", _usual_taps, "it always reads boundaries 2, n // 2 and n - 3 of at least 7 layers", _E3),
        ),
        (replace(NEEDS_OWN_HEAD, kinds=_E3), _LENT_HEAD_E1),
        "fixed boundaries 2, n // 2, n - 3", forms.safeailab,
    ),
    Consumer(
        "sglang", "SGLang", "main, 2026-09", ("eagle1", "eagle3", "mla"),
        (
            _ONE_LAYER, _FULL_E1, identity_map(), _SILU,
            rotations("default", "linear", "llama3", "yarn", kinds=GROUPED), _YARN,
            rotations("default", "yarn", kinds=_MLA),
            only("bias", True, why="its EAGLE-1 fc always has a bias", kinds=_E1),
            *off("qkv_bias", "attention_bias", "mlp_bias", why="it has no", kinds=GROUPED),
            *off("norm_before_residual", "qk_norm", why="it has no"),
            *_LATENT, *rising_taps(lowest=1, beyond=1),
        ),
        (NEEDS_LENT_EMBEDDING, _LENT_HEAD_E1, NEEDS_OWN_REDUCED_HEAD),
        OUTPUTS, forms.sglang,
    ),
    Consumer(
        "vllm", "vLLM", "0.32.0", ("eagle1", "eagle3", "mla"),
        (
            only("bias", False, why="its EAGLE-1 fc has no bias", kinds=_E1), _FULL_E1, identity_map(), _SILU,
            rotations("default", "linear", "llama3", "yarn", kinds=GROUPED), _YARN,
            rotations("default", "yarn", kinds=_MLA),
            *off("norm_before_fc", why="its latent-attention drafter has no", kinds=_MLA),
            _QUERY_LATENT, *_QWEN3, *_LATENT, *rising_taps(),
        ),
        (_LENT_HEAD_E1, NEEDS_OWN_REDUCED_HEAD),
        BOUNDARIES, forms.vllm,
    ),
    Consumer(
        "speculators", "speculators (vLLM)", "0.3, vLLM 0.32.0", _E3,
        (
            _THREE, identity_map(), _SILU, rotations("default", "linear", "llama3", "yarn"), _YARN,
            *_QWEN3, *rising_taps(),
        ),
        (NEEDS_OWN_HEAD,),
        BOUNDARIES, forms.speculators, "its config names the target",
    ),
    Consumer(
        "atom", "ATOM", "main, 2026-08", FUSED,
        (
            _ONE_LAYER, _FULL, identity_map(), _SILU, rotations("default", kinds=_E3),
            rotations("default", "yarn", kinds=_MLA),
            _QUERY_LATENT, *off("norm_before_residual", "norm_before_fc", "qk_norm", why="it has no"),
            *off("attention_bias", "mlp_bias", why="it has no", kinds=_E3),
            *_LATENT, *rising_taps(),
        ),
        (NEEDS_OWN_EMBEDDING, NEEDS_OWN_HEAD),
        BOUNDARIES, forms.atom,
    ),
    Consumer(
        "tensorrt-llm", "TensorRT-LLM (PyTorch backend)", "main, 2026-09", FUSED,
        (
            _ONE_LAYER, identity_map(), _SILU,
            rotations("default", "linear", "llama3", "yarn", kinds=_E3), _YARN, rotations("yarn", kinds=_MLA),
            _QUERY_LATENT, *off("norm_before_residual", "qk_norm", why="it has no"),
            Rule("norm_before_fc", lambda s: not (s.get("fc_norm") and s.get("norm_before_fc")),
                 "it has no norm_before_fc beside fc_norm", FUSED),
            *_LATENT, *rising_taps(lowest=1),
        ),
        (
            replace(NEEDS_LENT_EMBEDDING, kinds=FUSED,
                    when=lambda s: s.config.hidden_size == s.config.target_hidden_size),
            replace(NEEDS_OWN_EMBEDDING, kinds=FUSED,
                    when=lambda s: s.config.hidden_size != s.config.target_hidden_size),
            NEEDS_OWN_REDUCED_HEAD,
        ),
        "layer outputs, in the serving configuration", forms.tensorrt_llm,
    ),
    Consumer(
        "gguf", "llama.cpp", "as in llama-cpp-python 0.3.36", _E3,
        (
            _ONE_LAYER, _THREE, identity_map(), _SILU, rotations("default", "linear", "llama3", "yarn"), _YARN,
            *off("fc_norm", "norm_output", "qk_norm", "attention_bias", "mlp_bias", why="it has no"),
            Rule("taps", lambda s: s.layers is None or all(0 <= k <= s.layers for k in s.config.taps or ()),
                 "its taps lie at boundaries 0 to the number of layers"),
        ),
        (NEEDS_OWN_REDUCED_HEAD,),
        BOUNDARIES, None, "the file carries the target's tokenizer and boundaries",
    ),
)  # fmt: skip
CONSUMERS: dict[str, Consumer] = {consumer.name: consumer for consumer in _ALL}


def who_can(drafter: DrafterToExport) -> list[str]:
    """The consumers that can represent a drafter as it is, or with --target."""
    return [name for name, consumer in CONSUMERS.items() if not consumer.prepare(drafter)[1]]
