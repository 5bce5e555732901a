"""What llama.cpp's file of a target says about it; none of its weights is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eyas.drafters.formats.gguf_file import GGUF_SUFFIX, Gguf, Texts
from eyas.drafters.formats.gguf_names import ARCHITECTURE
from eyas.errors import ModelError


@dataclass(frozen=True)
class GgufTarget:
    """Sizes, as `drafters.loading.check_fit` asks for them."""

    num_layers: int
    hidden_size: int
    vocab_size: int

    @property
    def final_boundary(self) -> int:
        """llama.cpp has no boundary after the final norm."""
        return self.num_layers


def read_gguf_target(name: str) -> GgufTarget:
    """Raises ModelError if there is no such file or it says too little, CheckpointError if it is damaged."""
    path = Path(name)
    if path.suffix != GGUF_SUFFIX or not path.is_file():
        raise ModelError(
            f"llama.cpp reads a target from a {GGUF_SUFFIX} file, and {name} is none: write one with its "
            "convert_hf_to_gguf.py (--outfile TARGET.gguf MODEL) and give that as --model"
        )
    found = Gguf(path).metadata
    architecture = found.get("general.architecture")
    if architecture == ARCHITECTURE:
        raise ModelError(f"{name} is a drafter: give the target's file as --model, this one as --draft-model")
    layers, hidden = (found.get(f"{architecture}.{key}") for key in ("block_count", "embedding_length"))
    tokens = found.get("tokenizer.ggml.tokens")
    vocab = tokens.count if isinstance(tokens, Texts) else found.get(f"{architecture}.vocab_size")
    if not (isinstance(layers, int) and isinstance(hidden, int) and isinstance(vocab, int)):
        raise ModelError(f"{name} doesn't say how many layers, channels and tokens the target has: convert it again")
    return GgufTarget(layers, hidden, vocab)
