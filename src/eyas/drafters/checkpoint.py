"""Drafter checkpoints of every format and kind: opening, checking, building networks, and writing.

Loading is strict. Configuration, names and shapes are checked before any weight is read. Every tensor must then belong
to the network and hold finite numbers, and nothing stays uninitialized. Only the embedding and the head may be absent:
the target's are then used.

The vocabulary map says which target token each draft token stands for: `d2t` holds offsets (target id = draft id +
d2t), or the target ids themselves in files of some exporters. Shapes: V / Vd full / draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor

from eyas.drafters.config import DrafterConfig, TransformerConfig
from eyas.drafters.files import CONFIG, KeyReport, RawCheckpoint, TensorInfo
from eyas.drafters.formats.fields import Fields
from eyas.drafters.formats.opening import open_raw
from eyas.drafters.formats.tensor_names import EMBEDDING, HEAD, VOCABULARY_MAP, is_computed, name_in_file, native_name
from eyas.drafters.kind import Kind
from eyas.drafters.network import DraftNetwork, Rotary, shapes_of
from eyas.drafters.registry import kind_for, kind_of
from eyas.errors import CheckpointError, ConfigError
from eyas.files import write_json, writing_path
from eyas.targets.passes import EmbeddingAndHead

WEIGHTS = "model.safetensors"
PROVENANCE = "eyas"
"""The key of config.json that holds a drafter's provenance."""

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_network(
    path: Path, target: EmbeddingAndHead | None = None, *, weights: str | None = None, ignore: Collection[str] = ()
) -> DraftNetwork:
    """The drafter at `path`; see `open_checkpoint` and `Checkpoint.network`."""
    layers = None if target is None else target.num_layers
    return open_checkpoint(path, weights=weights, ignore=ignore, layers=layers).network(target)


def open_checkpoint(
    path: Path, *, weights: str | None = None, ignore: Collection[str] = (), layers: int | None = None
) -> Checkpoint:
    """Read the configuration and the headers of the drafter at `path`, a directory or a GGUF file.

    `weights` names a weight file other than the default, `ignore` lists config keys to ignore, `layers` is the
    target's number of layers. Raises CheckpointError and ConfigError.
    """
    return interpret(open_raw(path, weights), ignore=ignore, layers=layers)


def interpret(raw: RawCheckpoint, *, ignore: Collection[str] = (), layers: int | None = None) -> Checkpoint:
    """Recognize the kind of an opened checkpoint and read its configuration. Raises CheckpointError and ConfigError."""
    found = raw.headers.tensors
    if twice := sorted(name for name in found if native_name(name) != name and native_name(name) in found):
        also = ", ".join(sorted({native_name(name).split(".")[0] for name in twice}))
        raise CheckpointError(f"{raw.path} names the same tensors twice, also as {also}.*: {', '.join(twice)}")
    kind = kind_of(raw.config, found, str(raw.path))
    left_out = {name: "a table that every reader computes" for name in found if is_computed(name)}
    left_out |= {name: "the target's, for training only" for name in raw.training_only if name in found}
    tensors = {native_name(name): info for name, info in found.items() if name not in left_out}
    fields = Fields(raw.config, raw.where, tensors, ignore, layers)
    config = kind.read(fields)
    _check_rotation(config, raw.where)
    report = LoadReport(
        format=raw.format,
        used=fields.used if raw.used is None else raw.used,
        defaulted=raw.defaulted | fields.defaulted,
        ignored=raw.ignored | (fields.ignored if raw.used is None else {}) | left_out,
        convention=fields.convention,
        notes=raw.notes + fields.notes,
        doubts=raw.doubts + fields.doubts,
    )
    return Checkpoint(kind, config, report, raw, tensors)


_ROPE_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, StrictDataclassError, TypeError, ValueError)
"""The errors that transformers raises for RoPE sections that it can't compute."""


def _check_rotation(config: DrafterConfig, where: str) -> None:
    """Refuse a RoPE section from which transformers can't compute tables. Raises ConfigError."""
    if not isinstance(config, TransformerConfig):
        return
    try:
        rotary = Rotary(config)
        if not (bool(rotary.inv_freq.isfinite().all()) and isfinite(rotary.attention_scaling)):
            raise ValueError("frequencies that are not finite")
    except _ROPE_ERRORS as error:
        raise ConfigError(f"{where}: RoPE can't be computed from {config.rope_parameters}: {error}") from error


@dataclass
class Checkpoint:
    """A drafter whose configuration and tensor headers have been read, but not its weights."""

    kind: Kind
    config: DrafterConfig
    report: LoadReport
    raw: RawCheckpoint
    tensors: dict[str, TensorInfo]
    """By native name, without tensors that every reader computes or only training needs."""

    @property
    def provenance(self) -> dict[str, Any]:
        """The provenance in the drafter's config.json; empty if there is none."""
        found = self.raw.config.get(PROVENANCE)
        return found if isinstance(found, dict) else {}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most weights in the file; float32 for dtypes that eyas doesn't compute in."""
        sizes: dict[str, int] = {}
        for info in self.tensors.values():
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.parameters
        return _DTYPES.get(max(sizes, key=lambda name: sizes[name]), torch.float32)

    def network(self, target: EmbeddingAndHead | None = None) -> DraftNetwork:
        """Read the weights in the file's dtype; embedding or head that the file omits are shared with `target`.

        Raises CheckpointError.
        """
        where = str(self.raw.path)
        network = self.kind.blank(self.config)
        check_tensors(self.tensors, shapes_of(network), where)
        found = {native_name(name): tensor for name, tensor in self.raw.load().items()}
        tensors = {name: found[name] for name in self.tensors}
        whole = {name for name, blank in network.state_dict().items() if not blank.is_floating_point()}
        check_numbers(tensors, where, whole)
        self.report.notes += complete_vocabulary(tensors, self.config, where)
        if target is None and "shared" in (self.config.embedding, self.config.head):
            part = EMBEDDING if self.config.embedding == "shared" else HEAD
            raise CheckpointError(f"{where} has no {part} and no target was given to share its own")
        return network.fill(tensors, target)


@dataclass
class LoadReport(KeyReport):
    """How a checkpoint was read: the treatment of every key, and the meaning of its layer numbers."""

    format: str
    used: list[str]
    """The keys that change the computation."""
    convention: str
    """How layer numbers were read; empty if the file has none."""


def check_tensors(found: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Refuse a checkpoint with missing, extra or misshapen tensors; the message lists all of them.

    Raises CheckpointError. The vocabulary map is checked when it is read.
    """
    wrong = [
        f"{name} is {list(found[name].shape)}, the config says {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape and name not in VOCABULARY_MAP
    ]
    missing = sorted(set(expected) - set(found) - VOCABULARY_MAP)
    extra = sorted(set(found) - set(expected))
    if missing or extra:
        wrong.insert(0, f"missing: {', '.join(missing) or 'none'}\n  extra: {', '.join(extra) or 'none'}")
    if wrong:
        shapes = "\n  ".join(wrong)
        raise CheckpointError(
            f"{where} does not hold the tensors its configuration asks for.\n  {shapes}\n"
            "Check the sizes, the number of layers, the norms and the biases in it."
        )


def check_numbers(tensors: Mapping[str, Tensor], where: str, whole: Collection[str] = VOCABULARY_MAP) -> None:
    """Refuse weights that are not floats or not finite, apart from `whole` numbers. Raises CheckpointError."""
    for name, tensor in tensors.items():
        if name in VOCABULARY_MAP:
            continue
        if name in whole:
            if tensor.is_floating_point() or tensor.is_complex():
                raise CheckpointError(f"{where}: {name} holds no whole numbers: the file is damaged")
            continue
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{where}: {name} holds {str(tensor.dtype).removeprefix('torch.')}: eyas loads float weights only; "
                "use the unquantized drafter"
            )
        low, high = torch.aminmax(tensor)
        if not (bool(low.isfinite()) and bool(high.isfinite())):
            raise CheckpointError(f"{where}: {name} holds NaN or infinite numbers: the file is damaged")


def save_network(network: DraftNetwork, path: Path, provenance: Mapping[str, Any] | None = None) -> None:
    """Write a network as a drafter directory; config.json is written last, so a directory with one is complete."""
    config = network.config
    kind = kind_for(network.config)
    with_map = kind.full_map or config.draft_vocab_size < config.vocab_size
    tensors = {
        name_in_file(name, kind.first_layer): tensor
        for name, tensor in network.state_dict().items()
        if name not in VOCABULARY_MAP or with_map
    }
    values = kind.write(config) | {"dtype": str(network.dtype).removeprefix("torch.")}
    if provenance is not None:
        values[PROVENANCE] = dict(provenance)
    write_directory(path, values, tensors)


def write_directory(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a drafter directory: weights first, config.json last."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with writing_path(path / WEIGHTS) as file:
        save_file(held, file, metadata={"format": "pt"})
    write_json(path / CONFIG, config)


ABSOLUTE = "d2t holds target ids instead of offsets: read as ids, since as offsets it would name wrong tokens"


def complete_vocabulary(tensors: dict[str, Tensor], config: DrafterConfig, where: str) -> list[str]:
    """Complete the vocabulary map in `tensors` if it is missing or partial; returns notes on how it was read.

    Raises CheckpointError for a map that is damaged, or missing where one is required.
    """
    full, draft = config.vocab_size, config.draft_vocab_size
    if "d2t" not in tensors:
        if draft != full:
            raise CheckpointError(
                f"{where}: draft_vocab_size {draft} of {full}, but no d2t tensor maps it: re-export it"
            )
        tensors["d2t"] = torch.zeros(draft, dtype=torch.int64)
    ids, notes = read_map(tensors["d2t"], config, where, tensors.get("t2d"))
    covered = _covered(ids, full)
    if not torch.equal(tensors.setdefault("t2d", covered).to(torch.bool), covered):
        raise CheckpointError(f"{where}: t2d and d2t name different tokens: the vocabulary map is damaged")
    tensors["d2t"] = ids - torch.arange(draft)
    tensors["t2d"] = covered
    return notes


def _covered(ids: Tensor, full: int) -> Tensor:
    """Which of `full` tokens [V] are among these ids, as `t2d` says it."""
    covered = torch.zeros(full, dtype=torch.bool)
    covered[ids] = True
    return covered


def read_map(d2t: Tensor, config: DrafterConfig, where: str, t2d: Tensor | None = None) -> tuple[Tensor, list[str]]:
    """The target ids [Vd] in `d2t`, and notes on how it was read. Raises CheckpointError for a damaged map.

    `t2d` [V] decides between offsets and ids where `d2t` could be either; without it such a map is refused.
    """
    full, draft = config.vocab_size, config.draft_vocab_size
    if d2t.is_floating_point() or d2t.is_complex() or d2t.dtype == torch.bool:
        raise CheckpointError(f"{where}: d2t holds {str(d2t.dtype).removeprefix('torch.')}, not whole numbers")
    if d2t.shape != (draft,):
        raise CheckpointError(f"{where}: d2t is {list(d2t.shape)}, the config says draft_vocab_size {draft}")
    written = d2t.to(torch.int64)
    if not bool(((written >= -full) & (written < full)).all()):  # so that the sum below can't overflow
        raise CheckpointError(f"{where}: d2t has numbers beyond the vocabulary of {full}")
    shifted = written + torch.arange(draft)
    offsets = names_tokens(shifted, full)
    absolute = names_tokens(written, full)
    if offsets and absolute and not torch.equal(shifted, written):
        if t2d is None:
            raise CheckpointError(
                f"{where}: d2t could hold offsets or target ids, and there is no t2d to tell which: add a tensor t2d "
                f"with {full} booleans, true for every token that has a draft token"
            )
        offsets = not torch.equal(t2d.to(torch.bool), _covered(written, full))
    if offsets:
        return shifted, []
    if absolute:
        return written, [ABSOLUTE]
    raise CheckpointError(f"{where}: d2t must map to {draft} different tokens below {full} (id = draft id + d2t)")


def names_tokens(ids: Tensor, full: int) -> bool:
    """Whether these are distinct ids in a vocabulary of `full` tokens."""
    return int(ids.min()) >= 0 and int(ids.max()) < full and len(set(ids.tolist())) == len(ids)
