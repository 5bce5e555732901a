"""The reports of `eyas inspect` on the target or drafter in a folder, a GGUF file, or under a Hub id.

A target's properties, and whether eyas supports it, are read from config and tensor headers alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from eyas.drafters.automatic import published
from eyas.drafters.block.network import BlockConfig
from eyas.drafters.checkpoint import PROVENANCE, Checkpoint, check_tensors, complete_vocabulary, interpret
from eyas.drafters.config import DrafterConfig, FusedTapsConfig, TransformerConfig, WindowedConfig
from eyas.drafters.files import CONFIG, Headers, RawCheckpoint, TensorInfo, read_headers, read_json
from eyas.drafters.formats.gguf_heads import companion_of, holds_heads
from eyas.drafters.formats.opening import open_raw
from eyas.drafters.formats.taps import IDS
from eyas.drafters.formats.tensor_names import EMBEDDING, SHAREABLE, VOCABULARY_MAP, is_head, native_name
from eyas.drafters.in_target.mtp import find_modules
from eyas.drafters.loading import local_directory
from eyas.drafters.network import shapes_of
from eyas.drafters.registry import UNKNOWN, kind_name
from eyas.drafters.window.layers import SlidingWindow
from eyas.errors import CheckpointError, ConfigError, ModelError, UnsupportedModelError
from eyas.gguf import PLAIN_TYPES, Gguf
from eyas.gguf_config import Model, heads_of
from eyas.gguf_target import gguf_in, weights_file
from eyas.hub import ModelFiles, find_config, find_files
from eyas.targets.adapters import check_peft
from eyas.targets.architecture import attention_plan, context_limit, model_class, refuse_unsupported
from eyas.targets.gguf_weights import check_names
from eyas.targets.loading import read_config, resolve_device
from eyas.targets.parameters import described_parameter_count
from eyas.targets.quantization import dequantize_at_load, quantized_by, refuse_quantization
from eyas.targets.taps import default_taps
from eyas.targets.tokenizers import load_tokenizer, stop_token_origins

_HUB_ERRORS = (HfHubHTTPError, LocalEntryNotFoundError, OSError)


class Located(NamedTuple):
    """A model's config and the location of its weights."""

    config: dict[str, Any]
    path: Path | None
    """The folder or GGUF file; None = the weights aren't on this machine."""


def locate(source: str | Path) -> Located:
    """Find a target or a drafter. Of a Hub id, a drafter is downloaded, because it is small; a target's weights aren't.

    Raises MissingModelError if there is no such model, ModelError or CheckpointError if it can't be read.
    """
    files = find_files(source)
    path = Path(files.source)
    named = gguf_in(path)
    if named is not None:
        return Located({}, named)  # a drafter's: a target's has a folder with a config.json
    if files.adapter is not None and not files.adapter.holds_base:
        return locate(files.adapter.base)
    if path.exists():
        return Located(_config(path), path)
    try:
        config = read_json(Path(hf_hub_download(files.source, "config.json")))
    except _HUB_ERRORS as error:
        raise CheckpointError(f"{source} can't be fetched from the Hub: {error}") from error
    if detect(config, Headers()) != "target":
        return Located(config, local_directory(files.source))
    try:
        return Located(config, Path(snapshot_download(files.source, local_files_only=True)))
    except _HUB_ERRORS:
        return Located(config, None)


def _config(path: Path) -> dict[str, Any]:
    if not (path / "config.json").exists():
        raise CheckpointError(f"{path} has no config.json, so it is neither a target nor a drafter")
    return read_json(path / "config.json")


def headers_at(path: Path) -> Headers:
    """The headers of the weights in a folder, or of the GGUF file that it stands for, whose dtypes are GGML's types."""
    file = weights_file(path)
    if file is None:
        return read_headers(path)
    tensors = {name: TensorInfo(each.shape, each.type, file) for name, each in Gguf(file).tensors.items()}
    return Headers(tensors, [file.name])


def detect(config: dict[str, Any], headers: Headers) -> str:
    """`target`, the kind of a drafter that eyas loads or knows by name, or `unknown`."""
    kind = kind_name(config, headers.tensors)
    if kind == UNKNOWN and (config.get("model_type") or config.get("architectures")):
        return "target"
    return kind


class Report:
    """The common part of reports on targets and on drafters; subclasses are dataclasses."""

    role: ClassVar[str]
    """The kind of model that it reports on: `target` or `drafter`."""
    problems: list[str]
    """The reasons why the model can't be used; empty if it can."""
    warnings: list[str]
    """Possible trouble with a model that can be used."""

    def as_dict(self) -> dict[str, Any]:
        """All fields as a JSON object, with `role` and whether the model is `usable`."""
        fields: dict[str, Any] = asdict(self)  # type: ignore[call-overload]  # the subclasses are dataclasses
        return {"role": self.role, "usable": not self.problems} | fields


@dataclass(frozen=True)
class TargetProfile:
    """The properties of a target with which drafters are compared."""

    layers: int
    hidden_size: int
    vocab_size: int
    max_length: int | None
    """Positions in the target's context; None = no known limit."""
    rope_theta: float | None
    """RoPE's base; None = the target has no RoPE, or several."""
    fingerprint: str | None = None
    """Fingerprint of its weights; None = they were not read."""


@dataclass
class TargetReport(Report):
    """The facts about a target, with problems (eyas can't use it) and warnings."""

    role = "target"

    path: str
    architecture: str
    parameters: int | None
    """The number of parameters, before quantization if it is quantized; None = the weights are not on this machine."""
    dtypes: list[str]
    quantized_by: str | None
    """The method that its weights are quantized with; None = they are not."""
    layers: int
    hidden_size: int
    vocab_size: int
    max_length: int | None
    attention: dict[str, int | None]
    """Attention type -> positions in its window; None = all positions."""
    default_taps: list[int]
    rope_theta: float | None
    tokenizer: bool
    """Whether there are tokenizer files; without them prompts and answers are token ids."""
    chat_template: bool
    stop_ids: dict[int, str]
    """The tokens that end answers -> where they are defined."""
    mtp_modules: list[str] = field(default_factory=list)
    """The MTP modules among its tensors, for `--method mtp`: where they are, and whose layout they have."""
    known_drafters: list[str] = field(default_factory=list)
    """Published drafters of this model: their names, kinds and the sources of the pairs."""
    adapter: str | None = None
    """The adapter that is merged into the weights at load."""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def profile(self) -> TargetProfile:
        """The properties with which drafters are compared."""
        return TargetProfile(self.layers, self.hidden_size, self.vocab_size, self.max_length, self.rope_theta)


def report_target(model: str | Path, headers: Headers | None) -> TargetReport:
    """Examine the target `model`; `headers` are those of its weights, None if these aren't on this machine.

    Raises ModelError, or UnsupportedModelError if it is not a decoder language model.
    """
    files = find_config(model)
    config = read_config(files)
    chosen = model_class(config)
    file = files.base.gguf
    text = config.get_text_config()
    types = sorted({info.dtype for info in headers.tensors.values()}) if file is not None and headers else None
    method = "GGUF" if types is not None and set(types) - PLAIN_TYPES else quantized_by(config)
    tokenizer, trouble = _tokenizer(files)
    report = TargetReport(
        path=str(files.gguf or files.source),
        architecture=", ".join(config.architectures or ()) or config.model_type,
        parameters=None if headers is None else _parameters(headers, chosen, config, stored=file is None),
        dtypes=types or ([] if headers is None else headers.dtypes),
        quantized_by=method,
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_length=context_limit(text),
        attention={},
        default_taps=list(default_taps(text.num_hidden_layers)),
        rope_theta=_rope_theta(text),
        tokenizer=tokenizer is not None,
        chat_template=bool(getattr(tokenizer, "chat_template", None)),
        stop_ids=stop_token_origins(files, tokenizer),
        problems=trouble,
    )
    try:
        refuse_unsupported(chosen, config)
        report.attention = dict(attention_plan(text).windows)
        dequantize_at_load(config, resolve_device(None))
        refuse_quantization(chosen, config)
        if file is not None:
            check_names(file, chosen, config)
    except ModelError as error:
        report.problems.append(str(error))
    modules = None if headers is None else find_modules(headers.tensors, report.layers)
    opened = None if file is None else Gguf(file)
    if opened is not None and holds_heads(opened):
        report.mtp_modules = [f"blk.{layer}.nextn.* (llama.cpp's layout)" for layer in heads_of(opened)]
    elif opened is not None and (companion := companion_of(opened)) is not None:
        report.mtp_modules = [f"{companion} (next to the file)"]
    elif modules is not None:
        report.mtp_modules = [f"{prefix}* ({modules.layout.family}'s layout)" for prefix in modules.prefixes]
    report.known_drafters = [f"{pair.drafter} ({pair.kind}; {pair.source})" for pair in published(model)]
    if files.adapter is not None:
        report.adapter = str(files.adapter)
        try:
            check_peft(files.adapter)
        except UnsupportedModelError as error:
            report.problems.append(str(error))
    if headers is not None and not headers.files:
        pickles = f"only pickles ({', '.join(headers.pickles)})" if headers.pickles else "no weights"
        report.problems.append(f"{pickles}: targets are loaded from safetensors only")
    if not report.tokenizer:
        report.warnings.append("no tokenizer files: prompts and answers are token ids, text can't be read or written")
    elif not report.chat_template:
        report.warnings.append("no chat template: `messages` and `turns` rows, and eyas chat, won't work")
    return report


def _parameters(headers: Headers, chosen: type[Any], config: Any, *, stored: bool) -> int:
    """The number of a target's parameters; `stored`: its tensors are stored as the model has them.

    A quantized target stores several parameters in one number, and a GGUF file tables that are computed.
    """
    if stored and quantized_by(config) is None:
        return headers.parameters
    return described_parameter_count(chosen, config)


def _rope_theta(config: Any) -> float | None:
    """RoPE's theta if there is exactly one; hybrid models may have one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    found = (value.get("rope_theta") for value in (rope, *rope.values()) if isinstance(value, dict))
    thetas = {float(theta) for theta in found if theta is not None}
    return thetas.pop() if len(thetas) == 1 else None


def _tokenizer(files: ModelFiles) -> tuple[Any, list[str]]:
    """The tokenizer of a checkpoint, None if it has none, and the errors in reading it."""
    try:
        return load_tokenizer(files), []
    except ModelError as error:
        return None, [str(error)]


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
    windows: list[str] = field(default_factory=list)
    """What guesses see in each layer; empty if no layer has a sliding window."""
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
    report.own_embedding = config.embedding == "own"
    report.own_head = config.head == "own"
    report.config = config.model_dump(exclude={"taps"})
    report.taps = None if config.taps is None else list(config.taps)
    report.windows = _windows(config)
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


def report_heads(file: Path, target: TargetProfile | None = None) -> DrafterReport:
    """Examine a GGUF file that has nothing but MTP heads and, given `target`, whether the two fit."""
    opened = Gguf(file)
    heads = heads_of(opened)
    mine = {name: info for name, info in opened.tensors.items() if name.startswith("blk.")}
    report = DrafterReport(
        path=str(file),
        kind="mtp",
        parameters=sum(prod(info.shape) for info in mine.values()),
        dtypes=sorted({info.type for info in mine.values()}),
        files=[file.name],
        format="GGUF: a companion with MTP heads",
        notes=[f"{len(heads)} of them, after {heads.start} layers of a target that isn't in the file"],
    )
    try:
        facts = Model.read(opened)
    except ModelError as error:
        report.problems.append(str(error))
        return report
    report.config = {"architecture": facts.keys.name, "layers": facts.layers, "vocab_size": facts.rows}
    if not holds_heads(opened):
        report.problems.append(f"no nextn.eh_proj.weight in each of the layers {list(heads)}")
    for what, ours, theirs in (
        ("layers", facts.layers, None if target is None else target.layers),
        ("vocabulary", facts.rows, None if target is None else target.vocab_size),
    ):
        if theirs is not None and ours != theirs:
            report.problems.append(f"doesn't fit the target: {what} of {ours}, but the target's is {theirs}")
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


def _windows(config: DrafterConfig) -> list[str]:
    """What a drafter with sliding windows sees in each layer."""
    if not isinstance(config, WindowedConfig) or config.sliding_window is None:
        return []
    reaches = [_reach(window) for window in config.layer_windows]
    if isinstance(config, BlockConfig):
        later = ["no later slots" if view.causal else "later slots too" for view in config.views]
        reaches = [f"{reach}, {slots}" for reach, slots in zip(reaches, later, strict=True)]
    return [f"layer {number}: {reach}" for number, reach in enumerate(reaches)]


def _reach(window: SlidingWindow | None) -> str:
    if window is None:
        return "all positions"
    return f"{window.size:,} positions before the draft" if window.anchored else f"{window.size:,} positions"


def _tap_source(config: dict[str, Any]) -> str:
    """The keys that the taps were read from."""
    keys = [key for key in ("taps", IDS, *_BLOCK_TAPS) if config.get(key) is not None]
    for section, inside in (("eagle_config", (IDS, "layer_ids")), ("dflash_config", _BLOCK_TAPS[:1])):
        nested = config.get(section)
        if isinstance(nested, dict):
            keys += [f"{section}.{key}" for key in inside if nested.get(key) is not None]
    return ", ".join(keys) or "not in the config: the kind's default"


def _check_tensors(report: DrafterReport, checkpoint: Checkpoint) -> None:
    expected = shapes_of(checkpoint.kind.blank(checkpoint.config))
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
    if config.taps is None and (isinstance(config, FusedTapsConfig) or config.is_block):
        report.warnings.append(
            "no taps in config.json: every reader uses its own default, and defaults differ by one between projects "
            "(boundaries or layer outputs)"
        )
    if isinstance(config, TransformerConfig) and not config.reads_target:
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
    if config.embedding == "shared" and config.embedding_size != target.hidden_size:
        report.problems.append(
            f"no embedding of its own, and the target's is {target.hidden_size} wide, not {config.embedding_size}"
        )
    n = target.layers
    if config.taps is not None:
        outside = [tap for tap in config.taps if not 0 <= tap <= n + 1]
        if outside:
            report.problems.append(f"taps {outside} lie outside the target's boundaries 0..{n + 1}")
    if isinstance(config, TransformerConfig) and not config.reads_target:
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
