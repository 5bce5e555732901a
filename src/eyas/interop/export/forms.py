"""The directory a consumer reads: config.json and tensors, each as that consumer looks for them.

RoPE is written where older readers look (`rope_theta`, `rope_scaling`) and where newer ones do (`rope_parameters`); the
boundaries also under `taps`, where nobody takes them for something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from eyas.drafters.formats.speculators import LAYER, MODEL_TYPE_KEY
from eyas.drafters.formats.taps import IDS
from eyas.drafters.registry import FIRST, MIDLAYER
from eyas.interop.export.drafter import DrafterToExport, tree_plan


class Form(NamedTuple):
    """What is written."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def safeailab(drafter: DrafterToExport) -> Form:
    """Its reader copies the target's embedding unless the config names `target_hidden_size`."""
    config = _native(drafter)
    if drafter.config.embedding == "shared":
        config.pop("target_hidden_size", None)
    elif drafter.kind.name == "eagle3":
        config["target_hidden_size"] = drafter.config.target_hidden_size
    return Form(config, _named(drafter, midlayer=True))


def sglang(drafter: DrafterToExport) -> Form:
    """Layer numbers are outputs here, and nested; a missing draft vocabulary size means the target's head."""
    config = _native(drafter)
    if drafter.kind.name == "eagle1":
        # SGLang's fc always has a bias; a `bias` key would be taken for one of the attention
        config.pop("bias")
        config["architectures"] = ["LlamaForCausalLMEagle"]
        return Form(config, _named(drafter, midlayer=False))
    config |= _taps(drafter, shift=-1, flat=False)
    config["draft_vocab_size"] = None if drafter.config.head == "shared" else drafter.config.draft_vocab_size
    return Form(config, _named(drafter, midlayer=drafter.kind.name == "eagle3"))


def vllm(drafter: DrafterToExport) -> Form:
    """Boundaries, at the top level and nested."""
    return Form(_native(drafter) | _taps(drafter, shift=0, flat=True), _named(drafter, midlayer=False))


def atom(drafter: DrafterToExport) -> Form:
    """Boundaries, nested only; the MLA form by its tensors' names."""
    config = _native(drafter) | _taps(drafter, shift=0, flat=False)
    return Form(config, _named(drafter, midlayer=drafter.kind.name == "eagle3"))


def tensorrt_llm(drafter: DrafterToExport) -> Form:
    """Layer numbers go into the serving configuration; `norm_before_fc` is read nested."""
    config = _native(drafter)
    if config.pop("norm_before_fc", False):
        config["eagle_config"] = {"norm_before_fc": True}
    return Form(config, _named(drafter, midlayer=drafter.kind.name == "eagle3"))


_SPECULATORS = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def speculators(drafter: DrafterToExport) -> Form:
    """The library's nested form; every toggle is written, as readers disagree about defaults."""
    native = _native(drafter)
    layer_keys = {
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "num_hidden_layers", "rms_norm_eps", "hidden_act", "max_position_embeddings", "rope_parameters", "rope_theta",
        "rope_scaling", "attention_bias", "mlp_bias", "vocab_size", "model_type", "tie_word_embeddings",
    }  # fmt: skip
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        MODEL_TYPE_KEY: "eagle3",
        "speculators_version": "0.3.0",
        LAYER: {key: value for key, value in native.items() if key in layer_keys},
        "target_hidden_size": drafter.config.target_hidden_size,
        "has_no_defaults_at_init": False,
        "torch_dtype": native["dtype"],
        **{key: native[key] for key in _SPECULATORS},
    }
    config |= {IDS: list(drafter.config.taps or ()), "taps": list(drafter.config.taps or ())}
    config["speculators_config"] = {
        "algorithm": "eagle3",
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
    return Form(config, _named(drafter, midlayer=False))


def _native(drafter: DrafterToExport) -> dict[str, Any]:
    """Our own configuration without layer numbers, RoPE in all its places."""
    config = drafter.kind.write(drafter.config) | {"dtype": str(drafter.dtype).removeprefix("torch.")}
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
    """Layer numbers under the field's key."""
    if drafter.config.taps is None:
        return {}
    ids = [tap + shift for tap in drafter.config.taps]
    nested = {"eagle_config": {IDS: ids, "use_aux_hidden_state": True}}
    return nested | ({IDS: ids} if flat else {})


def _named(drafter: DrafterToExport, *, midlayer: bool) -> dict[str, Tensor]:
    """Tensors under the consumer's names, the vocabulary map only where it maps."""
    first = MIDLAYER if midlayer and drafter.kind.name != "eagle1" else FIRST
    return {
        first + name.removeprefix(FIRST) if name.startswith(FIRST) else name: tensor
        for name, tensor in drafter.tensors.items()
        if name not in ("d2t", "t2d") or drafter.reduced
    }
