"""Loading a small language model as drafter: whether files hold one, and whether it fits the target."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from eyas.assets import PROMPTS
from eyas.drafters.files import CONFIG, read_headers, read_json
from eyas.drafters.registry import UNKNOWN, kind_name
from eyas.drafters.small_lm.drafter import SmallLmDrafter
from eyas.drafters.small_lm.vocabulary import SharedVocabulary
from eyas.errors import DrafterMismatchError, UnsupportedModelError
from eyas.targets import Target, load_target, load_tokenizer

_LOG = logging.getLogger("eyas")


def holds_language_model(path: Path) -> bool:
    """Whether a folder holds a transformers model and no drafter, as far as its config and tensors' names say."""
    if not (path / CONFIG).is_file():
        return False
    config = read_json(path / CONFIG)
    known = config.get("model_type") in CONFIG_MAPPING
    return known and kind_name(config, read_headers(path).tensors) == UNKNOWN


def load_small_lm(
    source: str | Path, target: Target, tokenizer: Any = None, quantize: str | None = None
) -> SmallLmDrafter:
    """Load a language model that drafts for `target`, in its dtype and on its device.

    `tokenizer` is the target's: with it the model may have another vocabulary. `quantize` as in `load_target`. Raises
    ModelError, UnsupportedModelError for models that can't be verified like a target, DrafterMismatchError for
    vocabularies that can't be mapped.
    """
    eager = target.device.type == "cuda" and target.record is None
    model = load_target(source, dtype=target.dtype, device=target.device, eager=eager, quantize=quantize)
    if not model.head_is_exact:
        raise UnsupportedModelError(
            f"the draft model {source} ({model.config.model_type}) changes its logits in a way that eyas doesn't know: "
            "choose another"
        )
    if model.states:
        raise UnsupportedModelError(
            f"the draft model {source} ({model.config.model_type}) has recurrent states, which a draft would change: "
            "choose one whose layers are all attention"
        )
    size, targets_size = parameters_of(model), parameters_of(target)
    if size >= targets_size:
        _LOG.warning(
            "the draft model %s has %d parameters, the target %d: drafting costs as much as decoding, so use a "
            "model a tenth as large or smaller",
            source, size, targets_size,
        )  # fmt: skip
    if model.max_length is not None and (target.max_length is None or model.max_length < target.max_length):
        _LOG.warning("the draft model %s drafts up to its context of %d tokens only", source, model.max_length)
    return SmallLmDrafter(model, _shared_vocabulary(source, model, target, tokenizer))


def parameters_of(target: Target) -> int:
    """How many parameters a model has."""
    return sum(weight.numel() for weight in target.model.parameters())


def _shared_vocabulary(source: str | Path, model: Target, target: Target, tokenizer: Any) -> SharedVocabulary | None:
    """What the vocabularies have in common; None if they are the same."""
    own = None if tokenizer is None else load_tokenizer(source)
    same_size = model.vocab_size == target.vocab_size
    if own is None or (same_size and own.get_vocab() == tokenizer.get_vocab()):
        if same_size:
            return None
        raise DrafterMismatchError(
            f"the draft model {source} has a vocabulary of {model.vocab_size} tokens, the target one of "
            f"{target.vocab_size}: to map one to the other both need their tokenizers, and "
            f"{'the target' if tokenizer is None else 'the draft model'} has none"
        )
    shared = SharedVocabulary(tokenizer, own, target.vocab_size, model.vocab_size, target.device)
    if not len(shared.target_ids):
        raise DrafterMismatchError(f"the draft model {source} has no token in common with the target: choose another")
    if own.get_vocab() != tokenizer.get_vocab():
        _LOG.warning(
            "the draft model %s has another vocabulary than the target: %.1f %% of its tokens can be drafted, which "
            "make %.1f %% of some English and code",
            source, 100 * shared.share, 100 * shared.share_of(text for _, text in PROMPTS),
        )  # fmt: skip
    return shared
