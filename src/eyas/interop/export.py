"""`export`: a drafter in the form another engine reads, read back and compared before it is put in its place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from eyas.drafters.checkpoint import open_checkpoint, write_directory
from eyas.drafters.config import DrafterConfig
from eyas.drafters.folders import place_folder
from eyas.drafters.loading import check_fit
from eyas.drafters.network import DraftNetwork
from eyas.errors import ExportError, UsageError
from eyas.interop.commands import GGUF_FILE, TENSORRT_FILE, command, tensorrt_yaml
from eyas.interop.comparison import largest_difference, some_logits
from eyas.interop.consumers import CONSUMERS, Consumer, who_can
from eyas.interop.gguf_writing import write_gguf
from eyas.interop.readme import readme
from eyas.interop.rules import Refusal
from eyas.interop.subject import Serving, Subject, at_least_the_targets_length, subject_of

_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}
"""How far logits may move where a product is taken in another order: with a copy of the target's head or embedding."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    place: Path
    consumer: Consumer
    command: str
    changes: tuple[str, ...]
    difference: float
    """Largest difference of a logit to the original's, as a share of the largest logit."""


def export(
    drafter: Path,
    to: str,
    output: Path,
    serving: Serving | None = None,
    *,
    taps: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    weights: str | None = None,
    ignore: Collection[str] = (),
) -> Exported:
    """Write the drafter at `drafter` for consumer `to` into the new folder `output`.

    `taps` settles which boundaries a file means that can be read in two ways; `dtype` widens the weights. Raises
    ExportError for what the consumer can't represent, UsageError, CheckpointError, ConfigError, DrafterMismatchError.
    """
    consumer = consumer_named(to)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} exists and isn't empty: name a new folder")
    original, subject = opened(drafter, serving, taps, weights, ignore)
    if dtype is not None:
        subject = _widened(subject, dtype)
        original = original.to(dtype)
    prepared = representable(consumer, subject, str(drafter))
    line = command(consumer.name, prepared, output)
    difference = 0.0

    def write(place: Path) -> None:
        nonlocal difference
        _write(prepared, consumer, place, output)
        difference = read_back(place, prepared, original)
        (place / "README.md").write_text(readme(prepared, consumer, line), encoding="utf-8")

    place_folder(output, write)
    return Exported(output, consumer, line, prepared.changes, difference)


def consumer_named(name: str) -> Consumer:
    """UsageError lists the names."""
    if name not in CONSUMERS:
        raise UsageError(f"unknown consumer {name!r}: write one of {', '.join(CONSUMERS)}")
    return CONSUMERS[name]


def opened(
    drafter: Path,
    serving: Serving | None,
    taps: Sequence[int] | None = None,
    weights: str | None = None,
    ignore: Collection[str] = (),
) -> tuple[DraftNetwork, Subject]:
    """A drafter that has only one reading and fits its target, loaded and taken apart. Raises as `export`."""
    layers = None if serving is None else serving.ends.num_layers
    checkpoint = open_checkpoint(drafter, weights=weights, ignore=ignore, layers=layers)
    doubts = [doubt for doubt in checkpoint.report.doubts if taps is None or not doubt.startswith("taps")]
    if doubts:
        raise ExportError(
            f"{drafter} can be read in two ways, and the wrong one would cost acceptance without an error:\n  "
            + "\n  ".join(doubts)
            + "\nSettle it there, or name the boundaries with --taps."
        )
    if serving is None and "shared" in (checkpoint.config.embedding, checkpoint.config.head):
        raise UsageError(f"{drafter} uses its target's embedding or head: give --target")
    network = checkpoint.network(None if serving is None else serving.ends)
    subject = subject_of(network, serving, checkpoint.provenance)
    if taps is not None:
        if len(taps) != network.config.tap_count:
            raise UsageError(f"--taps names {len(taps)} boundaries, the drafter reads {network.config.tap_count}")
        subject = replace(subject, config=subject.config.model_copy(update={"taps": tuple(taps)}))
    if serving is not None:
        config = subject.config
        check_fit(config, config.taps or config.default_taps(serving.ends.num_layers), serving.ends, str(drafter))
    return network, subject


def _widened(subject: Subject, dtype: torch.dtype) -> Subject:
    """With float tensors of another type that holds every number exactly. UsageError if it doesn't."""
    tensors = {}
    for name, tensor in subject.tensors.items():
        tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if not torch.equal(tensors[name].to(tensor.dtype), tensor):
            raise UsageError(f"{name} can't be written as {str(dtype).removeprefix('torch.')} without rounding")
    return replace(subject, tensors=tensors)


def representable(consumer: Consumer, subject: Subject, name: str) -> Subject:
    """The subject as a consumer can read it. ExportError names every field that stands in the way."""
    prepared, broken = consumer.prepare(at_least_the_targets_length(subject))
    if broken:
        raise ExportError(explained(consumer, broken, subject, name))
    return prepared


def explained(consumer: Consumer, broken: list[Refusal], subject: Subject, name: str) -> str:
    """The refusal with its way out."""
    reasons = "\n  ".join(f"{refusal.field}: {refusal.reason}" for refusal in broken)
    others = [CONSUMERS[other].title for other in who_can(subject) if other != consumer.name]
    way_out = f"serve it with {' or '.join(others)}" if others else "serve it with eyas"
    fields = ", ".join(dict.fromkeys(refusal.field for refusal in broken))
    if broken[0].field not in ("kind", "target"):
        way_out += f", or train one with other {fields}"
    return f"{consumer.title} can't represent the drafter {name}:\n  {reasons}\nNearest way out: {way_out}."


def _write(subject: Subject, consumer: Consumer, place: Path, final: Path) -> None:
    """Everything but the README; `final` is where the folder will lie."""
    if consumer.form is None:
        place.mkdir(parents=True, exist_ok=True)
        write_gguf(subject, place / GGUF_FILE)
        return
    form = consumer.form(subject)
    write_directory(place, form.config, form.tensors)
    if consumer.name == "tensorrt-llm":
        (place / TENSORRT_FILE).write_text(tensorrt_yaml(subject, final.resolve()), encoding="utf-8")


def read_back(place: Path, subject: Subject, original: DraftNetwork) -> float:
    """Load what was written and compare configuration, weights and logits; the largest difference of these.

    Raises ExportError.
    """
    ends = None if subject.serving is None else subject.serving.ends
    checkpoint = open_checkpoint(place, layers=subject.layers)
    if checkpoint.config != subject.config:
        raise ExportError(f"the exported configuration reads back differently: {_unlike(checkpoint.config, subject)}")
    network = checkpoint.network(ends)
    found = network.state_dict()
    wrong = [name for name, tensor in subject.tensors.items() if not torch.equal(found.pop(name), tensor)]
    if wrong or found:
        raise ExportError(f"exported tensors read back differently: {', '.join([*wrong, *found])}")
    difference = largest_difference(some_logits(original), some_logits(network))
    allowed = _ROUNDING[subject.dtype] if subject.changes else 0.0
    if not difference <= allowed:
        raise ExportError(
            f"the exported drafter's logits differ from the original's by {difference:.2g} of the largest"
        )
    return difference


def _unlike(found: DrafterConfig, subject: Subject) -> str:
    return ", ".join(
        f"{key} {getattr(found, key)} for {value}"
        for key, value in subject.config.model_dump().items()
        if getattr(found, key) != value
    )
