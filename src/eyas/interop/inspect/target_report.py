"""Reports on targets: their properties, and whether eyas supports them, from config and tensor headers alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from eyas.drafters.files import Headers
from eyas.drafters.in_target.mtp import find_modules
from eyas.errors import ModelError, UnsupportedModelError
from eyas.targets.adapters import check_peft, find_adapter
from eyas.targets.architecture import attention_plan, context_limit, model_class, refuse_unsupported
from eyas.targets.loading import read_config
from eyas.targets.quantization import quantized_by, refuse_quantization
from eyas.targets.taps import default_taps
from eyas.targets.tokenizers import load_tokenizer, stop_token_origins


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
    """The number of parameters, of a quantised model before it was; None = the weights are not on this machine."""
    dtypes: list[str]
    quantized_by: str | None
    """The method that its weights are quantised with; None = they are not."""
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
    """The tokens that end answers -> where that is written."""
    mtp_modules: list[str] = field(default_factory=list)
    """The MTP modules among its tensors, for `--method mtp`: where they are, and whose layout they have."""
    adapter: str | None = None
    """The adapter that is merged into the weights at load."""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def profile(self) -> TargetProfile:
        """The properties with which drafters are compared."""
        return TargetProfile(self.layers, self.hidden_size, self.vocab_size, self.max_length, self.rope_theta)


def report_target(name: str | Path, headers: Headers | None) -> TargetReport:
    """Examine the target `name`; `headers` are those of its weights, None if these aren't on this machine.

    Raises ModelError, or UnsupportedModelError if it is not a decoder language model.
    """
    config = read_config(str(name))
    chosen = model_class(config)
    text, method = config.get_text_config(), quantized_by(config)
    tokenizer, trouble = _tokenizer(name)
    report = TargetReport(
        path=str(name),
        architecture=", ".join(config.architectures or ()) or config.model_type,
        parameters=None if headers is None else _parameters(headers, chosen, config),
        dtypes=[] if headers is None else headers.dtypes,
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
        stop_ids=stop_token_origins(name, tokenizer),
        problems=trouble,
    )
    try:
        refuse_unsupported(chosen, config)
        report.attention = dict(attention_plan(text).windows)
        refuse_quantization(chosen, config)
    except ModelError as error:
        report.problems.append(str(error))
    modules = None if headers is None else find_modules(headers.tensors, report.layers)
    if modules is not None:
        report.mtp_modules = [f"{prefix}* ({modules.layout.family}'s layout)" for prefix in modules.prefixes]
    adapter = find_adapter(name)
    if adapter is not None:
        report.adapter = str(adapter)
        try:
            check_peft(adapter)
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


def _parameters(headers: Headers, chosen: type[Any], config: Any) -> int:
    """How many parameters a target has; a quantised one holds several in a number."""
    if quantized_by(config) is None:
        return headers.parameters
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in chosen(config).parameters())


def _rope_theta(config: Any) -> float | None:
    """RoPE's theta if there is exactly one; hybrid models may have one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    found = (value.get("rope_theta") for value in (rope, *rope.values()) if isinstance(value, dict))
    thetas = {float(theta) for theta in found if theta is not None}
    return thetas.pop() if len(thetas) == 1 else None


def _tokenizer(name: str | Path) -> tuple[Any, list[str]]:
    """The tokenizer of a checkpoint, None if it has none, and why it can't be read."""
    try:
        return load_tokenizer(name), []
    except ModelError as error:
        return None, [str(error)]
