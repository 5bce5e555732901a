"""The forms that consumers read: config.json and tensors, under the keys and names that each of them expects.

RoPE is written under the keys of older readers (`rope_theta`, `rope_scaling`) and of newer ones (`rope_parameters`);
boundaries are also written as `taps`, which is unambiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from eyas.drafters.formats.speculators import ALGORITHMS, BOUNDARIES_KEY, LAYER, MODEL_TYPE_KEY, SLIDING_KEY
from eyas.drafters.formats.taps import IDS
from eyas.drafters.formats.tensor_names import FIRST_LAYER, VOCABULARY_MAP, name_in_file
from eyas.drafters.kind import EAGLE, PEAGLE
from eyas.interop.export.drafter import DrafterToExport, tree_plan
from eyas.interop.export.rules import BLOCK


class Form(NamedTuple):
    """The content of an exported folder: the config, and tensors by name."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def safeailab(drafter: DrafterToExport) -> Form:
    """SafeAILab/EAGLE, which copies the target's embedding unless the config has `target_hidden_size`."""
    config = _native(drafter)
    if drafter.config.embedding == "shared":
        config.pop("target_hidden_size", None)
    return Form(config, _named(drafter, first_layer=drafter.kind.first_layer))


def openvino(drafter: DrafterToExport) -> Form:
    """OpenVINO GenAI, by way of optimum-intel's class `LlamaEagle3ForCausalLM`, which always reads the map."""
    config = _native(drafter) | {"architectures": ["LlamaForCausalLMEagle3"], "tie_word_embeddings": False}
    prefix = drafter.kind.first_layer
    return Form(config, {name_in_file(name, prefix): tensor for name, tensor in drafter.tensors.items()})


def sglang(drafter: DrafterToExport) -> Form:
    """SGLang: layer numbers are outputs, and nested; a draft vocabulary size of null means the target's head."""
    if drafter.kind.family in BLOCK:
        return _block(drafter)
    config = _native(drafter)
    if drafter.kind.family == EAGLE:
        # SGLang's fc always has a bias; it would apply a `bias` key to attention
        config.pop("bias")
        config["architectures"] = ["LlamaForCausalLMEagle"]
        return Form(config, _named(drafter, first_layer=FIRST_LAYER))
    config |= _taps(drafter, shift=-1, flat=False)
    config["draft_vocab_size"] = None if drafter.config.head == "shared" else drafter.config.draft_vocab_size
    return Form(config, _named(drafter, first_layer=drafter.kind.first_layer))


def vllm(drafter: DrafterToExport) -> Form:
    """vLLM: layer numbers are boundaries, at the top level and nested; those of block drafters are outputs."""
    if drafter.kind.family in BLOCK:
        return _block(drafter)
    config = _native(drafter) | _taps(drafter, shift=0, flat=True)
    if drafter.kind.family == PEAGLE:  # run as `eagle3`, for which it makes a name that it doesn't know of other ones
        config["architectures"] = ["Eagle3Qwen3ForCausalLM" if drafter.get("qk_norm") else "LlamaForCausalLMEagle3"]
    return Form(config, _named(drafter, first_layer=FIRST_LAYER))


def atom(drafter: DrafterToExport) -> Form:
    """ATOM: layer numbers are boundaries, nested only."""
    config = _native(drafter) | _taps(drafter, shift=0, flat=False)
    return Form(config, _named(drafter, first_layer=drafter.kind.first_layer))


def tensorrt_llm(drafter: DrafterToExport) -> Form:
    """TensorRT-LLM, which reads `norm_before_fc` nested; layer numbers go into its serving configuration."""
    config = _native(drafter)
    if config.pop("norm_before_fc", False):
        config["eagle_config"] = {"norm_before_fc": True}
    return Form(config, _named(drafter, first_layer=drafter.kind.first_layer))


def speculators(drafter: DrafterToExport) -> Form:
    """The nested form of the speculators library. Every key is written, because readers have different defaults."""
    assert drafter.kind.family is not None
    native, name = _native(drafter), drafter.kind.family.method
    layer_keys = {
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "num_hidden_layers", "rms_norm_eps", "hidden_act", "max_position_embeddings", "rope_parameters", "rope_theta",
        "rope_scaling", "attention_bias", "mlp_bias", "vocab_size", "model_type", "tie_word_embeddings",
    }  # fmt: skip
    taps = list(drafter.config.taps or ())
    config: dict[str, Any] = {
        "architectures": [_LIBRARY_CLASSES[name]],
        MODEL_TYPE_KEY: name,
        "speculators_version": "0.3.0",
        LAYER: {key: value for key, value in native.items() if key in layer_keys},
        "target_hidden_size": drafter.config.target_hidden_size,
        "has_no_defaults_at_init": False,
        "torch_dtype": native["dtype"],
        "draft_vocab_size": native["draft_vocab_size"],
        **{key: drafter.get(key) for key in ALGORITHMS[name].keys if drafter.get(key) is not None},
    }
    block = drafter.kind.family in BLOCK
    config |= {"taps": taps} | ({BOUNDARIES_KEY: taps, SLIDING_KEY: True} if block else {IDS: taps})
    config["speculators_config"] = {
        "algorithm": name,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": tree_plan(drafter).depth,
                "accept_tolerance": 0.0,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {"name_or_path": "" if drafter.target is None else drafter.target.name, "architectures": []},
    }
    config |= {key: native[key] for key in ("default_tree", "eyas") if key in native}
    return Form(config, _named(drafter, first_layer=FIRST_LAYER))


_LIBRARY_CLASSES = {
    "eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator", "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
}  # fmt: skip
"""Algorithm -> the architecture that the speculators library writes."""


def _block(drafter: DrafterToExport) -> Form:
    """A block drafter as z-lab and DeepSpec publish it, which vLLM and SGLang read: layer numbers are outputs."""
    config = _native(drafter)
    if drafter.layers is not None:
        config["num_target_layers"] = drafter.layers
    return Form(config, _named(drafter, first_layer=FIRST_LAYER))


def _native(drafter: DrafterToExport) -> dict[str, Any]:
    """The native config without layer numbers, with RoPE under all of its keys.

    Keys that are false and are so by default are left out: SpecForge's class takes the mere presence of `norm_output`
    for a drafter without that norm.
    """
    config = drafter.kind.write(drafter.config) | {"dtype": str(drafter.dtype).removeprefix("torch.")}
    for key, field in type(drafter.config).model_fields.items():
        if field.default is False and config.get(key) is False:
            del config[key]
    for key in ("taps", IDS, "eagle_config"):
        config.pop(key, None)
    rope: Mapping[str, Any] = config["rope_parameters"]
    if rope["rope_type"] != "default":
        config["rope_scaling"] = {**rope, "type": rope["rope_type"]}
    if drafter.config.taps is not None:
        config["taps"] = list(drafter.config.taps)
    if drafter.provenance:
        config["eyas"] = dict(drafter.provenance)
    return config


def _taps(drafter: DrafterToExport, *, shift: int, flat: bool) -> dict[str, Any]:
    """The layer numbers (boundaries plus `shift`), nested in `eagle_config` and, if `flat`, also at the top level."""
    if drafter.config.taps is None:
        return {}
    ids = [tap + shift for tap in drafter.config.taps]
    nested = {"eagle_config": {IDS: ids, "use_aux_hidden_state": True}}
    return nested | ({IDS: ids} if flat else {})


def _named(drafter: DrafterToExport, *, first_layer: str) -> dict[str, Tensor]:
    """The tensors under the consumer's names; the vocabulary map is included only for a reduced draft vocabulary."""
    return {
        name_in_file(name, first_layer): tensor
        for name, tensor in drafter.tensors.items()
        if name not in VOCABULARY_MAP or drafter.reduced
    }
