"""Tokenizers of targets: none is invented, and the tokens that end answers are those of `transformers.generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from eyas.errors import ModelError
from eyas.hub import find_target
from eyas.session import load
from eyas.targets.tokenizers import load_tokenizer, stop_token_origins, turn_end_ids
from eyas.types import Request

from .. import tiny

TURNS = "{% for m in messages %}w3 {{ m['content'] }}END w4{% endfor %}"
INVENTED = ["Cohere", "GPT2", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma", "Llama"]


def words(template: str | None, eos: str | None = "w2") -> Any:
    made = Tokenizer(WordLevel({f"w{i}": i for i in range(tiny.VOCAB)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0", eos_token=eos, chat_template=template)


@pytest.mark.parametrize("name", INVENTED)
def test_where_there_are_no_tokenizer_files_there_is_no_tokenizer(tmp_path: Path, name: str) -> None:
    getattr(tf, f"{name}Config")().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("name", ["CohereConfig", "Qwen2Config", "GemmaConfig"])
def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path: Path, name: str) -> None:
    """transformers makes one that knows nothing but special tokens."""
    getattr(tf, name)().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match="no vocabulary but special tokens: add the file that holds it"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (TURNS.replace("END", " w2"), True),
        (TURNS.replace("END", "w2\n"), True),
        (TURNS.replace("END", ""), False),
        ("{% for m in messages %}{{ m['content'] }} w5 {% endfor %} w2", False),
        ("{% for m in messages %}{{ m['content'] }}{% if not loop.last %}w2{% endif %}{% endfor %}", True),
        ("{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'user' %} w2{% endif %}{% endfor %}", False),
        ("{{ raise_exception('no chats') }}", False),
        (None, False),
    ],
)
def test_the_eos_counts_in_chats_whose_template_ends_turns_with_it(template: str | None, ends: bool) -> None:
    assert turn_end_ids(words(template)) == ((2,) if ends else ())
    assert turn_end_ids(words(template, eos=None)) == ()


def test_a_template_that_is_replaced_is_read_anew() -> None:
    made = words(TURNS.replace("END", ""))
    assert turn_end_ids(made) == ()
    made.chat_template = TURNS.replace("END", " w2")
    assert turn_end_ids(made) == (2,)


@pytest.mark.parametrize(
    ("generation", "ids", "file"),
    [
        (None, {6}, "config.json"),
        ({"eos_token_id": [7, 5]}, {5, 7}, "generation_config.json"),
        ({"top_k": 3}, set(), ""),
    ],
)
def test_the_origins_are_those_of_what_the_engine_stops_at(
    tmp_path: Path, generation: dict[str, Any] | None, ids: set[int], file: str
) -> None:
    tiny.build_model("llama", eos_token_id=6).save_pretrained(tmp_path)
    words(TURNS.replace("END", " w2")).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    found = stop_token_origins(find_target(tmp_path), load_tokenizer(tmp_path))
    in_chats = {2: "the tokenizer's w2, in chats: the template ends turns with it"}
    assert found == dict.fromkeys(ids, file) | in_chats
    engine = load(tmp_path, device="cpu")
    assert set(engine.end_ids(Request((5,), chat=True))) == ids | {2}
    assert set(engine.end_ids(Request((5,)))) == ids
