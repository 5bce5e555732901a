"""The forms that consumers read, and the rules for what each of them can represent.

RoPE is written under the keys of older readers (`rope_theta`, `rope_scaling`) and of newer ones (`rope_parameters`);
boundaries are also written as `taps`, which is unambiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from eyas.drafters.formats.speculators import ALGORITHMS, BOUNDARIES_KEY, LAYER, MODEL_TYPE_KEY, SLIDING_KEY
from eyas.drafters.formats.taps import IDS
from eyas.drafters.formats.tensor_names import FIRST_LAYER, VOCABULARY_MAP, name_in_file
from eyas.drafters.kind import DFLASH, DFLASH2, DSPARK, EAGLE, EAGLE3, EAGLE3_MLA, PEAGLE, Family
from eyas.interop.export.drafter import (
    DrafterToExport,
    copy_embedding,
    copy_head,
    leave_out_embedding,
    leave_out_head,
    tree_plan,
)
from eyas.targets.architecture import attention_plan

Families = tuple[Family, ...]
EAGLES: Families = (EAGLE, EAGLE3, EAGLE3_MLA)
FUSED: Families = (EAGLE3, EAGLE3_MLA)
GROUPED: Families = (EAGLE, EAGLE3)
BLOCK: Families = (DFLASH, DFLASH2, DSPARK)
EVERY: Families = (*EAGLES, PEAGLE, *BLOCK)


@dataclass(frozen=True)
class Refusal:
    """A field that prevents a consumer from representing a drafter, and why."""

    field: str
    reason: str


@dataclass(frozen=True)
class Rule:
    """A condition on one field that a consumer requires."""

    field: str
    holds: Callable[[DrafterToExport], bool]
    """Whether a drafter meets the condition."""
    reason: str
    families: Families = EVERY
    """The families of drafters that it applies to."""


@dataclass(frozen=True)
class Need:
    """A requirement that can be met by a change: copying or removing an embedding or a head."""

    field: str
    change: Callable[[DrafterToExport], DrafterToExport | None]
    """Returns the changed drafter, the drafter itself if no change is needed, or None if the change is impossible."""
    reason: str
    families: Families = EVERY
    """The families of drafters that it applies to."""
    when: Callable[[DrafterToExport], bool] = lambda _: True
    """Whether it applies to a drafter of these families."""


def equals(field: str, *allowed: Any, why: str, families: Families = EVERY) -> Rule:
    """A rule that a field has one of the allowed values; kinds without the field pass."""
    return Rule(field, lambda drafter: drafter.get(field, allowed[0]) in allowed, why, families)


def recurrent_targets(*types: str) -> Rule:
    """A rule that a target with recurrent layers has one of these types; other targets pass."""
    known = f"those of type {' or '.join(types)} only" if types else "none"

    def holds(drafter: DrafterToExport) -> bool:
        config = None if drafter.target is None else drafter.target.partial.config
        return config is None or not attention_plan(config).recurrent or config.model_type in types

    return Rule("target", holds, f"of targets with recurrent layers it drafts for {known}")


def is_off(*fields: str, why: str, families: Families = EVERY) -> list[Rule]:
    """Rules that toggles are off; the reason is `why` followed by the field's name."""
    return [equals(field, False, why=f"{why} {field}", families=families) for field in fields]


def rotations(*types: str, families: Families = EVERY) -> Rule:
    """A rule that RoPE has one of these types."""

    def holds(drafter: DrafterToExport) -> bool:
        return drafter.get("rope_parameters", {"rope_type": types[0]})["rope_type"] in types

    return Rule("rope_parameters", holds, f"it computes RoPE of type {', '.join(types)} only", families)


def rising_taps(lowest: int = 0, beyond: int = 0, families: Families = (*FUSED, PEAGLE, *BLOCK)) -> list[Rule]:
    """Rules that taps ascend, from at least `lowest` to at most the target's number of layers minus `beyond`."""

    def known(drafter: DrafterToExport) -> tuple[int, ...]:
        return drafter.config.taps or ()

    def within(drafter: DrafterToExport) -> bool:
        most = 2**30 if drafter.layers is None else drafter.layers - beyond
        return all(lowest <= tap <= most for tap in known(drafter))

    span = f"{lowest} to the number of layers" + (f" minus {beyond}" if beyond else "")
    return [
        Rule("taps", lambda d: list(known(d)) == sorted(set(known(d))), "it reads taps in ascending order", families),
        Rule("taps", within, f"its taps lie at boundaries {span}", families),
    ]


def identity_map() -> Rule:
    """A rule that a full draft vocabulary has the target's order, because consumers don't read a map for it."""
    return Rule(
        "d2t",
        lambda d: d.reduced or not bool(d.tensors["d2t"].any()),
        "it doesn't read the vocabulary map of a full draft vocabulary, but this one reorders tokens",
    )


def as_wide_as_the_target(why: str, families: Families = EVERY) -> Rule:
    """A rule that the drafter's states are as wide as the target's."""
    return Rule("hidden_size", lambda d: d.config.hidden_size == d.config.target_hidden_size, why, families)


def window_causality(drafter: DrafterToExport) -> bool:
    """Whether the slots of a block drafter see no later ones in layers with a window, if it has any."""
    return _windowed(drafter) and (drafter.get("sliding_causal") or drafter.get("causal")) is True


def _windowed(drafter: DrafterToExport) -> bool:
    return drafter.get("sliding_window", None) is not None


def windows(why: str, holds: Callable[[DrafterToExport], bool], families: Families) -> Rule:
    """A rule about drafters that have layers with a sliding window; others pass."""
    return Rule("sliding_window", lambda drafter: not _windowed(drafter) or holds(drafter), why, families)


def layers_alike(drafter: DrafterToExport) -> bool:
    """Whether all layers of a block drafter are causal, or none is."""
    return len({view.causal for view in drafter.get("views")}) == 1


NEEDS_OWN_EMBEDDING = Need("embedding", copy_embedding, "it expects an embedding in the file: give `model=` to copy it")
NEEDS_OWN_HEAD = Need(
    "head",
    copy_head,
    "it expects a head in the file: give `model=` to copy it (impossible if the target scales or caps its logits)",
)
NEEDS_OWN_REDUCED_HEAD = Need(
    "head",
    copy_head,
    "it can't use rows of the target's head for a reduced draft vocabulary: give `model=` to copy them (impossible if "
    "the target scales or caps its logits)",
    when=lambda drafter: drafter.reduced,
)
NEEDS_SHARED_EMBEDDING = Need(
    "embedding",
    leave_out_embedding,
    "it always uses the target's embedding, but this drafter has its own: give `model=` to compare the two",
)
NEEDS_SHARED_HEAD = Need(
    "head",
    leave_out_head,
    "it always uses the target's head, but this drafter has its own: give `model=` to compare the two",
)


_NO_WINDOW = equals(
    "draft_window",
    None,
    why="it attends to all pairs, and this drafter to sinks and a window: remove draft_window from config.json to "
    "export it for contexts as short as its window",
)


def refusals(drafter: DrafterToExport, families: Families, rules: Iterable[Rule]) -> list[Refusal]:
    """A refusal for every rule that a drafter breaks; for kinds outside `families` only one, for the field `kind`."""
    if not drafter.kind.trained:
        return [Refusal("kind", f"{drafter.kind.name} comes with its target: engines that run it read its own files")]
    if drafter.kind.family not in families:
        return [Refusal("kind", f"it doesn't support drafters of kind {drafter.kind.name}")]
    return [
        Refusal(rule.field, rule.reason)
        for rule in (_NO_WINDOW, *rules)
        if drafter.kind.family in rule.families and not rule.holds(drafter)
    ]


def meet_needs(drafter: DrafterToExport, needs: Iterable[Need]) -> tuple[DrafterToExport, list[Refusal]]:
    """The drafter changed to meet all needs, and a refusal for each need that can't be met."""
    unmet = []
    for need in needs:
        if drafter.kind.family not in need.families or not need.when(drafter):
            continue
        changed = need.change(drafter)
        if changed is None:
            unmet.append(Refusal(need.field, need.reason))
        else:
            drafter = changed
    return drafter, unmet


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
    if drafter.kind.family == PEAGLE:  # run as `eagle3`, for which vLLM turns other names into unknown ones
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
    native = _native(drafter)
    name = drafter.kind.family.method
    layer_keys = {
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "num_hidden_layers", "rms_norm_eps", "hidden_act", "max_position_embeddings", "rope_parameters", "rope_theta",
        "rope_scaling", "attention_bias", "mlp_bias", "vocab_size", "model_type", "tie_word_embeddings",
        "sliding_window", "use_sliding_window", "layer_types",
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
    config |= {"taps": taps} | (
        {BOUNDARIES_KEY: taps, SLIDING_KEY: not window_causality(drafter)} if block else {IDS: taps}
    )
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

    Keys that are false, as by default, are left out: SpecForge's class takes the mere presence of `norm_output` to mean
    a drafter without that norm.
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
