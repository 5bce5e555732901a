"""Preparing a drafter for another engine's server: its files must have the form that the engine reads.

A drafter in another form is refused with the command that exports it, or exported first if the user says where to.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.drafters.checkpoint import Checkpoint, open_checkpoint
from eyas.drafters.formats.gguf import GGUF_SUFFIX, Gguf, SkippedArray
from eyas.drafters.formats.gguf_eagle3 import ARCHITECTURE
from eyas.drafters.formats.opening import gguf_in
from eyas.drafters.loading import check_fit, check_method
from eyas.errors import CheckpointError, ExportError, ModelError, UsageError
from eyas.interop.export.consumers import CONSUMERS
from eyas.interop.export.drafter import DrafterToExport, ServedTarget, tree_plan
from eyas.interop.export.export import export, load_to_export, prepare_for, read_back, refusal_text
from eyas.interop.export.rules import refusals
from eyas.interop.serving.commands import ServedDrafter
from eyas.interop.serving.engines import ServingEngine
from eyas.interop.serving.readiness import obstacles


@dataclass(frozen=True)
class SpeculationRequest:
    """A drafter that another engine is to serve with, and how it may be read and exported."""

    path: Path
    name: str
    """The drafter as the user named it, for messages."""
    target: str
    """The target as the engine is given it."""
    load_target: Callable[[], ServedTarget] | None
    """Loads the target as transformers reads it; None if that is not known."""
    method: str | None = None
    """The kind that the user expects; None = whatever the files hold."""
    tree: str | None = None
    """None = the drafter's own tree."""
    tree_option: str = "--tree"
    """The option in which the tree was given, for messages."""
    export_to: Path | None = None
    """Where the drafter is exported if the engine can't read it as it is; None = it is refused then."""
    weights: str | None = None
    ignore: Collection[str] = ()


def served_drafter(engine: ServingEngine, request: SpeculationRequest) -> ServedDrafter:
    """What the engine's command says about the drafter, which is exported first if that is requested and needed.

    Raises ExportError for a drafter that the engine can't represent, or would not read in its present form, UsageError
    for a tree that it can't draft, and what loading raises.
    """
    checkpoint = open_checkpoint(request.path, weights=request.weights, ignore=request.ignore)
    check_method(request.method, checkpoint.kind.name, request.name)
    own = tree_plan(DrafterToExport(checkpoint.config, {}))
    plan = own if request.tree is None else engine.plan(request.tree, request.tree_option)
    path = _gguf(engine, request, checkpoint) if engine.consumers == ("gguf",) else _directory(engine, request)
    family = checkpoint.kind.family
    assert family is not None  # a drafter that only eyas runs was refused above
    return ServedDrafter(family.method, str(path), plan)


def _directory(engine: ServingEngine, request: SpeculationRequest) -> Path:
    """The directory that the engine reads the drafter from."""
    target = None if request.load_target is None else request.load_target()
    _, drafter = load_to_export(request.path, target, None, request.weights, request.ignore)
    checkpoint = open_checkpoint(request.path, weights=request.weights, ignore=request.ignore, layers=drafter.layers)
    nested = "speculators" in engine.consumers and checkpoint.raw.format == "speculators"
    consumer = CONSUMERS["speculators" if nested else engine.consumers[0]]
    prepared = prepare_for(consumer, drafter, request.name)
    reasons = obstacles(consumer.name, prepared, checkpoint)
    if request.weights or request.ignore:
        reasons.append("--draft-weights and --ignore-config-key mean nothing to it: it would read all that is there")
    if not reasons:
        return request.path
    if request.export_to is None:
        raise _refused(engine, request, reasons)
    return _exported(request, engine.consumers[0], request.export_to, target)


def _gguf(engine: ServingEngine, request: SpeculationRequest, checkpoint: Checkpoint) -> Path:
    """The file that llama.cpp reads the drafter from; its sizes must be those in the target's file."""
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
    """Export to `path`, or check that it was exported there before: the same command can be given again."""
    if not (path.is_dir() and any(path.iterdir())):
        export(request.path, consumer, path, target, weights=request.weights, ignore=request.ignore)
        return path
    network, drafter = load_to_export(request.path, target, None, request.weights, request.ignore)
    try:
        read_back(path, prepare_for(CONSUMERS[consumer], drafter, request.name), network)
    except (CheckpointError, ExportError) as error:
        raise UsageError(
            f"{path} isn't empty and holds something else than {request.name}: name a new folder ({error})"
        ) from error
    return path


def _check_rules(engine: ServingEngine, request: SpeculationRequest, checkpoint: Checkpoint) -> None:
    """Refuse what no export can mend before an export is proposed. Raises ExportError."""
    consumer = CONSUMERS[engine.consumers[0]]
    config = checkpoint.config
    found = checkpoint.raw.headers.tensors
    d2t = checkpoint.raw.load_some(["d2t"])["d2t"] if "d2t" in found else torch.zeros(config.draft_vocab_size)
    drafter = DrafterToExport(config, {"d2t": d2t})
    if broken := refusals(drafter, consumer.families, consumer.rules):
        raise ExportError(refusal_text(consumer, broken, drafter, request.name))


def _refused(engine: ServingEngine, request: SpeculationRequest, reasons: Sequence[str]) -> ExportError:
    target = request.target if engine.consumers != ("gguf",) else "TARGET"
    line = ["eyas", "export", request.name, "--to", engine.consumers[0], "--output", "DIR", "--target", target]
    listed = "\n  ".join(reasons)
    return ExportError(
        f"{engine.title} would not read {request.name} as it lies there:\n  {listed}\nWrite it in {engine.title}'s "
        f"form and serve that:\n  {shlex.join(line)}\nor give --export-to DIR: it is written there first."
    )


@dataclass(frozen=True)
class GgufTarget:
    """The sizes of a target in a GGUF file, for `check_fit`; none of its weights is read."""

    num_layers: int
    hidden_size: int
    vocab_size: int

    @property
    def final_boundary(self) -> int:
        """llama.cpp has no boundary after the final norm."""
        return self.num_layers


def read_gguf_target(name: str) -> GgufTarget:
    """Read the sizes of the target in a GGUF file.

    Raises ModelError if there is no such file or it says too little, CheckpointError if it is damaged.
    """
    path = Path(name)
    if path.suffix != GGUF_SUFFIX or not path.is_file():
        raise ModelError(
            f"llama.cpp reads a target from a {GGUF_SUFFIX} file, and {name} is none: write one with its "
            "convert_hf_to_gguf.py (--outfile TARGET.gguf MODEL) and give that as --model"
        )
    found = Gguf(path).metadata
    architecture = found.get("general.architecture")
    if architecture == ARCHITECTURE:
        raise ModelError(f"{name} is a drafter: give the target's file as --model, this one as --draft-model")
    layers, hidden = (found.get(f"{architecture}.{key}") for key in ("block_count", "embedding_length"))
    tokens = found.get("tokenizer.ggml.tokens")
    vocab = tokens.count if isinstance(tokens, SkippedArray) else found.get(f"{architecture}.vocab_size")
    if not (isinstance(layers, int) and isinstance(hidden, int) and isinstance(vocab, int)):
        raise ModelError(f"{name} doesn't say how many layers, channels and tokens the target has: convert it again")
    return GgufTarget(layers, hidden, vocab)
