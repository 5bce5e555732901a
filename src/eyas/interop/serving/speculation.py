"""A drafter on its way into another engine's server: does it lie there in a form that the engine reads, and how far is
it to draft?

One that lies there in another form is refused with the command that exports it, or exported first.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.drafters.checkpoint import Checkpoint, open_checkpoint
from eyas.drafters.formats.gguf import GGUF_SUFFIX, Gguf, Texts
from eyas.drafters.formats.gguf_eagle3 import ARCHITECTURE
from eyas.drafters.formats.opening import gguf_in
from eyas.drafters.loading import check_fit, check_method
from eyas.errors import CheckpointError, ExportError, ModelError, UsageError
from eyas.interop.export.consumers import CONSUMERS
from eyas.interop.export.export import explained, export, opened, read_back, representable
from eyas.interop.export.rules import refusals
from eyas.interop.export.subject import Serving, Subject, tree_plan
from eyas.interop.serving.commands import Drafting
from eyas.interop.serving.engines import Engine
from eyas.interop.serving.readiness import obstacles


@dataclass(frozen=True)
class Wish:
    """The drafter to be served, and how it may be read and written."""

    drafter: Path
    name: str
    """As the user wrote it."""
    target: str
    serving: Callable[[], Serving] | None
    """Loads the target as transformers reads it; None if that is not known."""
    method: str | None = None
    tree: str | None = None
    tree_option: str = "--tree"
    """What said it."""
    export_to: Path | None = None
    weights: str | None = None
    ignore: Collection[str] = ()


def drafting(engine: Engine, wish: Wish) -> Drafting:
    """What the engine's command says of the drafter, which is exported first if that is wished and needed.

    Raises ExportError for what the engine can't represent, or would not read as it lies there, UsageError for a tree
    that it can't draft, and what loading raises.
    """
    checkpoint = open_checkpoint(wish.drafter, weights=wish.weights, ignore=wish.ignore)
    check_method(wish.method, checkpoint.kind.name, wish.name)
    own = tree_plan(Subject(checkpoint.config, {}))
    plan = own if wish.tree is None else engine.plan(wish.tree, wish.tree_option)
    place = _gguf(engine, wish, checkpoint) if engine.consumers == ("gguf",) else _directory(engine, wish)
    return Drafting(checkpoint.kind.name, str(place), plan)


def _directory(engine: Engine, wish: Wish) -> Path:
    """Where the engine finds the drafter."""
    serving = None if wish.serving is None else wish.serving()
    _, subject = opened(wish.drafter, serving, None, wish.weights, wish.ignore)
    checkpoint = open_checkpoint(wish.drafter, weights=wish.weights, ignore=wish.ignore, layers=subject.layers)
    nested = "speculators" in engine.consumers and checkpoint.source.format == "speculators"
    consumer = CONSUMERS["speculators" if nested else engine.consumers[0]]
    prepared = representable(consumer, subject, wish.name)
    reasons = obstacles(consumer.name, prepared, checkpoint)
    reasons += ["what is to be overlooked there the engine would read"] if wish.weights or wish.ignore else []
    if not reasons:
        return wish.drafter
    if wish.export_to is None:
        raise _refused(engine, wish, reasons)
    return _exported(wish, engine.consumers[0], wish.export_to, serving)


def _gguf(engine: Engine, wish: Wish, checkpoint: Checkpoint) -> Path:
    """The file for llama.cpp; sizes are compared with those in the target's file."""
    target, config = read_gguf_target(wish.target), checkpoint.config
    file = gguf_in(wish.drafter)
    if file is None:
        _check_rules(engine, wish, checkpoint)
    check_fit(config, config.taps or config.default_taps(target.num_layers), target, wish.name)
    if file is not None:
        return file
    if wish.export_to is None:
        raise _refused(engine, wish, obstacles("gguf", Subject(config, {}), checkpoint))
    place = _exported(wish, "gguf", wish.export_to, None if wish.serving is None else wish.serving())
    return gguf_in(place) or place


def _exported(wish: Wish, consumer: str, place: Path, serving: Serving | None) -> Path:
    """Write it there, or see that it was written there before: the same command can be given again."""
    if not (place.is_dir() and any(place.iterdir())):
        export(wish.drafter, consumer, place, serving, weights=wish.weights, ignore=wish.ignore)
        return place
    network, subject = opened(wish.drafter, serving, None, wish.weights, wish.ignore)
    try:
        read_back(place, representable(CONSUMERS[consumer], subject, wish.name), network)
    except (CheckpointError, ExportError) as error:
        raise UsageError(
            f"{place} isn't empty and holds something else than {wish.name}: name a new folder ({error})"
        ) from error
    return place


def _check_rules(engine: Engine, wish: Wish, checkpoint: Checkpoint) -> None:
    """What no export could mend is said before one is proposed. Raises ExportError."""
    consumer = CONSUMERS[engine.consumers[0]]
    config = checkpoint.config
    found = checkpoint.source.headers.tensors
    d2t = checkpoint.source.load_some(["d2t"])["d2t"] if "d2t" in found else torch.zeros(config.draft_vocab_size)
    subject = Subject(config, {"d2t": d2t})
    if broken := refusals(subject, consumer.kinds, consumer.rules):
        raise ExportError(explained(consumer, broken, subject, wish.name))


def _refused(engine: Engine, wish: Wish, reasons: Sequence[str]) -> ExportError:
    target = wish.target if engine.consumers != ("gguf",) else "TARGET"
    line = ["eyas", "export", wish.name, "--to", engine.consumers[0], "--output", "DIR", "--target", target]
    listed = "\n  ".join(reasons)
    return ExportError(
        f"{engine.title} would not read {wish.name} as it lies there:\n  {listed}\nWrite it in {engine.title}'s form "
        f"and serve that:\n  {shlex.join(line)}\nor give --export-to DIR: it is written there first."
    )


# What llama.cpp's file of a target says about it; none of its weights is read.


@dataclass(frozen=True)
class GgufTarget:
    """Sizes, as `drafters.loading.check_fit` asks for them."""

    num_layers: int
    hidden_size: int
    vocab_size: int

    @property
    def final_boundary(self) -> int:
        """llama.cpp has no boundary after the final norm."""
        return self.num_layers


def read_gguf_target(name: str) -> GgufTarget:
    """Raises ModelError if there is no such file or it says too little, CheckpointError if it is damaged."""
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
    vocab = tokens.count if isinstance(tokens, Texts) else found.get(f"{architecture}.vocab_size")
    if not (isinstance(layers, int) and isinstance(hidden, int) and isinstance(vocab, int)):
        raise ModelError(f"{name} doesn't say how many layers, channels and tokens the target has: convert it again")
    return GgufTarget(layers, hidden, vocab)
