"""Prepares a drafter for another engine's server: its files must have the form that the engine reads.

A drafter in another form is refused with the command that exports it, or exported first if `--export-to` is given.

Engines use defaults for missing keys and skip unknown tensors without an error. So every key that matters is compared;
a missing key counts as the engine's default.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.drafters.checkpoint import Checkpoint, open_checkpoint
from eyas.drafters.files import CONFIG, read_json
from eyas.drafters.formats.gguf_layout import GGUF_LAYOUTS
from eyas.drafters.formats.taps import IDS
from eyas.drafters.formats.tensor_names import FIRST_LAYER, MIDLAYER, SHAREABLE, VOCABULARY_MAP, is_computed
from eyas.drafters.kind import DSPARK, EAGLE, EAGLE3, EAGLE3_MLA, PEAGLE, Family
from eyas.drafters.loading import check_fit, check_method
from eyas.errors import CheckpointError, ExportError, ModelError, UsageError
from eyas.gguf import Gguf, SkippedArray
from eyas.gguf_target import GGUF_SUFFIX, gguf_in
from eyas.interop.export.consumers import CONSUMERS
from eyas.interop.export.drafter import DrafterToExport, ServedTarget, tree_plan
from eyas.interop.export.export import export, load_to_export, prepare_for, read_back, refusal_text
from eyas.interop.export.forms import BLOCK, Form, refusals
from eyas.interop.serving.commands import ServedDrafter
from eyas.interop.serving.engines import ServingEngine

_TOGGLES = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
_DEFAULTS = _TOGGLES | {"num_aux_hidden_states": 3, "max_position_embeddings": 2048}
_ABSENT: dict[str, dict[str, Any]] = {
    "vllm": _DEFAULTS,
    "sglang": _DEFAULTS | {"draft_vocab_size": "missing", "rope_theta": 10000.0},
    "speculators": {**_TOGGLES, "norm_before_residual": True},
}
"""Consumer -> its defaults for missing keys of EAGLE drafters; for all other keys, all have the same default."""
_ABSENT_IN_BLOCKS: dict[str, dict[str, Any]] = {
    "vllm": {"markov_rank": "missing", "enable_confidence_head": False, "confidence_head_with_markov": False},
    "sglang": {"markov_rank": "missing", "markov_head_type": "missing"},
    "speculators": {},
}
"""The same for block drafters; vLLM and SGLang look for these keys at the top level only."""
_ELSEWHERE = frozenset("taps eyas default_tree dtype torch_dtype eagle_config architectures model_type".split()) | {
    IDS, "rope_parameters", "rope_theta", "rope_scaling", "speculators_config", "speculators_version",
    "transformer_layer_config", "has_no_defaults_at_init", "tie_word_embeddings",
    "dflash_config", "target_layer_ids", "mask_token_id", "num_target_layers",
}  # fmt: skip
"""Keys that don't affect decoding, or that other checks compare by meaning."""
_ARCHITECTURES: dict[tuple[str, Family], frozenset[str]] = {
    ("vllm", EAGLE): frozenset({"LlamaForCausalLM", "EagleLlamaForCausalLM"}),
    ("vllm", EAGLE3): frozenset(
        "LlamaForCausalLM LlamaForCausalLMEagle3 Eagle3LlamaForCausalLM Eagle3MiniMaxM2ForCausalLM "
        "Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3vlForCausalLM".split()
    ),
    ("vllm", PEAGLE): frozenset({"LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}),
    ("vllm", EAGLE3_MLA): frozenset({"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"}),
}
"""Further architecture names that a consumer accepts for a family, in addition to the one that export writes."""


def obstacles(consumer: str, drafter: DrafterToExport, checkpoint: Checkpoint) -> list[str]:
    """The reasons why a consumer wouldn't read these files as `drafter`, which is prepared for it; empty if it would.

    Raises CheckpointError or ConfigError for files that can't be read.
    """
    form = CONSUMERS[consumer].form
    path = checkpoint.raw.path
    if form is None:
        return [] if gguf_in(path) is not None else ["it is a directory of safetensors, not a GGUF file"]
    if gguf_in(path) is not None:
        return ["it is a GGUF file, not a directory with config.json"]
    written = form(drafter)
    config = read_json(path / CONFIG)
    found = _architecture(consumer, drafter, written, config)
    if drafter.kind.family in BLOCK:
        found += _config_keys(consumer, written.config, config, _ABSENT_IN_BLOCKS[consumer])
        found += _outputs(consumer, drafter, written.config, config)
    else:
        absent = _ABSENT[consumer] | (_TOGGLES if drafter.kind.family == PEAGLE else {})  # by its own defaults
        found += _config_keys(consumer, _TOGGLES | written.config, config, absent)
        found += _layers(consumer, drafter, config)
        if consumer == "sglang" and "rope_scaling" in written.config and not config.get("rope_scaling"):
            found.append("rope_scaling: missing, so RoPE is read as unscaled")
        if consumer == "sglang" and "bias" in config and "bias" not in written.config:
            found.append("bias: SGLang applies it to attention")
    return [*found, *_tensors(consumer, written, checkpoint), *_map(written, checkpoint)]


def _architecture(consumer: str, drafter: DrafterToExport, written: Form, config: Mapping[str, Any]) -> list[str]:
    if consumer == "speculators":  # recognized by another key
        return []
    known = frozenset(written.config["architectures"])
    if drafter.kind.family is not None and not drafter.get("qk_norm"):  # only one architecture has these norms
        known |= _ARCHITECTURES.get((consumer, drafter.kind.family), frozenset())
    have = config.get("architectures") or []
    return [] if set(have) & known else [f"architectures: {have}, not {' or '.join(sorted(known))}"]


def _config_keys(
    consumer: str, written: Mapping[str, Any], config: Mapping[str, Any], absent: Mapping[str, Any]
) -> list[str]:
    nested = config.get("eagle_config") or {}
    found = []
    for key, wanted in written.items():
        if key in _ELSEWHERE - absent.keys():
            continue
        have = config.get(key)
        if consumer == "vllm" and key == "norm_before_fc":
            have = nested.get(key, have)
        if have is None and not (consumer == "sglang" and key in config):  # null has a meaning in SGLang
            have = absent.get(key, wanted)
        if have != wanted:
            found.append(f"{key}: read as {have}, but the drafter has {wanted}")
    return found


def _layers(consumer: str, drafter: DrafterToExport, config: Mapping[str, Any]) -> list[str]:
    """Compare the boundaries that the consumer would read with the drafter's."""
    if drafter.config.taps is None:
        return []
    nested = config.get("eagle_config") or {}
    default = drafter.config.default_taps(drafter.layers) if drafter.layers is not None else None
    if consumer == "sglang":
        ids = nested.get(IDS)
        read = default if ids is None else tuple(k + 1 for k in ids)
    elif config.get(IDS):
        read = tuple(config[IDS])
    elif consumer == "vllm" and (nested.get(IDS) or nested.get("layer_ids")):
        return [f"{IDS}: only nested, which vLLM's versions read differently"]
    else:
        read = default
    wanted = drafter.config.taps
    return [] if read == wanted else [f"{IDS}: read as {_boundaries(read)}, but the drafter has {_boundaries(wanted)}"]


def _outputs(
    consumer: str, drafter: DrafterToExport, written: Mapping[str, Any], config: Mapping[str, Any]
) -> list[str]:
    """Compare the section of a block drafter's config, or the keys in its place, with what the consumer should read."""
    if consumer == "speculators":  # its form has keys of its own
        return []
    nested = drafter.kind.family != DSPARK
    section = (config.get("dflash_config") or {}) if nested else config
    wanted = {"target_layer_ids": [tap - 1 for tap in drafter.config.taps or ()]}
    wanted |= written["dflash_config"] if nested else {"mask_token_id": drafter.get("mask_token_id")}
    wanted.pop("causal_head", None)  # of the authors' own code
    where = "dflash_config." if nested else ""
    return [
        f"{key}: {where}{key} is read as {section.get(key)}, but the drafter has {value}"
        for key, value in wanted.items()
        if section.get(key) != value
    ]


def _boundaries(taps: tuple[int, ...] | None) -> str:
    return "unknown boundaries" if taps is None else f"boundaries {list(taps)}"


def _tensors(consumer: str, written: Form, checkpoint: Checkpoint) -> list[str]:
    """Compare names: a missing tensor would be left random, and one with an unknown name would be skipped."""
    alike: Callable[[str], str] = str
    if consumer in ("vllm", "speculators"):
        alike = _without_midlayer
    names = {alike(name) for name in checkpoint.raw.headers.tensors if not is_computed(name)}
    names -= {alike(name) for name in checkpoint.raw.training_only}
    wanted = {alike(name) for name in written.tensors}
    missing = sorted(wanted - names)
    more = sorted(names - wanted - SHAREABLE - VOCABULARY_MAP)
    sides = ((missing, "missing"), (more, "unknown to it"))
    return [f"tensors: {_some(names)} {what}" for names, what in sides if names]


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _without_midlayer(name: str) -> str:
    return FIRST_LAYER + name.removeprefix(MIDLAYER) if name.startswith(MIDLAYER) else name


def _map(written: Form, checkpoint: Checkpoint) -> list[str]:
    """Compare the vocabulary map, which all consumers read as offsets."""
    wanted = written.tensors.get("d2t")
    have = checkpoint.raw.headers.tensors.get("d2t")
    if wanted is None or have is None:
        return []
    read = checkpoint.raw.load_some(["d2t"])["d2t"]
    return [] if torch.equal(read, wanted.to(read.dtype)) else ["d2t: holds target ids, but is read as offsets"]


@dataclass(frozen=True)
class SpeculationRequest:
    """A drafter to serve with another engine, and how to read and export it."""

    path: Path
    name: str
    """The drafter as the user named it, for messages."""
    target: str
    """The target in the form in which it is passed to the engine."""
    load_target: Callable[[], ServedTarget] | None
    """Loads the target with transformers; None if its transformers folder is unknown."""
    method: str | None = None
    """The kind that the user expects; None = any."""
    tree: str | None = None
    """The tree to draft; None = the drafter's default tree."""
    tree_parameter: str = "tree"
    """The parameter that gave the tree, for messages."""
    export_to: Path | None = None
    """The folder to export to if the engine can't read the drafter as it is; None = refuse it."""
    weights: str | None = None
    ignore: Collection[str] = ()


def served_drafter(engine: ServingEngine, request: SpeculationRequest) -> ServedDrafter:
    """The properties of the drafter for the engine's command; it is exported first if that is needed and requested.

    Raises ExportError for a drafter that the engine can't represent, or wouldn't read in its present form; UsageError
    for a tree that it can't draft; and the errors of loading.
    """
    checkpoint = open_checkpoint(request.path, weights=request.weights, ignore=request.ignore)
    check_method(request.method, checkpoint.kind.name, request.name)
    own = tree_plan(DrafterToExport(checkpoint.config, {}))
    plan = own if request.tree is None else engine.plan(request.tree, request.tree_parameter)
    guesses = checkpoint.config.guesses
    if guesses is not None and (plan.width > 1 or plan.depth > guesses):
        raise UsageError(
            f"{request.name} guesses {guesses} tokens at once, as chains in {engine.title}: leave out "
            f"`{request.tree_parameter}={request.tree}`"
        )
    path = _gguf(engine, request, checkpoint) if engine.consumers == ("gguf",) else _directory(engine, request)
    family = checkpoint.kind.family
    assert family is not None  # a drafter that only eyas runs was refused above
    return ServedDrafter(family.method, str(path), plan)


def _directory(engine: ServingEngine, request: SpeculationRequest) -> Path:
    """The folder from which the engine reads the drafter."""
    target = None if request.load_target is None else request.load_target()
    _, drafter = load_to_export(request.path, target, None, request.weights, request.ignore)
    checkpoint = open_checkpoint(request.path, weights=request.weights, ignore=request.ignore, layers=drafter.layers)
    nested = "speculators" in engine.consumers and checkpoint.raw.format == "speculators"
    consumer = CONSUMERS["speculators" if nested else engine.consumers[0]]
    prepared = prepare_for(consumer, drafter, request.name)
    reasons = obstacles(consumer.name, prepared, checkpoint)
    if request.weights or request.ignore:
        reasons.append("it has no counterpart to `draft_weights=` and `ignore_config_keys=`: it would read everything")
    if not reasons:
        return request.path
    if request.export_to is None:
        raise _refused(engine, request, reasons)
    return _exported(request, engine.consumers[0], request.export_to, target)


def _gguf(engine: ServingEngine, request: SpeculationRequest, checkpoint: Checkpoint) -> Path:
    """The file from which llama.cpp reads the drafter; its sizes are checked against the target's file."""
    target = read_gguf_target(request.target)
    config = checkpoint.config
    file = gguf_in(request.path)
    if file is None:
        _check_rules(engine, request, checkpoint)
    check_fit(config, target, request.name)
    if file is not None:
        return file
    if request.export_to is None:
        raise _refused(engine, request, obstacles("gguf", DrafterToExport(config, {}), checkpoint))
    loaded = None if request.load_target is None else request.load_target()
    path = _exported(request, "gguf", request.export_to, loaded)
    return gguf_in(path) or path


def _exported(request: SpeculationRequest, consumer: str, path: Path, target: ServedTarget | None) -> Path:
    """Export to `path`, or check that it was exported there before, so that the same command can be repeated."""
    if not (path.is_dir() and any(path.iterdir())):
        export(request.path, consumer, path, target, weights=request.weights, ignore=request.ignore)
        return path
    network, drafter = load_to_export(request.path, target, None, request.weights, request.ignore)
    try:
        read_back(path, prepare_for(CONSUMERS[consumer], drafter, request.name), network)
    except (CheckpointError, ExportError) as error:
        raise UsageError(
            f"{path} isn't empty and doesn't hold {request.name}: choose a new folder ({error})"
        ) from error
    return path


def _check_rules(engine: ServingEngine, request: SpeculationRequest, checkpoint: Checkpoint) -> None:
    """Raise ExportError for a drafter that the engine can't represent, before an export is suggested."""
    consumer = CONSUMERS[engine.consumers[0]]
    config = checkpoint.config
    found = checkpoint.raw.headers.tensors
    d2t = checkpoint.raw.load_some(["d2t"])["d2t"] if "d2t" in found else torch.zeros(config.draft_vocab_size)
    drafter = DrafterToExport(config, {"d2t": d2t})
    if broken := refusals(drafter, consumer.families, consumer.rules):
        raise ExportError(refusal_text(consumer, broken, drafter, request.name))


def _refused(engine: ServingEngine, request: SpeculationRequest, reasons: Sequence[str]) -> ExportError:
    target = request.target if engine.consumers != ("gguf",) else "TARGET"
    line = ["eyas", "export", request.name, "--to", engine.consumers[0], "--output", "DIR", "--model", target]
    listed = "\n  ".join(reasons)
    return ExportError(
        f"{engine.title} can't read {request.name} as it is:\n  {listed}\nExport it in {engine.title}'s form and serve "
        f"that:\n  {shlex.join(line)}\nor give `export_to=DIR` to have it exported there first."
    )


@dataclass(frozen=True)
class GgufTarget:
    """The sizes of a target in a GGUF file, for `check_fit`; its weights are not read."""

    num_layers: int
    hidden_size: int
    vocab_size: int

    @property
    def final_boundary(self) -> int:
        """The last boundary, which is before the final norm: llama.cpp has none after it."""
        return self.num_layers


def read_gguf_target(name: str) -> GgufTarget:
    """Read the sizes of the target in a GGUF file.

    Raises ModelError if there is no such file or sizes are missing in it, CheckpointError if it is damaged.
    """
    path = Path(name)
    if gguf_in(path) != path:
        raise ModelError(
            f"llama.cpp reads a target from a {GGUF_SUFFIX} file, which {name} is not: make one with its "
            "convert_hf_to_gguf.py (--outfile TARGET.gguf MODEL) and give that as `model=`"
        )
    found = Gguf(path).metadata
    architecture = found.get("general.architecture")
    if architecture in GGUF_LAYOUTS:
        raise ModelError(f"{name} is a drafter: give the target's file as `model=`, this one as `draft_model=`")
    layers, hidden = (found.get(f"{architecture}.{key}") for key in ("block_count", "embedding_length"))
    tokens = found.get("tokenizer.ggml.tokens")
    vocab = tokens.count if isinstance(tokens, SkippedArray) else found.get(f"{architecture}.vocab_size")
    if not (isinstance(layers, int) and isinstance(hidden, int) and isinstance(vocab, int)):
        raise ModelError(f"{name} lacks the target's number of layers, channels or tokens: convert it again")
    return GgufTarget(layers, hidden, vocab)
