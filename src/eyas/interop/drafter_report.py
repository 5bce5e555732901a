"""What a drafter directory is, and anything about it that could silently cost acceptance."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from eyas.drafters.checkpoint import computed, expected_tensors
from eyas.drafters.config import DrafterConfig, TransformerConfig
from eyas.drafters.eagle3.config import FusedTapsConfig
from eyas.drafters.kinds import KINDS, kind_for, tensor_name
from eyas.errors import ConfigError
from eyas.interop.headers import Headers

OPTIONAL = frozenset({"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"})
"""Tensors a file may leave out: the first two are then the target's, the map is then the identity (or derived)."""

CONVENTION = "tap k is the residual stream entering target layer k (0 = embeddings)"


@dataclass(frozen=True)
class TargetFacts:
    """What must be known of a target to judge a drafter made for it."""

    layers: int
    hidden_size: int
    vocab_size: int
    max_length: int | None
    rope_theta: float | None
    fingerprint: str | None = None
    """None = its weights were not read."""


@dataclass
class DrafterReport:
    """Facts, problems (it won't load or won't fit) and warnings (it may draft badly)."""

    path: str
    kind: str
    parameters: int
    dtypes: list[str]
    files: list[str]
    config: dict[str, Any] = field(default_factory=dict)
    taps: list[int] | None = None
    tap_source: str = ""
    convention: str = CONVENTION
    own_embedding: bool = False
    own_head: bool = False
    provenance: Any = None
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def target_fingerprint(self) -> str | None:
        """Of the target it says it was trained for."""
        found = self.provenance.get("target_fingerprint") if isinstance(self.provenance, dict) else None
        return found if isinstance(found, str) else None

    def as_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return {"role": "drafter", "usable": not self.problems} | asdict(self)


def report_drafter(
    path: Path, raw: dict[str, Any], headers: Headers, kind: str, target: TargetFacts | None = None
) -> DrafterReport:
    """Examine a drafter directory; with `target`, whether they fit."""
    names = {tensor_name(name) for name in headers.tensors}
    report = DrafterReport(
        path=str(path),
        kind=kind,
        parameters=headers.parameters,
        dtypes=headers.dtypes,
        files=headers.files,
        own_embedding="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
        provenance=raw.get("eyas"),
    )
    if kind not in KINDS:
        report.problems.append(f"kind {kind}: eyas loads {', '.join(KINDS)}")
        return report
    if not headers.files:
        found = f"only pickles ({', '.join(headers.pickles)})" if headers.pickles else "no weight files"
        report.problems.append(
            f"{found}: eyas reads safetensors" + ("; a pickle you trust: --draft-weights" if headers.pickles else "")
        )
    try:
        config = KINDS[kind].read(raw, str(path / "config.json"), (), names if headers.files else None)
    except ConfigError as error:
        report.problems.append(str(error))
        return report
    report.config = config.model_dump(exclude={"taps"})
    report.taps = None if config.taps is None else list(config.taps)
    report.tap_source = _tap_source(raw)
    if headers.files:
        _check_tensors(report, config, headers)
        _check_map(report, config, headers)
    _suspect(report, config, raw)
    if target is not None:
        _compare(report, config, target)
    return report


def _tap_source(raw: dict[str, Any]) -> str:
    """Which keys the taps were read from."""
    nested = raw.get("eagle_config") or {}
    keys = [key for key in ("taps", "eagle_aux_hidden_state_layer_ids") if raw.get(key) is not None]
    keys += [
        f"eagle_config.{key}"
        for key in ("eagle_aux_hidden_state_layer_ids", "layer_ids")
        if nested.get(key) is not None
    ]
    return ", ".join(keys) or "not written: the kind's default"


def _check_tensors(report: DrafterReport, config: DrafterConfig, headers: Headers) -> None:
    expected = expected_tensors(kind_for(config), config)
    found = {tensor_name(name): info.shape for name, info in headers.tensors.items() if not computed(name)}
    report.missing = sorted(set(expected) - set(found) - OPTIONAL)
    report.extra = sorted(set(found) - set(expected))
    if report.missing or report.extra:
        report.problems.append("tensors and config.json disagree: see missing and extra")
    report.problems += [
        f"{name} is {list(found[name])}, the config says {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]


def _check_map(report: DrafterReport, config: DrafterConfig, headers: Headers) -> None:
    full, draft = config.vocab_size, config.draft_vocab_size
    if "d2t" not in headers.tensors:
        if draft != full:
            report.problems.append(f"a draft vocabulary of {draft} out of {full}, but no d2t tensor maps it")
        return
    if headers.tensors["d2t"].shape != (draft,):
        return  # reported with the other shapes
    ids = headers.read("d2t").long() + torch.arange(headers.tensors["d2t"].parameters)
    if int(ids.min()) < 0 or int(ids.max()) >= full or len(set(ids.tolist())) != ids.numel():
        report.problems.append("d2t does not map to different tokens of the vocabulary (id = draft id + d2t)")
        if bool((headers.read("d2t") == headers.read("d2t").sort().values).all()):
            report.warnings.append("d2t rises steadily: perhaps it holds absolute ids instead of offsets")
        return
    if "t2d" in headers.tensors:
        covered = torch.zeros(full, dtype=torch.bool)
        covered[ids] = True
        if not torch.equal(headers.read("t2d").bool(), covered):
            report.problems.append("t2d and d2t name different tokens: the vocabulary map is damaged")


def _suspect(report: DrafterReport, config: DrafterConfig, raw: dict[str, Any]) -> None:
    if config.taps is not None and len(set(config.taps)) != config.tap_count:
        report.problems.append(f"reads {config.tap_count} different taps, but the config names {list(config.taps)}")
    if config.taps is None and isinstance(config, FusedTapsConfig):
        report.warnings.append(
            "no tap list in config.json: every reader falls back on its own default, and the defaults differ by one "
            "between projects (boundaries or layer outputs)"
        )
    if isinstance(config, TransformerConfig):
        _suspect_positions(report, config, raw)
    if report.provenance is None:
        report.warnings.append("no provenance (key `eyas`): nothing says what it was trained for or on")


def _suspect_positions(report: DrafterReport, config: TransformerConfig, raw: dict[str, Any]) -> None:
    if config.max_position_embeddings <= 2048:
        report.warnings.append(
            f"max_position_embeddings is {config.max_position_embeddings}: eyas goes on past it, two other engines "
            "crash on longer prompts"
        )
    if not any(raw.get(key) for key in ("rope_theta", "rope_parameters", "rope_scaling")):
        report.warnings.append(
            "no rope_theta: 10000 is assumed; if the drafter was trained with another, it drafts badly"
        )


def _compare(report: DrafterReport, config: DrafterConfig, target: TargetFacts) -> None:
    for what, mine, theirs in (
        ("states", config.target_hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
    ):
        if mine != theirs:
            report.problems.append(f"doesn't fit the target: {what} of {mine}, the target's {theirs}")
    if config.embedding == "shared" and config.hidden_size != target.hidden_size:
        report.problems.append(
            f"no embedding of its own, and the target's is {target.hidden_size} wide, not {config.hidden_size}"
        )
    n = target.layers
    if config.taps is not None:
        outside = [tap for tap in config.taps if not 0 <= tap <= n + 1]
        if outside:
            report.problems.append(f"taps {outside} lie outside the target's boundaries 0..{n + 1}")
        if list(config.taps) == [1, n // 2 - 1, n - 4]:
            report.warnings.append(
                f"taps {list(config.taps)} are what trainers that count layer *outputs* write by default; as "
                f"boundaries that would be {[tap + 1 for tap in config.taps]}: compare acceptance with both"
            )
    if isinstance(config, TransformerConfig):
        _compare_positions(report, config, target)
    recorded = report.target_fingerprint
    if target.fingerprint is not None and recorded is not None and recorded != target.fingerprint:
        report.warnings.append(
            f"trained for other weights than this target's: fingerprint {recorded}, the target's {target.fingerprint}"
        )


def _compare_positions(report: DrafterReport, config: TransformerConfig, target: TargetFacts) -> None:
    theta = float(config.rope_parameters["rope_theta"])
    if target.rope_theta is not None and theta != target.rope_theta:
        report.warnings.append(
            f"rope_theta is {theta:g}, the target's {target.rope_theta:g}: usual only if it was trained so"
        )
    if target.max_length is not None and config.max_position_embeddings < target.max_length:
        report.warnings.append(
            f"max_position_embeddings {config.max_position_embeddings} is less than the target's {target.max_length}"
        )
