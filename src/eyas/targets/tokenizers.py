"""The tokenizer that belongs to a target, if it has one, and the tokens that end its answers.

An answer ends where `transformers.generate` ends it: at the eos of the generation config, which transformers derives
from the model's config if there is none. The tokenizer's own eos counts only in chats, and only if the chat template
ends the assistant's turns with it.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import AutoTokenizer, GenerationConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, cached_file
from transformers.utils.chat_template_utils import render_jinja_template

from eyas.errors import EyasError, ModelError, UsageError
from eyas.files import read_text
from eyas.gguf_target import weights_file
from eyas.gguf_tokenizer import load_built
from eyas.hub import ModelFiles, find_files, why_unreadable

_FILES = (
    "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json",
    "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model", "bpe.codes", "tiktoken.model",
)  # fmt: skip
"""A tokenizer has at least one of these files: those that transformers writes, and vocabularies of other tools."""
_PROBE_ANSWER = "eyas-answer"
"""The assistant's text in the chat that is rendered to see how a template ends turns."""


def load_tokenizer(model: str | Path | ModelFiles, chat_template: str | None = None) -> Any:
    """The tokenizer of a local directory, a Hub id or `smollm2`; None if there are no tokenizer files.

    Without files, transformers would make up an empty tokenizer for some models. `chat_template` replaces the
    tokenizer's own. Raises ModelError if it can't be read or has only special tokens, UsageError for a template without
    a tokenizer.
    """
    files = model if isinstance(model, ModelFiles) else find_files(model)
    source = files.tokenizer
    try:
        tokenizer = _loaded(source) if any(_has(source, file) for file in _FILES) else None
    except EyasError:
        raise
    except Exception as error:  # tokenizers raises plain Exception, other libraries whatever a bad file causes
        raise ModelError(f"can't load the tokenizer of {model}: {why_unreadable(error)}") from error
    if tokenizer is None:
        if chat_template is not None:
            raise UsageError(f"{model} has no tokenizer, so a chat template can't be used: leave it out")
        return None
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    if all(token in special for token in tokenizer.get_vocab()):
        raise ModelError(
            f"the tokenizer of {model} has no vocabulary but special tokens: add the file that holds it, such as "
            "tokenizer.json, or remove tokenizer_config.json to use token ids alone"
        )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def _loaded(name: str) -> Any:
    file = weights_file(name)
    return AutoTokenizer.from_pretrained(name, trust_remote_code=False) if file is None else load_built(name, file)


def read_chat_template(file: str | Path) -> str:
    """The source of the chat template in a file. Raises UsageError if it can't be read or isn't a Jinja template."""
    try:
        source = read_text(Path(file))
        render_jinja_template([[]], chat_template=source)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"can't read the chat template {file}: {error}") from error
    except TemplateSyntaxError as error:
        raise UsageError(f"the chat template {file} isn't valid Jinja: line {error.lineno}: {error.message}") from error
    except Exception:  # noqa: BLE001  # a template may refuse an empty chat, with any exception
        return source
    return source


def _has(name: str, file: str) -> bool:
    found = cached_file(
        name,
        file,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return found is not None


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """The tokens at which `transformers.generate` ends an answer of this model."""
    source = getattr(model, "generation_config", None) or model.config.get_text_config()
    return _as_ids(source.eos_token_id)


def turn_end_ids(tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's eos, if its chat template ends the assistant's turns with it; otherwise empty."""
    source = getattr(tokenizer, "chat_template", None)
    if not source or tokenizer.eos_token_id is None or not _ends_turns(tokenizer, str(source)):
        return ()
    return (tokenizer.eos_token_id,)


def read_generation_config(source: str) -> tuple[GenerationConfig, str]:
    """The generation config of a directory or Hub id, as transformers finds it, and the file that it is in."""
    try:
        return GenerationConfig.from_pretrained(source), GENERATION_CONFIG_NAME
    except OSError:  # transformers does the same
        made = GenerationConfig.from_pretrained(source, config_file_name=CONFIG_NAME, _from_model_config=True)
        return made, CONFIG_NAME


def stop_token_origins(files: ModelFiles, tokenizer: Any) -> dict[int, str]:
    """The tokens that end a checkpoint's answers, each with the place that says so."""
    base = files.base
    config, file = read_generation_config(base.source)
    origins = dict.fromkeys(_as_ids(config.eos_token_id), file if base.gguf is None else base.gguf.name)
    for token in turn_end_ids(tokenizer):
        origins.setdefault(token, f"the tokenizer's {tokenizer.eos_token}, in chats: the template ends turns with it")
    return origins


def _as_ids(found: int | list[int] | None) -> tuple[int, ...]:
    return () if found is None else (found,) if isinstance(found, int) else tuple(sorted(set(found)))


@lru_cache(maxsize=16)
def _ends_turns(tokenizer: Any, source: str) -> bool:  # noqa: ARG001  # a template can be replaced
    """Whether the eos follows the assistant's text, in the middle of a chat or at its end."""
    user, said = {"role": "user", "content": "eyas-question"}, {"role": "assistant", "content": _PROBE_ANSWER}
    for chat in ([user, said, user], [user, said]):
        try:
            text: str = tokenizer.apply_chat_template(chat, tokenize=False)
        except Exception:  # noqa: BLE001  # templates may raise anything
            continue
        if text.rpartition(_PROBE_ANSWER)[2].lstrip().startswith(tokenizer.eos_token):
            return True
    return False
