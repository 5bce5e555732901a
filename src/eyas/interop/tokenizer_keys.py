"""A byte-level BPE tokenizer in the keys of GGUF; a drafter's file carries its target's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from eyas.errors import ExportError

_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5


@dataclass(frozen=True)
class TokenizerKeys:
    """What `tokenizer.ggml.*` holds."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    bos: int | None
    eos: int | None
    pad: int | None


def tokenizer_keys(tokenizer: Any, size: int) -> TokenizerKeys:
    """For a transformers tokenizer and a model with `size` rows of embedding. Raises ExportError for other kinds."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = {} if backend is None else json.loads(backend.to_str())
    model = described.get("model", {})
    if model.get("type") != "BPE" or '"ByteLevel"' not in json.dumps(described.get("pre_tokenizer")):
        raise ExportError(
            "the target's tokenizer is no byte-level BPE, the only kind eyas writes into GGUF: export with --to vllm "
            "and let llama.cpp's convert_hf_to_gguf.py --target-model-dir convert that directory"
        )
    tokens, types = [f"[PAD{i}]" for i in range(size)], [_UNUSED] * size
    for token, number in model["vocab"].items():
        if number < size:
            tokens[number], types[number] = token, _NORMAL
    for added in described.get("added_tokens", ()):
        if added["id"] < size:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = _CONTROL if added["special"] else _USER
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return TokenizerKeys(tokens, types, merges, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
