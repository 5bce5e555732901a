"""Reports on drafters: the contents of their files, and anything that could lower acceptance without an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.drafters.block.network import BlockConfig
from eyas.drafters.checkpoint import PROVENANCE, Checkpoint, check_tensors, interpret
from eyas.drafters.config import DrafterConfig, FusedTapsConfig, TransformerConfig
from eyas.drafters.files import CONFIG, Headers, RawCheckpoint, read_json
from eyas.drafters.formats.opening import gguf_in, open_raw
from eyas.drafters.formats.taps import IDS
from eyas.drafters.formats.tensor_names import EMBEDDING, SHAREABLE, VOCABULARY_MAP, is_head, native_name
from eyas.drafters.formats.vocabulary import complete_vocabulary
from eyas.drafters.registry import kind_name
from eyas.errors import CheckpointError, ConfigError
from eyas.interop.inspect.target_report import Report, TargetProfile

CONVENTION = "tap k is the residual stream entering target layer k (0 = embeddings)"

_BLOCK_TAPS = ("target_layer_ids", "aux_hidden_state_layer_ids")
"""Keys under which files of block drafters have their taps."""


@dataclass
class DrafterReport(Report):
    """The facts about a drafter, with problems (it won't load or doesn't fit) and warnings (it may draft badly)."""

    role = "drafter"

    path: str
    kind: str
    parameters: int
    dtypes: list[str]
    files: list[str]
    config: dict[str, Any] = field(default_factory=dict)
    taps: list[int] | None = None
    tap_source: str = ""
    convention: str = CONVENTION
    format: str = ""
    used: list[str] = field(default_factory=list)
    defaulted: dict[str, Any] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    own_embedding: bool = False
    own_head: bool = False
    provenance: Any = None
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def target_fingerprint(self) -> str | None:
        """The fingerprint of the target that it was trained for; None if the provenance doesn't hold one."""
        found = self.provenance.get("target_fingerprint") if isinstance(self.provenance, dict) else None
        return found if isinstance(found, str) else None


def report_drafter(path: Path, target: TargetProfile | None = None) -> DrafterReport:
    """Examine a drafter's folder or GGUF file and, given `target`, whether the two fit.

    Problems are reported rather than raised; CheckpointError is raised only if there is no config to report on.
    """
    raw, problem = _open(path)
    names = {native_name(name) for name in raw.headers.tensors}
    report = DrafterReport(
        path=str(path),
        kind=kind_name(raw.config, raw.headers.tensors),
        parameters=raw.headers.parameters,
        dtypes=raw.headers.dtypes,
        files=raw.headers.files,
        format=raw.format,
        own_embedding=EMBEDDING in names,
        own_head=any(map(is_head, names)),
        provenance=raw.config.get(PROVENANCE),
        problems=[problem] if problem else [],
    )
    try:
        checkpoint = interpret(raw, layers=None if target is None else target.layers)
    except (CheckpointError, ConfigError) as error:
        report.problems.append(str(error))
        return report
    config = checkpoint.config
    report.config = config.model_dump(exclude={"taps"})
    report.taps = None if config.taps is None else list(config.taps)
    report.tap_source = _tap_source(raw.config)
    report.convention = checkpoint.report.convention or report.convention
    for name in ("used", "defaulted", "ignored"):
        setattr(report, name, getattr(checkpoint.report, name))
    report.notes += checkpoint.report.notes
    report.warnings += checkpoint.report.doubts
    if raw.headers.files:
        _check_tensors(report, checkpoint)
        _check_map(report, checkpoint)
    _warn(report, config, raw.config)
    if target is not None:
        _compare_with(report, config, target)
    return report


def _open(path: Path) -> tuple[RawCheckpoint, str]:
    """The checkpoint and the reason why its weights can't be read, which is empty if they can.

    Without readable weights the checkpoint has none.
    """
    try:
        return open_raw(path), ""
    except CheckpointError as error:
        if gguf_in(path) is not None or not (path / CONFIG).is_file():
            raise
        config = read_json(path / CONFIG)  # raises if that was the reason
        return RawCheckpoint(path, "directory", config, str(path / CONFIG), Headers(), dict, lambda _: {}), str(error)


def _tap_source(config: dict[str, Any]) -> str:
    """The keys that the taps were read from."""
    keys = [key for key in ("taps", IDS, *_BLOCK_TAPS) if config.get(key) is not None]
    for section, inside in (("eagle_config", (IDS, "layer_ids")), ("dflash_config", _BLOCK_TAPS[:1])):
        nested = config.get(section)
        if isinstance(nested, dict):
            keys += [f"{section}.{key}" for key in inside if nested.get(key) is not None]
    return ", ".join(keys) or "not in the config: the kind's default"


def _check_tensors(report: DrafterReport, checkpoint: Checkpoint) -> None:
    expected = checkpoint.kind.blank(checkpoint.config).shapes
    report.missing = sorted(set(expected) - set(checkpoint.tensors) - SHAREABLE - VOCABULARY_MAP)
    report.extra = sorted(set(checkpoint.tensors) - set(expected))
    try:
        check_tensors(checkpoint.tensors, expected, report.path)
    except CheckpointError as error:
        report.problems.append(str(error))


def _check_map(report: DrafterReport, checkpoint: Checkpoint) -> None:
    """Check the vocabulary map, the only tensors that are read."""
    try:
        tensors = checkpoint.raw.load_some([name for name in sorted(VOCABULARY_MAP) if name in checkpoint.tensors])
        report.notes += complete_vocabulary(tensors, checkpoint.config, report.path)
    except CheckpointError as error:
        report.problems.append(str(error))


def _warn(report: DrafterReport, config: DrafterConfig, raw: dict[str, Any]) -> None:
    if config.taps is not None and len(set(config.taps)) != config.tap_count:
        report.problems.append(f"reads {config.tap_count} different taps, but the config names {list(config.taps)}")
    if config.taps is None and isinstance(config, FusedTapsConfig | BlockConfig):
        report.warnings.append(
            "no taps in config.json: every reader uses its own default, and defaults differ by one between projects "
            "(boundaries or layer outputs)"
        )
    if isinstance(config, TransformerConfig):
        _warn_of_positions(report, config, raw)
    if report.provenance is None:
        report.warnings.append("no provenance (key `eyas`): its target and training data are unknown")


def _warn_of_positions(report: DrafterReport, config: TransformerConfig, raw: dict[str, Any]) -> None:
    if config.max_position_embeddings <= 2048:
        report.warnings.append(
            f"max_position_embeddings is {config.max_position_embeddings}: eyas continues beyond it, but two other "
            "engines crash on longer prompts"
        )
    if not any(raw.get(key) for key in ("rope_theta", "rope_parameters", "rope_scaling")):
        report.warnings.append(
            "no rope_theta: 10000 is assumed; if the drafter was trained with another value, it drafts badly"
        )


def _compare_with(report: DrafterReport, config: DrafterConfig, target: TargetProfile) -> None:
    for what, mine, theirs in (
        ("states", config.target_hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
    ):
        if mine != theirs:
            report.problems.append(f"doesn't fit the target: {what} of {mine}, but the target's is {theirs}")
    if config.embedding == "shared" and config.hidden_size != target.hidden_size:
        report.problems.append(
            f"no embedding of its own, and the target's is {target.hidden_size} wide, not {config.hidden_size}"
        )
    n = target.layers
    if config.taps is not None:
        outside = [tap for tap in config.taps if not 0 <= tap <= n + 1]
        if outside:
            report.problems.append(f"taps {outside} lie outside the target's boundaries 0..{n + 1}")
    if isinstance(config, TransformerConfig):
        _compare_positions(report, config, target)
    recorded = report.target_fingerprint
    if target.fingerprint is not None and recorded is not None and recorded != target.fingerprint:
        report.warnings.append(
            f"trained for other weights than this target's: its fingerprint is {recorded}, the target's "
            f"{target.fingerprint}"
        )


def _compare_positions(report: DrafterReport, config: TransformerConfig, target: TargetProfile) -> None:
    theta = float(config.rope_parameters["rope_theta"])
    if target.rope_theta is not None and theta != target.rope_theta:
        report.warnings.append(
            f"rope_theta is {theta:g}, but the target's is {target.rope_theta:g}: correct only if it was trained so"
        )
    if target.max_length is not None and config.max_position_embeddings < target.max_length:
        report.warnings.append(
            f"max_position_embeddings {config.max_position_embeddings} is less than the target's {target.max_length}"
        )
