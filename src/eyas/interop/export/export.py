"""`export`: a drafter in the form another engine reads, read back and compared before it is put in its place."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eyas.drafters.checkpoint import open_checkpoint, write_directory
from eyas.drafters.config import DrafterConfig
from eyas.drafters.loading import check_fit
from eyas.drafters.network import DraftNetwork
from eyas.errors import ExportError, UsageError
from eyas.files import place_folder
from eyas.interop.export.consumers import CONSUMERS, Consumer, who_can
from eyas.interop.export.drafter import DrafterToExport, ServedTarget, at_least_the_targets_length, drafter_to_export
from eyas.interop.export.gguf import write_gguf
from eyas.interop.export.rules import Refusal
from eyas.interop.serving.commands import GGUF_FILE, TENSORRT_FILE, command, tensorrt_yaml
from eyas.targets.attention import grouped_attention

_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}
"""How far logits may move where a product is taken in another order: with a copy of the target's head or embedding."""


@dataclass(frozen=True)
class ExportResult:
    """What was written."""

    path: Path
    consumer: Consumer
    command: str
    changes: tuple[str, ...]
    difference: float
    """Largest difference of a logit to the original's, as a share of the largest logit."""


def export(
    path: Path,
    to: str,
    output: Path,
    target: ServedTarget | None = None,
    *,
    taps: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    weights: str | None = None,
    ignore: Collection[str] = (),
) -> ExportResult:
    """Write the drafter at `drafter` for consumer `to` into the new folder `output`.

    `taps` settles which boundaries a file means that can be read in two ways; `dtype` widens the weights. Raises
    ExportError for what the consumer can't represent, UsageError, CheckpointError, ConfigError, DrafterMismatchError.
    """
    consumer = consumer_named(to)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} exists and isn't empty: name a new folder")
    original, drafter = opened(path, target, taps, weights, ignore)
    if dtype is not None:
        drafter = _widened(drafter, dtype)
        original = original.to(dtype)
    prepared = representable(consumer, drafter, str(path))
    line = command(consumer.name, prepared, output)
    difference = 0.0

    def write(place: Path) -> None:
        nonlocal difference
        _write(prepared, consumer, place, output)
        difference = read_back(place, prepared, original)
        (place / "README.md").write_text(readme(prepared, consumer, line), encoding="utf-8")

    place_folder(output, write)
    return ExportResult(output, consumer, line, prepared.changes, difference)


def consumer_named(name: str) -> Consumer:
    """UsageError lists the names."""
    if name not in CONSUMERS:
        raise UsageError(f"unknown consumer {name!r}: write one of {', '.join(CONSUMERS)}")
    return CONSUMERS[name]


def opened(
    path: Path,
    target: ServedTarget | None,
    taps: Sequence[int] | None = None,
    weights: str | None = None,
    ignore: Collection[str] = (),
) -> tuple[DraftNetwork, DrafterToExport]:
    """A drafter that has only one reading and fits its target, loaded and taken apart. Raises as `export`."""
    layers = None if target is None else target.partial.num_layers
    checkpoint = open_checkpoint(path, weights=weights, ignore=ignore, layers=layers)
    doubts = [doubt for doubt in checkpoint.report.doubts if taps is None or not doubt.startswith("taps")]
    if doubts:
        raise ExportError(
            f"{path} can be read in two ways, and the wrong one would cost acceptance without an error:\n  "
            + "\n  ".join(doubts)
            + "\nSettle it there, or name the boundaries with --taps."
        )
    if target is None and "shared" in (checkpoint.config.embedding, checkpoint.config.head):
        raise UsageError(f"{path} uses its target's embedding or head: give --target")
    network = checkpoint.network(None if target is None else target.partial)
    drafter = drafter_to_export(network, target, checkpoint.provenance)
    if taps is not None:
        if len(taps) != network.config.tap_count:
            raise UsageError(f"--taps names {len(taps)} boundaries, the drafter reads {network.config.tap_count}")
        drafter = replace(drafter, config=drafter.config.model_copy(update={"taps": tuple(taps)}))
    if target is not None:
        config = drafter.config
        check_fit(config, config.taps or config.default_taps(target.partial.num_layers), target.partial, str(path))
    return network, drafter


def _widened(drafter: DrafterToExport, dtype: torch.dtype) -> DrafterToExport:
    """With float tensors of another type that holds every number exactly. UsageError if it doesn't."""
    tensors = {}
    for name, tensor in drafter.tensors.items():
        tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if not torch.equal(tensors[name].to(tensor.dtype), tensor):
            raise UsageError(f"{name} can't be written as {str(dtype).removeprefix('torch.')} without rounding")
    return replace(drafter, tensors=tensors)


def representable(consumer: Consumer, drafter: DrafterToExport, name: str) -> DrafterToExport:
    """The drafter as a consumer can read it. ExportError names every field that stands in the way."""
    prepared, broken = consumer.prepare(at_least_the_targets_length(drafter))
    if broken:
        raise ExportError(explained(consumer, broken, drafter, name))
    return prepared


def explained(consumer: Consumer, broken: list[Refusal], drafter: DrafterToExport, name: str) -> str:
    """The refusal with its way out."""
    reasons = "\n  ".join(f"{refusal.field}: {refusal.reason}" for refusal in broken)
    others = [CONSUMERS[other].title for other in who_can(drafter) if other != consumer.name]
    way_out = f"serve it with {' or '.join(others)}" if others else "serve it with eyas"
    fields = ", ".join(dict.fromkeys(refusal.field for refusal in broken))
    if broken[0].field not in ("kind", "target"):
        way_out += f", or train one with other {fields}"
    return f"{consumer.title} can't represent the drafter {name}:\n  {reasons}\nNearest way out: {way_out}."


def _write(drafter: DrafterToExport, consumer: Consumer, place: Path, final: Path) -> None:
    """Everything but the README; `final` is where the folder will lie."""
    if consumer.form is None:
        place.mkdir(parents=True, exist_ok=True)
        write_gguf(drafter, place / GGUF_FILE)
        return
    form = consumer.form(drafter)
    write_directory(place, form.config, form.tensors)
    if consumer.name == "tensorrt-llm":
        (place / TENSORRT_FILE).write_text(tensorrt_yaml(drafter, final.resolve()), encoding="utf-8")


def read_back(place: Path, drafter: DrafterToExport, original: DraftNetwork) -> float:
    """Load what was written and compare configuration, weights and logits; the largest difference of these.

    Raises ExportError.
    """
    checkpoint = open_checkpoint(place, layers=drafter.layers)
    if checkpoint.config != drafter.config:
        raise ExportError(f"the exported configuration reads back differently: {_unlike(checkpoint.config, drafter)}")
    network = checkpoint.network(None if drafter.target is None else drafter.target.partial)
    found = network.state_dict()
    wrong = [name for name, tensor in drafter.tensors.items() if not torch.equal(found.pop(name), tensor)]
    if wrong or found:
        raise ExportError(f"exported tensors read back differently: {', '.join([*wrong, *found])}")
    difference = largest_difference(some_logits(original), some_logits(network))
    allowed = _ROUNDING[drafter.dtype] if drafter.changes else 0.0
    if not difference <= allowed:
        raise ExportError(
            f"the exported drafter's logits differ from the original's by {difference:.2g} of the largest"
        )
    return difference


def _unlike(found: DrafterConfig, drafter: DrafterToExport) -> str:
    return ", ".join(
        f"{key} {getattr(found, key)} for {value}"
        for key, value in drafter.config.model_dump().items()
        if getattr(found, key) != value
    )


# Do two draft networks compute the same? Tried on random states, with outputs fed back.
#
# Shapes: S positions, A taps, Ht target hidden, H draft hidden, Vd draft vocabulary.


POSITIONS, STEPS = 24, 3


@torch.inference_mode()
def some_logits(network: DraftNetwork) -> Tensor:
    """[STEPS, S, Vd] float32: a pass over random taps and tokens, then its own outputs fed back."""
    config, draw = network.config, torch.Generator().manual_seed(11)
    taps = torch.randn(1, POSITIONS, config.tap_count, config.target_hidden_size, generator=draw).to(network.dtype)
    hidden, found = network.fuse(taps), []
    for step in range(STEPS):
        tokens = torch.randint(config.vocab_size, (1, POSITIONS), generator=draw)
        positions = torch.arange(POSITIONS).unsqueeze(0) + 37 * step
        hidden, normed = network.step(tokens, hidden, positions, _causal)
        found.append(network.logits(normed)[0].float())
    return torch.stack(found)


def _causal(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return grouped_attention(q, k, v, mask)


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Relative to the largest logit."""
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-6))


# The README of an exported directory: what it drafts for, how it was read and written, what is known of it.


def accept_length(drafter: DrafterToExport) -> float | None:
    """As measured by decoding when the drafter was trained, if its card says so."""
    for place in (drafter.provenance.get("validation"), drafter.provenance):
        found = place.get("decoded_accept_length") if isinstance(place, dict) else None
        if isinstance(found, int | float):
            return float(found)
    return None


def readme(drafter: DrafterToExport, consumer: Consumer, command: str) -> str:
    """Markdown."""
    provenance, measured = drafter.provenance, accept_length(drafter)
    target_name = provenance.get("target", "not recorded") if drafter.target is None else drafter.target.name
    fingerprint = provenance.get("target_fingerprint")
    taps = drafter.config.taps
    rows = [
        ("target", f"`{target_name}`" + (f", weights {fingerprint}" if fingerprint else "")),
        ("drafter", f"{drafter.kind.name}, {sum(t.numel() for t in drafter.tensors.values()):,} numbers, "
                    f"{str(drafter.dtype).removeprefix('torch.')}"),
        ("taps", "the consumer's default" if taps is None else
         f"boundaries {list(taps)} (k = the residual entering target layer k); {consumer.title} numbers: "
         f"{consumer.convention}"),
        ("draft vocabulary", f"{drafter.config.draft_vocab_size:,} of {drafter.config.vocab_size:,}"),
        ("embedding, head", f"{drafter.config.embedding}, {drafter.config.head} (shared = the target's)"),
        ("accept length", "not measured" if measured is None else
         f"{measured:.2f} tokens a target pass, decoded by eyas with `{drafter.config.default_tree or 'its tree'}` "
         "while training"),
        ("written for", f"{consumer.title} {consumer.version}, by `eyas export --to {consumer.name}`"),
        ("changed on the way", "; ".join(drafter.changes) or "nothing"),
    ]  # fmt: skip
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    text = f"# A drafter for {target_name}\n\n| | |\n|---|---|\n{table}\n\nServe it:\n\n```bash\n{command}\n```\n"
    if provenance:
        text += f"\nProvenance:\n\n```json\n{json.dumps(dict(provenance), indent=2)}\n```\n"
    return text
