"""Reporting on a target: what it is and whether eyas can speculate on it, from its config and tensor headers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from eyas.drafters.files import Headers
from eyas.errors import ModelError, UnsupportedModelError
from eyas.targets.architecture import attention_plan, causal_lm_class, context_limit, refuse_unsupported
from eyas.targets.loading import load_tokenizer, read_config
from eyas.targets.taps import default_taps


class Report:
    """What reports on targets and on drafters have in common; subclasses are dataclasses."""

    role: ClassVar[str]
    """What it reports on: `target` or `drafter`."""
    problems: list[str]
    """The reasons why it can't be used; empty if it can."""
    warnings: list[str]
    """What may go wrong although it can be used."""

    def as_dict(self) -> dict[str, Any]:
        """All fields as a JSON object, with the role and whether it is usable."""
        fields: dict[str, Any] = asdict(self)  # type: ignore[call-overload]  # the subclasses are dataclasses
        return {"role": self.role, "usable": not self.problems} | fields


@dataclass(frozen=True)
class TargetProfile:
    """What must be known about a target to judge a drafter made for it."""

    layers: int
    hidden_size: int
    vocab_size: int
    max_length: int | None
    """Positions that the target's context holds; None = no limit is known."""
    rope_theta: float | None
    """None = the target has no RoPE, or several."""
    fingerprint: str | None = None
    """Of its weights; None = they were not read."""


@dataclass
class TargetReport(Report):
    """What a target is, and what is wrong with it."""

    role = "target"

    path: str
    architecture: str
    parameters: int | None
    """How many numbers it has; None = the weights are not on this machine."""
    dtypes: list[str]
    layers: int
    hidden_size: int
    vocab_size: int
    max_length: int | None
    attention: dict[str, int | None]
    """Attention type -> how many positions it sees; None = all."""
    default_taps: list[int]
    rope_theta: float | None
    chat_template: bool
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def profile(self) -> TargetProfile:
        """What drafters are compared with."""
        return TargetProfile(self.layers, self.hidden_size, self.vocab_size, self.max_length, self.rope_theta)


def report_target(name: str | Path, headers: Headers | None) -> TargetReport:
    """Examine the target `name`; `headers` are those of its weights, None if they aren't on this machine.

    Raises ModelError, and UnsupportedModelError for what is no decoder LM.
    """
    config = read_config(str(name))
    model_class = causal_lm_class(config)
    if model_class is None:
        raise UnsupportedModelError(
            f"{name}: transformers has no causal language model for {config.model_type}; a target is a decoder LM"
        )
    text = config.get_text_config()
    report = TargetReport(
        path=str(name),
        architecture=", ".join(config.architectures or ()) or config.model_type,
        parameters=None if headers is None else headers.parameters,
        dtypes=[] if headers is None else headers.dtypes,
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_length=context_limit(text),
        attention={},
        default_taps=list(default_taps(text.num_hidden_layers)),
        rope_theta=_rope_theta(text),
        chat_template=_has_chat_template(name),
    )
    try:
        refuse_unsupported(model_class, config)
        report.attention = dict(attention_plan(text).windows)
    except UnsupportedModelError as error:
        report.problems.append(str(error))
    if headers is not None and not headers.files:
        pickles = f"only pickles ({', '.join(headers.pickles)})" if headers.pickles else "no weights"
        report.problems.append(f"{pickles}: a target is loaded from safetensors")
    if not report.chat_template:
        report.warnings.append("no chat template: `messages` and `turns` rows, and eyas chat, won't work")
    return report


def _rope_theta(config: Any) -> float | None:
    """One theta, if there is one: hybrid models may have one a layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    found = (value.get("rope_theta") for value in (rope, *rope.values()) if isinstance(value, dict))
    thetas = {float(theta) for theta in found if theta is not None}
    return thetas.pop() if len(thetas) == 1 else None


def _has_chat_template(name: str | Path) -> bool:
    try:
        return bool(getattr(load_tokenizer(name), "chat_template", None))
    except ModelError:
        return False
