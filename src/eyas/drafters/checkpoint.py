"""Drafter checkpoints of every format and kind, opened, checked and made into networks; loading is strict.

Configuration, names and shapes are checked before any weight is read; then every tensor is placed and finite, nothing
stays uninitialised. Only the embedding and the head may be absent: they are then the target's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor

from eyas.drafters.config import DrafterConfig, TransformerConfig
from eyas.drafters.files import RawCheckpoint, TensorInfo
from eyas.drafters.formats.fields import Fields
from eyas.drafters.formats.opening import CONFIG, open_raw
from eyas.drafters.formats.vocabulary import complete_vocabulary
from eyas.drafters.layers import Rotary
from eyas.drafters.network import DraftNetwork
from eyas.drafters.registry import Kind, file_name, kind_for, kind_of, tensor_name
from eyas.errors import CheckpointError, ConfigError
from eyas.targets import Target

WEIGHTS = "model.safetensors"
PROVENANCE = "eyas"
"""The key of config.json under which a drafter says where it comes from."""

OPTIONAL = frozenset({"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"})
"""Tensors a file may leave out: the first two are then the target's, the map is then the identity (or derived)."""


@dataclass
class LoadReport:
    """How a checkpoint was read: what became of every key, and how its numbers were understood."""

    format: str
    used: list[str]
    defaulted: dict[str, Any]
    """What the file does not say, and what was taken."""
    ignored: dict[str, str]
    """Keys and tensors that change nothing, and why."""
    convention: str
    """How layer numbers were read; empty where none are written."""
    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    """Where the file can be read in two ways: both are named."""


@dataclass
class Checkpoint:
    """A drafter whose configuration and tensor names are understood; its weights are not read yet."""

    kind: Kind
    config: DrafterConfig
    report: LoadReport
    raw: RawCheckpoint
    tensors: dict[str, TensorInfo]
    """In the `layers.{i}` layout, without those that are computed or were about training."""

    @property
    def provenance(self) -> dict[str, Any]:
        """What the drafter says of itself."""
        found = self.raw.config.get(PROVENANCE)
        return found if isinstance(found, dict) else {}

    @property
    def dtype(self) -> torch.dtype:
        """What most of its weights are stored as; float32 for types that nobody computes in."""
        sizes: dict[str, int] = {}
        for info in self.tensors.values():
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.parameters
        return _DTYPES.get(max(sizes, key=lambda name: sizes[name]), torch.float32)

    def network(self, target: Target | None = None) -> DraftNetwork:
        """Read the weights, float tensors in the file's dtype; `target` lends what the file hasn't.

        Raises CheckpointError.
        """
        where = str(self.raw.path)
        check_tensors(self.tensors, expected_tensors(self.kind, self.config), where)
        found = {tensor_name(name): tensor for name, tensor in self.raw.load().items()}
        tensors = {name: found[name] for name in self.tensors}
        _check_numbers(tensors, where)
        self.report.notes += complete_vocabulary(tensors, self.config, where)
        if target is None and "shared" in (self.config.embedding, self.config.head):
            part = "embed_tokens.weight" if self.config.embedding == "shared" else "lm_head.weight"
            raise CheckpointError(f"{where} has no {part} and no target was given to share its own")
        return assembled(self.kind, self.config, tensors, target)


def assembled(
    kind: Kind, config: DrafterConfig, tensors: Mapping[str, Tensor], target: Target | None = None
) -> DraftNetwork:
    """The network of exactly these tensors, none of them copied; `target` lends what is shared."""
    with torch.device("meta"):  # nothing is initialised for nothing
        network = kind.network(config)
    network.load_state_dict(tensors, assign=True)
    if target is not None and "shared" in (config.embedding, config.head):
        network.borrow(target)
    return network.eval().requires_grad_(False)


def open_checkpoint(
    path: Path, *, weights: str | None = None, ignore: Collection[str] = (), layers: int | None = None
) -> Checkpoint:
    """Read the configuration and the headers of the drafter at `path`, a directory or a GGUF file.

    `weights` names a weight file other than the default, `ignore` config keys to overlook, `layers` is the number of
    layers of the target. Raises CheckpointError and ConfigError.
    """
    return understand(open_raw(path, weights), ignore=ignore, layers=layers)


def understand(source: RawCheckpoint, *, ignore: Collection[str] = (), layers: int | None = None) -> Checkpoint:
    """Tell the kind of a source and read its configuration."""
    found = source.headers.tensors
    if twice := sorted(name for name in found if tensor_name(name) != name and tensor_name(name) in found):
        also = ", ".join(sorted({tensor_name(name).split(".")[0] for name in twice}))
        raise CheckpointError(f"{source.path} names the same tensors twice, also as {also}.*: {', '.join(twice)}")
    kind = kind_of(source.config, found, str(source.path))
    left_out = {name: "a table that everyone computes" for name in found if computed(name)}
    left_out |= {name: "the target's, for training only" for name in source.training_only if name in found}
    tensors = {tensor_name(name): info for name, info in found.items() if name not in left_out}
    fields = Fields(source.config, source.where, tensors, ignore, layers)
    config = kind.read(fields)
    _check_rotation(config, source.where)
    report = LoadReport(
        format=source.format,
        used=fields.used if source.used is None else source.used,
        defaulted=source.defaulted | fields.defaulted,
        ignored=source.ignored | (fields.ignored if source.used is None else {}) | left_out,
        convention=fields.convention,
        notes=source.notes + fields.notes,
        doubts=source.doubts + fields.doubts,
    )
    return Checkpoint(kind, config, report, source, tensors)


_ROPE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What transformers raises for RoPE sections that it can't compute."""


def _check_rotation(config: DrafterConfig, where: str) -> None:
    """transformers must be able to compute the RoPE tables. Raises ConfigError."""
    if not isinstance(config, TransformerConfig):
        return
    try:
        rotary = Rotary(config)
        if not (bool(rotary.inv_freq.isfinite().all()) and isfinite(rotary.attention_scaling)):
            raise ValueError("frequencies that are no numbers")
    except _ROPE_ERRORS as error:
        raise ConfigError(f"{where}: RoPE can't be computed from {config.rope_parameters}: {error}") from error


def load_network(
    path: Path,
    target: Target | None = None,
    *,
    weights: str | None = None,
    ignore: Collection[str] = (),
) -> DraftNetwork:
    """The drafter at `path`; see `open_checkpoint` and `Checkpoint.network`."""
    layers = None if target is None else target.num_layers
    return open_checkpoint(path, weights=weights, ignore=ignore, layers=layers).network(target)


def save_network(network: DraftNetwork, path: Path, provenance: Mapping[str, Any] | None = None) -> None:
    """Write `path`; config.json is written last, so a directory with one is whole."""
    kind = kind_for(network.config)
    tensors = {
        file_name(name, kind): t
        for name, t in network.state_dict().items()
        if name not in ("d2t", "t2d") or kind.full_map or network.config.draft_vocab_size < network.config.vocab_size
    }
    config = kind.write(network.config) | {"dtype": str(network.dtype).removeprefix("torch.")}
    if provenance is not None:
        config[PROVENANCE] = dict(provenance)
    write_directory(path, config, tensors)


def write_directory(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """A drafter directory: weights first, config.json last and at once."""
    path.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(held, path / WEIGHTS, metadata={"format": "pt"})
    partial = path / (CONFIG + ".partial")
    partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (path / WEIGHTS).chmod(partial.stat().st_mode)  # safetensors lets nobody else read it
    partial.replace(path / CONFIG)


def expected_tensors(kind: Kind, config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors a drafter of this config has, the vocabulary map included."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in kind.network(config).state_dict().items()}


def computed(name: str) -> bool:
    """Is this a table that some checkpoints store and everyone computes?"""
    return name.endswith("rotary_emb.inv_freq")


def check_tensors(found: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Refuse a checkpoint that lacks tensors, has others, or has them in other shapes, all at once.

    Raises CheckpointError. The vocabulary map is checked when it is read.
    """
    wrong = [
        f"{name} is {list(found[name].shape)}, the config says {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape and name not in _MAP
    ]
    missing, extra = sorted(set(expected) - set(found) - _MAP), sorted(set(found) - set(expected))
    if missing or extra:
        wrong.insert(0, f"missing: {', '.join(missing) or 'none'}\n  extra: {', '.join(extra) or 'none'}")
    if wrong:
        shapes = "\n  ".join(wrong)
        raise CheckpointError(
            f"{where} does not hold the tensors its configuration asks for.\n  {shapes}\n"
            "Check the sizes, the number of layers, the norms and the biases there."
        )


_MAP = frozenset({"d2t", "t2d"})
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _check_numbers(tensors: Mapping[str, Tensor], where: str) -> None:
    """Every weight is a finite number in a type that is computed in."""
    for name, tensor in tensors.items():
        if name in _MAP:
            continue
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{where}: {name} holds {str(tensor.dtype).removeprefix('torch.')}: eyas loads float weights only; "
                "use the unquantised drafter"
            )
        low, high = torch.aminmax(tensor)
        if not (bool(low.isfinite()) and bool(high.isfinite())):
            raise CheckpointError(f"{where}: {name} holds NaN or infinite numbers: the file is damaged")
