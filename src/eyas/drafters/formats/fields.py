"""Strict reading of a configuration's keys.

Every key is read, known to change nothing, or refused: eyas never guesses what an unknown key does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from eyas.config import StrictModel, validated
from eyas.drafters.files import KeyReport
from eyas.errors import ConfigError

_DESCRIPTIVE = frozenset(
    "dtype torch_dtype transformers_version _name_or_path name_or_path bos_token_id "
    "eos_token_id pad_token_id use_cache initializer_range pretraining_tp return_dict output_hidden_states "
    "output_attentions chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type mlp_only_layers "
    "attention_dropout target_model_type max_window_layers use_return_dict tie_encoder_decoder "
    "tokenizer_class _torchspec_version".split()
)
"""Keys of published config.json files that don't affect the computation."""
_GENERATION = frozenset(
    "bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample early_stopping "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id "
    "length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences "
    "output_scores remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id suppress_tokens "
    "temperature top_k top_p typical_p".split()
)
"""Keys that every model's config had in transformers 4: about generation, which a drafter's file doesn't decide."""
_GENERIC = frozenset(
    "attn_implementation _attn_implementation finetuning_task prefix task_specific_params tf_legacy_loss torchscript "
    "use_bfloat16".split()
)
"""Further such keys: about training, other frameworks, and how a model is run."""
_UNSET = frozenset("add_cross_attention cross_attention_hidden_size is_decoder pruned_heads".split())
"""Such keys that change nothing as long as they are unset: false, null or empty."""
_KIND = ("architectures", "model_type")
"""Keys by which the kind was recognized."""
_CODE = "it names code, and eyas runs no code that comes with a checkpoint"

ConfigT = TypeVar("ConfigT", bound=StrictModel)


@dataclass
class Fields(KeyReport):
    """A configuration while it is read. Readers take keys out of `values` and put converted ones back."""

    raw: Mapping[str, Any]
    """The whole configuration, unchanged."""
    where: str
    """The file it comes from, for messages."""
    names: Mapping[str, Any] | None = None
    """The checkpoint's tensors: native name -> an object with its `shape`; None = unknown."""
    keys_to_ignore: Collection[str] = ()
    """Keys to ignore at the user's request."""
    layers: int | None = None
    """How many layers the target has; None = unknown."""
    values: dict[str, Any] = field(init=False)
    """Unread keys, and keys already converted to the form that the config class takes."""
    convention: str = ""
    """How the tap numbers were interpreted; empty if there are none."""

    def __post_init__(self) -> None:
        if self.raw.get("quantization_config") is not None and "quantization_config" not in self.keys_to_ignore:
            raise ConfigError(
                f"{self.where}: quantization_config: eyas loads float weights only; use the unquantized drafter"
            )
        self.values = {}
        for key, value in self.raw.items():
            if key in self.keys_to_ignore:
                self.ignored[key] = "as requested"
            elif key in _KIND:
                continue
            elif key == "eyas":
                self.ignored[key] = "provenance"
            elif key == "auto_map":
                self.ignored[key] = _CODE
            elif key == "quantization_config":
                self.ignored[key] = "null"
            elif key in _DESCRIPTIVE | _GENERIC:
                self.ignored[key] = "descriptive"
            elif key in _GENERATION:
                self.ignored[key] = "about generation"
            elif key in _UNSET and not value:
                self.ignored[key] = "unset"
            else:
                self.values[key] = value

    @property
    def used(self) -> list[str]:
        """The keys that change the computation."""
        return [key for key in self.raw if key not in self.ignored]

    def take(self, key: str, kind: type, *, default: Any = None) -> Any:
        """Remove a value and return it; null counts as absent. Raises ConfigError if it is of another type."""
        value = self.values.pop(key, None)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.where}: {key} is {_shown(value)}, not {_NAMES.get(kind, kind.__name__)}")
        return value

    def ignore(self, key: str, reason: str) -> None:
        """Drop a key that changes nothing for this kind."""
        if self.values.pop(key, None) is not None or key in self.raw:
            self.ignored[key] = reason

    def default(self, key: str, value: Any) -> None:
        """Fill in a value that the file leaves out."""
        if self.values.get(key) is None:
            self.values[key] = self.defaulted[key] = value

    def finish(self, cls: type[ConfigT]) -> ConfigT:
        """The validated configuration. Raises ConfigError, also for unread keys."""
        unknown = sorted(set(self.values) - set(cls.model_fields))
        if unknown:
            raise ConfigError(
                f"{self.where}: unknown key{'s' * (len(unknown) > 1)} {', '.join(unknown)}: eyas can't tell whether "
                "this changes what the drafter computes; if it does not, name it with `ignore_config_keys=`"
            )
        config = validated(cls, self.values, self.where)
        for key in cls.model_fields:
            if key not in self.values and key not in ("embedding", "head", "taps", "default_tree", "draft_window"):
                self.defaulted[key] = getattr(config, key)
        return config


def architectures(raw: Mapping[str, Any]) -> list[str]:
    """The class names under `architectures`; empty if that is no list."""
    written = raw.get("architectures")
    return [name for name in written if isinstance(name, str)] if isinstance(written, list) else []


NESTED = "dflash_config"
"""The section in which published files keep a block drafter's settings; some files have them at the top level."""

_NAMES = {dict: "an object", list: "a list", bool: "true or false", int: "a whole number", str: "text"}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
