"""Prepares a drafter for another engine's server: its files must have the form that the engine reads.

A drafter in another form is refused with the command that exports it, or exported first if `--export-to` is given.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.drafters.checkpoint import Checkpoint, open_checkpoint
from eyas.drafters.formats.opening import GGUF_LAYOUTS, gguf_in
from eyas.drafters.loading import check_fit, check_method
from eyas.errors import CheckpointError, ExportError, ModelError, UsageError
from eyas.gguf import GGUF_SUFFIX, Gguf, SkippedArray
from eyas.interop.export.consumers import CONSUMERS
from eyas.interop.export.drafter import DrafterToExport, ServedTarget, tree_plan
from eyas.interop.export.export import export, load_to_export, prepare_for, read_back, refusal_text
from eyas.interop.export.rules import refusals
from eyas.interop.serving.commands import ServedDrafter
from eyas.interop.serving.engines import ServingEngine
from eyas.interop.serving.readiness import obstacles


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
    tree_option: str = "--tree"
    """The option that gave the tree, for messages."""
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
    plan = own if request.tree is None else engine.plan(request.tree, request.tree_option)
    guesses = checkpoint.config.guesses
    if guesses is not None and (plan.width > 1 or plan.depth > guesses):
        raise UsageError(
            f"{request.name} guesses {guesses} tokens at once, as chains in {engine.title}: leave out "
            f"{request.tree_option} {request.tree}"
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
        reasons.append("it has no counterpart to --draft-weights and --ignore-config-key: it would read everything")
    if not reasons:
        return request.path
    if request.export_to is None:
        raise _refused(engine, request, reasons)
    return _exported(request, engine.consumers[0], request.export_to, target)


def _gguf(engine: ServingEngine, request: SpeculationRequest, checkpoint: Checkpoint) -> Path:
    """The file from which llama.cpp reads the drafter; its sizes are checked against the target's file."""
    target, config = read_gguf_target(request.target), checkpoint.config
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
        f"that:\n  {shlex.join(line)}\nor give --export-to DIR to have it exported there first."
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
    if path.suffix != GGUF_SUFFIX or not path.is_file():
        raise ModelError(
            f"llama.cpp reads a target from a {GGUF_SUFFIX} file, which {name} is not: make one with its "
            "convert_hf_to_gguf.py (--outfile TARGET.gguf MODEL) and give that as --model"
        )
    found = Gguf(path).metadata
    architecture = found.get("general.architecture")
    if architecture in GGUF_LAYOUTS:
        raise ModelError(f"{name} is a drafter: give the target's file as --model, this one as --draft-model")
    layers, hidden = (found.get(f"{architecture}.{key}") for key in ("block_count", "embedding_length"))
    tokens = found.get("tokenizer.ggml.tokens")
    vocab = tokens.count if isinstance(tokens, SkippedArray) else found.get(f"{architecture}.vocab_size")
    if not (isinstance(layers, int) and isinstance(hidden, int) and isinstance(vocab, int)):
        raise ModelError(f"{name} lacks the target's number of layers, channels or tokens: convert it again")
    return GgufTarget(layers, hidden, vocab)
