"""The engines that read exported drafters (consumers): what each can represent, and the form that it reads.

Everything applies to the versions named here. docs/formats.md says which consumers were run, and which are supported
from their specifications only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from eyas.drafters.formats.taps import BOUNDARIES, OUTPUTS
from eyas.drafters.kind import DFLASH, DFLASH2, DSPARK, EAGLE, EAGLE3, EAGLE3_MLA, PEAGLE
from eyas.interop.export import forms
from eyas.interop.export.drafter import DrafterToExport
from eyas.interop.export.forms import (
    BLOCK,
    EAGLES,
    FUSED,
    GROUPED,
    NEEDS_OWN_EMBEDDING,
    NEEDS_OWN_HEAD,
    NEEDS_OWN_REDUCED_HEAD,
    NEEDS_SHARED_EMBEDDING,
    NEEDS_SHARED_HEAD,
    Families,
    Need,
    Refusal,
    Rule,
    as_wide_as_the_target,
    equals,
    identity_map,
    is_off,
    layers_alike,
    meet_needs,
    recurrent_targets,
    refusals,
    rising_taps,
    rotations,
    window_causality,
    windows,
)


@dataclass(frozen=True)
class Consumer:
    """An engine that reads exported drafters."""

    name: str
    title: str
    """Its name as its authors spell it."""
    version: str
    families: Families
    """The families of drafters that it can run."""
    rules: tuple[Rule, ...]
    needs: tuple[Need, ...]
    convention: str
    """How it numbers the target's layers, as text for the README."""
    form: Callable[[DrafterToExport], forms.Form] | None
    """The function that makes its config and tensors; None = a GGUF file."""
    target_needed: str = ""
    """Why an export needs a target; empty if it doesn't."""

    def prepare(self, drafter: DrafterToExport) -> tuple[DrafterToExport, list[Refusal]]:
        """The drafter in a form that this consumer can read, and the reasons why it can't, if any."""
        if self.target_needed and drafter.target is None:
            return drafter, [Refusal("target", f"{self.target_needed}: give `model=`")]
        broken = refusals(drafter, self.families, self.rules)
        if broken and broken[0].field == "kind":
            return drafter, broken
        drafter, unmet = meet_needs(drafter, self.needs)
        return drafter, broken + unmet


_E1 = (EAGLE,)
_E3 = (EAGLE3,)
_MLA = (EAGLE3_MLA,)
_DFLASH = (DFLASH, DFLASH2)
_DSPARK = (DSPARK,)
_DFLASH2 = (DFLASH2,)
_THIRD = (EAGLE3, PEAGLE)
"""The families with EAGLE-3's layers and grouped-query attention."""
_PLAIN_YARN = frozenset("factor original_max_position_embeddings beta_fast beta_slow".split())
_LATENT_YARN = _PLAIN_YARN | {"mscale", "mscale_all_dim"}


def _yarn_keys(drafter: DrafterToExport) -> set[str]:
    """The keys of a YaRN section without type and theta; empty for other types of RoPE."""
    rope = drafter.get("rope_parameters")
    keys = {key for key, value in rope.items() if value is not None} - {"rope_type", "rope_theta"}
    return keys if rope["rope_type"] == "yarn" else set()


def _latent_yarn(drafter: DrafterToExport) -> bool:
    """Whether a YaRN section has only known keys, and both `mscale` and `mscale_all_dim` or neither."""
    keys = _yarn_keys(drafter)
    return keys <= _LATENT_YARN and ("mscale" in keys) == ("mscale_all_dim" in keys)


_SILU = equals("hidden_act", "silu", why="it computes SiLU only")
_ONE_LAYER = equals("num_hidden_layers", 1, why="it has one decoder layer", families=FUSED)
_THREE = equals("num_aux_hidden_states", 3, why="it reads three taps", families=(*FUSED, PEAGLE))
_YARN = Rule(
    "rope_parameters",
    lambda d: _yarn_keys(d) <= _PLAIN_YARN,
    "its YaRN takes factor, original length and betas",
    (*GROUPED, PEAGLE, *BLOCK),
)
_LATENT = (
    Rule("rope_parameters", _latent_yarn, "its YaRN takes mscale and mscale_all_dim together, or none", _MLA),
    equals("rope_interleave", True, why="it rotates adjacent channels", families=_MLA),
    *is_off("attention_bias", "mlp_bias", why="its latent attention and MLP have no", families=_MLA),
)
_QUERY_LATENT = Rule("q_lora_rank", lambda d: d.get("q_lora_rank") is not None, "it needs a query latent", _MLA)
_QWEN3 = (
    Rule("attention_bias", lambda d: not (d.get("qk_norm") and d.get("attention_bias")),
         "its Qwen3 drafter has no attention_bias", _THIRD),
    Rule("mlp_bias", lambda d: not (d.get("qk_norm") and d.get("mlp_bias")),
         "its Qwen3 drafter has no mlp_bias", _THIRD),
)  # fmt: skip
_NORM_ORDER = Rule(
    "norm_before_fc",
    lambda d: not (d.get("fc_norm") and d.get("norm_before_fc")),
    "it applies norm_before_fc before fc_norm, not after it",
    _THIRD,
)
_HEADS_DIVIDE = Rule(
    "head_dim",
    lambda d: d.get("head_dim") * d.get("num_attention_heads") == d.config.hidden_size,
    "its heads have hidden_size / num_attention_heads channels",
    _E1,
)
_BLOCKS = (
    equals("qk_norm", True, why="its block drafters norm queries and keys", families=BLOCK),
    *is_off("mlp_bias", why="its block drafters have no", families=BLOCK),
    Rule("taps", lambda d: d.config.taps is not None, "it must find them in the file: give `model=`", BLOCK),
    equals("sample_from_anchor", False, why="the anchor of its DFlash blocks predicts nothing", families=_DFLASH),
    Rule("markov_rank", lambda d: d.get("markov_rank") > 0, "its DSpark drafters have a Markov head", _DSPARK),
    rotations("default", "linear", "llama3", "yarn", families=BLOCK),
)
_BIDIRECTIONAL = Rule(
    "causal",
    lambda d: not any(view.causal and view.window is None for view in d.get("views")),
    "in layers without a window, the slots of its blocks see each other both ways",
    BLOCK,
)
_EVERY_GUESS = windows(
    "it counts a window from each guess, and this drafter from where a draft begins",
    lambda d: not d.get("sliding_anchored"),
    (*BLOCK, *_THIRD),
)
_NO_WINDOW = equals("sliding_window", None, why="its EAGLE-3 has no sliding window", families=_E3)
_SAME_CAUSALITY = windows(
    "its layers are all causal or none is, and here only those with a window are", layers_alike, BLOCK
)
_VANILLA = equals("markov_head_type", "vanilla", why="its Markov head reads the last token only", families=_DSPARK)
_VLLM_RECURRENT = recurrent_targets("nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
_FULL_VOCABULARY = Rule("draft_vocab_size", lambda d: not d.reduced, "it drafts the whole vocabulary only")
_FULL_E1 = Rule("draft_vocab_size", lambda d: not d.reduced, "its EAGLE-1 drafts the whole vocabulary only", _E1)
_SHARED_HEAD_E1 = replace(NEEDS_SHARED_HEAD, families=_E1)


def _has_default_taps(drafter: DrafterToExport) -> bool:
    """Whether the taps are EAGLE-3's defaults for this target or, if it is unknown, for some target."""
    taps = drafter.config.taps
    n = (taps[2] + 3 if taps and len(taps) == 3 else 7) if drafter.layers is None else drafter.layers
    return n >= 7 and taps in (None, (2, n // 2, n - 3))


_ALL = (
    Consumer(
        "safeailab", "SafeAILab/EAGLE", "main, 2026-08", GROUPED,
        (
            recurrent_targets(),
            _ONE_LAYER, _THREE, _FULL_E1, _HEADS_DIVIDE, identity_map(), rotations("default", "linear", "dynamic"),
            *is_off("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "qk_norm", why="it has no"),
            *is_off("attention_bias", "mlp_bias", why="it has no"),
            _NO_WINDOW,
            Rule("taps", _has_default_taps, "it always reads boundaries 2, n // 2 and n - 3 of at least 7 layers", _E3),
        ),
        (replace(NEEDS_OWN_HEAD, families=_E3), _SHARED_HEAD_E1),
        "fixed boundaries 2, n // 2, n - 3", forms.safeailab,
    ),
    Consumer(
        "sglang", "SGLang", "main, 2026-09", (*EAGLES, DFLASH, DFLASH2, DSPARK),
        (
            _ONE_LAYER, _FULL_E1, replace(_FULL_VOCABULARY, families=BLOCK), identity_map(), _SILU,
            rotations("default", "linear", "llama3", "yarn", families=GROUPED), _YARN,
            rotations("default", "yarn", families=_MLA),
            equals("bias", True, why="its EAGLE-1 fc always has a bias", families=_E1),
            *is_off("qkv_bias", "attention_bias", "mlp_bias", why="it has no", families=GROUPED),
            *is_off("norm_before_residual", "qk_norm", why="it has no", families=EAGLES),
            *_LATENT, *rising_taps(lowest=1, beyond=1), *_BLOCKS, _BIDIRECTIONAL, _EVERY_GUESS, _NO_WINDOW,
            windows("its layers with a window are causal", window_causality, (DFLASH,)),
            equals("sliding_window", None, why="it has windows in DFlash and DFlash 2 only", families=_DSPARK),
            as_wide_as_the_target("its block drafters are as wide as the target", BLOCK),
            *(equals(field, True, why=f"its DSpark drafters need {field}", families=_DSPARK)
              for field in ("sample_from_anchor", "enable_confidence_head")),
        ),
        (NEEDS_SHARED_EMBEDDING, replace(NEEDS_SHARED_HEAD, families=(*_E1, *BLOCK)), NEEDS_OWN_REDUCED_HEAD),
        OUTPUTS, forms.sglang,
    ),
    Consumer(
        "vllm", "vLLM", "0.32.0", (*EAGLES, PEAGLE, DFLASH, DSPARK),
        (
            _VLLM_RECURRENT,
            equals("bias", False, why="its EAGLE-1 fc has no bias", families=_E1), _FULL_E1, identity_map(), _SILU,
            rotations("default", "linear", "llama3", "yarn", families=(*GROUPED, PEAGLE)), _YARN,
            rotations("default", "yarn", families=_MLA),
            *is_off("norm_before_fc", why="its latent-attention drafter has no", families=_MLA),
            _QUERY_LATENT, *_QWEN3, _NORM_ORDER, *_LATENT, *rising_taps(), *_BLOCKS, _VANILLA,
            replace(_BIDIRECTIONAL, families=_DSPARK), _EVERY_GUESS,
        ),
        (_SHARED_HEAD_E1, NEEDS_OWN_REDUCED_HEAD),
        BOUNDARIES, forms.vllm,
    ),
    Consumer(
        "speculators", "speculators (vLLM)", "0.3, vLLM 0.32.0", (*_THIRD, DFLASH, DSPARK),
        (
            _VLLM_RECURRENT,
            _THREE, identity_map(), _SILU, rotations("default", "linear", "llama3", "yarn", families=_THIRD), _YARN,
            *_QWEN3, _NORM_ORDER, *rising_taps(), *_BLOCKS, _BIDIRECTIONAL, _VANILLA, _SAME_CAUSALITY,
            windows("in this form a window counts from where a draft begins, and this drafter's from each guess",
                    lambda d: d.get("sliding_anchored"), (*BLOCK, *_E3)),
            windows("in this form a window of P-EAGLE counts from each guess, and this drafter's from where a draft "
                    "begins", lambda d: not d.get("sliding_anchored"), (PEAGLE,)),
            *is_off("fc_norm", why="vLLM reads P-EAGLE in this form without", families=(PEAGLE,)),
            as_wide_as_the_target("its block drafters are as wide as the target", BLOCK),
        ),
        (NEEDS_OWN_HEAD,),
        BOUNDARIES, forms.speculators, "its config names the target",
    ),
    Consumer(
        "atom", "ATOM", "main, 2026-08", FUSED,
        (
            _ONE_LAYER, _FULL_VOCABULARY, identity_map(), _SILU, rotations("default", families=_E3),
            rotations("default", "yarn", families=_MLA),
            _QUERY_LATENT, *is_off("norm_before_residual", "norm_before_fc", "qk_norm", why="it has no"),
            *is_off("attention_bias", "mlp_bias", why="it has no", families=_E3),
            *_LATENT, *rising_taps(), _NO_WINDOW,
        ),
        (NEEDS_OWN_EMBEDDING, NEEDS_OWN_HEAD),
        BOUNDARIES, forms.atom,
    ),
    Consumer(
        "tensorrt-llm", "TensorRT-LLM (PyTorch backend)", "main, 2026-09", FUSED,
        (
            _ONE_LAYER, identity_map(), _SILU,
            rotations("default", "linear", "llama3", "yarn", families=_E3), _YARN, rotations("yarn", families=_MLA),
            _QUERY_LATENT, *is_off("norm_before_residual", "qk_norm", why="it has no"),
            Rule("norm_before_fc", lambda d: not (d.get("fc_norm") and d.get("norm_before_fc")),
                 "it has no norm_before_fc together with fc_norm", FUSED),
            *_LATENT, *rising_taps(lowest=1), _NO_WINDOW,
        ),
        (
            replace(NEEDS_SHARED_EMBEDDING, families=FUSED,
                    when=lambda d: d.config.hidden_size == d.config.target_hidden_size),
            replace(NEEDS_OWN_EMBEDDING, families=FUSED,
                    when=lambda d: d.config.hidden_size != d.config.target_hidden_size),
            NEEDS_OWN_REDUCED_HEAD,
        ),
        "layer outputs, in the serving configuration", forms.tensorrt_llm,
    ),
    Consumer(
        "openvino", "OpenVINO GenAI", "2026.4, optimum-intel 2.2", _E3,
        (
            _ONE_LAYER, _THREE, identity_map(), rotations("default", "linear", "llama3", "yarn"),
            *is_off("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "qk_norm", why="it has no"),
            *is_off("attention_bias", why="it has no"),
            as_wide_as_the_target("it uses the target's embedding, so its width must be the target's"),
            *rising_taps(), _NO_WINDOW,
        ),
        (NEEDS_SHARED_EMBEDDING, NEEDS_OWN_HEAD),
        "boundaries, in the converted model's rt_info", forms.openvino,
    ),
    Consumer(
        "gguf", "llama.cpp", "as in llama-cpp-python 0.3.36", (*_E3, DFLASH, DFLASH2, DSPARK),
        (
            _ONE_LAYER, _THREE, identity_map(), _SILU,
            rotations("default", "linear", "llama3", "yarn", families=_E3), _YARN,
            *is_off("fc_norm", "norm_output", "qk_norm", "mlp_bias", why="it has no", families=_E3),
            *is_off("attention_bias", why="it has no"), *_BLOCKS, _VANILLA, _NO_WINDOW, _EVERY_GUESS, _SAME_CAUSALITY,
            windows("in its blocks a slot sees all later ones, also beyond the window",
                    lambda d: window_causality(d) or d.get("block_size") <= d.get("sliding_window"), BLOCK),
            as_wide_as_the_target("its block drafters are as wide as the target", BLOCK),
            replace(_FULL_VOCABULARY, families=_DFLASH2),
            Rule("selector_top_k",
                 lambda d: d.config.hidden_size >= d.get("selector_top_k") * (d.get("selector_top_k") + 1),
                 "its selector with k candidates needs a hidden_size of at least k (k + 1)", _DFLASH2),
            Rule("confidence_head_with_markov",
                 lambda d: d.get("confidence_head_with_markov") or not d.get("enable_confidence_head"),
                 "its confidence head reads the token before as well", _DSPARK),
            Rule("taps", lambda d: d.layers is None or all(0 <= k <= d.layers for k in d.config.taps or ()),
                 "its taps lie at boundaries 0 to the number of layers"),
        ),
        # llama.cpp uses the drafter's own embedding, if it has one, in place of a missing head
        (NEEDS_OWN_REDUCED_HEAD, replace(NEEDS_OWN_HEAD, families=BLOCK, when=lambda d: d.config.embedding == "own")),
        BOUNDARIES, None, "the file carries the target's tokenizer and boundaries",
    ),
)  # fmt: skip
CONSUMERS: dict[str, Consumer] = {consumer.name: consumer for consumer in _ALL}


def supporting_consumers(drafter: DrafterToExport) -> list[str]:
    """The consumers that can represent a drafter as it is, or with its target."""
    return [name for name, consumer in CONSUMERS.items() if not consumer.prepare(drafter)[1]]
