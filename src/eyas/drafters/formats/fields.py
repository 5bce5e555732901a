"""A checkpoint's configuration while it is read: afterwards it says what became of every key.

A key is either known to change nothing, read, or refused: eyas never guesses what an unknown key does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from eyas.config import StrictModel, validated
from eyas.errors import ConfigError

# Keys of published config.json files that say nothing about the computation.
_DESCRIPTIVE = frozenset(
    "dtype torch_dtype transformers_version _name_or_path name_or_path bos_token_id "
    "eos_token_id pad_token_id use_cache initializer_range pretraining_tp return_dict output_hidden_states "
    "output_attentions chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type mlp_only_layers "
    "attention_dropout target_model_type max_window_layers use_return_dict tie_encoder_decoder "
    "tokenizer_class _torchspec_version".split()
)
_KIND = ("architectures", "model_type")
"""Keys that tell the kind, before anything else is read."""
_CODE = "it names code, and eyas runs no code that comes with a checkpoint"

ConfigT = TypeVar("ConfigT", bound=StrictModel)


@dataclass
class Fields:
    """A configuration in the field's keys; `values` are what nobody has read yet."""

    raw: Mapping[str, Any]
    where: str
    names: Collection[str] | None = None
    """The checkpoint's tensors, in the `layers.{i}` layout; None = unknown."""
    overlook: Collection[str] = ()
    """Keys that the user asked to ignore."""
    layers: int | None = None
    """Of the target, where it is known."""
    values: dict[str, Any] = field(init=False)
    ignored: dict[str, str] = field(default_factory=dict)
    """Key -> why it changes nothing."""
    defaulted: dict[str, Any] = field(default_factory=dict)
    """Field -> what was taken, the file not saying."""
    notes: list[str] = field(default_factory=list)
    """What the user should know: readings that were chosen."""
    doubts: list[str] = field(default_factory=list)
    """Readings that the file leaves open."""
    convention: str = ""
    """How the numbers of the taps were read."""

    def __post_init__(self) -> None:
        if self.raw.get("quantization_config") is not None and "quantization_config" not in self.overlook:
            raise ConfigError(
                f"{self.where}: quantization_config: eyas loads float weights only; use the unquantised drafter"
            )
        self.values = {}
        for key, value in self.raw.items():
            if key in self.overlook:
                self.ignored[key] = "as asked"
            elif key in _KIND:
                continue
            elif key == "eyas":
                self.ignored[key] = "provenance"
            elif key == "auto_map":
                self.ignored[key] = _CODE
            elif key == "quantization_config":
                self.ignored[key] = "null"
            elif key in _DESCRIPTIVE:
                self.ignored[key] = "descriptive"
            else:
                self.values[key] = value

    @property
    def used(self) -> list[str]:
        """The keys that were read."""
        return [key for key in self.raw if key not in self.ignored]

    def take(self, key: str, kind: type, *, default: Any = None) -> Any:
        """Remove and return a value of a type; null counts as absent. ConfigError for another type."""
        value = self.values.pop(key, None)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.where}: {key} is {_shown(value)}, not {_NAMES.get(kind, kind.__name__)}")
        return value

    def ignore(self, key: str, reason: str) -> None:
        """Drop a key that changes nothing here."""
        if self.values.pop(key, None) is not None or key in self.raw:
            self.ignored[key] = reason

    def default(self, key: str, value: Any) -> None:
        """Fill in what the file does not say."""
        if self.values.get(key) is None:
            self.values[key] = self.defaulted[key] = value

    def finish(self, cls: type[ConfigT]) -> ConfigT:
        """Validate; refuse keys nobody has read. Raises ConfigError."""
        unknown = sorted(set(self.values) - set(cls.model_fields))
        if unknown:
            raise ConfigError(
                f"{self.where}: unknown key{'s' * (len(unknown) > 1)} {', '.join(unknown)}: eyas can't tell whether "
                "the drafter computes something else because of it; if it does not, name it with --ignore-config-key"
            )
        config = validated(cls, self.values, self.where)
        for key in cls.model_fields:
            if key not in self.values and key not in ("embedding", "head", "taps", "default_tree"):
                self.defaulted[key] = getattr(config, key)
        return config


def architectures(raw: Mapping[str, Any]) -> list[str]:
    """The class names that a configuration gives; whatever is no list of names gives none."""
    written = raw.get("architectures")
    return [name for name in written if isinstance(name, str)] if isinstance(written, list) else []


_NAMES = {dict: "an object", list: "a list", bool: "true or false", int: "a whole number", str: "text"}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
